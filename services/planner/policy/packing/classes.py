"""Size classes of Mell, and an index that finds bins by their class.

    L (C/2, C]    M (C/3, C/2]    S (C/4, C/3]    T (C/8, C/4]    smaller ones are gathered until they are a T

C is the capacity that all bins share. One of another capacity (a group, a worker that has given memory away) is left
out: it is in no class, nothing is put there, and nothing is taken from it unless it overflows.

Pure. Source: Mell, section VI-C.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from enum import IntEnum
from typing import Any, NamedTuple

from services.planner.policy.packing.bins import Bin, Item


class SizeClass(IntEnum):
    """How large an item is, beside a bin."""

    TINY = 0
    T = 1
    S = 2
    M = 3
    L = 4


_DIVISORS = {SizeClass.L: 2, SizeClass.M: 3, SizeClass.S: 4, SizeClass.T: 8}
MOST_ITEMS = {SizeClass.M: 2, SizeClass.S: 3}
"""Items of its own class that a bin of this class holds."""


def size_class(size: int, capacity: int) -> SizeClass:
    """Return the class of a size."""
    return next((each for each, divisor in _DIVISORS.items() if divisor * size > capacity), SizeClass.TINY)


def least_size(kind: SizeClass, capacity: int) -> int:
    """Return the smallest size of a class."""
    return capacity // _DIVISORS[kind] + 1 if kind in _DIVISORS else 1


def item_class(item: Item, capacity: int) -> SizeClass:
    """Return the class of an item: what is gathered counts as T, even if it could be more."""
    return SizeClass.T if item.is_gathered else size_class(item.size, capacity)


class Content(NamedTuple):
    """What lies in a bin, by class."""

    kind: SizeClass
    """Of its largest item; TINY: it is empty."""
    largest: list[Item]
    """Items of that class."""
    companion: Item | None
    """The S or M beside an L."""
    small: list[Item]
    """The T, if they are not the largest."""


def content(bin_: Bin, capacity: int) -> Content:
    """Sort the items of a bin."""
    by_class: dict[SizeClass, list[Item]] = {}
    for item in bin_.items.values():
        by_class.setdefault(item_class(item, capacity), []).append(item)
    kind = max(by_class, default=SizeClass.TINY)
    between = [item for each in (SizeClass.S, SizeClass.M) if each < kind for item in by_class.get(each, ())]
    small = by_class.get(SizeClass.T, []) if kind > SizeClass.T else []
    return Content(kind, by_class.get(kind, []), between[0] if between else None, small)


class ClassIndex:
    """Bins by class and room, and the S and M that could go beside an L.

    Args:
        capacity: that all bins of a class share.
    """

    def __init__(self, capacity: int) -> None:
        self.by_order: dict[SizeClass, list[tuple[int, Bin]]] = {each: [] for each in SizeClass}
        """Bins of a class, the most recently activated one last; TINY: those that are empty."""
        self.by_free: dict[SizeClass, list[tuple[int, int, Bin]]] = {SizeClass.L: [], SizeClass.M: []}
        """(free, number) of the bins whose room T may have."""
        self.lonely: list[tuple[int, int, Bin]] = []
        """(capacity without the L, number) of L-bins that have no S or M."""
        self.companions: list[tuple[int, int, int, Item]] = []
        """(size, number of the bin, place in it) of the S and M in S- and M-bins."""
        self._capacity = capacity

    def latest(self, kind: SizeClass) -> Bin | None:
        """Return the most recently activated bin of a class."""
        bins = self.by_order[kind]
        return bins[-1][1] if bins else None

    def update(self, bin_: Bin) -> None:
        """Know a bin as it is now."""
        self.discard(bin_)
        if bin_.capacity != self._capacity and bin_.items:
            return
        held = content(bin_, self._capacity)
        keys: list[tuple[list[Any], tuple[Any, ...]]] = [(self.by_order[held.kind], (bin_.order, bin_))]
        if held.kind in self.by_free:
            keys.append((self.by_free[held.kind], (bin_.free, bin_.number, bin_)))
        if held.kind is SizeClass.L and held.companion is None:
            keys.append((self.lonely, (self._capacity - held.largest[0].size, bin_.number, bin_)))
        if held.kind in MOST_ITEMS:
            keys += [(self.companions, (item.size, bin_.number, n, item)) for n, item in enumerate(held.largest)]
        for keyed, key in keys:
            insort(keyed, key)
        bin_.filed = keys

    def discard(self, bin_: Bin) -> None:
        """Forget a bin."""
        for keyed, key in bin_.filed or ():
            del keyed[bisect_left(keyed, key)]
        bin_.filed = None
