"""What a terminal shows of an answer, and what a pipe gets of it."""

from __future__ import annotations

import io

import pytest

from cli.answer import show_answer, start_answer
from cli.conversation import Pacing
from sluice_client.async_client import AsyncSluiceClient
from tests.support.openai_server import FINISH, ROLE, USAGE, Server, chunk, delta, events, running, stream


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def thought(text: str) -> dict[str, object]:
    return chunk(choices=[{"index": 0, "delta": {"reasoning": text, "reasoning_content": text}, "finish_reason": None}])


THINKS = events(ROLE, thought("Let me"), thought(" see."), delta("Yes"), delta("."), FINISH, USAGE, "[DONE]")
ONLY_THINKS = events(ROLE, thought("Let me"), FINISH, USAGE, "[DONE]")


async def shown(out: io.StringIO, answer: bytes) -> str:
    async with running(Server(stream(answer))) as url, AsyncSluiceClient(url, model="demo") as client:
        await show_answer(start_answer(client, [{"role": "user", "content": "Is it?"}], Pacing("off")), out)
    return out.getvalue()


async def test_a_thought_is_dim_in_a_terminal_and_what_is_said_begins_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert await shown(Terminal(), THINKS) == "\x1b[2mLet me see.\x1b[0m\n\nYes.\n"
    assert await shown(Terminal(), ONLY_THINKS) == "\x1b[2mLet me\x1b[0m\n\n\n"


async def test_a_pipe_gets_what_is_said_alone() -> None:
    assert await shown(io.StringIO(), THINKS) == "Yes.\n"
