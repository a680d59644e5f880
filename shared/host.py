"""Which process this is, for people who look from outside (`$SRV.INFO`, reports, `sluice chaos`); cores and memory."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that a process could still take; 0: the system does not say."""

    shared_bytes: int
    """What others on the machine may take as well."""
    own_bytes: int | None = None
    """What the limit of a container leaves to this process alone; None: no such limit."""


def is_first_process() -> bool:
    """Return whether this is the first process of a container: its control groups and host name are its own then."""
    return os.getpid() == 1


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process could still take: the machine's, or those of its control groups.

    What files have in memory counts as free, where the system would take it for others. 0: the system does not say.

    Args:
        root: of the file system that says it.
    """
    return max(0, min([*_left_on_machine(root), *_left_in_groups(root)], default=0))


def free_memory_here(root: Path = Path("/"), *, is_alone: bool | None = None) -> FreeMemory:
    """Return the same with a container's limit by itself, where this process has one for itself.

    Args:
        root: of the file system that says it.
        is_alone: whether control groups are this process's own; None: as `is_first_process` says.
    """
    groups = _left_in_groups(root)
    if not groups or not (is_first_process() if is_alone is None else is_alone):
        return FreeMemory(free_memory(root))
    return FreeMemory(sum(_left_on_machine(root)), max(0, min(groups)))


def _left_on_machine(root: Path) -> list[int]:
    return [1024 * kib for kib in _numbers(root / "proc/meminfo", "MemAvailable:")]


def _left_in_groups(root: Path) -> list[int]:
    return [left for group in _memory_groups(root) if (left := _left_in(*group)) is not None]


def _memory_groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Return folders of control groups that bound this process's memory, and the names there: limit, use, files."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:  # version 2
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        inner = top / path.lstrip("/")  # in a container it may be the host's path, which is not there; the top is
        yield from ((folder, *names) for folder in (inner, *inner.parents))


def _left_in(folder: Path, limit: str, use: str, files: str) -> int | None:
    """Return the bytes that a control group leaves; None: it has no limit."""
    texts = (_read(folder / limit).strip(), _read(folder / use).strip())
    if not all(text.isdecimal() for text in texts):
        return None
    most, used = map(int, texts)
    return most - used + sum(_numbers(folder / "memory.stat", files))


def _numbers(file: Path, name: str) -> list[int]:
    """Return the number behind a name in a file of lines, if it is there."""
    fields = (line.split() for line in _read(file).splitlines())
    return [int(words[1]) for words in fields if words[:1] == [name] and words[1].isdecimal()]


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
