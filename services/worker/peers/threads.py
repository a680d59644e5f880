"""Work that blocks, off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

R = TypeVar("R")


async def in_thread(function: Callable[[], R], name: str, *, interrupt: Callable[[], None] | None = None) -> R:
    """Call a function in a thread of its own, and return what it returns or raise what it raises.

    If the caller is cancelled, the function still runs to its end, since nobody can stop it, and then the cancellation
    goes on.

    Args:
        function: what is called.
        name: of the thread.
        interrupt: called on the loop when the caller is cancelled, so that the function ends soon.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def work() -> None:
        try:
            settle = partial(done.set_result, function())
        except BaseException as error:  # handed to the waiting coroutine, whatever it is
            settle = partial(done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear of it
            loop.call_soon_threadsafe(settle)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    cancelled: asyncio.CancelledError | None = None
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError as error:
            cancelled = error
            if interrupt is not None:
                interrupt()
    thread.join()
    if cancelled is not None:
        done.exception()  # looked at: nobody else will
        raise cancelled
    return done.result()
