"""How the pages get from one `PageHolding` to another: a plan, which is pure, and what carries it out, all or nothing.

Dropping layer 1 of two:

    layer 1   | 4 | 5 |          ──►   | . | . |
    keys 0    | 6 | . |          ──►   | 6 | 4 |          its tensor stays where it is, and gains blocks
    values 0  | 7 | . |          ──►   | 7 | 5 |

Whatever is to be unmapped is unmapped first, then all is mapped: so KV can move within its own range (to other block
ids), also onto places that it leaves. Bytes stay in their pages. A fault in the middle is undone in reverse order.

Sources: KunServe v2, section 4.1, "Local instance memory management"; v1, section 4.1, "Unified local GPU memory
management". Both map the dropped parameters' memory to the tail of the KV; how it is spread over the layers' ranges,
the undoing and the moves to other ids are ours. V1 says "buddy memory allocation" (4.3), where pages of one size by
layer do: a deviation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from services.worker.memory.holdings import NotEnoughPagesError
from services.worker.memory.layout import Kind, MemoryLayout, PageHolding, Region
from services.worker.memory.pool import PageCopy, PagePool, Place, Prepared
from services.worker.memory.ranges import PageId, VirtualRange
from services.worker.memory.spans import Spans


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """A plan: who gives pages to whom."""

    moves: tuple[PageCopy, ...]
    """All sources are left before any target is reached."""
    after: PageHolding


class MemoryLostError(Exception):
    """A change failed, and undoing it failed too: what is mapped is not what the ledger says. The worker must end."""


def plan_change(layout: MemoryLayout, before: PageHolding, after: PageHolding, shift: int = 0) -> MemoryChange:
    """Return the moves that lead from one holding to another.

    What both have stays where it is, with its bytes. Pages that are given up back what is new, in the order of
    `layout.regions`; what is over becomes free, what is missing comes from free pages.

    Args:
        layout: of the memory.
        before: what is mapped now.
        after: what is to be mapped.
        shift: pages by which the KV of layers that are held before and after moves, with its bytes.

    Raises:
        NotEnoughPagesError: the budget does not hold what is wanted.
    """
    needed = layout.num_pages(after)
    if needed > layout.facts.num_pages:
        raise NotEnoughPagesError(needed, layout.facts.num_pages)
    now, then = layout.mapped(before), layout.mapped(after)
    staying = frozenset(before.layers) & frozenset(after.layers)
    carried: list[PageCopy] = []
    sources: list[tuple[Place, int]] = []
    targets: list[tuple[Place, int]] = []
    for region in layout.regions:
        by = shift if region.kind in (Kind.KEYS, Kind.VALUES) and region.layer in staying else 0
        old, new = now.get(region, Spans()), then.get(region, Spans())
        kept = old.shifted(by) & new
        if by:
            carried += [PageCopy(n, Place(region, place.first - by), place) for place, n in _places(region, kept)]
        sources += _places(region, old - kept.shifted(-by))
        targets += _places(region, new - kept)
    return MemoryChange((*carried, *_join(sources, targets)), after)


def _places(region: Region, pages: Spans) -> list[tuple[Place, int]]:
    return [(Place(region, first), end - first) for first, end in pages.ranges]


def _join(sources: list[tuple[Place, int]], targets: list[tuple[Place, int]]) -> Iterator[PageCopy]:
    """Yield moves that lead from the sources to the targets, in order; what is over or missing is free."""
    given, taken = _Runs(sources), _Runs(targets)
    while given.count or taken.count:
        count = min(given.count, taken.count) or given.count or taken.count
        source = given.take(count) if given.count else None
        yield PageCopy(count, source, taken.take(count) if taken.count else None)


class _Runs:
    """Runs of places that are used up from the front."""

    def __init__(self, runs: list[tuple[Place, int]]) -> None:
        self._runs = runs[::-1]

    @property
    def count(self) -> int:
        """Length of the first run; 0 if there is none."""
        return self._runs[-1][1] if self._runs else 0

    def take(self, count: int) -> Place:
        """Remove so many places from the first run, and return the first of them."""
        place, length = self._runs.pop()
        if count < length:
            self._runs.append((Place(place.region, place.first + count), length - count))
        return place


def apply(
    change: MemoryChange,
    pool: PagePool,
    ranges: Mapping[Region, VirtualRange],
    page_bytes: int,
    page_ids: Sequence[PageId],
) -> None:
    """Carry a plan out: all of it, or nothing.

    Args:
        change: planned from what the pool says now.
        pool: the ledger.
        ranges: every region's.
        page_bytes: size of a page.
        page_ids: the memory's page that stands for each of the ledger's.

    Raises:
        LedgerError: the plan does not fit the ledger; nothing was touched.
        MemoryLostError: it failed, and undoing it too.
        BaseException: whatever a range raised; all is as it was.
    """
    prepared = pool.prepare(change.moves)
    carry_out(prepared, ranges, page_bytes, page_ids, page_ids)
    pool.commit(prepared)


def carry_out(
    prepared: Prepared,
    ranges: Mapping[Region, VirtualRange],
    page_bytes: int,
    before: Sequence[PageId],
    after: Sequence[PageId],
) -> Callable[[], None]:
    """Unmap all sources, then map all targets: all of it, or nothing. The ledger is the caller's.

    Args:
        prepared: moves of the ledger's pages.
        ranges: every region's.
        page_bytes: size of a page.
        before: the memory's page that stands for each of the ledger's until now.
        after: that which does from now on.

    Returns:
        What takes it back; raises `MemoryLostError` if it cannot.

    Raises:
        MemoryLostError: it failed, and undoing it too.
        BaseException: whatever a range raised; all is as it was.
    """
    undo: list[Callable[[], object]] = []
    runs = [(move, pages.tolist()) for move, pages in zip(prepared.moves, prepared.pages, strict=True)]
    try:
        for move, pages in runs:
            if move.source is not None:
                reserved, offset = ranges[move.source.region], move.source.first * page_bytes
                found = reserved.unmap_run(offset, len(pages))
                undo.append(partial(reserved.map_run, offset, found))
                expected = [before[page] for page in pages]
                assert found == expected, f"the ledger says that {move} moves pages {expected}, but {found} were mapped"
        for move, pages in runs:
            if move.target is not None:
                reserved, offset = ranges[move.target.region], move.target.first * page_bytes
                reserved.map_run(offset, [after[page] for page in pages])
                undo.append(partial(reserved.unmap_run, offset, len(pages)))
    except BaseException as error:
        _undo(undo, error)
        raise
    return lambda: _undo(undo, None)


def _undo(undo: list[Callable[[], object]], error: BaseException | None) -> None:
    """Take all steps back; `error` says why, None: somebody wants it."""
    try:
        for step in reversed(undo):
            step()
    except BaseException as second:
        why = "it is taken back" if error is None else f"{type(error).__name__}: {error}"
        raise MemoryLostError(f"{why}; undoing it: {type(second).__name__}: {second}") from error
