"""Best fit, worst fit and load balancing, on bins: what packers are compared with.

    best-fit       to the fullest bin in which it fits
    worst-fit      to the emptiest bin, if it fits there
    load-balance   the same, and requests go from the fullest bins to the emptiest ones (`load_balance.py`)

A bin that overflows sends away the request that came last, which starts again elsewhere (`restarts`): it
is computed again, as a worker that runs out of memory does with whom it preempts.

Pure and incremental. Source: the baselines of Mell, section VIII-B, which does not say what they do at an overflow.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import islice
from typing import Final

from services.planner.policy.load_balance import MAX_TARGET_USAGE, pair_up
from services.planner.policy.packing.bins import Bin, Item, Name
from services.planner.policy.packing.packer import Packer

NUM_BUCKETS: Final = 1024
"""Of an index; a bin's share of memory is known as exactly."""
NUM_LOOKED_AT: Final = 8
"""Bins of the bucket of a size itself, which may have a little less room, before fuller ones are passed over."""


class FreeIndex:
    """Bins by how much is free, in buckets, so that a change of a bin costs the same however many there are.

    Args:
        capacity: of a bin.
    """

    def __init__(self, capacity: int) -> None:
        self._width = max(capacity // NUM_BUCKETS, 1)
        self._buckets: dict[int, dict[int, Bin]] = {}
        self._mask = 0
        """A bit for each bucket that has bins."""

    def update(self, bin_: Bin) -> None:
        """Know a bin as it is now."""
        bucket, before = (bin_.capacity - bin_.used) // self._width, bin_.filed
        if bucket == before or (bucket < 0 and before == 0):
            return
        if before is not None:
            self.discard(bin_)
        bucket = bin_.filed = max(bucket, 0)
        bins = self._buckets.get(bucket)
        if bins:
            bins[bin_.number] = bin_
        else:
            self._buckets[bucket] = {bin_.number: bin_}
            self._mask |= 1 << bucket

    def discard(self, bin_: Bin) -> None:
        """Forget a bin."""
        if bin_.filed is not None:
            bins = self._buckets[bin_.filed]
            del bins[bin_.number]
            if not bins:
                self._mask ^= 1 << bin_.filed
            bin_.filed = None

    def fullest(self, size: int) -> Bin | None:
        """Return the bin with the least room of at least this; of two that are as full, to a bucket, either."""
        bucket = size // self._width
        own = self._buckets.get(bucket, {}).values()
        for bin_ in islice(own, NUM_LOOKED_AT):
            if bin_.capacity - bin_.used >= size:
                return bin_
        bucket += 1
        rest = self._mask >> bucket
        if rest:
            return next(iter(self._buckets[bucket + (rest & -rest).bit_length() - 1].values()))
        return next((bin_ for bin_ in own if bin_.free >= size), None)

    def emptiest(self, size: int) -> Bin | None:
        """Return the bin with most room, to a bucket, if it is at least this."""
        last = self._buckets[self._mask.bit_length() - 1] if self._mask else {}
        return next((bin_ for bin_ in last.values() if bin_.free >= size), None)


def _by_free(bin_: Bin) -> tuple[int, int]:
    return bin_.free, bin_.number


class FitPacker(Packer):
    """Keeps each request in a bin where it fits.

    Args:
        capacity: of a bin that is activated.
        max_bins: how many there are; None: as many as are needed.
    """

    def __init__(self, capacity: int, *, max_bins: int | None = None) -> None:
        self._index = FreeIndex(capacity)
        super().__init__(capacity, self._index, max_bins)

    def place(self, name: Name, size: int) -> None:
        """Take in a request that has come."""
        assert name not in self._items, "a request comes once"
        item = self._items[name] = Item({name: size}, size)
        self._put(item)

    def remove(self, name: Name) -> None:
        """Forget a request that has ended."""
        self._end_if_empty(self.bins.drop(self._items.pop(name)))

    def resize(self, name: Name, size: int) -> None:
        """Note that a request has grown."""
        item = self._items[name]
        self.bins.resize(item, name, size)
        if item.bin is not None:
            self._fit_again(item.bin)

    def change_capacity(self, number: int, capacity: int) -> None:
        """Note that a bin holds more, or less, than before."""
        bin_ = self.bins[number]
        self.bins.set_capacity(bin_, capacity)
        self._fit_again(bin_)

    def _fit_again(self, bin_: Bin) -> None:
        while bin_.free < 0 and len(bin_.items) > 1:
            self._relieve(bin_)

    @abstractmethod
    def _choose(self, size: int) -> Bin | None:
        """Return the bin in use that takes a request; None: one more is needed."""

    def _relieve(self, bin_: Bin) -> None:
        """Have a bin that overflows hold less."""
        item = list(bin_.items.values())[-1]
        self.bins.drop(item)
        self.num_restarts += 1
        self._put(item)

    def by_free(self) -> list[Bin]:
        """Return all bins, the fullest first."""
        return sorted(self.bins, key=_by_free)

    def _put(self, item: Item) -> None:
        bin_ = self._choose(item.size) or self.bins.activate() or self._index.emptiest(item.size)
        if bin_ is not None:
            self.bins.put(item, bin_)
        else:
            self._evict(item.members)

    def _end_if_empty(self, bin_: Bin) -> None:
        if not bin_.items:
            self.bins.terminate(bin_)


class BestFit(FitPacker):
    """To the fullest bin in which it fits."""

    def _choose(self, size: int) -> Bin | None:
        return self._index.fullest(size)


class WorstFit(FitPacker):
    """To the emptiest bin."""

    def _choose(self, size: int) -> Bin | None:
        return self._index.emptiest(size)


class LoadBalance(WorstFit):
    """To the emptiest bin; then from the fullest bins to the emptiest."""

    def tick(self, now_s: float) -> None:
        """Move a request of each pair: the smallest, if the pair is nearer then."""
        bins = self.by_free()
        usages = {bin_.number: bin_.used / bin_.capacity for bin_ in bins}
        targets = [bin_.number for bin_ in reversed(bins) if usages[bin_.number] < MAX_TARGET_USAGE]
        for source, target in pair_up(usages, usages, targets):
            item = min(self.bins[source].items.values(), key=lambda each: each.size)
            if 2 * item.size <= self.bins[source].used - self.bins[target].used:
                self.bins.lift(item)
                self.bins.put(item, self.bins[target])
