"""Run tests on a machine that stands still now and then: python -m tests.support.pauses --kind all -- COMMAND …

Every process of the command is stopped for a moment, again and again, as a virtual machine is when its host is busy;
or one by chance, as a process is that gets no turn. Where something fails only then, a test depends on the machine, or
the product does. Processes that a test has stopped itself stay stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

PAUSES_S: Final = {
    "all": (0.1, 0.3, 0.7, 1.2, 2.0),
    "one": (0.02, 0.05, 0.1, 0.2, 0.35),
    "tests": (0.05, 0.1, 0.2, 0.4),
}
"""How long processes are stopped, by kind: all of them, any one, or one that runs the tests."""
_BETWEEN_S: Final = (0.3, 4.0)
_PROC: Final = Path("/proc")
_STOPPED: Final = "TtZX"


def processes_of(root: int) -> dict[int, str]:
    """Return a process and all that descend from it, parents first, with their states as `/proc` tells them."""
    children: dict[int, list[int]] = {}
    states: dict[int, str] = {}
    for folder in _PROC.iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended just now
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            states[int(folder.name)] = state
            children.setdefault(int(parent), []).append(int(folder.name))
    found, waiting = dict[int, str](), [root]
    while waiting:
        pid = waiting.pop(0)
        if pid in states:
            found[pid] = states[pid]
            waiting += children.get(pid, [])
    return found


def pause(root: int, kind: str, rng: random.Random, stand_still: Callable[[], None]) -> int:
    """Stop what runs until `stand_still` returns; return how many processes that were."""
    running = [pid for pid, state in processes_of(root).items() if state not in _STOPPED]
    if kind == "tests":
        running = list(filter(_runs_tests, running)) or running[:1]
    chosen = running if kind == "all" else rng.sample(running, min(1, len(running)))
    stopped = [pid for pid in chosen if _signal(pid, signal.SIGSTOP)]
    try:
        stand_still()
    finally:
        for pid in reversed(stopped):
            _signal(pid, signal.SIGCONT)
    return len(stopped)


def _runs_tests(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"execnet" in (_PROC / str(pid) / "cmdline").read_bytes()  # a worker of pytest-xdist
    return False


def _signal(pid: int, number: signal.Signals) -> bool:
    with contextlib.suppress(OSError):
        os.kill(pid, number)
        return True
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(description="Run a command whose processes stand still now and then.")
    parser.add_argument("--kind", choices=sorted(PAUSES_S), default="all", help="which stand still (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and their lengths (default: 0)")
    parser.add_argument("command", nargs="+", help="after --")
    chosen = parser.parse_args(argv)
    process, rng, count = subprocess.Popen(chosen.command), random.Random(chosen.seed), 0
    while True:
        try:
            code = process.wait(rng.uniform(*_BETWEEN_S))
            break
        except subprocess.TimeoutExpired:
            duration_s = rng.choice(PAUSES_S[chosen.kind])
            count += pause(process.pid, chosen.kind, rng, partial(time.sleep, duration_s)) > 0
    sys.stderr.write(f"stood still {count} times ({chosen.kind})\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
