"""One answer for code without an event loop."""

from __future__ import annotations

from contextlib import suppress
from typing import Self

from sluice_client.answer_facts import AnswerFacts
from sluice_client.async_answer import AsyncAnswer
from sluice_client.loop_thread import LoopEndedError, LoopThread
from sluice_client.pacer import PacerStats


class Answer(AnswerFacts):
    """An iterator of text, made by `SluiceClient.chat` and `.complete`; iterate once.

    The request is sent at the first use. Leaving early: `with`, or `close()`; the HTTP connection is closed at once,
    which makes the server cancel. So does Ctrl-C while the next text is waited for. An error is raised after the text
    that came before it.
    """

    def __init__(self, answer: AsyncAnswer, loop_thread: LoopThread) -> None:
        super().__init__(answer.record)
        self._answer = answer
        self._loop_thread = loop_thread

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        text = self._loop_thread.run(self._next)
        if text is None:
            raise StopIteration
        return text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._loop_thread.start(self._answer.aclose)

    def read(self) -> str:
        """Read to the end without pacing; returns the whole text."""
        return self._loop_thread.run(self._answer.read)

    def skip(self) -> None:
        """Show what has arrived now, and the rest as it arrives."""
        self._loop_thread.run(self._skip)

    def stop(self) -> None:
        """Make the server cancel; what had arrived is shown at once, then the iteration ends, without an error."""
        self._loop_thread.run(self._answer.stop)

    def cancel(self) -> None:
        """As `stop`, but the server is told in so many words: also where a proxy keeps its connection open.

        Raises:
            SluiceClientError: it could not be told; the iteration ends all the same.
        """
        self._loop_thread.run(self._answer.cancel)

    def close(self) -> None:
        """End the answer and close its connection. Calling it again changes nothing."""
        with suppress(LoopEndedError):  # so its connections are closed
            self._loop_thread.run(self._answer.aclose)

    @property
    def stats(self) -> PacerStats:
        """QoE, stalls and buffer, as seen here."""
        try:
            return self._loop_thread.run(self._stats)
        except LoopEndedError:
            return self._answer.stats

    async def _next(self) -> str | None:
        return await anext(self._answer, None)

    async def _skip(self) -> None:
        self._answer.skip()

    async def _stats(self) -> PacerStats:
        return self._answer.stats
