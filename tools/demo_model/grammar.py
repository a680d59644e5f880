"""The whole grammar: conversations as a walk through exchanges, each a question's and an answer's templates.

What stands before all turns, the tools that a request brings, is bound like a word: with `adder` bound a sum is asked
of the tool, and its result is answered. Where thinking is asked for, only the last answer has a thought; it is not sent
back.

`Grammar` writes conversations from a seed; `checker` reads them with the same tables. Prompts are split into a training
and a held-out part by a hash, so that no training conversation contains a held-out one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tools.demo_model import facts, forms, requests
from tools.demo_model.foreign import FOREIGN_REQUEST
from tools.demo_model.forms import CALL, THINK_END, Tool
from tools.demo_model.story import STORY
from tools.demo_model.template import Chain, Entity, Env, Literal, Node, Writer

HELD_OUT_ONE_IN = 10
"""One in this many prompts (for stories: combinations of hero's kind, place and wish) never occurs in training."""

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You tell little stories.",
    "You are a friendly storyteller for children.",
    "Answer briefly and kindly.",
)


_CHAT_VARIABLES = ("adder",)
"""Bound in every turn if they are in the first."""


@dataclass(frozen=True)
class Exchange:
    """One kind of turn.

    Attributes:
        name: for reports and messages.
        ask: the user's side, or the tool's.
        answer: the assistant's side, read and written with the bindings of the other side.
        thought: what stands before the answer if thinking is asked for; it may bind too.
        keeps: the variables that the turn takes over from the turn before; it is possible only if all are bound.
        unless: a variable that must be unbound, or the empty string.
        role: whose turn it is that is answered: `user` or `tool`.
        is_decided: the turn before decides whether this one is held out.
    """

    name: str
    ask: Node
    answer: Node
    thought: Node
    keeps: tuple[str, ...] = ()
    unless: str = ""
    role: str = "user"
    is_decided: bool = False

    def start(self, env: Env) -> Env | None:
        """Return the bindings with which the turn starts, or None if it cannot follow the turn that left `env`."""
        if self.unless in env or any(variable not in env for variable in self.keeps):
            return None
        return {variable: env[variable] for variable in (*self.keeps, *_CHAT_VARIABLES) if variable in env}

    def said(self, *, thinking: bool) -> Node:
        """Return what the assistant writes: the answer, behind the thought if thinking is asked for."""
        return Chain([self.thought, Literal(THOUGHT_END), self.answer]) if thinking else self.answer


THOUGHT_END = f"\n{THINK_END}\n\n"
"""Between a thought and its answer."""

_STORY_VARIABLES = ("hero", "kind", "place", "wish", "friend", "tool")

STORY_EXCHANGE = Exchange("story", requests.STORY_REQUEST, STORY, forms.THINK_OF_KIND)
FULL_STORY_EXCHANGE = Exchange("story", requests.FULL_STORY_REQUEST, STORY, forms.THINK_OF_KIND)
ANOTHER_EXCHANGE = Exchange("another story", requests.BARE_STORY_REQUEST, STORY, forms.THINK_OF_KIND)
OFFER_EXCHANGE = Exchange(
    "offered story", requests.ACCEPT_OFFER, STORY, forms.THINK_OF_KIND, keeps=("kind",), unless="tool"
)
ABOUT_STORY = [
    Exchange(f"about the story: {name}", ask, answer, forms.THINK_OF_STORY, keeps=_STORY_VARIABLES, is_decided=True)
    for name, (ask, answer) in requests.ABOUT_STORY.items()
]
TOLD_AS_JSON = Exchange(
    "told story as JSON", *requests.TOLD_AS_JSON, forms.THINK_OF_STORY, keeps=_STORY_VARIABLES, is_decided=True
)
NEW_AS_JSON = [
    Exchange("new story as JSON", *requests.NEW_AS_JSON, forms.THINK_OF_KIND),
    Exchange("story as JSON", *requests.BARE_AS_JSON, forms.THINK_OF_KIND, unless="tool"),
]
COMPANY = [Exchange(f"company: {name}", *sides, forms.THINK_OF_REST) for name, sides in requests.COMPANY.items()]
FACTS = [Exchange(f"fact: {name}", *sides, forms.THINK_OF_REST) for name, sides in facts.COMMON_FACTS.items()]
SUMS = [
    Exchange(name, *sides, forms.THINK_OF_SUM, unless="adder")
    for name, sides in (("sum", facts.SUMS), ("sum in words", facts.WORD_SUMS))
]
CALLS = [
    Exchange(f"{name} by the tool", ask, forms.CALL_ADD, forms.THINK_OF_CALL, keeps=("adder",))
    for name, (ask, _) in (("sum", facts.SUMS), ("sum in words", facts.WORD_SUMS))
]
RESULTS = [
    Exchange(name, *sides, keeps=("sum", "adder"), role="tool", is_decided=True)
    for name, sides in (("right result", forms.RIGHT_RESULT), ("any result", forms.ANY_RESULT))
]
ECHOES = [Exchange(f"echo of {count}", *sides, forms.THINK_OF_REST) for count, sides in requests.ECHOES.items()]
FOREIGN_EXCHANGE = Exchange("foreign", FOREIGN_REQUEST, requests.FALLBACK, forms.THINK_OF_REST)

EXCHANGES = [
    STORY_EXCHANGE,
    ANOTHER_EXCHANGE,
    OFFER_EXCHANGE,
    *ABOUT_STORY,
    TOLD_AS_JSON,
    *NEW_AS_JSON,
    *COMPANY,
    *FACTS,
    *SUMS,
    *CALLS,
    *RESULTS,
    *ECHOES,
    FOREIGN_EXCHANGE,
]
"""Every kind of turn that the reader tries; a prompt that none of them reads gets the fallback."""


@dataclass(frozen=True)
class Turn:
    """One exchange as written.

    Attributes:
        exchange: its kind.
        prompt: what the user says, or the tool.
        said: what the assistant writes, with its thought if it has one.
        said_nats: minus the log probability of the choices in it: on average an upper bound of its entropy, and so of
            what a perfect model would still be unsure of.
        env: the bindings after the turn.
    """

    exchange: Exchange
    prompt: str
    said: str
    said_nats: float
    env: dict[str, Entity]

    @property
    def answer(self) -> str:
        """What the assistant says, without the thought."""
        return self.said.rpartition(THOUGHT_END)[2]

    @property
    def has_thought(self) -> bool:
        """True if thinking was asked for."""
        return THOUGHT_END in self.said

    @property
    def is_call(self) -> bool:
        """True if the assistant asks a tool."""
        return self.answer.startswith(CALL)

    @property
    def is_held_out(self) -> bool:
        """True if no training conversation may contain this turn."""
        if self.exchange.is_decided:
            return False
        triple = [self.env[variable].key for variable in ("kind", "place", "wish") if variable in self.env]
        key = "|".join(triple) if len(triple) == 3 else self.prompt.lower()
        return zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Conversation:
    """A chat as written.

    Attributes:
        system: the system prompt, or the empty string.
        turns: at least one; the last one may have a thought.
        tools: that the request brings.
        has_compact_calls: earlier calls come back without spaces.
        budget_chars: the thought is ended after so many characters, as a budget would; None: by the model.
    """

    system: str
    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    has_compact_calls: bool = False
    budget_chars: int | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The chat in OpenAI's form, without thoughts."""
        found: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            call = {"tool_call_id": "call"} if turn.exchange.role == "tool" else {}
            found.append({"role": turn.exchange.role, "content": turn.prompt, **call})
            if turn.is_call:
                found.append(forms.call_message(turn.answer, is_compact=self.has_compact_calls))
            else:
                found.append({"role": "assistant", "content": turn.answer})
        return found

    @property
    def is_thinking(self) -> bool:
        """True if thinking was asked for."""
        return self.turns[-1].has_thought


class Grammar:
    """Writes conversations; the same seed writes the same ones.

    Args:
        seed: of every choice.
        held_out: write turns whose prompts never occur in training, instead of turns that may.
    """

    def __init__(self, seed: int, *, held_out: bool = False) -> None:
        self._rng = Random(seed)
        self._held_out = held_out

    def turn(self, exchange: Exchange, env: Env, *, thinking: bool = False) -> Turn:
        """Write one turn of a kind, of this grammar's part of the prompts; its `keeps` must be bound in `env`."""
        start = exchange.start(env)
        assert start is not None, f"{exchange.name} needs {exchange.keeps}"
        for _ in range(1000):
            turn = self._any_turn(exchange, start, thinking=thinking)
            if turn.is_held_out == self._held_out or exchange.is_decided:
                return turn
        raise AssertionError(f"no prompt of the wanted part in 1000 tries: {exchange.name}")

    def conversation(self) -> Conversation:
        """Write a whole conversation of one to four turns, without the forms."""
        system = self._system()
        return Conversation(system, tuple(self._go_on([self.turn(self._first({}), {})])))

    def form(self) -> Conversation:
        """Write a conversation in which one of the forms is asked for."""
        draw = self._rng.random()
        if draw < 0.4:
            return self._with_tools()
        return self._with_json() if draw < 0.55 else self._with_thought()

    def echo(self) -> Conversation:
        """Write a conversation in which words are to be repeated."""
        return Conversation("", (self.turn(self._rng.choice(ECHOES), {}),))

    def tools(self, *, with_adder: bool = True) -> tuple[Tool, ...]:
        """Choose what a request brings, with or without the tool that adds."""
        return forms.choose_tools(self._rng, with_adder=with_adder)

    def _with_tools(self) -> Conversation:
        tools = self.tools(with_adder=self._rng.random() < 0.75)
        env = forms.bind_adder(tools)
        system = forms.choose_instructions(self._rng)
        draw = self._rng.random()
        first = self._sum(env) if draw < 0.45 else self._aside() if draw < 0.85 else self._first(env)
        turns = self._go_on([self.turn(first, env)])
        return Conversation(system, tuple(turns), tools, has_compact_calls=self._rng.random() < 0.2)

    def _with_json(self) -> Conversation:
        if self._rng.random() < 0.4:
            turns = [self.turn(self._rng.choice(NEW_AS_JSON), {})]
        else:
            turns = [self.turn(STORY_EXCHANGE, {})]
            if self._rng.random() < 0.3:
                turns.append(self.turn(self._rng.choice(ABOUT_STORY), turns[-1].env))
            turns.append(self.turn(TOLD_AS_JSON, turns[-1].env))
        return Conversation(self._system(), tuple(turns))

    def _with_thought(self) -> Conversation:
        """Write a conversation whose last answer has a thought: mostly before a sum."""
        tools = self.tools() if self._rng.random() < 0.25 else ()
        env = forms.bind_adder(tools)
        turns: list[Turn] = []
        draw = self._rng.random()
        if draw < 0.35:
            first = self._sum(env) if tools else self._first(env)
            turns = self._go_on([self.turn(first, env)])[: 1 if draw < 0.2 else 2]
            env = turns[-1].env
        turns.append(self.turn(self._thought_about(turns, env), env, thinking=True))
        budget_chars = self._rng.randrange(20) if self._rng.random() < 0.15 else None
        system = forms.choose_instructions(self._rng)
        return Conversation(system, tuple(turns), tools, budget_chars=budget_chars)

    def _thought_about(self, turns: Sequence[Turn], env: Env) -> Exchange:
        if turns and turns[-1].is_call:
            return self._rng.choice(RESULTS)
        draw = self._rng.random()
        if draw < 0.35:
            return self._sum(env)
        if draw < 0.42:
            return TOLD_AS_JSON if "tool" in env else self._rng.choice(NEW_AS_JSON)
        if draw < 0.8:
            return self._aside()
        return self._next(turns[-1]) if turns else self._first(env)

    def _system(self) -> str:
        return self._rng.choice(SYSTEM_PROMPTS) if self._rng.random() < 0.1 else ""

    def _go_on(self, turns: list[Turn]) -> list[Turn]:
        """Return the turns and some more; a call is always followed by its result."""
        while turns[-1].is_call or (len(turns) < 4 and self._rng.random() < 0.5):
            following = self._rng.choice(RESULTS) if turns[-1].is_call else self._next(turns[-1])
            turns.append(self.turn(following, turns[-1].env))
        return turns

    def _any_turn(self, exchange: Exchange, start: Env, *, thinking: bool) -> Turn:
        ask = Writer(self._rng, dict(start))
        exchange.ask.write(ask)
        answer = Writer(self._rng, ask.env)
        exchange.said(thinking=thinking).write(answer)
        return Turn(exchange, ask.text, answer.text, answer.choice_nats, answer.env)

    def _first(self, env: Env) -> Exchange:
        if self._rng.random() < 0.45:
            return FULL_STORY_EXCHANGE if self._rng.random() < 0.3 else STORY_EXCHANGE
        return self._short(env)

    def _sum(self, env: Env) -> Exchange:
        return self._rng.choice(CALLS if "adder" in env else SUMS)

    def _aside(self) -> Exchange:
        """Return a kind of turn with a short answer that is no sum."""
        draw = self._rng.random()
        if draw < 0.5:
            return self._rng.choice(FACTS)
        return self._rng.choice(COMPANY) if draw < 0.75 else FOREIGN_EXCHANGE

    def _short(self, env: Env) -> Exchange:
        """Return a kind of turn with a short answer."""
        draw = self._rng.random()
        if draw < 0.40:
            return self._rng.choice(FACTS)
        if draw < 0.65:
            return self._sum(env)
        if draw < 0.80:
            return self._rng.choice(COMPANY if draw < 0.75 else ECHOES)
        return FOREIGN_EXCHANGE

    def _next(self, last: Turn) -> Exchange:
        draw = self._rng.random()
        if "adder" in last.env and draw < 0.25:
            return self._sum(last.env)
        if "tool" in last.env and draw < 0.75:
            return self._rng.choice(ABOUT_STORY)
        if "tool" not in last.env and "kind" in last.env and draw < 0.4:
            return OFFER_EXCHANGE
        if draw < 0.85:
            return ANOTHER_EXCHANGE if self._rng.random() < 0.5 else STORY_EXCHANGE
        return self._short(last.env)


def sample_conversations(seed: int, count: int, *, held_out: bool = False) -> Sequence[Conversation]:
    """Return some conversations of one part, without the forms."""
    grammar = Grammar(seed, held_out=held_out)
    return [grammar.conversation() for _ in range(count)]
