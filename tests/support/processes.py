"""Looking at processes from outside, with deadlines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

PAUSE_S = 0.02


def is_running(pid: int) -> bool:
    """Return whether the process exists and has not ended (one that nobody has reaped yet has ended)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    if not stat.parent.parent.is_dir():
        return True
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 10.0) -> None:
    """Return when the condition holds.

    Raises:
        AssertionError: it does not within the limit.
    """
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(PAUSE_S)
