"""What a worker's memory is to hold next: one pure function for each thing that can happen to it.

    drop      parameters of some layers go, and KV of theirs that nobody reads; the pages back more blocks of the others
    grow      free pages back more blocks at the tail
    shrink    the tail's pages become free
    restore   the tail's pages become parameters and KV of layers that come back
    reside    the tail's pages become parameters of layers that others compute, and KV of theirs, or those become free
    leave     of KV only what is in use stays, in layers that go too, until it is handed over; elsewhere under other ids
    hand over KV of layers that have gone goes, and that of others comes
    fill      from wherever blocks are, all that there is memory for, from the first on

Each returns a `PageHolding`, and never one that the budget does not allow. `change.py` says how to get there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from services.worker.memory.layout import MemoryLayout, PageHolding
from services.worker.memory.spans import Spans


class NotEnoughPagesError(Exception):
    """The budget does not allow it; nothing was changed.

    Args:
        needed: pages that it would take in all.
        budget: pages that there are.
    """

    def __init__(self, needed: int, budget: int) -> None:
        super().__init__(f"{needed} pages are needed, the budget is {budget}")
        self.needed = needed
        self.budget = budget


def whole(layout: MemoryLayout, num_blocks: int) -> PageHolding:
    """Return the whole model with blocks [0, num_blocks).

    Raises:
        ValueError: more blocks than could ever be.
        NotEnoughPagesError: the budget does not hold them.
    """
    holding = PageHolding(tuple(range(layout.facts.num_layers)), Spans())
    return backed(layout, holding, Spans.of((0, num_blocks)))


def dropped(layout: MemoryLayout, holding: PageHolding, layers: Iterable[int], in_use: Spans) -> PageHolding:
    """Return the holding without some layers; their KV stays where blocks are in use.

    Args:
        layout: of the memory.
        holding: before.
        layers: held now; not all of them.
        in_use: blocks that somebody still reads in these layers; others are not kept.

    Raises:
        ValueError: a layer is not held, or none would be left.
    """
    gone = tuple(sorted(set(layers)))
    kept = tuple(layer for layer in holding.layers if layer not in gone)
    if len(kept) + len(gone) != len(holding.layers):
        raise ValueError(f"of layers {gone} some are not among those held, {holding.layers}")
    if not kept:
        raise ValueError("a worker has to keep a layer")
    left = layout.usable(holding) & in_use
    leaving = (*holding.leaving, *((layer, left) for layer in gone if left))
    return PageHolding(kept, holding.kv, tuple(sorted(leaving, key=lambda entry: entry[0])), holding.beside)


def grown(layout: MemoryLayout, holding: PageHolding, max_blocks: int | None = None) -> PageHolding:
    """Return the holding with as many more blocks at the tail as free pages allow.

    The pages are spread evenly over keys and values of all layers that are held, which makes the least of them as large
    as it can be; pages that would not complete a block in all of them stay free.

    Args:
        layout: of the memory.
        holding: before.
        max_blocks: how many more at most; None: as many as fit.
    """
    first_page = holding.kv.end
    room = max(layout.pool_pages(holding) - holding.kv.total, 0)
    end_page = min(first_page + room, layout.max_pages)
    with_all = holding.kv | Spans.of((first_page, max(end_page, first_page)))
    new = (layout.within(with_all) - layout.usable(holding)).head(
        layout.facts.max_blocks if max_blocks is None else max_blocks
    )
    return replace(holding, kv=holding.kv | layout.covering(new))


def backed(layout: MemoryLayout, holding: PageHolding, blocks: Spans) -> PageHolding:
    """Return the holding with some more blocks, by their ids.

    Raises:
        ValueError: there are no such ids.
        NotEnoughPagesError: the budget does not hold them.
    """
    if blocks.end > layout.facts.max_blocks:
        raise ValueError(f"block {blocks.end - 1} is beyond the {layout.facts.max_blocks} that could ever be")
    return _checked(layout, replace(holding, kv=holding.kv | layout.covering(blocks)))


def shrunk(layout: MemoryLayout, holding: PageHolding, num_blocks: int) -> PageHolding:
    """Return the holding with only the pages that its first blocks need.

    Args:
        layout: of the memory.
        holding: before.
        num_blocks: to be kept, of those with the lowest ids; the pages may hold some more.

    Raises:
        ValueError: there are fewer.
    """
    usable = layout.usable(holding)
    if not 0 <= num_blocks <= usable.total:
        raise ValueError(f"of {usable.total} blocks {num_blocks} cannot be kept")
    return replace(holding, kv=layout.covering(usable.head(num_blocks)))


def room(layout: MemoryLayout, layers: Iterable[int], resident: Iterable[int] = ()) -> int:
    """Return how many blocks a worker has for the layers that it computes if it uses all of its budget.

    Args:
        layout: of the memory.
        layers: computed; not none.
        resident: layers whose parameters it has; those that it computes are among them in any case.
    """
    computed = tuple(sorted(layers))
    beside = tuple(sorted(set(resident) - set(computed)))
    return layout.usable(grown(layout, PageHolding(computed, Spans(), beside=beside))).total


def room_ahead(layout: MemoryLayout, layers: Iterable[int], num_blocks: int) -> int:
    """Return of how many blocks a worker can have all layers, beside the whole model and KV that it computes with.

    No more than it computes with, and than it has alone.

    Args:
        layout: of the memory.
        layers: computed; not none.
        num_blocks: of these.
    """
    computed, whole = tuple(sorted(layers)), range(layout.facts.num_layers)
    beside = tuple(layer for layer in whole if layer not in computed)
    most = min(num_blocks, room(layout, whole))
    if not beside:
        return most
    used = layout.num_pages(PageHolding(computed, layout.covering(Spans.of((0, num_blocks))), beside=beside))
    pages = max(layout.facts.num_pages - used, 0) // (2 * len(beside))
    return min(layout.within(Spans.of((0, pages))).total, most)


def restored(layout: MemoryLayout, holding: PageHolding, layers: Iterable[int], min_blocks: int) -> PageHolding:
    """Return the holding with some more layers; blocks at the tail make room for their parameters and KV.

    What is left of the KV of these layers stays where it is, and so do parameters that are there already.

    Args:
        layout: of the memory.
        holding: before.
        layers: of the model, not held now.
        min_blocks: that have to stay, of those with the lowest ids; as many as fit do.

    Raises:
        ValueError: a layer is held, or there is none of that number; or fewer blocks are there now.
        NotEnoughPagesError: so many blocks do not fit beside them.
    """
    return _fitted(layout, _with_layers(layout, holding, layers), min_blocks)


def resided(
    layout: MemoryLayout, holding: PageHolding, beside: Iterable[int], min_blocks: int, ahead: Spans | None = None
) -> PageHolding:
    """Return the holding with the parameters of exactly these layers beside those that are held.

    Blocks at the tail make room for what is new; the pages of what is not named any more become free.

    Args:
        layout: of the memory.
        holding: before.
        beside: of the model, not held.
        min_blocks: that have to stay, of those with the lowest ids; as many as fit do.
        ahead: blocks of the layers beside that there is to be memory for, so that KV can come before they are held;
            none: that memory goes. None: what is left of the KV of layers that are not held stays as it is.

    Raises:
        ValueError: a layer is held, or there is none of that number; or fewer blocks are there now.
        NotEnoughPagesError: so many blocks do not fit beside them.
    """
    wanted = set(beside)
    if wanted & set(holding.layers) or not wanted <= set(range(layout.facts.num_layers)):
        raise ValueError(f"layers {sorted(wanted)} cannot lie beside {holding.layers}")
    leaving = holding.leaving
    if ahead is not None:
        if ahead.end > layout.facts.max_blocks:
            raise ValueError(f"block {ahead.end - 1} is beyond the {layout.facts.max_blocks} that could ever be")
        left = [(layer, blocks) for layer, blocks in leaving if layer not in (*holding.beside, *wanted)]
        come = [(layer, ahead) for layer in wanted if ahead]
        leaving = tuple(sorted((*left, *come), key=lambda entry: entry[0]))
    return _fitted(layout, replace(holding, beside=tuple(sorted(wanted)), leaving=leaving), min_blocks)


def _with_layers(layout: MemoryLayout, holding: PageHolding, layers: Iterable[int]) -> PageHolding:
    """Return the holding with more layers, whether it fits or not."""
    new = set(layers)
    if not new or new & set(holding.layers) or not new <= set(range(layout.facts.num_layers)):
        raise ValueError(f"layers {sorted(new)} cannot come back to {holding.layers}")
    leaving = tuple((layer, left) for layer, left in holding.leaving if layer not in new)
    beside = tuple(layer for layer in holding.beside if layer not in new)
    return PageHolding(tuple(sorted((*holding.layers, *new))), holding.kv, leaving, beside)


def _fitted(layout: MemoryLayout, wanted: PageHolding, min_blocks: int) -> PageHolding:
    """Return what is wanted with as many of the first blocks as fit; raises as `restored`."""
    usable, pages = layout.usable(wanted), layout.pool_pages(wanted)
    fitting = -1 if pages < 0 else layout.within(wanted.kv.head(pages)).total
    if not 0 <= min_blocks <= usable.total:
        raise ValueError(f"of {usable.total} blocks {min_blocks} cannot be kept")
    if fitting < min_blocks:
        needed = replace(wanted, kv=layout.covering(usable.head(min_blocks)))
        raise NotEnoughPagesError(layout.num_pages(needed), layout.facts.num_pages)
    if fitting == usable.total:
        return wanted
    return replace(wanted, kv=layout.covering(usable.head(fitting)))


def left(
    layout: MemoryLayout, holding: PageHolding, layers: Iterable[int], in_use: Spans, by_blocks: int
) -> PageHolding:
    """Return the holding without some layers and of all KV with that in use: theirs, and the others' under other ids.

    Args:
        layout: of the memory.
        holding: before.
        layers: held now; not all of them.
        in_use: blocks.
        by_blocks: added to every id in the layers that stay; a multiple of `layout.unit_blocks`.

    Raises:
        ValueError: as in `dropped`, or ids would be none or beyond those that could ever be.
    """
    after = dropped(layout, holding, layers, in_use)
    kv = layout.covering(layout.usable(holding) & in_use).shifted(page_shift(layout, by_blocks))
    if kv.end > layout.max_pages:
        raise ValueError(f"ids cannot be moved by {by_blocks}: there are {layout.facts.max_blocks}")
    return replace(after, kv=kv)


def handed_over(layout: MemoryLayout, holding: PageHolding, taken: Spans) -> PageHolding:
    """Return the holding with no KV of layers that are not held, and with some more of those that are.

    Args:
        layout: of the memory.
        holding: before.
        taken: pages of keys, and of values, of each layer that is held.

    Raises:
        ValueError: pages are there already, or there are no such pages.
        NotEnoughPagesError: the budget does not hold them.
    """
    if taken & holding.kv or taken.end > layout.max_pages:
        raise ValueError(f"pages {taken} cannot come to {holding.kv} among {layout.max_pages}")
    return _checked(layout, replace(holding, kv=holding.kv | taken, leaving=()))


def filled(layout: MemoryLayout, holding: PageHolding) -> PageHolding:
    """Return the holding with nothing that leaves, and as many blocks from the first on as there is memory for.

    Raises:
        ValueError: blocks are there that would lose their memory.
    """
    after = grown(layout, replace(holding, kv=Spans(), leaving=()))
    if holding.kv - after.kv:
        raise ValueError(f"KV at pages {holding.kv - after.kv} lies beyond those that there is memory for")
    return after


def page_shift(layout: MemoryLayout, by_blocks: int) -> int:
    """Return by how many pages KV moves when its ids change by so many.

    Raises:
        ValueError: not a multiple of `layout.unit_blocks`.
    """
    if by_blocks % layout.unit_blocks:
        raise ValueError(f"ids can change by multiples of {layout.unit_blocks}, not by {by_blocks}")
    return by_blocks * layout.facts.block_bytes // layout.facts.page_bytes


def _checked(layout: MemoryLayout, holding: PageHolding) -> PageHolding:
    needed = layout.num_pages(holding)
    if needed > layout.facts.num_pages:
        raise NotEnoughPagesError(needed, layout.facts.num_pages)
    return holding
