"""One answer: text as displayed while it streams, and what is known about it afterwards."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Self

from sluice_client.answer_facts import AnswerFacts
from sluice_client.paced_stream import PacedStream
from sluice_client.pacer import Pacer, PacerStats, Piece
from sluice_client.protocol import AnswerRecord


class AsyncAnswer(AnswerFacts):
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
        super().__init__(record)
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
    def stats(self) -> PacerStats:
        """QoE, stalls and buffer, as seen here."""
        return self._stream.stats
