"""Bins, the items in them, and every move between them: the books of all packers.

A bin is a worker as packing sees it; an item is the KV of one request, or of several that move as one. Bins are
activated as they are needed and terminated once they are empty. Sizes and capacities are in one unit of the caller's
choice: tokens, or blocks.

Pure and deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

Name = Hashable
"""Of a request."""


@dataclass(slots=True, eq=False)
class Item:
    """What moves as one."""

    members: dict[Name, int]
    """Sizes of the requests in it."""
    size: int
    """Of all of them together."""
    is_gathered: bool = False
    """Whether it is made of small requests, and may get more of them."""
    bin: Bin | None = field(default=None, repr=False)
    """Where it lies; None: nowhere now."""
    came_from: int | None = None
    """The bin that it was taken out of so as to lie elsewhere."""


@dataclass(slots=True, eq=False)
class Bin:
    """One worker that is in use."""

    number: int
    """Which one; a number is used again."""
    order: int
    """How many had been activated before it: the largest is the most recently activated one."""
    capacity: int
    used: int = 0
    items: dict[int, Item] = field(default_factory=dict)
    """By identity, in the order in which they came."""
    filed: Any = field(default=None, repr=False)
    """What an index knows of it."""

    @property
    def free(self) -> int:
        """How much more fits; below 0 if it overflows."""
        return self.capacity - self.used


@dataclass(frozen=True, slots=True)
class BinMove:
    """An item goes from one bin to another."""

    members: dict[Name, int]
    """Sizes of its requests."""
    source: int
    target: int


class Index(Protocol):
    """Finds bins by what is in them."""

    def update(self, bin_: Bin) -> None:
        """Know a bin as it is now: after each change."""

    def discard(self, bin_: Bin) -> None:
        """Forget a bin."""


class Bins:
    """Which items lie where.

    Args:
        capacity: of a bin that is activated.
        index: is kept up to date.
        max_bins: how many there may be at a time; None: as many as are needed.
    """

    def __init__(self, capacity: int, index: Index, max_bins: int | None = None) -> None:
        self.capacity = capacity
        self.num_moves = 0
        """Times that a request was moved, ever."""
        self._moves: list[BinMove] = []
        """In their order, until somebody takes them."""
        self._index = index
        self.max_bins = max_bins
        self._by_number: dict[int, Bin] = {}
        self._unused: list[int] = []
        self._num_activated = 0

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Bin]:
        return iter(self._by_number.values())

    def __getitem__(self, number: int) -> Bin:
        return self._by_number[number]

    def activate(self) -> Bin | None:
        """Take one more bin into use; None: there is none."""
        if self.max_bins is not None and len(self._by_number) >= self.max_bins:
            return None
        number = heapq.heappop(self._unused) if self._unused else len(self._by_number)
        bin_ = Bin(number, self._num_activated, self.capacity)
        self._num_activated += 1
        self._by_number[number] = bin_
        self._index.update(bin_)
        return bin_

    def renew(self, bin_: Bin) -> None:
        """Have a bin be the one that was activated last."""
        bin_.order = self._num_activated
        self._num_activated += 1
        self._index.update(bin_)

    def terminate(self, bin_: Bin) -> None:
        """Take an empty bin out of use."""
        assert not bin_.items, "it is empty"
        self._index.discard(bin_)
        del self._by_number[bin_.number]
        heapq.heappush(self._unused, bin_.number)

    def put(self, item: Item, bin_: Bin) -> None:
        """Lay an item into a bin: a move, if it was lifted from another one."""
        assert item.bin is None, "an item lies in one bin"
        bin_.items[id(item)] = item
        bin_.used += item.size
        item.bin = bin_
        self._index.update(bin_)
        source, item.came_from = item.came_from, None
        if source is not None and source != bin_.number:
            self.note(BinMove(dict(item.members), source, bin_.number))

    def lift(self, item: Item) -> Bin:
        """Take an item out of its bin so as to put it elsewhere; return that bin."""
        bin_ = self.drop(item)
        item.came_from = bin_.number
        return bin_

    def drop(self, item: Item) -> Bin:
        """Take an item out of its bin for good; return that bin."""
        bin_ = item.bin
        assert bin_ is not None, "it lies somewhere"
        del bin_.items[id(item)]
        bin_.used -= item.size
        item.bin = None
        self._index.update(bin_)
        return bin_

    def resize(self, item: Item, name: Name, size: int) -> None:
        """Let one of an item's requests have another size."""
        self._change(item, item.size + size - item.members[name])
        item.members[name] = size

    def regroup(self, item: Item, members: dict[Name, int]) -> None:
        """Let these be the requests of an item."""
        self._change(item, sum(members.values()))
        item.members = members

    def _change(self, item: Item, size: int) -> None:
        bin_ = item.bin
        assert bin_ is not None, "it lies somewhere"
        bin_.used += size - item.size
        item.size = size
        self._index.update(bin_)

    def set_capacity(self, bin_: Bin, capacity: int) -> None:
        """Let a bin hold more, or less, than before."""
        bin_.capacity = capacity
        self._index.update(bin_)

    def note(self, move: BinMove) -> None:
        """Write a move down."""
        self._moves.append(move)
        self.num_moves += len(move.members)

    def take_moves(self) -> list[BinMove]:
        """Return all moves since the last call."""
        moves, self._moves = self._moves, []
        return moves
