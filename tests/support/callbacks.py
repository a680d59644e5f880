"""How long callbacks keep an event loop, in processor time of its thread: other work on the machine adds nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch


@dataclass(slots=True)
class Callbacks:
    """What has run on one event loop."""

    longest_s: float = 0.0
    longest: str = ""
    """Which callback that was."""


@contextmanager
def timed_callbacks() -> Iterator[Callbacks]:
    """Measure every callback of the running event loop within the block; those that are under way are left out."""
    thread, seen, run = threading.get_ident(), Callbacks(), asyncio.events.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        if threading.get_ident() != thread:
            run(handle)
            return
        began_s = time.thread_time()
        run(handle)
        taken_s = time.thread_time() - began_s
        if taken_s > seen.longest_s:
            seen.longest_s, seen.longest = taken_s, repr(handle)[:300]

    with patch.object(asyncio.events.Handle, "_run", timed):
        yield seen
