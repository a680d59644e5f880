"""Which pages go from which stage to which where workers of one device become a group: nothing is copied. Pure.

    worker 0, ids 0 to 5           worker 1, ids 0 to 3                 the group, ids 0 to 9
    layer 0 | a a a |              layer 0 | c c . |                    stage 0, layer 0 | a a a | c c . |
    layer 1 | b b b |              layer 1 | d d . |                    stage 1, layer 1 | b b b | d d . |

    stage 0 gives b b b and takes c c, and one page of any contents (a blank); stage 1 the other way round

Ids of the group are each worker's own behind those of the workers before it, from the border of a page on: so whole
pages keep what they hold, those that stay are mapped elsewhere, and blocks in them that nobody names are free ones.
Each stage gives as many pages as it takes: the device's memory is shared out as before.

Source: KunServe v2, section 4.2 (which KV goes where when layers move).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from services.worker.contract.arrays import I32
from services.worker.kv_moves.kv_table import MAX_EXCHANGED, KvLot, KvOffer, KvTable, holders
from services.worker.memory.layout import Kind, MemoryLayout, Region
from services.worker.memory.pool import Place
from services.worker.memory.spans import Spans
from shared.layers import LayerRange


@dataclass(frozen=True, slots=True)
class PageRun:
    """Pages of one lot in some layers: where they lie at the source, and where at the target; keys and values alike."""

    layers: LayerRange
    pages: Spans
    """At the source, of each layer's keys and of its values."""
    shift: int
    """How many pages further on they lie at the target."""

    @property
    def num_pages(self) -> int:
        """In all layers."""
        return 2 * len(self.layers) * self.pages.total

    def places(self, shift: int) -> Iterator[Place]:
        """Yield where they lie, so many pages further on than at the source."""
        for layer in self.layers:
            for kind in (Kind.KEYS, Kind.VALUES):
                for page in self.pages:
                    yield Place(Region(kind, layer), page + shift)


@dataclass(frozen=True, slots=True)
class PageFlow:
    """What one stage gives to another, in this order."""

    source: int
    target: int
    runs: tuple[PageRun, ...]
    num_blanks: int
    """That follow."""

    @property
    def num_pages(self) -> int:
        """With the blanks."""
        return sum(run.num_pages for run in self.runs) + self.num_blanks

    @property
    def at_source(self) -> Iterator[Place | None]:
        """Where each page lies before; None: a blank."""
        for run in self.runs:
            yield from run.places(0)
        yield from [None] * self.num_blanks

    @property
    def at_target(self) -> Iterator[Place | None]:
        """Where each page lies then."""
        for run in self.runs:
            yield from run.places(run.shift)
        yield from [None] * self.num_blanks


def table_by_pages(offers: Sequence[KvOffer], layout: MemoryLayout) -> KvTable | None:
    """Return what moves when workers of one device become a group; None: they are not, or have nothing.

    Blocks whose ids the group has no memory for are left out, wherever they stand in what is wanted, and so are those
    on the host, which lie in no page.

    Args:
        offers: by stage.
        layout: of the memory of each of them.
    """
    cards = {offer.card for offer in offers}
    if len(cards) > 1 or "" in cards:
        return None
    named = [
        (sources, kept)
        for stage, offer in enumerate(offers)
        if (sources := holders(offers, stage, layout.facts.num_layers))
        and len(kept := offer.kept.only(np.flatnonzero(offer.kept.ids >= 0).tolist()))
    ]
    bases = layout.group_bases(int(kept.ids.max()) + 1 for _, kept in named)
    num_blocks = min(offer.num_blocks for offer in offers)
    seen: set[bytes] = set()
    lots = []
    for (sources, whole), base in zip(named, bases, strict=False):
        places = (whole.ids + np.int32(base)).tolist()
        pairs = zip(whole.names, places, strict=True)
        fresh = [i for i, (name, place) in enumerate(pairs) if name not in seen and place < num_blocks]
        kept = whole.only(fresh[: MAX_EXCHANGED - len(seen)])
        seen.update(kept.names)
        if kept:
            targets = tuple(range(len(offers)))
            lots.append(KvLot(sources, targets, kept.ids, base, kept.names, places=kept.ids + np.int32(base)))
    return KvTable(tuple(offer.layers for offer in offers), tuple(lots), by_pages=True) if lots else None


def shift_of(lot: KvLot) -> int:
    """Return by how much the ids of a lot's blocks change.

    Raises:
        ValueError: not all by the same.
    """
    shifts = np.unique(lot.target_ids - lot.ids)
    if len(shifts) != 1:
        raise ValueError("the blocks of a lot do not stay together")
    return int(shifts[0])


def blocks_of(ids: I32) -> Spans:
    """Return ids as a set."""
    return Spans.of(*((block, block + 1) for block in ids.tolist()))


def page_flows(table: KvTable, wanted: Sequence[LayerRange], layout: MemoryLayout) -> tuple[PageFlow, ...]:
    """Return what goes from each stage to each other one; every stage gives as many pages as it takes.

    Args:
        table: by pages.
        wanted: by stage: layers after the change.
        layout: of the memory of each stage.

    Raises:
        ValueError: blocks do not keep their places in their pages.
    """
    num_stages = len(wanted)
    runs: dict[tuple[int, int], list[PageRun]] = {}
    surplus = [0] * num_stages
    for lot in table.lots:
        shift, rest = divmod(shift_of(lot) * layout.facts.block_bytes, layout.facts.page_bytes)
        if rest:
            raise ValueError("blocks do not keep their places in their pages")
        pages = layout.covering(blocks_of(lot.ids))
        for source in lot.sources:
            for target in range(num_stages):
                layers = table.held[source].overlap(wanted[target])
                if layers is None or source == target:
                    continue
                run = PageRun(layers, pages, shift)
                runs.setdefault((source, target), []).append(run)
                surplus[source] += run.num_pages
                surplus[target] -= run.num_pages
    blanks = _level(surplus)
    pairs = sorted({*runs, *blanks})
    return tuple(PageFlow(*pair, tuple(runs.get(pair, ())), blanks.get(pair, 0)) for pair in pairs)


def _level(surplus: Sequence[int]) -> dict[tuple[int, int], int]:
    """Return how many blanks go from whom to whom so that nobody has given more than it has taken.

    Args:
        surplus: by stage: pages given, less those taken; in all 0.
    """
    found: dict[tuple[int, int], int] = {}
    givers = [[stage, -count] for stage, count in enumerate(surplus) if count < 0]
    takers = [[stage, count] for stage, count in enumerate(surplus) if count > 0]
    while givers:
        giver, taker = givers[-1], takers[-1]
        count = min(giver[1], taker[1])
        found[giver[0], taker[0]] = count
        for side, each in ((givers, giver), (takers, taker)):
            each[1] -= count
            if not each[1]:
                side.pop()
    return found
