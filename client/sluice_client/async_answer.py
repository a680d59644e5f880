"""One answer: text as displayed while it streams, and what is known about it afterwards."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

from sluice_client.paced_stream import PacedStream
from sluice_client.pacer import Pacer, PacerStats, Piece
from sluice_client.protocol import AnswerRecord


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that was not streamed."""

    text: str
    finish_reason: str | None
    usage: dict[str, Any] | None
    request_id: str | None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """The texts of all choices (`n`), by index; the first one is `text`."""
    logprobs: dict[str, Any] | None = None
    """Of the first choice, in OpenAI's format; None unless they were asked for."""


class AsyncAnswer:
    """An asynchronous iterator of text, made by `AsyncSluiceClient.chat` and `.complete`; iterate once.

    The request is sent at the first use. Leaving early: `async with`, or `aclose()`; the HTTP connection is closed at
    once, which makes the server cancel. An error is raised after the text that came before it.
    """

    def __init__(
        self,
        source: AsyncGenerator[Piece, None],
        record: AnswerRecord,
        pacer: Pacer,
        cancel: Callable[[], Awaitable[None]],
    ) -> None:
        self._record = record
        self._cancel = cancel
        self._stream = PacedStream(source, pacer)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        return await self._stream.__anext__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    async def read(self) -> str:
        """Read to the end without pacing; returns the whole text."""
        self._stream.skip()
        async for _ in self:
            pass
        return self.text

    def skip(self) -> None:
        """Show what has arrived now, and the rest as it arrives."""
        self._stream.skip()

    async def stop(self) -> None:
        """Make the server cancel; what had arrived is shown at once, then the iteration ends, without an error."""
        await self._stream.stop()

    async def cancel(self) -> None:
        """As `stop`, but the server is told in so many words: also where a proxy keeps its connection open.

        Raises:
            SluiceClientError: it could not be told; the iteration ends all the same.
        """
        try:
            await self._cancel()
        finally:
            await self.stop()

    async def aclose(self) -> None:
        """End the answer and close its connection. Calling it again changes nothing."""
        await self._stream.aclose()

    @property
    def text(self) -> str:
        """Everything received so far; the whole answer after the end."""
        return "".join(self._record.parts)

    @property
    def reasoning(self) -> str:
        """The model's thinking, if the server sends it apart; never displayed."""
        return "".join(self._record.reasoning_parts)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Tool calls in OpenAI's format, complete after the end."""
        return [call for _, call in sorted(self._record.tool_calls.items())]

    @property
    def logprobs(self) -> list[dict[str, Any]]:
        """Log-probabilities received so far, in OpenAI's format: chat's entries, or the parts of a completion's."""
        return list(self._record.logprobs)

    @property
    def finish_reason(self) -> str | None:
        """Why the model ended; None while it has not."""
        return self._record.finish_reason

    @property
    def usage(self) -> dict[str, Any] | None:
        """Token counts, if the server sent them."""
        return self._record.usage

    @property
    def request_id(self) -> str | None:
        """From the header x-request-id, else the id of the chunks."""
        return self._record.request_id

    @property
    def model(self) -> str | None:
        """The model that answers, as the server names it."""
        return self._record.model

    @property
    def server_stats(self) -> dict[str, Any]:
        """What a Sluice server says of the answer after its end: `qoe`, `ttft_s`, `tokens`; else empty."""
        return self._record.server_stats

    @property
    def stats(self) -> PacerStats:
        """QoE, stalls and buffer, as seen here."""
        return self._stream.stats

    @property
    def qoe(self) -> float:
        """QoE of the answer as it reached this client, in [0, 1]; time counts from the sending of the request."""
        return self.stats.qoe

    @property
    def stall_seconds(self) -> float:
        """Seconds for which the reader waited after the first token."""
        return self.stats.stall_seconds

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending the request to the first token; None while there is none."""
        return self.stats.ttft_s
