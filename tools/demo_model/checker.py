"""Accepts an answer exactly when the grammar could have produced it for that conversation.

The checker reads: it parses the user's message with the grammar's templates, keeps what the message fixes (a name, a
place, a wish, a number), and parses the whole answer under these bindings. A name that changes, a sentence out of
place, a wrong sum or a missing end leaves no derivation. A prompt that the grammar does not know has one answer, the
fallback. Earlier turns are read in the same way, since a later question may be about an earlier story.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.demo_model.forms import Tool, bind_adder, call_text
from tools.demo_model.grammar import EXCHANGES, FOREIGN_EXCHANGE, Exchange
from tools.demo_model.template import Env, Reader, readings

Message = Mapping[str, Any]
"""`role`, `content` and `tool_calls`, as in OpenAI's API."""


@dataclass(frozen=True)
class Verdict:
    """What the checker found.

    Attributes:
        accepted: some derivation produces the whole answer.
        explained: the longest beginning of the answer that some derivation explains; the whole answer if accepted.
    """

    accepted: bool
    explained: str


def check(messages: Sequence[Message], answer: str, *, tools: Sequence[Tool] = (), thinking: bool = False) -> Verdict:
    """Return whether the grammar could have answered so.

    Args:
        messages: the chat up to and including the message of a user or a tool that is answered; system messages do not
            matter.
        answer: as the model writes it, with a call's tags, and behind the opening tag of its thinking.
        tools: that the request brings.
        thinking: it is asked for.

    Raises:
        ValueError: the chat is not user (later also tool) and assistant in turn, ending with the former.
    """
    asked, answers = _sides(messages)
    start = bind_adder(tools)
    before = _story_so_far(asked[:-1], answers, start)
    furthest = 0
    for exchange, env in _read(asked[-1], before, start):
        reader = Reader(answer)
        if any(after == len(answer) for after, _ in exchange.said(thinking=thinking).read(reader, 0, env)):
            return Verdict(accepted=True, explained=answer)
        furthest = max(furthest, reader.furthest)
    return Verdict(accepted=False, explained=answer[:furthest])


_Asked = tuple[str, str]
"""A role, and what it says."""


def _sides(messages: Sequence[Message]) -> tuple[list[_Asked], list[str]]:
    chat = [message for message in messages if message["role"] != "system"]
    asked = [(message["role"], message["content"].strip()) for message in chat[0::2]]
    roles = {role for role, _ in asked}
    if len(chat) % 2 == 0 or asked[0][0] != "user" or not roles <= {"user", "tool"}:
        raise ValueError("a chat goes user, assistant, …, user")
    if any(message["role"] != "assistant" for message in chat[1::2]):
        raise ValueError("a chat goes user, assistant, …, user")
    return asked, [call_text(m) if m.get("tool_calls") else m["content"].strip() for m in chat[1::2]]


def _story_so_far(asked: Sequence[_Asked], answers: Sequence[str], start: Env) -> list[Env]:
    """Return every binding that the last exchange can have left; `start` if it cannot be read."""
    before: list[Env] = [start]
    for message, answer in zip(asked, answers, strict=True):
        after: Iterable[Env] = (
            env for exchange, bound in _read(message, before, start) for env in readings(exchange.answer, answer, bound)
        )
        before = _distinct(after) or [start]
    return before


def _read(asked: _Asked, before: Sequence[Env], start: Env) -> Iterator[tuple[Exchange, Env]]:
    """Yield each way to understand a message, with what it fixes; for a user's the fallback if there is none."""
    role, prompt = asked
    known = False
    for exchange in (exchange for exchange in EXCHANGES if exchange.role == role):
        for bound in _distinct(bound for env in before if (bound := exchange.start(env)) is not None):
            for env in _distinct(readings(exchange.ask, prompt, bound)):
                known = True
                yield exchange, env
    if not known and role == "user":
        yield FOREIGN_EXCHANGE, start


def _distinct(envs: Iterable[Env]) -> list[Env]:
    found: dict[tuple[object, ...], Env] = {}
    for env in envs:
        identity = tuple(sorted((variable, id(entity)) for variable, entity in env.items()))
        found.setdefault(identity, env)
    return list(found.values())
