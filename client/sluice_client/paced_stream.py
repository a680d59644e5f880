"""Shows any asynchronous stream of text at a pacer's pace, under whatever event loop runs.

    source ──► reader task ──push──► Pacer ──pop──► async for

The reader takes pieces as they come, so that the source is never slowed down by the pacing (until the buffer's limit).
Time is the loop's: live, uvloop's or a simulation's. The shortest timer is 1 ms.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable
from typing import Self

from sluice_client.pacer import Pacer, PacerStats, Piece, ReadingPacer

MIN_TIMER_S = 1e-3
"""Loops round shorter timers, some to nothing."""

SMOOTH_FRAME_S = 1 / 60
"""Default of `frame_s` for people: a screen shows no more frames per second than this."""


TIMER_SLACK_S = 1e-9
"""Added to a timer, so that rounding of the loop's time never makes it end just short of the instant."""


class _Intake:
    """What the reader task and the stream share; the task does not hold the stream, so that one left behind dies."""

    def __init__(
        self, source: AsyncIterable[str | Piece], pacer: Pacer, started_s: float, max_buffered_chars: int
    ) -> None:
        self.source = source
        self.pacer = pacer
        self.started_s = started_s
        self.max_buffered_chars = max_buffered_chars
        self.changed = asyncio.Event()
        self.has_room = asyncio.Event()
        self.is_ending = False  # the reader has read its last, and closes the source
        self.is_closed = False

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() - self.started_s

    async def read(self) -> None:
        iterator = aiter(self.source)
        try:
            async for item in iterator:
                piece = item if isinstance(item, Piece) else Piece(item)
                how = {"paced": piece.paced, "thinks": piece.thinks}
                self.pacer.push(self.now_s(), piece.text, piece.num_tokens, **how)
                self.changed.set()
                while self.pacer.buffered_chars >= self.max_buffered_chars:
                    self.has_room.clear()
                    await self.has_room.wait()
        finally:
            self.is_ending = True
            self.pacer.finish(self.now_s())
            self.changed.set()
            await _close(iterator)
            await self.close()

    async def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.pacer.finish(self.now_s())
            await _close(self.source)

    def on_reader_done(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled():
            reader.exception()  # seen; the stream raises it in its turn
        self.changed.set()


class PacedStream:
    """An asynchronous iterator of text as it is to be displayed, made of one of text as it arrives.

    Iterate once; use it as an asynchronous context manager if you may leave the loop early. An error of the source is
    raised after the text that arrived before it has been shown. Cancelling the task that iterates ends the stream, as
    with an asynchronous generator: the reader task is gone and the source closed when the cancellation arrives at the
    caller, and `drain()` gives the text that was not shown yet.

    Args:
        source: pieces of text; a string counts as one token. Closed (`aclose` or `close`) with the stream.
        pacer: fresh; owned by the stream.
        started_s: `loop.time()` of the request's arrival; None: the first use of the stream.
        frame_s: least time between two pieces of output, seconds; None: 1/60 in smooth mode, else 0.
        max_buffered_chars: the source is not read further while this much text waits.
    """

    def __init__(
        self,
        source: AsyncIterable[str | Piece],
        pacer: Pacer,
        *,
        started_s: float | None = None,
        frame_s: float | None = None,
        max_buffered_chars: int = 1 << 20,
    ) -> None:
        self.pacer = pacer
        self._source = source
        self._started_s = started_s
        self._frame_s = _default_frame_s(pacer) if frame_s is None else frame_s
        self._max_buffered_chars = max_buffered_chars
        self._intake: _Intake | None = None
        self._reader: asyncio.Task[None] | None = None
        self._next_frame_s = float("-inf")
        self._closed = False
        self._stopped = False

    @property
    def stats(self) -> PacerStats:
        """QoE, stalls and buffer so far."""
        return self.pacer.stats()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        intake = self._start()
        try:
            while not self._closed:
                text = self._take_frame(intake)
                if text:
                    return text
                await self._wait(intake)
        except asyncio.CancelledError:
            await self.aclose()
            raise
        raise StopAsyncIteration

    def skip(self) -> None:
        """The reader asks for everything: the buffer is shown now, the rest as it arrives."""
        intake = self._start()
        self.pacer.skip(intake.now_s())
        self._next_frame_s = float("-inf")
        intake.changed.set()

    async def stop(self) -> None:
        """End the source now; what had arrived is shown at once, then the iteration ends."""
        self._stopped = True
        self.skip()
        await self._end_reader()

    def drain(self) -> str:
        """Take everything that arrived and was not shown, at once."""
        if self._intake is None:
            return ""
        now_s = self._intake.now_s()
        self.pacer.skip(now_s)
        return "".join(shown.text for shown in self.pacer.pop(now_s))

    async def aclose(self) -> None:
        """End the stream: the reader task is awaited and the source closed. Calling it again changes nothing."""
        self._closed = True
        if self._reader is not None:
            await self._end_reader()
        else:
            await _close(self._source)

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        reader = self._reader
        if reader is not None and not reader.done() and not reader.get_loop().is_closed():
            reader.cancel()

    def _start(self) -> _Intake:
        if self._intake is None:
            started_s = asyncio.get_running_loop().time() if self._started_s is None else self._started_s
            self._intake = _Intake(self._source, self.pacer, started_s, self._max_buffered_chars)
            if not self._closed:
                self._reader = asyncio.create_task(self._intake.read(), name="sluice-client-reader")
                self._reader.add_done_callback(self._intake.on_reader_done)
        return self._intake

    def _take_frame(self, intake: _Intake) -> str:
        now_s = intake.now_s()
        if now_s < self._next_frame_s:
            return ""
        text = "".join(shown.text for shown in self.pacer.pop(now_s))
        intake.has_room.set()
        if text:
            self._next_frame_s = now_s + self._frame_s
        return text

    async def _wait(self, intake: _Intake) -> None:
        """Return when something may be due, or end the stream if nothing ever will be."""
        due_s = self.pacer.next_due_s()
        assert self._reader is not None, "a stream that is not closed has a reader"
        if due_s is None and self._reader.done():
            self._closed = True
            if not self._stopped:
                self._reader.result()  # raises the source's error
            return
        intake.changed.clear()
        if due_s is None:
            await intake.changed.wait()
            return
        wake_s = max(due_s, self._next_frame_s, intake.now_s() + MIN_TIMER_S) + TIMER_SLACK_S
        # not asyncio.timeout: a Ctrl-C that cancels the task just before one begins is lost when that one expires
        timer = asyncio.get_running_loop().call_at(intake.started_s + wake_s, intake.changed.set)
        try:
            await intake.changed.wait()
        finally:
            timer.cancel()

    async def _end_reader(self) -> None:
        """Cancel the reader and wait until it is gone; its error, if any, is dropped with the stream."""
        assert self._intake is not None, "the stream was started"
        assert self._reader is not None, "the reader was started"
        if not self._intake.is_ending:
            self._reader.cancel()
        await asyncio.wait((self._reader,))
        await self._intake.close()  # a task cancelled before its first step has closed nothing


def _default_frame_s(pacer: Pacer) -> float:
    return 0.0 if isinstance(pacer, ReadingPacer) else SMOOTH_FRAME_S


async def _close(source: object) -> None:
    """Close a stream if it can be closed: `aclose` (generators), or `close` (SDKs), a coroutine or not."""
    for name in ("aclose", "close"):
        close = getattr(source, name, None)
        if close is not None:
            result = close()
            if inspect.isawaitable(result):
                await result
            return
