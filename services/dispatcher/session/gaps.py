"""Gaps between tokens, counted in the hot path for the price of a dictionary look-up; a histogram when it is read."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
"""Upper borders of the buckets, seconds."""
_TICKS_PER_S: Final = 10_000
_MAX_DISTINCT: Final = 4096


class GapHistogram:
    """Times between two tokens, of any number of requests."""

    def __init__(self) -> None:
        self._ticks: dict[int, int] = {}
        self.same_s = 0.0
        """The newest gap. A step's sequences have equal ones: whoever has one like it may add 1 to `num_same` instead
        of calling `add`."""
        self.num_same = 0
        """How often it came in a row."""
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, gap_s: float, count: int = 1) -> None:
        """Count `count` gaps of this length; resolution 0.1 ms."""
        if gap_s == self.same_s:
            self.num_same += count
            return
        self._settle()
        self.same_s, self.num_same = gap_s, count

    def _settle(self) -> None:
        ticks = int(self.same_s * _TICKS_PER_S + 0.5)
        pending = self._ticks
        pending[ticks] = pending.get(ticks, 0) + self.num_same
        self.num_same = 0
        if len(pending) > _MAX_DISTINCT:
            self._fold()

    def _fold(self) -> None:
        for ticks, count in self._ticks.items():
            gap_s = ticks / _TICKS_PER_S
            self._counts[bisect_left(BOUNDS_S, gap_s)] += count
            self._sum_s += gap_s * count
        self._ticks.clear()

    def snapshot(self) -> tuple[list[int], int, float]:
        """Return (cumulative counts per bound, number, sum in seconds)."""
        self._settle()
        self._fold()
        total, cumulative = 0, []
        for count in self._counts:
            total += count
            cumulative.append(total)
        return cumulative[:-1], total, self._sum_s
