"""What a process has open, to compare before with after."""

from __future__ import annotations

import threading
from pathlib import Path

SHARED = ("asyncio_", "log")
"""Beginnings of names of threads that belong to the event loop and to the process."""


def whats_open() -> tuple[list[str], int]:
    """Return the names of all threads but shared ones, and how many files and sockets are open."""
    threads = [thread.name for thread in threading.enumerate() if not thread.name.startswith(SHARED)]
    return sorted(threads), len(list(Path("/proc/self/fd").iterdir()))
