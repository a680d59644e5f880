"""Streams one answer to the terminal at a pace, and says how it went."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final, TextIO, Unpack

from cli.console import Console
from cli.conversation import Pacing
from cli.exit_codes import FAILED, UNREACHABLE, CommandError
from cli.http import topic_of
from cli.wrap import WordWrap
from sluice_client.async_answer import AsyncAnswer
from sluice_client.async_client import AsyncSluiceClient
from sluice_client.errors import APIConnectionError, APIStatusError, SluiceClientError
from sluice_client.params import ChatMessage, ChatParams

THOUGHTS_S: Final = 0.1
"""Between two looks at what the model thinks."""


def start_answer(
    client: AsyncSluiceClient,
    messages: Sequence[ChatMessage],
    pacing: Pacing,
    **params: Unpack[ChatParams],
) -> AsyncAnswer:
    """Return the answer to the conversation; the request is sent at its first use.

    Args:
        client: connected.
        messages: the conversation.
        pacing: of what is shown; the server is told the target, unless nothing is paced.
        **params: of the request.
    """
    qoe = None if pacing.mode == "off" else pacing.target
    return client.chat(messages, pace=pacing.mode, qoe=qoe, **params)


async def show_answer(answer: AsyncAnswer, out: TextIO, column: int = 0) -> None:
    """Write the text as it becomes due, and a line end; closes the answer, also when cancelled.

    Args:
        answer: to be read.
        out: a terminal, where no word is broken at the edge, or anything else.
        column: of the terminal, where the text begins.

    Raises:
        CommandError: the answer broke off; what came before it was written.
    """
    wrap = WordWrap(lambda: shutil.get_terminal_size().columns, column) if out.isatty() else None
    thoughts = None if wrap is None else _Thoughts(answer, out, wrap)
    try:
        async with answer, thoughts or nullcontext():
            async for text in answer:
                if thoughts is not None:
                    await thoughts.end()
                shown = printable(text)
                out.write(shown if wrap is None else wrap.feed(shown))
                out.flush()
    except APIConnectionError as error:
        raise CommandError(f"no answer: {error}", "See `sluice status`", UNREACHABLE) from error
    except APIStatusError as error:
        is_long = error.code == "context_length_exceeded"
        look = "See `sluice status`" if error.status >= 500 else ""
        hint = "Send less; in a conversation /clear begins anew" if is_long else look
        raise CommandError(f"the server refused: {error}", hint, FAILED, topic_of(error.code or "")) from error
    except SluiceClientError as error:
        raise CommandError(f"the answer broke off: {error}", "See `sluice status`", FAILED) from error
    finally:
        out.write("\n")
        out.flush()


class _Thoughts:
    """Shows in a terminal what the model thinks before it says something, as it comes: dim, and not paced.

    Args:
        answer: while it is read.
        out: the terminal.
        wrap: of all that is written there.
    """

    def __init__(self, answer: AsyncAnswer, out: TextIO, wrap: WordWrap) -> None:
        self._answer = answer
        self._out = out
        self._wrap = wrap
        self._style = Console(out).style
        self._num_shown = 0
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._following = asyncio.create_task(self._follow())

    async def __aexit__(self, *_exc: object) -> None:
        await self.end()

    async def end(self) -> None:
        """Show the rest; what is said begins in a line of its own. Calling it again changes nothing."""
        if self._following is None:
            return
        self._following.cancel()
        self._following = None
        self._show()
        if self._num_shown:
            self._out.write(self._wrap.feed("\n\n"))

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(THOUGHTS_S)
            self._show()

    def _show(self) -> None:
        text = self._answer.reasoning
        if news := printable(text[self._num_shown :]):
            self._out.write(self._style(self._wrap.feed(news), "dim"))
            self._out.flush()
        self._num_shown = len(text)


def describe_answer(answer: AsyncAnswer) -> str:
    """Return one line about how the answer reached the reader."""
    tokens = (answer.usage or {}).get("completion_tokens")
    ttft = "no token" if answer.ttft_s is None else f"first token after {answer.ttft_s:.2f} s"
    stall_s = answer.stall_seconds
    stalls = f"stalled {stall_s:.1f} s" if stall_s >= 0.05 else "no stall"
    count = f" · {tokens} tokens" if tokens is not None else ""
    return f"QoE {answer.qoe:.2f} · {ttft}{count} · {stalls}"


def describe_pacing(answer: AsyncAnswer, pacing: Pacing) -> str:
    """Return one line about what part of the time until all was shown is pacing."""
    stats = answer.stats
    received_s, shown_s = stats.received_s or 0.0, stats.shown_s or 0.0
    speed, pacing_s = f"{pacing.target.speed_tokens_per_s:g} tokens/s", max(shown_s - received_s, 0.0)
    how = {"reading": f"at reading speed, {speed}", "smooth": "evenly, as it came", "off": "as it came"}[pacing.mode]
    faster = "; --pace off shows it at once" if pacing_s >= 1 else ""
    return f"generated in {received_s:.1f} s, shown in {shown_s:.1f} s ({pacing_s:.1f} s are pacing), {how}{faster}"


def printable(text: str) -> str:
    """Return the text without control characters: what a model writes must not steer the terminal."""
    return "".join(char for char in text if char in "\n\t" or (char >= " " and not "\x7f" <= char <= "\x9f"))
