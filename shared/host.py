"""Which process this is, for people who look from outside (`$SRV.INFO`, reports, `sluice chaos`), and its cores."""

from __future__ import annotations

import os
import platform
import re
import socket
from pathlib import Path


def process_facts() -> dict[str, str]:
    """Return `pid` and `host` of this process, as service metadata: texts."""
    return {"pid": str(os.getpid()), "host": socket.gethostname()}


def count_cores(most: int | None = None) -> int:
    """Return how many cores this process may run on, or `most` if that is less; 0 and None are no limit."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(found, most or found)


def processor_name() -> str:
    """Return the name of this machine's processor, or its kind where the system does not say more."""
    try:
        names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.machine()
