"""An event loop in a thread of its own, with which threads that have no loop use what is asynchronous."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import Any, TypeVar

R = TypeVar("R")

END_LIMIT_S = 5.0
"""Longest wait for the thread's end; it is a daemon, and goes on by itself."""
_CLOSED = "the client is closed"
_FORKED = "the client was in use before this process was forked; make one in each process"


class LoopEndedError(RuntimeError):
    """The loop runs no more."""


class LoopThread:
    """A loop in a daemon thread that begins with the first use, for any number of threads.

    It ends with `close`, when this object is garbage, and before the interpreter ends: what runs is cancelled, and the
    resource closed. After a fork it is of no use in the child.

    Args:
        resource: open while the loop runs.
    """

    def __init__(self, resource: AbstractAsyncContextManager[object]) -> None:
        self._resource = resource
        self._lock = threading.RLock()  # the garbage collector may come in, and call `start`
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid: int | None = None
        self._end: Callable[[], object] = lambda: None

    def run(self, function: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Return what a coroutine of the loop returns; an exception here, such as of Ctrl-C, cancels it.

        Raises:
            LoopEndedError: before, or meanwhile.
        """
        assert threading.current_thread() is not self._thread, "the loop cannot wait for itself"
        future = self._submit(function)
        try:
            return future.result()
        except CancelledError:
            raise LoopEndedError(_CLOSED) from None
        except BaseException:
            future.cancel()
            raise
        finally:
            del future  # it holds the exception, whose traceback holds this frame

    def start(self, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Have a coroutine run without waiting for it; do nothing if the loop has not begun, or has ended."""
        if self._loop is not None:
            with suppress(LoopEndedError):
                self._submit(function)

    def close(self) -> None:
        """End the loop; who waits for it hears a `LoopEndedError`. Calling it again changes nothing."""
        with self._lock:
            self._is_closed = True
        self._end()

    def _submit(self, function: Callable[[], Coroutine[Any, Any, R]]) -> Future[R]:
        with self._lock:  # what comes before the loop's end is told of it
            if self._is_closed:
                raise LoopEndedError(_CLOSED)
            if self._loop is None:
                self._loop = self._begin()
            if self._pid != os.getpid():
                raise LoopEndedError(_FORKED)
            if self._loop.is_closed():  # by the interpreter's exit
                raise LoopEndedError(_CLOSED)
            return asyncio.run_coroutine_threadsafe(function(), self._loop)

    def _begin(self) -> asyncio.AbstractEventLoop:
        loop, is_over = asyncio.new_event_loop(), asyncio.Event()
        is_open: Future[None] = Future()
        holding = loop.create_task(_hold(self._resource, is_open, is_over))
        self._thread = threading.Thread(target=_serve, args=(loop, holding), name="sluice-client", daemon=True)
        self._end = weakref.finalize(self, _end, loop, is_over, self._thread)
        self._pid = os.getpid()
        self._thread.start()
        is_open.result()
        return loop


async def _hold(resource: AbstractAsyncContextManager[object], is_open: Future[None], is_over: asyncio.Event) -> None:
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(resource)
        except BaseException as error:
            is_open.set_exception(error)
            return
        is_open.set_result(None)
        await is_over.wait()
        await _cancel_others()
    await _cancel_others()  # who came meanwhile


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _serve(loop: asyncio.AbstractEventLoop, holding: asyncio.Task[None]) -> None:
    # not asyncio.Runner, which waits for names that are looked up, and begins a thread for it: too late at the exit
    try:
        loop.run_until_complete(holding)
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _end(loop: asyncio.AbstractEventLoop, is_over: asyncio.Event, thread: threading.Thread) -> None:
    if thread.is_alive():  # it is not in a child of a fork
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(is_over.set)
        if thread is not threading.current_thread():  # where garbage may be collected
            thread.join(END_LIMIT_S)
