"""What every packer is asked, and what of many operations at once is left to move."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set

from services.planner.policy.packing.bins import BinMove, Bins, Index, Item, Name


class Packer(ABC):
    """Keeps requests in bins, told of each that comes, grows and goes.

    Args:
        capacity: of a bin that is activated.
        index: finds bins.
        max_bins: how many there are; None: as many as are needed.
    """

    def __init__(self, capacity: int, index: Index, max_bins: int | None) -> None:
        self.capacity = capacity
        self.bins = Bins(capacity, index, max_bins)
        self.evicted: list[Name] = []
        """Requests that have no place any more, because there are no more bins; the caller takes them."""
        self.num_restarts = 0
        """Requests that began again elsewhere."""
        self._items: dict[Name, Item] = {}

    def where(self, name: Name) -> int | None:
        """Return the number of the bin that a request is in."""
        item = self._items.get(name)
        return None if item is None or item.bin is None else item.bin.number

    def batch(self, removed: Iterable[Name], resized: Mapping[Name, int], placed: Mapping[Name, int]) -> list[BinMove]:
        """Carry out many operations as one: who ends goes first, then who grows, then who comes.

        Returns:
            The moves that are left of all: of each request at most one.
        """
        gone = dict.fromkeys(removed)
        for name in gone:
            if name in self._items:  # it may just have been evicted
                self.remove(name)
        for name, size in resized.items():
            if name in self._items:
                self.resize(name, size)
        for name, size in placed.items():
            self.place(name, size)
        return net_moves(self.bins.take_moves(), gone.keys() | placed.keys())

    @abstractmethod
    def place(self, name: Name, size: int) -> None:
        """Take in a request that has come."""

    @abstractmethod
    def remove(self, name: Name) -> None:
        """Forget a request that has ended."""

    @abstractmethod
    def resize(self, name: Name, size: int) -> None:
        """Note that a request has grown."""

    @abstractmethod
    def change_capacity(self, number: int, capacity: int) -> None:
        """Note that a bin holds more, or less, than before."""

    def tick(self, now_s: float) -> None:  # noqa: B027  most do nothing
        """Do what is done by period."""

    def _evict(self, names: Iterable[Name]) -> None:
        for name in names:
            self._items.pop(name, None)
            self.evicted.append(name)


def net_moves(moves: Sequence[BinMove], without: Set[Name] = frozenset()) -> list[BinMove]:
    """Return what is left of moves one after the other: A to B to C is A to C, A to B to A is none.

    Args:
        moves: in their order.
        without: requests that have come meanwhile, or gone.

    Returns:
        One move for each request, in the order of their last ones.
    """
    first: dict[Name, int] = {}
    last: dict[Name, tuple[int, int]] = {}
    for move in moves:
        for name, size in move.members.items():
            first.setdefault(name, move.source)
            last.pop(name, None)
            last[name] = (size, move.target)
    return [
        BinMove({name: size}, first[name], target)
        for name, (size, target) in last.items()
        if first[name] != target and name not in without
    ]
