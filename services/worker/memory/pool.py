"""The ledger of a worker's pages: each is free, or at exactly one place of one range.

    pages    0 1 2 3 4 5 6 7 | budget
    free     . . . . . 1 1 1
    layer 0  [0 1]   keys 0  [2 .]   values 0  [4 .]   layer 1  [3]

Bookkeeping only: nothing is mapped here. A change is prepared on copies and then takes effect at once, so that at every
moment parameters + KV + free = budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.worker.memory.layout import Kind, Region
from services.worker.memory.spans import Spans

I32 = npt.NDArray[np.int32]
NOTHING = -1
"""In a table: no page is here."""


class Place(NamedTuple):
    """Where a page of a range lies."""

    region: Region
    first: int
    """Counted in pages from the range's beginning."""


class PageCopy(NamedTuple):
    """Consecutive pages that go from one place to another, in the same order."""

    num_pages: int
    source: Place | None
    """None: pages that are free."""
    target: Place | None
    """None: they become free."""


class LedgerError(Exception):
    """Moves do not fit what the ledger says; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Moves with their pages, and the ledger as it is after them."""

    moves: tuple[PageCopy, ...]
    pages: tuple[I32, ...]
    """Of each move, in order."""
    tables: dict[Region, I32]
    is_free: npt.NDArray[np.bool_]


class PagePool:
    """Who has which page.

    Args:
        num_pages: the budget.
        regions: every range, and how many places it has.
    """

    def __init__(self, num_pages: int, regions: Mapping[Region, int]) -> None:
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._tables: dict[Region, I32] = {
            region: np.full(count, NOTHING, dtype=np.int32) for region, count in regions.items()
        }

    @property
    def budget(self) -> int:
        """Pages in all."""
        return len(self._is_free)

    @property
    def num_free(self) -> int:
        """Pages that are nowhere."""
        return int(self._is_free.sum())

    def count(self, *kinds: Kind) -> int:
        """Return how many pages lie in ranges of some kinds."""
        return sum(int((table != NOTHING).sum()) for region, table in self._tables.items() if region.kind in kinds)

    def places(self, region: Region) -> Spans:
        """Return where in a range there are pages."""
        taken = np.flatnonzero(self._tables[region] != NOTHING)
        breaks = np.flatnonzero(np.diff(taken) != 1) + 1
        parts = np.split(taken, breaks) if len(taken) else []
        return Spans(tuple((int(part[0]), int(part[-1]) + 1) for part in parts))

    def pages(self, region: Region) -> I32:
        """Return the pages of a range by place; `NOTHING` where there is none."""
        return self._tables[region].copy()

    def set_budget(self, num_pages: int) -> None:
        """Lower the budget for good.

        Raises:
            LedgerError: a page beyond it is in use, or the budget would rise.
        """
        if not 0 < num_pages <= self.budget or not self._is_free[num_pages:].all():
            raise LedgerError(f"a budget of {self.budget} pages, {self.num_free} of them free, cannot be {num_pages}")
        self._is_free = self._is_free[:num_pages].copy()

    def prepare(self, moves: Sequence[PageCopy]) -> Prepared:
        """Look up the pages of some moves, all of which leave their places before any arrives.

        Free pages are taken in ascending order: pages side by side are cheaper to map.

        Raises:
            LedgerError: there is no page at a source, one at a target, or too few are free.
        """
        touched = dict.fromkeys(
            place.region for move in moves for place in (move.source, move.target) if place is not None
        )
        tables = {region: self._tables[region].copy() for region in touched}
        is_free = self._is_free.copy()
        pages: list[I32 | None] = [_take(tables, move) for move in moves]
        wanted = sum(move.num_pages for move in moves if move.source is None)
        if wanted > self.num_free:
            raise LedgerError(f"{wanted} free pages are needed, there are {self.num_free}")
        free = np.flatnonzero(self._is_free)[:wanted].astype(np.int32)
        is_free[free] = False
        for index, move in enumerate(moves):
            found = pages[index]
            if found is None:
                found, free = free[: move.num_pages], free[move.num_pages :]
                pages[index] = found
            if move.target is None:
                is_free[found] = True
            else:
                _put(tables, move.target, found)
        return Prepared(tuple(moves), tuple(found for found in pages if found is not None), tables, is_free)

    def commit(self, prepared: Prepared) -> None:
        """Let prepared moves take effect; nothing else was committed since."""
        self._tables.update(prepared.tables)
        self._is_free = prepared.is_free

    def check_invariants(self) -> None:
        """Check that every page is free or at exactly one place."""
        held = np.concatenate([table[table != NOTHING] for table in self._tables.values()])
        seen = np.bincount(held, minlength=self.budget)
        assert len(seen) == self.budget, "a page beyond the budget is in use"
        seen += self._is_free
        assert (seen == 1).all(), f"pages {np.flatnonzero(seen != 1).tolist()} are not at exactly one place"
        parameters, kv = self.count(Kind.OUTER, Kind.PARAMETERS), self.count(Kind.KEYS, Kind.VALUES)
        assert parameters + kv + self.num_free == self.budget, "parameters + KV + free is not the budget"


def _take(tables: dict[Region, I32], move: PageCopy) -> I32 | None:
    """Remove and return the pages at a move's source; None if they are free ones."""
    if move.num_pages < 1 or move.source == move.target:
        raise LedgerError(f"{move} moves nothing")
    if move.source is None:
        return None
    part = _part(tables, move.source, move.num_pages)
    if (part == NOTHING).any():
        raise LedgerError(f"{move} takes pages from where there are none")
    taken = part.copy()
    part[:] = NOTHING
    return taken


def _put(tables: dict[Region, I32], target: Place, pages: I32) -> None:
    part = _part(tables, target, len(pages))
    if (part != NOTHING).any():
        raise LedgerError(f"{len(pages)} pages cannot go to {target}: there are pages already")
    part[:] = pages


def _part(tables: dict[Region, I32], place: Place, count: int) -> I32:
    table = tables[place.region]
    if place.first < 0 or place.first + count > len(table):
        raise LedgerError(f"{place.region} has no {count} places from {place.first} on")
    return table[place.first : place.first + count]
