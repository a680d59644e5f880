"""A few threads for tokenising and templates, with a bounded queue, so that no prompt holds up the event loop.

Texts of best effort wait before that queue, and leave a thread to the others if there are several.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

R = TypeVar("R")


class TextPoolFullError(Exception):
    """As many texts wait as the limit allows; the caller answers 429."""


class TextPool:
    """Runs text work in threads; the tokenizers library lets the GIL go while it encodes or decodes a batch.

    Args:
        num_threads: texts worked on at a time.
        max_pending: texts waiting or worked on; more are refused at once.
        max_flex: the same of best effort, which waits apart.
        flex_memory: characters that best effort may have waiting.
    """

    def __init__(self, num_threads: int, max_pending: int, max_flex: int = 0, flex_memory: int = 0) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._max_pending = max_pending
        self._max_flex, self._flex_memory = max_flex, flex_memory
        self._num_flex = self._num_flex_chars = 0
        self._flex_threads = asyncio.Semaphore(max(num_threads - 1, 1))
        self.num_pending = 0
        """Texts waiting or worked on. A text whose client is gone still counts until its thread has finished."""

    async def run(self, work: Callable[[], R]) -> R:
        """Return the work's result.

        Raises:
            TextPoolFullError: nothing was started.
        """
        if self.num_pending >= self._max_pending:
            raise TextPoolFullError
        loop = asyncio.get_running_loop()
        self.num_pending += 1
        future = self._threads.submit(work)
        future.add_done_callback(lambda _: _call_if_open(loop, self._on_done))
        return await asyncio.wrap_future(future)

    async def run_flex(self, work: Callable[[], R], num_chars: int) -> R:
        """Return the result of best effort's work on a text of so many characters.

        Raises:
            TextPoolFullError: nothing was started.
        """
        if self._num_flex >= self._max_flex or self._num_flex_chars + num_chars > self._flex_memory:
            raise TextPoolFullError
        self._num_flex, self._num_flex_chars = self._num_flex + 1, self._num_flex_chars + num_chars
        try:
            await self._flex_threads.acquire()
            loop = asyncio.get_running_loop()
            future = self._threads.submit(work)  # its thread is taken until it has finished, whoever still waits for it
            future.add_done_callback(lambda _: _call_if_open(loop, self._flex_threads.release))
            return await asyncio.wrap_future(future)
        finally:
            self._num_flex, self._num_flex_chars = self._num_flex - 1, self._num_flex_chars - num_chars

    def _on_done(self) -> None:
        self.num_pending -= 1

    def close(self) -> None:
        """Drop what waits, and wait for what runs."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def _call_if_open(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
