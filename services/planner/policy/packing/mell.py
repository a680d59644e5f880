"""Mell: packs requests by size class, so that the bins in use are at most 4/3 of the fewest, and few requests move.

    place, remove, resize ─► an item is put, dropped or grown ─► every bin that this has changed is made good again

What a bin is held to, by the class of its largest item (`classes.py`), but for the most recently activated bin of each
class:

    L   has an S or M beside the L if one of an S- or M-bin fits, and is 3/4 full if there is a T-bin
    M   has two M, and is 3/4 full if there is a T-bin
    S   has three S
    T   is 3/4 full

Pure and incremental. Source: Mell, section VI-C. Deviations: as printed, the operations break the paper's own theorem
(`mell_printed.py`), so T may lie in M-bins too, and bins that have lost something are filled up again; of what
overflows only that goes that has to. What the paper leaves open: beside an L goes the largest S or M that fits; the T
that fill a bin up are the largest; a T that has to go is the smallest that is enough.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Final

from services.planner.policy.packing.bins import Bin, Item
from services.planner.policy.packing.class_packer import NUM_CANDIDATES, ClassPacker
from services.planner.policy.packing.classes import MOST_ITEMS, Content, SizeClass, content, item_class

FULL: Final = (3, 4)
"""Share of a bin up to which it is filled with T, as a fraction."""


class Mell(ClassPacker):
    """The corrected form; see the module."""

    def __init__(self, capacity: int, **how: Any) -> None:
        super().__init__(capacity, **how)
        self._dirty: dict[Bin, None] = {}
        """Bins that have changed."""
        self._let_off: dict[Bin, SizeClass] = {}
        """Those that lack something, and were the latest of their class when they were looked at."""

    def _allocate(self, item: Item) -> None:
        kind = item_class(item, self.capacity)
        bin_ = self._choose(item)
        if kind is SizeClass.T:
            self._put_or_evict(item, bin_ or self._new_bin(item))
            if item.bin is not None and len(item.bin.items) == 1:
                self._dirty[item.bin] = None
            return
        removed: list[Item] = []
        if bin_ is None:
            bin_ = self._new_bin(item)
        else:
            removed = self._lift_small(bin_, item.size - bin_.free)
        self._put_or_evict(item, bin_)
        for each in removed:
            self._allocate(each)
        if item.bin is not None:
            self._dirty[item.bin] = None

    def _choose(self, item: Item) -> Bin | None:
        kind = item_class(item, self.capacity)
        if kind is SizeClass.T:
            return self._room_for_small(item)
        return None if kind is SizeClass.L else self._bin_beside_l(item) or self._latest_with_place(kind, item.size)

    def _departed(self, kind: SizeClass, bin_: Bin) -> None:
        self._dirty[bin_] = None
        if kind is SizeClass.L:
            self._reallocate(list(bin_.items.values()))

    def _changed(self, item: Item, before: SizeClass) -> None:
        bin_, kind = item.bin, item_class(item, self.capacity)
        assert bin_ is not None, "it lies somewhere"
        self._dirty[bin_] = None
        if kind is before:
            if kind is SizeClass.T and bin_.free < 0 and content(bin_, self.capacity).kind is SizeClass.T:
                self._reallocate([item])
        elif kind is not SizeClass.L or any(
            item_class(each, self.capacity) is SizeClass.L for each in bin_.items.values() if each is not item
        ):
            self._reallocate([item])

    def _capacity_changed(self, bin_: Bin) -> None:
        self._dirty[bin_] = None
        self._dirty |= {lonely: None for *_, lonely in self._index.lonely}  # it may have an S or M for them again

    def _finish(self) -> None:
        while True:
            while self._dirty:
                self._make_good(self._dirty.popitem()[0])
            later = [bin_ for bin_, kind in self._let_off.items() if self._index.latest(kind) is not bin_]
            for bin_ in later:
                del self._let_off[bin_]
                self._dirty[bin_] = None
            for kind in (SizeClass.L, SizeClass.M) if self._index.latest(SizeClass.T) else ():
                emptiest = self._index.by_free[kind][-1:]
                self._dirty |= {bin_: None for *_, bin_ in emptiest if not _is_full(bin_)}
            if not self._dirty:
                break
        super()._finish()

    def _make_good(self, bin_: Bin) -> None:
        """Hold a bin to what its class promises."""
        self._relieve(bin_)
        if bin_.capacity != self.capacity or not bin_.items:
            return
        held = content(bin_, self.capacity)
        if held.kind is SizeClass.L:
            if held.companion is None:
                self._find_companion(bin_, held.largest[0])
        elif held.kind in MOST_ITEMS:
            self._fill_with_own(bin_, held.kind)
        if held.kind is not SizeClass.S:
            self._fill_with_small(bin_, held.kind)

    def _relieve(self, bin_: Bin) -> None:
        """Send away what a bin has no room for; a single item may be larger than the bin."""
        lifted: list[Item] = []
        while bin_.free < 0 and len(bin_.items) > 1:
            held = content(bin_, self.capacity)
            apart = held.companion is not None and held.largest[0].size + held.companion.size > bin_.capacity
            if apart and held.companion is not None:
                self.bins.lift(held.companion)
                lifted.append(held.companion)
            elif held.small:
                lifted += self._lift_small(bin_, -bin_.free)
            else:
                item = self._enough(list(bin_.items.values()), -bin_.free)
                self.bins.lift(item)
                lifted.append(item)
        for item in lifted:
            self._allocate(item)

    def _find_companion(self, bin_: Bin, large: Item) -> None:
        """Fetch the largest S or M that fits beside an L."""
        companions = self._index.companions
        at = bisect_left(companions, (self.capacity - large.size + 1,))
        if not at:
            return
        item = companions[at - 1][-1]
        self._dirty[self.bins.lift(item)] = None
        removed = self._lift_small(bin_, item.size - bin_.free)
        self.bins.put(item, bin_)
        for each in removed:
            self._allocate(each)

    def _fill_with_own(self, bin_: Bin, kind: SizeClass) -> None:
        """Fetch what lacks of two M or three S from the most recently activated bin of the class."""
        while True:
            latest = self._index.latest(kind)
            held = content(bin_, self.capacity)
            if held.kind is not kind or len(held.largest) >= MOST_ITEMS[kind] or latest is None:
                return
            if latest is bin_:
                self._let_off[bin_] = kind
                return
            item = max(content(latest, self.capacity).largest, key=lambda each: each.size)
            if not _could_take(bin_, held, item.size):
                return
            self._dirty[self.bins.lift(item)] = None
            removed = self._lift_small(bin_, item.size - bin_.free)
            self.bins.put(item, bin_)
            for each in removed:
                self._allocate(each)

    def _fill_with_small(self, bin_: Bin, kind: SizeClass) -> None:
        """Fetch T from the most recently activated T-bin until the bin is full enough."""
        while not _is_full(bin_):
            latest = self._index.latest(SizeClass.T)
            if latest is None:
                return
            if latest is bin_:
                self._let_off[bin_] = kind
                return
            item = max(latest.items.values(), key=lambda each: each.size)
            self._dirty[self.bins.lift(item)] = None
            self.bins.put(item, bin_)

    def _room_for_small(self, item: Item) -> Bin | None:
        """Return the bin in use that takes a T: of an L, of M, or the T-bin that was activated last."""
        for kind in (SizeClass.L, SizeClass.M):
            fitting = [bin_ for free, _, bin_ in self._index.by_free[kind][-NUM_CANDIDATES:] if free >= item.size]
            if fitting:
                return self._by_priority(fitting, item)
        latest = self._index.latest(SizeClass.T)
        return latest if latest is not None and latest.free >= item.size else None

    def _bin_beside_l(self, item: Item) -> Bin | None:
        """Return the L-bin without S or M that takes one."""
        fitting = [bin_ for room, _, bin_ in self._index.lonely[-NUM_CANDIDATES:] if room >= item.size]
        return self._by_priority(fitting, item)

    def _latest_with_place(self, kind: SizeClass, size: int) -> Bin | None:
        """Return the bin of a class that was activated last, if it lacks one of its items and could take this one."""
        bin_ = self._index.latest(kind)
        if bin_ is None:
            return None
        held = content(bin_, self.capacity)
        return bin_ if len(held.largest) < MOST_ITEMS[kind] and _could_take(bin_, held, size) else None

    def _lift_small(self, bin_: Bin, size: int) -> list[Item]:
        """Lift T of a bin until so much is free, as few as possible."""
        lifted: list[Item] = []
        while size > 0 and (small := content(bin_, self.capacity).small):
            item = self._enough(small, size)
            self.bins.lift(item)
            lifted.append(item)
            size -= item.size
        return lifted

    @staticmethod
    def _enough(items: list[Item], size: int) -> Item:
        """Return the smallest item of at least a size, else the largest one."""
        return min(items, key=lambda each: (each.size < size, each.size if each.size >= size else -each.size))

    def _reallocate(self, items: list[Item]) -> None:
        for item in items:
            self._dirty[self.bins.lift(item)] = None
        for item in items:
            self._allocate(item)


def _could_take(bin_: Bin, held: Content, size: int) -> bool:
    """Return whether there is room without its T; where bins are few it may hold what is none of its class."""
    return size <= bin_.free + sum(item.size for item in held.small)


def _is_full(bin_: Bin) -> bool:
    return bin_.used * FULL[1] >= bin_.capacity * FULL[0]
