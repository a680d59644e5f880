"""Work that blocks on a disk or a device, in daemon threads: who stops meanwhile does not wait for it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

R = TypeVar("R")


async def off_the_loop(work: Callable[[], R], *, name: str = "load", niceness: int = 0) -> R:
    """Return what the work returns, or raise what it raises. If the caller is cancelled, the thread is left.

    Args:
        work: called in a thread of its own.
        name: of that thread.
        niceness: of that thread, above the process's.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def settle(set_it: Callable[[], None]) -> None:
        if not done.cancelled():
            set_it()

    def body() -> None:
        try:
            if niceness > 0:
                _yield_to_others(niceness)
            settled = partial(done.set_result, work())
        except BaseException as error:  # handed to the waiting coroutine, whatever it is
            settled = partial(done.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: nobody is left to hear of it
            loop.call_soon_threadsafe(settle, settled)

    threading.Thread(target=body, name=name, daemon=True).start()
    return await done


def _yield_to_others(niceness: int) -> None:
    """Let this thread, and those that it makes, take less of the cores, where the system allows it."""
    thread = threading.get_native_id()
    with suppress(OSError):  # a sandbox may refuse it
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
