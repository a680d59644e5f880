"""Who used the machine during a run: the engine and the client, or others."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Share:
    """CPU seconds up to one instant."""

    busy_s: float
    """Of all cores, whoever used them."""
    own_s: float
    """Of this process, its ended children, and the engine's tree."""

    @classmethod
    def take(cls, pid: int | None) -> Self:
        """Return the present state; `pid` is the engine's process, if it has one between runs."""
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        busy = sum(fields[:3]) + sum(fields[5:8])  # all but idle and waiting for disks
        times = os.times()
        own_s = sum(times[:4]) + (TICK_S * tree_ticks(pid) if pid is not None else 0.0)
        return cls(busy * TICK_S, own_s)


def tree_ticks(root: int) -> int:
    """Return the clock ticks of a process and of all that descend from it, ended ones included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it just ended
            continue
        parents[int(path.name)] = int(fields[1])
        ticks[int(path.name)] = sum(int(field) for field in fields[11:15])
    return sum(ticks[pid] for pid in ticks if descends(pid, root, parents))


def descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    """Return whether a process is the root or below it."""
    for _ in range(len(parents)):
        if pid == root:
            return True
        if pid not in parents:
            return False
        pid = parents[pid]
    return False


def foreign_share(before: Share, after: Share, elapsed_s: float, num_cores: int) -> float:
    """Return the share of the machine (0 to 1) that was used, but not by us, between two instants."""
    foreign_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, foreign_s / (elapsed_s * num_cores)))


async def wait_idle(limit_s: float = 15.0, look_s: float = 0.4, idle_share: float = 0.04) -> None:
    """Return once the machine is idle, or after `limit_s`: an engine's threads spin on for a second after its turn."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        before, began_s = Share.take(None), time.monotonic()
        await asyncio.sleep(look_s)
        elapsed_s = time.monotonic() - began_s
        if foreign_share(before, Share.take(None), elapsed_s, os.cpu_count() or 1) < idle_share:
            return
