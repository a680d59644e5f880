"""Ends what a test run has started when the run is killed: brokers and services lead sessions of their own.

pytest ──stdin──► reaper        pytest dies ─► end of file ─► every process with the run's mark in its environment
 └─ starts ─► broker, services …  (they inherit the mark)                                        is killed
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from uuid import uuid4

MARK = "TEST_RUN_MARK"
"""Variable that tells processes of one run from all others; `sluice` refuses names of its own that it does not know."""


def mark_this_process() -> None:
    """From now on whatever this process starts ends with it, however it ends; it may be called again."""
    mark = uuid4().hex
    read_end, _ = os.pipe()  # the other end closes when this process ends, and no child has it
    command = [sys.executable, "-I", "-S", __file__, mark]
    os.posix_spawn(sys.executable, command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, read_end, 0)])
    os.close(read_end)
    os.environ[MARK] = mark


def kill_marked(mark: str) -> None:
    """Kill every process that was started with this mark."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue  # it has ended, or is another user's


if __name__ == "__main__":
    os.setsid()  # what ends the run from a terminal does not reach it
    while os.read(0, 4096):
        pass
    kill_marked(sys.argv[1])
