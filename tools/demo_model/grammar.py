"""The whole grammar: conversations as a walk through exchanges, each a question's and an answer's templates.

`Grammar` writes conversations from a seed; `checker` reads them with the same tables. Prompts are split into a training
and a held-out part by a hash, so that no training conversation contains a held-out one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tools.demo_model import facts, requests
from tools.demo_model.foreign import FOREIGN_REQUEST
from tools.demo_model.story import STORY
from tools.demo_model.template import Entity, Env, Node, Writer

HELD_OUT_ONE_IN = 10
"""One in this many prompts (for stories: combinations of hero's kind, place and wish) never occurs in training."""

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You tell little stories.",
    "You are a friendly storyteller for children.",
    "Answer briefly and kindly.",
)


@dataclass(frozen=True)
class Exchange:
    """One kind of turn.

    Attributes:
        name: for reports and messages.
        ask: the user's side.
        answer: the assistant's side, read and written with the bindings of the user's side.
        keeps: the variables that the turn takes over from the turn before; it is possible only if all are bound.
        unless: a variable that must be unbound, or the empty string.
    """

    name: str
    ask: Node
    answer: Node
    keeps: tuple[str, ...] = ()
    unless: str = ""

    def start(self, env: Env) -> Env | None:
        """Return the bindings with which the turn starts, or None if it cannot follow the turn that left `env`."""
        if self.unless in env or any(variable not in env for variable in self.keeps):
            return None
        return {variable: env[variable] for variable in self.keeps}


_STORY_VARIABLES = ("hero", "kind", "place", "wish", "friend", "tool")

STORY_EXCHANGE = Exchange("story", requests.STORY_REQUEST, STORY)
FULL_STORY_EXCHANGE = Exchange("story", requests.FULL_STORY_REQUEST, STORY)
ANOTHER_EXCHANGE = Exchange("another story", requests.BARE_STORY_REQUEST, STORY)
OFFER_EXCHANGE = Exchange("offered story", requests.ACCEPT_OFFER, STORY, keeps=("kind",), unless="tool")
ABOUT_STORY = [
    Exchange(f"about the story: {name}", ask, answer, keeps=_STORY_VARIABLES)
    for name, (ask, answer) in requests.ABOUT_STORY.items()
]
COMPANY = [Exchange(f"company: {name}", ask, answer) for name, (ask, answer) in requests.COMPANY.items()]
FACTS = [Exchange(f"fact: {name}", ask, answer) for name, (ask, answer) in facts.COMMON_FACTS.items()]
SUMS = [Exchange("sum", *facts.SUMS), Exchange("sum in words", *facts.WORD_SUMS)]
ECHOES = [Exchange(f"echo of {count}", ask, answer) for count, (ask, answer) in requests.ECHOES.items()]
FOREIGN_EXCHANGE = Exchange("foreign", FOREIGN_REQUEST, requests.FALLBACK)

EXCHANGES = [
    STORY_EXCHANGE,
    ANOTHER_EXCHANGE,
    OFFER_EXCHANGE,
    *ABOUT_STORY,
    *COMPANY,
    *FACTS,
    *SUMS,
    *ECHOES,
    FOREIGN_EXCHANGE,
]
"""Every kind of turn that the reader tries; a prompt that none of them reads gets the fallback."""


@dataclass(frozen=True)
class Turn:
    """One exchange as written.

    Attributes:
        exchange: its kind's name.
        prompt: what the user says.
        answer: what the assistant says.
        answer_nats: minus the log probability of the choices in the answer: on average an upper bound of the
            answer's entropy, and so of what a perfect model would still be unsure of.
        env: the bindings after the turn.
    """

    exchange: str
    prompt: str
    answer: str
    answer_nats: float
    env: dict[str, Entity]

    @property
    def is_held_out(self) -> bool:
        """True if no training conversation may contain this turn."""
        if self.exchange.startswith("about the story"):
            return False  # the story before it already decides
        triple = [self.env[variable].key for variable in ("kind", "place", "wish") if variable in self.env]
        key = "|".join(triple) if len(triple) == 3 else self.prompt.lower()
        return zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Conversation:
    """A chat as written.

    Attributes:
        system: the system prompt, or the empty string.
        turns: at least one.
    """

    system: str
    turns: tuple[Turn, ...]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat in OpenAI's form."""
        found = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            found.append({"role": "user", "content": turn.prompt})
            found.append({"role": "assistant", "content": turn.answer})
        return found


class Grammar:
    """Writes conversations; the same seed writes the same ones.

    Args:
        seed: of every choice.
        held_out: write turns whose prompts never occur in training, instead of turns that may.
    """

    def __init__(self, seed: int, *, held_out: bool = False) -> None:
        self._rng = Random(seed)
        self._held_out = held_out

    def turn(self, exchange: Exchange, env: Env) -> Turn:
        """Write one turn of a kind, of this grammar's part of the prompts; its `keeps` must be bound in `env`."""
        start = exchange.start(env)
        assert start is not None, f"{exchange.name} needs {exchange.keeps}"
        for _ in range(1000):
            turn = self._any_turn(exchange, start)
            if turn.is_held_out == self._held_out or turn.exchange.startswith("about the story"):
                return turn
        raise AssertionError(f"no prompt of the wanted part in 1000 tries: {exchange.name}")

    def conversation(self) -> Conversation:
        """Write a whole conversation of one to four turns."""
        system = self._rng.choice(SYSTEM_PROMPTS) if self._rng.random() < 0.1 else ""
        turns = [self.turn(self._first(), {})]
        while len(turns) < 4 and self._rng.random() < 0.5:
            turns.append(self.turn(self._next(turns[-1]), turns[-1].env))
        return Conversation(system, tuple(turns))

    def echo(self) -> Conversation:
        """Write a conversation in which words are to be repeated."""
        return Conversation("", (self.turn(self._rng.choice(ECHOES), {}),))

    def _any_turn(self, exchange: Exchange, start: Env) -> Turn:
        ask = Writer(self._rng, dict(start))
        exchange.ask.write(ask)
        answer = Writer(self._rng, ask.env)
        exchange.answer.write(answer)
        return Turn(exchange.name, ask.text, answer.text, answer.choice_nats, answer.env)

    def _first(self) -> Exchange:
        if self._rng.random() < 0.45:
            return FULL_STORY_EXCHANGE if self._rng.random() < 0.3 else STORY_EXCHANGE
        return self._short()

    def _short(self) -> Exchange:
        """Return a kind of turn with a short answer."""
        draw = self._rng.random()
        if draw < 0.40:
            return self._rng.choice(FACTS)
        if draw < 0.65:
            return self._rng.choice(SUMS)
        if draw < 0.80:
            return self._rng.choice(COMPANY if draw < 0.75 else ECHOES)
        return FOREIGN_EXCHANGE

    def _next(self, last: Turn) -> Exchange:
        draw = self._rng.random()
        if "tool" in last.env and draw < 0.75:
            return self._rng.choice(ABOUT_STORY)
        if "tool" not in last.env and "kind" in last.env and draw < 0.4:
            return OFFER_EXCHANGE
        if draw < 0.85:
            return ANOTHER_EXCHANGE if self._rng.random() < 0.5 else STORY_EXCHANGE
        return self._short()


def sample_conversations(seed: int, count: int, *, held_out: bool = False) -> Sequence[Conversation]:
    """Return some conversations of one part."""
    grammar = Grammar(seed, held_out=held_out)
    return [grammar.conversation() for _ in range(count)]
