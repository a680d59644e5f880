"""What both forms of Mell have in common: items, those that are gathered of small requests, and which bin comes first.

Requests of up to C/8 are gathered: an item takes more of them up to C/4, and there is one that does. It is split once
it outgrows C/4, a request that outgrows C/8 becomes an item of its own, and one that shrinks below C/8 is merged with
the one that takes more, so that at most one is smaller than that.

Source: Mell, section VI-C.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.planner.policy.packing.bins import Bin, BinMove, Item, Name
from services.planner.policy.packing.classes import ClassIndex, SizeClass, item_class, size_class
from services.planner.policy.packing.packer import Packer

NUM_CANDIDATES = 8
"""Bins with most room that are compared by priority."""


@dataclass(frozen=True, slots=True)
class Priority:
    """Which of several bins takes an item first: the one with the largest sum of these weights."""

    free: float = 1.0
    """Times its share of free memory."""
    requests: float = -0.05
    """Times its number of items."""
    same_host: float = 0.05
    """If it is on the machine that the item comes from."""


class ClassPacker(Packer):
    """Keeps requests in bins by their size class.

    Args:
        capacity: of all bins.
        max_bins: how many there are; None: as many as are needed.
        priority: of bins.
        host_of: the machine of a bin.
    """

    def __init__(
        self,
        capacity: int,
        *,
        max_bins: int | None = None,
        priority: Priority = Priority(),
        host_of: Callable[[int], object] = lambda number: number,
    ) -> None:
        self._index = ClassIndex(capacity)
        super().__init__(capacity, self._index, max_bins)
        self._open: Item | None = None
        """The item that takes small requests."""
        self._priority = priority
        self._host_of = host_of

    def place(self, name: Name, size: int) -> None:
        """Take in a request that has come."""
        assert name not in self._items, "a request comes once"
        if size_class(size, self.capacity) is SizeClass.TINY:
            self._gather(name, size)
        else:
            item = self._items[name] = Item({name: size}, size)
            self._allocate(item)
        self._finish()

    def remove(self, name: Name) -> None:
        """Forget a request that has ended."""
        item = self._items.pop(name)
        self._take_out(item, name)
        self._finish()

    def resize(self, name: Name, size: int) -> None:
        """Note that a request has grown."""
        item = self._items[name]
        before = item_class(item, self.capacity)
        self.bins.resize(item, name, size)
        if not item.is_gathered and size_class(size, self.capacity) is SizeClass.TINY:
            item.is_gathered = True
            self.bins.regroup(item, item.members)
            self._merge(item)
        elif not item.is_gathered:
            self._changed(item, before)
        elif size_class(size, self.capacity) is not SizeClass.TINY:
            self._set_apart(item, name)
        elif 4 * item.size > self.capacity:
            self._split(item)
        else:
            self._changed(item, before)
        self._finish()

    def change_capacity(self, number: int, capacity: int) -> None:
        """Note that a bin holds more, or less, than before: it is left out unless it holds as much as the others."""
        bin_ = self.bins[number]
        self.bins.set_capacity(bin_, capacity)
        self._capacity_changed(bin_)
        self._finish()

    def next_bin(self, size: int) -> Bin | None:
        """Return the bin in use to which a request of a size would go; None: to one more."""
        opened = self._open
        if size_class(size, self.capacity) is not SizeClass.TINY:
            return self._choose(Item({}, size))
        if opened is not None and opened.bin is not None and 4 * (opened.size + size) <= self.capacity:
            return opened.bin if opened.bin.free >= size else None
        return self._choose(Item({}, size, is_gathered=True))

    @abstractmethod
    def _allocate(self, item: Item) -> None:
        """Find a place for an item that lies nowhere."""

    @abstractmethod
    def _choose(self, item: Item) -> Bin | None:
        """Return the bin in use that takes an item that lies nowhere; None: there is none."""

    @abstractmethod
    def _departed(self, kind: SizeClass, bin_: Bin) -> None:
        """Make good a bin that an item of this class, or a part of one, has been taken out of."""

    @abstractmethod
    def _changed(self, item: Item, before: SizeClass) -> None:
        """Make good a bin in which an item has another size; it was of this class."""

    @abstractmethod
    def _capacity_changed(self, bin_: Bin) -> None:
        """Make good a bin that holds more, or less, than before."""

    def _finish(self) -> None:
        """End an operation; bins that are empty are terminated."""
        for _, bin_ in self._index.by_order[SizeClass.TINY].copy():
            self.bins.terminate(bin_)

    def _new_bin(self, item: Item) -> Bin | None:
        """Return a bin that has nothing in it: the one that the item came from, or one more."""
        for _, bin_ in self._index.by_order[SizeClass.TINY]:
            if bin_.number == item.came_from and bin_.capacity == self.capacity:
                self.bins.renew(bin_)
                return bin_
        return self.bins.activate()

    def _by_priority(self, bins: Iterable[Bin], item: Item) -> Bin | None:
        """Return which of these takes an item first."""
        host = None if item.came_from is None else self._host_of(item.came_from)
        weights = self._priority

        def rank(bin_: Bin) -> tuple[float, int]:
            is_near = host is not None and self._host_of(bin_.number) == host
            score = weights.free * bin_.free / self.capacity + weights.requests * len(bin_.items)
            return score + weights.same_host * is_near, -bin_.number

        return max(bins, key=rank, default=None)

    def _put_or_evict(self, item: Item, bin_: Bin | None) -> None:
        """Put an item into a bin; without one, wherever it fits; else it is evicted."""
        if bin_ is None:
            bin_ = max(self.bins, key=lambda each: (each.free, -each.number), default=None)
        if bin_ is not None and bin_.free >= item.size:
            self.bins.put(item, bin_)
            return
        self._evict(item.members)
        if self._open is item:
            self._open = None

    def _gather(self, name: Name, size: int) -> None:
        opened = self._open
        if opened is not None and 4 * (opened.size + size) <= self.capacity:
            self._items[name] = opened
            self._extend(opened, {name: size})
        else:
            item = self._items[name] = self._open = Item({name: size}, size, is_gathered=True)
            self._allocate(item)

    def _extend(self, item: Item, members: dict[Name, int]) -> None:
        """Have an item take more requests; it goes elsewhere if its bin has no room for them."""
        bin_, size = item.bin, sum(members.values())
        assert bin_ is not None, "it lies somewhere"
        if bin_.free >= size:
            self.bins.regroup(item, item.members | members)
            return
        self.bins.lift(item)
        item.size += size
        self._departed(SizeClass.T, bin_)
        self._allocate(item)
        if item.bin is None:
            self._evict(members)
        item.members |= members

    def _take_out(self, item: Item, name: Name) -> None:
        """Take a request out of its item, which ends if it was the last."""
        bin_, kind = item.bin, item_class(item, self.capacity)
        assert bin_ is not None, "it lies somewhere"
        if len(item.members) == 1:
            self.bins.drop(item)
            if self._open is item:
                self._open = None
        else:
            self.bins.regroup(item, {each: size for each, size in item.members.items() if each != name})
            self._merge(item)
        self._departed(kind, bin_)

    def _set_apart(self, item: Item, name: Name) -> None:
        """Let a request that is not small any more be an item of its own, where it lies."""
        bin_, size = item.bin, item.members[name]
        assert bin_ is not None, "it lies somewhere"
        self._take_out(item, name)
        alone = self._items[name] = Item({name: size}, size)
        self.bins.put(alone, bin_)
        self._changed(alone, SizeClass.T)

    def _split(self, item: Item) -> None:
        """Let an item that has grown too large be two, where it lies."""
        bin_ = item.bin
        assert bin_ is not None, "it lies somewhere"
        halves: tuple[dict[Name, int], dict[Name, int]] = ({}, {})
        for name, size in sorted(item.members.items(), key=lambda each: -each[1]):
            min(halves, key=lambda half: sum(half.values()))[name] = size
        self.bins.regroup(item, halves[0])
        other = Item(halves[1], sum(halves[1].values()), is_gathered=True)
        self._items |= dict.fromkeys(other.members, other)
        self.bins.put(other, bin_)
        self._changed(item, SizeClass.T)
        for half in (item, other):
            if half.bin is not None:
                self._merge(half)

    def _merge(self, item: Item) -> None:
        """Merge an item that is smaller than C/8 with the one that takes more, or have it be that one."""
        opened = self._open
        if item is opened or size_class(item.size, self.capacity) is not SizeClass.TINY:
            return
        if opened is None or size_class(opened.size, self.capacity) is not SizeClass.TINY:
            self._open = item
            return
        source = self.bins.drop(item)
        self._items |= dict.fromkeys(item.members, opened)
        self._extend(opened, item.members)
        target = opened.bin
        if target is not None and target is not source:
            self.bins.note(BinMove(dict(item.members), source.number, target.number))
        self._departed(SizeClass.T, source)
