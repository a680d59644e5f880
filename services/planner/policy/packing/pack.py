"""Packs requests with room to grow: best fit, one request given away by a bin that overflows, the emptiest emptied.

    a request comes       to the fullest bin that has room for growth left then
    a bin overflows       it gives away one request: the smallest that leaves it room for growth
    every few seconds     one of the emptiest bins is emptied, if all of it fits elsewhere with room for growth, until
                          none can be; where a request fits nowhere, a smaller one that does may make place for it

Room for growth is what makes it rest: without it every bin is about to overflow. It is a share of a bin.

Pure and incremental. Source: the project's own, measured against Mell (docs/results/mell.md).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Any, Final

from services.planner.policy.packing.bins import Bin, Item
from services.planner.policy.packing.fits import FitPacker

ROOM_IF_INSTANT: Final = 0.02
"""Share of a bin that stays free when something is put into it, where moves take no time; the system `pack` leaves
`shared.systems.ROOM_FOR_GROWTH_S`."""
EMPTY_PERIOD_S: Final = 5.0
"""Between two looks at the emptiest bins."""
NUM_EMPTIEST: Final = 4
"""Bins of which one is emptied, the emptiest first."""
NUM_MADE_PLACE: Final = 64
"""Bins with most room in which a request may make place for a larger one."""
_Filed = tuple[int, int, Bin]


class Pack(FitPacker):
    """See the module.

    Args:
        capacity: of all bins.
        room_for_growth: share of a bin.
        how: as any packer.
    """

    def __init__(self, capacity: int, *, room_for_growth: float = ROOM_IF_INSTANT, **how: Any) -> None:
        super().__init__(capacity, **how)
        self._room = int(room_for_growth * capacity)
        self._not_before_s = float("-inf")

    def tick(self, now_s: float) -> None:
        """Empty the emptiest bins, if it is time."""
        if now_s < self._not_before_s:
            return
        self._not_before_s = now_s + EMPTY_PERIOD_S
        while self._empty_one():
            pass

    def _choose(self, size: int) -> Bin | None:
        return self._index.fullest(size + self._room)

    def _relieve(self, bin_: Bin) -> None:
        enough = self._room - bin_.free
        by_size = sorted(bin_.items.values(), key=lambda item: item.size)
        item = next((each for each in by_size if each.size >= enough), by_size[-1])
        self.bins.lift(item)
        self._put(item)

    def _empty_one(self) -> bool:
        """Move everything out of one of the emptiest bins; return whether there was room for all of it."""
        by_free = [(bin_.free, bin_.number, bin_) for bin_ in self.by_free()]
        for *_, source in reversed(by_free[-NUM_EMPTIEST:]):
            others = [key for key in by_free if key[-1] is not source]
            if source.used > sum(free - self._room for free, *_ in others if free > self._room):
                return False  # the others hold more
            plan = Elsewhere(others, self._room).plan(source.items.values())
            for item, bin_ in plan or ():
                self.bins.lift(item)
                self.bins.put(item, bin_)
            if plan:
                self._end_if_empty(source)
                return True
        return False


class Elsewhere:
    """Where the items of a bin could go, one after the other: each takes from the room that the next one finds.

    Args:
        by_free: the other bins, (free, number, bin), the fullest first.
        room: that stays free in each that takes something.
    """

    def __init__(self, by_free: list[_Filed], room: int) -> None:
        self._by_free = by_free
        self._room = room
        self._moved: set[int] = set()

    def plan(self, items: Iterable[Item]) -> list[tuple[Item, Bin]] | None:
        """Return which item should go where, in this order, the largest first; None: not all of them fit."""
        moves: list[tuple[Item, Bin]] = []
        for item in sorted(items, key=lambda each: -each.size):
            moves += self._fit(item) or self._make_place(item)
            if not moves or moves[-1][0] is not item:
                return None
        return moves

    def _fit(self, item: Item) -> list[tuple[Item, Bin]]:
        """Have an item go to the fullest bin that has room for it."""
        at = bisect_left(self._by_free, (item.size + self._room,))
        if at == len(self._by_free):
            return []
        bin_ = self._take(at, item.size)
        self._moved.add(id(item))
        return [(item, bin_)]

    def _make_place(self, item: Item) -> list[tuple[Item, Bin]]:
        """Have an item go where a smaller one leaves room for it: the smallest that fits elsewhere."""
        candidates: list[tuple[int, int, Item, Bin]] = []
        for free, number, bin_ in self._by_free[-NUM_MADE_PLACE:]:
            lacking = item.size + self._room - free
            smaller = [
                each.size
                for each in bin_.items.values()
                if lacking <= each.size < item.size and id(each) not in self._moved
            ]
            if smaller:
                size = min(smaller)
                found = next(each for each in bin_.items.values() if each.size == size and id(each) not in self._moved)
                candidates.append((size, number, found, bin_))
        for size, _, other, bin_ in sorted(candidates, key=lambda each: each[:2]):
            at = next(n for n, key in enumerate(self._by_free) if key[-1] is bin_)
            self._take(at, item.size - size)
            if moved := self._fit(other):
                self._moved.add(id(item))
                return [*moved, (item, bin_)]
            at = next(n for n, key in enumerate(self._by_free) if key[-1] is bin_)
            self._take(at, size - item.size)
        return []

    def _take(self, at: int, size: int) -> Bin:
        """Note that the bin at this place has so much less free; return it."""
        free, number, bin_ = self._by_free.pop(at)
        insort(self._by_free, (free - size, number, bin_))
        return bin_
