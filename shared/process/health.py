"""A health check for containers: does this process serve, does its event loop go on, and does it reach its broker?

The service writes a small file every second (`--health-file`); `python -m shared.process.health FILE` looks at it, and
exits with 1 and one line when the process stands still, has no broker, or does not serve yet (a worker loads its
model). Ages are measured on the monotonic clock, which all processes of a machine share, so that a wall clock that
jumps makes nobody ill.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

MAX_AGE_S = 5.0
"""A file that is older than this means that the process stands still."""


def write_health(path: Path, *, connected: bool, ready: bool) -> None:
    """Write the state of this moment; a reader sees the old state or the new one, never a half.

    Raises:
        OSError: the file cannot be written.
    """
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps({"at_s": time.monotonic(), "connected": connected, "ready": ready}))
    draft.replace(path)


def find_illness(path: Path) -> str | None:
    """Return what is wrong with the process that writes the file, or None if it is well."""
    try:
        state = json.loads(path.read_text())
        age_s = time.monotonic() - float(state["at_s"])
        connected, ready = bool(state["connected"]), bool(state["ready"])
    except (OSError, ValueError, OverflowError, RecursionError, KeyError, TypeError) as error:
        return f"{path} says nothing ({type(error).__name__})"
    if age_s > MAX_AGE_S:
        return f"the process has stood still for {age_s:.0f} s"
    if not connected:
        return "no connection to the broker"
    return None if ready else "it does not serve yet"


def main() -> None:
    """Entry point: one argument, the file."""
    illness = find_illness(Path(sys.argv[1] if len(sys.argv) > 1 else os.devnull))
    if illness is not None:
        sys.stdout.write(illness + "\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
