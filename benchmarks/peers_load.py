"""Who used the machine during a run: the engine and the client, or others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.support.pauses import processes_of

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
NUM_CORES = os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Share:
    """CPU seconds up to one instant."""

    at_s: float
    """The instant."""
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
        return cls(time.monotonic(), busy * TICK_S, own_s)


def tree_ticks(root: int) -> int:
    """Return the clock ticks of a process and of all that descend from it, ended ones included."""
    ticks = 0
    for pid in processes_of(root):
        with contextlib.suppress(OSError):  # it has ended just now
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks


def foreign_share(before: Share, after: Share, num_cores: int = NUM_CORES) -> float:
    """Return the share of the machine (0 to 1) that was used, but not by us, between two instants."""
    foreign_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, foreign_s / ((after.at_s - before.at_s) * num_cores)))


async def wait_idle(limit_s: float = 15.0, look_s: float = 0.4, idle_share: float = 0.04) -> None:
    """Return once the machine is idle, or after `limit_s`: an engine's threads spin on for a second after its turn."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        before = Share.take(None)
        await asyncio.sleep(look_s)
        if foreign_share(before, Share.take(None)) < idle_share:
            return
