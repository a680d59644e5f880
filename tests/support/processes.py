"""Running `sluice`, and looking at processes from outside, with deadlines."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

PAUSE_S = 0.02
LIMIT_S = 120.0
"""Of one command, on a busy machine."""


def sluice(*argv: str, text: str = "", env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of `sluice` to its end.

    Args:
        argv: what follows `sluice`.
        text: what it reads.
        env: its whole environment; None: that of this process.
    """
    command = [sys.executable, "-m", "cli.main", *argv]
    return subprocess.run(command, input=text, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def state_of(pid: int) -> str:
    """Return the process's state as the kernel calls it; `T` = stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def child_of(parent: int, word: str) -> int:
    """Return the newest child of a process that has this word in its command line; 0 if there is none."""
    found = 0
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            is_child = (path / "stat").read_text().rpartition(")")[2].split()[1] == str(parent)
            if is_child and word in (path / "cmdline").read_text():
                found = max(found, int(path.name))
    return found


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 10.0) -> None:
    """Return when the condition holds.

    Raises:
        AssertionError: it does not within the limit.
    """
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(PAUSE_S)


def heed_signals() -> None:
    """Give signals their usual meaning, as in a terminal's foreground: tests may run in the background, or by nohup."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
