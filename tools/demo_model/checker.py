"""Accepts an answer exactly when the grammar could have produced it for that conversation.

The checker reads: it parses the user's message with the grammar's templates, keeps what the message fixes (a name, a
place, a wish, a number), and parses the whole answer under these bindings. A name that changes, a sentence out of
place, a wrong sum or a missing end leaves no derivation. A prompt that the grammar does not know has one answer, the
fallback. Earlier turns are read in the same way, since a later question may be about an earlier story.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tools.demo_model.grammar import EXCHANGES, FOREIGN_EXCHANGE, Exchange
from tools.demo_model.template import Env, Reader, readings

Message = Mapping[str, str]
"""`role` and `content`, as in OpenAI's API."""


@dataclass(frozen=True)
class Verdict:
    """What the checker found.

    Attributes:
        accepted: some derivation produces the whole answer.
        explained: the longest beginning of the answer that some derivation explains; the whole answer if accepted.
    """

    accepted: bool
    explained: str


def check(messages: Sequence[Message], answer: str) -> Verdict:
    """Return whether the grammar could have answered so.

    Args:
        messages: the chat up to and including the user's message that is answered; system messages do not matter.
        answer: without special tokens.

    Raises:
        ValueError: the chat is not user and assistant in turn, ending with the user.
    """
    prompts, answers = _sides(messages)
    before = _story_so_far(prompts[:-1], answers)
    asked = list(_read_prompt(prompts[-1], before))
    furthest = 0
    for exchange, env in asked:
        reader = Reader(answer)
        if any(after == len(answer) for after, _ in exchange.answer.read(reader, 0, env)):
            return Verdict(accepted=True, explained=answer)
        furthest = max(furthest, reader.furthest)
    return Verdict(accepted=False, explained=answer[:furthest])


def _sides(messages: Sequence[Message]) -> tuple[list[str], list[str]]:
    chat = [message for message in messages if message["role"] != "system"]
    roles = ["assistant" if index % 2 else "user" for index in range(len(chat))]
    if len(chat) % 2 == 0 or [message["role"] for message in chat] != roles:
        raise ValueError("a chat goes user, assistant, …, user")
    contents = [message["content"].strip() for message in chat]
    return contents[0::2], contents[1::2]


def _story_so_far(prompts: Sequence[str], answers: Sequence[str]) -> list[Env]:
    """Return every binding that the last exchange can have left; nothing bound if it cannot be read."""
    before: list[Env] = [{}]
    for prompt, answer in zip(prompts, answers, strict=True):
        after: Iterable[Env] = (
            env for exchange, start in _read_prompt(prompt, before) for env in readings(exchange.answer, answer, start)
        )
        before = _distinct(after) or [{}]
    return before


def _read_prompt(prompt: str, before: Sequence[Env]) -> Iterator[tuple[Exchange, Env]]:
    """Yield each way to understand a prompt, with what it fixes; the fallback if there is none."""
    known = False
    for exchange in EXCHANGES:
        for start in _distinct(start for env in before if (start := exchange.start(env)) is not None):
            for env in _distinct(readings(exchange.ask, prompt, start)):
                known = True
                yield exchange, env
    if not known:
        yield FOREIGN_EXCHANGE, {}


def _distinct(envs: Iterable[Env]) -> list[Env]:
    found: dict[tuple[object, ...], Env] = {}
    for env in envs:
        identity = tuple(sorted((variable, id(entity)) for variable, entity in env.items()))
        found.setdefault(identity, env)
    return list(found.values())
