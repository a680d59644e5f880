"""Mell as it is printed: every operation is carried out to the letter, and nothing besides.

What its figure 10 leaves open is read as it is in `mell.py`, and: "depart and re-allocate" takes an item out without
filling up what it leaves; "the most recently activated GPU" is that of the bin's own class; an L-bin that overflows for
whatever reason sends away all that is beside the L, an M-bin its T, a T-bin the item that has grown.

    2 n T of .249 C, then n L of .501 C      the T stay where they are: 1.5 n bins, where n are enough
    2 n M of .335 C, then 2 n T of .165 C    no T goes to an M-bin: 1.33 n bins, where n are enough

So its theorem 1 does not hold (properties 1 and 5: T-bins beside L- and M-bins that are less than 3/4 full).

Pure and incremental. Source: Mell, section VI-C and figure 10.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from services.planner.policy.packing.bins import Bin, Item
from services.planner.policy.packing.class_packer import NUM_CANDIDATES, ClassPacker
from services.planner.policy.packing.classes import SizeClass, content, item_class

SMALL_SOURCES = (SizeClass.T, SizeClass.M)
"""Bins whose T fill up a T-bin."""


class PrintedMell(ClassPacker):
    """The printed form; see the module."""

    def _allocate(self, item: Item) -> None:
        kind = item_class(item, self.capacity)
        if kind is SizeClass.L:
            bin_ = self._new_bin(item)
            self._put_or_evict(item, bin_)
            if item.bin is not None:
                self._fetch_companion(item.bin)
            return
        bin_ = self._choose(item) or self._new_bin(item)
        held = None if bin_ is None or kind is SizeClass.T else content(bin_, self.capacity)
        others = self._lift(held.small) if held is not None and held.kind is SizeClass.L else []
        self._put_or_evict(item, bin_)
        self._allocate_all(others)

    def _choose(self, item: Item) -> Bin | None:
        kind = item_class(item, self.capacity)
        if kind is SizeClass.L:
            return None
        room = self._index.by_free[SizeClass.L] if kind is SizeClass.T else self._index.lonely
        fitting = [bin_ for free, _, bin_ in room[-NUM_CANDIDATES:] if free >= item.size]
        latest = self._index.latest(kind)
        last = latest if latest is not None and latest.free >= item.size else None
        return self._by_priority(fitting, item) or last

    def _departed(self, kind: SizeClass, bin_: Bin) -> None:
        held = content(bin_, self.capacity)
        before = max(kind, held.kind)
        latest = self._index.latest(before)
        if kind is SizeClass.L:
            self._allocate_all(self._lift(list(bin_.items.values())))
        elif before is not SizeClass.L and (latest is None or latest.order <= bin_.order):
            return
        elif kind is SizeClass.T:
            self._fetch_small(bin_, SMALL_SOURCES if before is SizeClass.T else (SizeClass.T,))
        elif before is SizeClass.L:
            self._fetch_companion(bin_)
        else:
            small = self._lift([item for item in bin_.items.values() if item_class(item, self.capacity) is SizeClass.T])
            self._fetch_own(bin_, kind)
            self._allocate_all(small)

    def _changed(self, item: Item, before: SizeClass) -> None:
        bin_, kind = item.bin, item_class(item, self.capacity)
        assert bin_ is not None, "it lies somewhere"
        others = [each for each in bin_.items.values() if each is not item]
        has_l = any(item_class(each, self.capacity) is SizeClass.L for each in others)
        if kind is not before and (kind is not SizeClass.L or has_l):
            self.bins.lift(item)
            self._departed(before, bin_)
            self._allocate(item)
        elif bin_.free < 0:
            held = content(bin_, self.capacity)
            if held.kind is SizeClass.L:
                gone = [each for each in bin_.items.values() if each is not held.largest[0]]
            elif held.kind is SizeClass.T:
                gone = [item]
            else:
                gone = held.small if sum(each.size for each in held.small) >= -bin_.free else [item]
            self._allocate_all(self._lift(gone))

    def _capacity_changed(self, bin_: Bin) -> None:
        by_size = sorted(bin_.items.values(), key=lambda item: item.size)
        gone: list[Item] = []
        while bin_.used - sum(item.size for item in gone) > bin_.capacity and len(by_size) > 1:
            gone.append(by_size.pop(0))
        self._allocate_all(self._lift(gone))

    def _fetch_companion(self, bin_: Bin) -> None:
        """Move an S or M beside an L from the bin that comes first, and fill that one up again."""
        held = content(bin_, self.capacity)
        if held.companion is not None:
            return
        large = held.largest[0]
        at = bisect_left(self._index.companions, (bin_.capacity - large.size + 1,))
        items = [item for *_, item in self._index.companions[max(at - NUM_CANDIDATES, 0) : at]]
        fitting = {item.bin: item for item in items if item.bin is not None}
        source = self._by_priority(fitting, large)
        if source is None:
            return
        item = fitting[source]
        kind = item_class(item, self.capacity)
        small = self._lift(content(bin_, self.capacity).small)
        self.bins.lift(item)
        self.bins.put(item, bin_)
        self._departed(kind, source)
        self._allocate_all(small)

    def _fetch_own(self, bin_: Bin, kind: SizeClass) -> None:
        """Move an S to an S-bin, or an M to an M-bin, from the one that was activated last."""
        latest = self._index.latest(kind)
        if latest is None or latest is bin_:
            return
        fitting = [item for item in content(latest, self.capacity).largest if item.size <= bin_.free]
        if fitting:
            item = max(fitting, key=lambda each: each.size)
            self.bins.lift(item)
            self.bins.put(item, bin_)

    def _fetch_small(self, bin_: Bin, kinds: Sequence[SizeClass]) -> None:
        """Move one T into a bin, from the bin of these classes that was activated last and has one."""
        sources = sorted(
            (each for kind in kinds for each in self._index.by_order[kind][-NUM_CANDIDATES:]), reverse=True
        )
        for _, source in sources:
            small = [
                item
                for item in source.items.values()
                if item_class(item, self.capacity) is SizeClass.T and item.size <= bin_.free
            ]
            if small and source is not bin_:
                item = max(small, key=lambda each: each.size)
                self.bins.lift(item)
                self.bins.put(item, bin_)
                return

    def _lift(self, items: Sequence[Item]) -> list[Item]:
        for item in items:
            self.bins.lift(item)
        return list(items)

    def _allocate_all(self, items: Sequence[Item]) -> None:
        for item in items:
            self._allocate(item)
