"""Streams one answer to the terminal at reading speed, and says how it went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TextIO

from cli.exit_codes import FAILED, UNREACHABLE, CommandError
from sluice_client.answer import Answer
from sluice_client.client import SluiceClient
from sluice_client.errors import APIConnectionError, APIStatusError, SluiceClientError
from sluice_client.qoe import QoeTarget

READER = QoeTarget()
"""The reader that QoE is measured against: first token within a second, then 4.8 tokens per second."""


def start_answer(
    client: SluiceClient,
    messages: Sequence[Mapping[str, Any]],
    *,
    pace: Literal["strict", "human"] | None,
    **params: Any,
) -> Answer:
    """Return the answer to the conversation; the request is sent at its first use.

    Args:
        client: connected.
        messages: the conversation.
        pace: `strict` shows each token exactly when the reader is ready for it; `human` is for somebody who works with
            the text and shows it as fast as it comes, only smoothed; None shows it at once.
        **params: of the request.
    """
    return client.chat(list(messages), pace=pace, qoe=None if pace is None else READER, **params)


async def show_answer(answer: Answer, out: TextIO) -> None:
    """Write the text as it becomes due, and a line end; closes the answer, also when cancelled.

    Raises:
        CommandError: the answer broke off; what came before it was written.
    """
    try:
        async with answer:
            async for text in answer:
                out.write(printable(text))
                out.flush()
    except APIConnectionError as error:
        raise CommandError(f"no answer: {error}", "See `sluice status`", UNREACHABLE) from error
    except APIStatusError as error:
        raise CommandError(f"the server refused: {error}", "See `sluice status`", FAILED) from error
    except SluiceClientError as error:
        raise CommandError(f"the answer broke off: {error}", "See `sluice status`", FAILED) from error
    finally:
        out.write("\n")
        out.flush()


def describe_answer(answer: Answer) -> str:
    """Return one line about how the answer reached the reader."""
    tokens = (answer.usage or {}).get("completion_tokens")
    ttft = "no token" if answer.ttft_s is None else f"first token after {answer.ttft_s:.2f} s"
    stall_s = answer.stall_seconds
    stalls = f"stalled {stall_s:.1f} s" if stall_s >= 0.05 else "no stall"
    count = f" · {tokens} tokens" if tokens is not None else ""
    return f"QoE {answer.qoe:.2f} · {ttft}{count} · {stalls}"


def printable(text: str) -> str:
    """Return the text without control characters: what a model writes must not steer the terminal."""
    return "".join(char for char in text if char in "\n\t" or (char >= " " and not "\x7f" <= char <= "\x9f"))
