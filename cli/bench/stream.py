"""One streamed answer of any OpenAI-compatible server: what arrived when, or how it failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from cli.bench.answers import MAX_COUNT, count_of
from sluice_client.errors import ProtocolError
from sluice_client.sse import SseDecoder, SseEvent

EMPTY = "empty"
"""Failure of an answer that came to its end without any text."""
MAX_DETAIL = 200
"""Characters of a server's complaint that are kept."""


@dataclass(slots=True)
class BenchRecord:
    """One request, from due to done; times are seconds since the load began."""

    index: int
    due_s: float
    sent_s: float = 0.0
    end_s: float | None = None
    """When the answer was complete or had failed; None while it runs."""
    deliveries: list[tuple[float, int]] = field(default_factory=list)
    """When text arrived, or the end, and how many tokens it was; ascending."""
    num_input: int | None = None
    """Tokens of the prompt as the server counted them."""
    num_output: int = 0
    """Tokens of the answer; while it runs, those that arrived."""
    is_counted: bool = False
    """Whether the server counted the tokens (`usage`); else each chunk with text counts as one."""
    finish_reason: str = ""
    failure: str = ""
    """Kind of failure; empty if there was none."""
    detail: str = ""

    def fail(self, kind: str, detail: str = "") -> None:
        """Note the first failure."""
        if not self.failure:
            self.failure, self.detail = kind, detail[:MAX_DETAIL]


def spread_tokens(deliveries: list[tuple[float, int]], total: int) -> list[tuple[float, int]]:
    """Return the deliveries with counts that sum up to the server's own count.

    Tokens too few are spread evenly, the remainder on the last ones (an end token arrives with the last text); tokens
    too many are taken from the last ones. Every delivery keeps at least one while there are enough.
    """
    counts = [count for _, count in deliveries]
    missing = total - sum(counts)
    if missing > 0 and counts:
        each, rest = divmod(missing, len(counts))
        counts = [count + each + (i >= len(counts) - rest) for i, count in enumerate(counts)]
    for least in (1, 0):
        for i in reversed(range(len(counts))):
            taken = min(max(-missing, 0), max(counts[i] - least, 0))
            counts[i] -= taken
            missing += taken
    return [(at_s, count) for (at_s, _), count in zip(deliveries, counts, strict=True) if count]


class AnswerReader:
    """Takes the bytes of one event stream and fills its outcome."""

    def __init__(self, outcome: BenchRecord) -> None:
        self._outcome = outcome
        self._decoder = SseDecoder()
        self._is_done = False
        self._total: int | None = None
        self._says_counts = False
        """The server says of each chunk how many tokens it is, so that all others had no text."""
        self._finish_s: float | None = None

    def feed(self, chunk: bytes, at_s: float) -> None:
        """Take bytes that arrived at this instant.

        Raises:
            ProtocolError, ValueError: they are no events in OpenAI's format.
        """
        for event in self._decoder.feed(chunk):
            self._take(event, at_s)

    def close(self, at_s: float) -> None:
        """Take the end of the stream: the outcome is complete, or has failed."""
        for event in self._decoder.close():
            self._take(event, at_s)
        outcome = self._outcome
        outcome.is_counted = self._total is not None
        outcome.num_output = outcome.num_output if self._total is None else self._total
        silent = outcome.num_output - sum(count for _, count in outcome.deliveries)
        if self._says_counts and self._finish_s is not None and silent > 0 and outcome.deliveries:
            outcome.deliveries.append((self._finish_s, silent))
        outcome.deliveries = spread_tokens(outcome.deliveries, outcome.num_output)
        if not (self._is_done or outcome.finish_reason):
            outcome.fail("broken off", "the stream ended without [DONE]")
        elif not outcome.deliveries:
            outcome.fail(EMPTY, "the answer had no text")

    def _take(self, event: SseEvent, at_s: float) -> None:
        if event.data.strip() == "[DONE]":
            self._is_done = True
            return
        chunk = json.loads(event.data)
        if not isinstance(chunk, dict):
            raise ValueError("an event that is no object")  # noqa: TRY004  the stream's content is wrong, not a type
        self._says_counts = self._says_counts or "sluice" in chunk
        if "error" in chunk:
            self._outcome.fail(*_complaint(chunk))
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._take_usage(usage)
        for choice in chunk.get("choices") or ():
            self._take_choice(choice, chunk, at_s)

    def _take_usage(self, usage: dict[str, Any]) -> None:
        num_input, total = count_of(usage.get("prompt_tokens")), count_of(usage.get("completion_tokens"))
        self._outcome.num_input = self._outcome.num_input if num_input is None else num_input
        self._total = self._total if total is None else total

    def _take_choice(self, choice: dict[str, Any], chunk: dict[str, Any], at_s: float) -> None:
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        if text:
            own = chunk.get("sluice") or {}  # our server says how many tokens a chunk holds
            count = count_of(own.get("n", 1))
            if count is None or self._outcome.num_output + count > MAX_COUNT:
                raise ValueError("an event with an impossible number of tokens")
            self._outcome.deliveries.append((at_s, count))
            self._outcome.num_output += count
        if choice.get("finish_reason"):
            self._outcome.finish_reason, self._finish_s = str(choice["finish_reason"]), at_s


def _complaint(answer: object) -> tuple[str, str]:
    """Return kind and text of an error object in OpenAI's form, or in whichever form it comes."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if not isinstance(error, dict):
        return "error event", str(error)
    return f"error event {error.get('code') or error.get('type') or ''}".strip(), str(error.get("message", ""))


async def stream_answer(
    session: aiohttp.ClientSession, url: str, body: bytes, clock: Callable[[], float], outcome: BenchRecord
) -> None:
    """Send one request and fill its outcome; failures are noted there, not raised.

    Args:
        session: with the headers and the time limit.
        url: of the endpoint.
        body: JSON, made beforehand so that making it is not measured.
        clock: seconds since the load began.
        outcome: of this request.
    """
    outcome.sent_s = clock()
    try:
        await _exchange(session, url, body, clock, outcome)
    except (ProtocolError, ValueError, TypeError, AttributeError, RecursionError) as error:
        outcome.fail("malformed", f"{type(error).__name__}: {error}")
    except TimeoutError:
        outcome.fail("timeout")
    except aiohttp.ClientConnectorError as error:
        outcome.fail("no connection", str(error))
    except (aiohttp.ClientError, OSError) as error:
        outcome.fail("broken off", f"{type(error).__name__}: {error}")
    outcome.end_s = clock()


async def _exchange(
    session: aiohttp.ClientSession, url: str, body: bytes, clock: Callable[[], float], outcome: BenchRecord
) -> None:
    async with session.post(url, data=body) as response:
        if response.status != 200:
            outcome.fail(f"http {response.status}", _message_of(await response.content.read(64 * 1024)))
            return
        reader = AnswerReader(outcome)
        async for chunk in response.content.iter_any():
            reader.feed(chunk, clock())
        reader.close(clock())


def _message_of(body: bytes) -> str:
    try:
        return _complaint(json.loads(body))[1]
    except (ValueError, RecursionError):
        return body.decode(errors="replace")
