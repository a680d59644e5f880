"""A tiny process that outlives `sluice up`, so that nothing else does.

It leads the process group of all children and waits for the end of its stdin, which only `sluice up` holds open. When
that one is gone, however it ended, the guardian kills the group and removes the run's folder. `sluice up` replaces a
guardian that is gone by another one in the same group. Started as a script with `python -I -S`, so it imports the
standard library only.

    up ──stdin──► guardian (of group G)               up dies ─► end of file ─► kill G, remove the folder
     └─ starts ─► worker, dispatcher, … (members of G from before their first instruction)
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

REMOVE_ATTEMPTS = 40
REMOVE_PAUSE_S = 0.05


def main(run_dir: Path, group: int) -> None:
    """Wait for the end of stdin, then kill the group and remove the folder.

    Args:
        run_dir: the folder.
        group: in which this process is; 0: one that it leads.
    """
    group = group or os.getpid()
    if os.getpgrp() != group:
        raise SystemExit("the guardian must be in the group that it kills")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    if os.fork() == 0:
        os.setsid()  # out of the group, to outlive it by a moment
        os.killpg(group, signal.SIGKILL)
        _remove(run_dir)
        os._exit(0)
    while True:
        signal.pause()


def _remove(run_dir: Path) -> None:
    for _ in range(REMOVE_ATTEMPTS):  # a process that is being killed may still write
        shutil.rmtree(run_dir, ignore_errors=True)
        if not run_dir.exists():
            return
        time.sleep(REMOVE_PAUSE_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
