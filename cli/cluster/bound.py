"""Becomes the program of its arguments, which the kernel kills when the process that started it is gone.

Started as a script with `python -I -S`, so it imports the standard library only. The guardian does the same for whole
groups, and removes the run's folder; this holds also when somebody kills both. Linux only; elsewhere the guardian is
alone.
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, argv: list[str]) -> None:
    """Run the program in place of this one.

    Args:
        parent: process id of who started this; it may be gone already.
        argv: the program's path, then its arguments.
    """
    if sys.platform == "linux":
        import ctypes  # here: it takes longer than all the rest

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == parent:
        os.execv(argv[0], argv)  # noqa: S606  a child of ours, no shell


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
