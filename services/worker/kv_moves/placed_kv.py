"""Where blocks of a group lie at one of its workers once that is alone: ids of its own, and which of them are taken.

    in the group   0 1 2 3 4 5 6 7 8 9      a worker's share   1 2 7 9
    alone          0 1 2 3                                     1 2 0 3      what can keep its id does

So a worker needs memory for all layers of its share only, not of all that the group has. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.worker.contract.arrays import EMPTY_I32, I32
from services.worker.contract.kept_kv import KeptKv


@dataclass(frozen=True, slots=True)
class PlacedKv:
    """Blocks that one worker of a group gets."""

    names: tuple[bytes, ...] = ()
    """[n] What they hold."""
    ids: I32 = field(default_factory=lambda: EMPTY_I32)
    """[n] In the group."""
    places: I32 = field(default_factory=lambda: EMPTY_I32)
    """[n] Ids at the worker when it is alone, all different."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def kept(self) -> KeptKv:
        """What the worker has, as it numbers it."""
        return KeptKv(self.names, self.places)

    def only(self, chosen: Sequence[int]) -> PlacedKv:
        """Return some of them."""
        return PlacedKv(tuple(self.names[i] for i in chosen), self.ids[list(chosen)], self.places[list(chosen)])


class Places:
    """Ids below a number, of one worker, and which of them are free.

    Args:
        num_blocks: there are so many.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._next = 0
        """Those from here on were never given away as the lowest free one."""
        self._returned: list[int] = []
        """A heap of lower ones that have come back; some are taken again."""
        self._taken: set[int] = set()

    def take(self, ids: Iterable[int]) -> list[int]:
        """Return places for the first of some blocks, as many as there are: each keeps its id if that is free."""
        wanted = list(ids)[: self._num_blocks - len(self._taken)]
        found = [block if self._is_free(block) else -1 for block in wanted]
        self._taken.update(found)
        self._taken.discard(-1)
        return [self._take_lowest() if place < 0 else place for place in found]

    def give_back(self, places: Iterable[int]) -> None:
        """Let taken ones be free again."""
        for place in places:
            self._taken.remove(place)
            heapq.heappush(self._returned, place)

    def _is_free(self, place: int) -> bool:
        return place < self._num_blocks and place not in self._taken

    def _take_lowest(self) -> int:
        while self._returned:
            place = heapq.heappop(self._returned)
            if place not in self._taken:
                self._taken.add(place)
                return place
        while self._next in self._taken:
            self._next += 1
        self._taken.add(self._next)
        return self._next
