"""Which KV goes from which stage to which, when workers become a group or stop being one. Pure.

    a group forms                                        a group of stages 0 and 1 dissolves

    worker 0, all layers  ── lot 0 ──► stages 0, 1, 2    stage 0 ─┬─ lot 0 (its share) ──► worker 0, all layers
    worker 1 ┐                                           stage 1 ─┘
    worker 2 ┴ one group  ── lot 1 ──► stages 0, 1, 2    stage 0 ─┬─ lot 1 ──────────────► worker 1, all layers
                                                         stage 1 ─┘
Every source of a lot has the same blocks for other layers, and sends each target the layers that it has and the target
wants. At the targets the blocks get new ids, one after the other. What is cut is always the end of a lot: sequences are
found by the beginning of their KV, and compute the rest again.

Where every member of a group has memory for all layers of some blocks (`KvOffer.ahead_blocks`), most of its share
comes to its places there while the group still serves (`table_to_copy`): the layers of the others. Its own layers of
these blocks follow within its memory when the group dissolves.

Source: KunServe v2, section 4.2 (KV is exchanged because layers moved). Deviation: blocks travel by what they hold, so
one that several workers have goes once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.worker.blocks.remote_kv import RemoteSpan
from services.worker.contract.arrays import I32
from services.worker.contract.kept_kv import NOTHING_KEPT, KeptKv
from services.worker.kv_moves.link_layers import LinkLayers, link_layers
from services.worker.kv_moves.placed_kv import PlacedKv
from shared.layers import LayerRange, check_tiling

MAX_EXCHANGED = 262_144
"""Most blocks that one exchange names: their list is one message. So many are some 800 GB of KV of a model of 14 B
parameters; what is not named is computed again."""
MOVE_BASE_S = 2.0
"""An exchange may take so long, however little moves."""
LINK_SLACK = 4.0
"""And so many times what its bytes take, one after the other, at the rate of a link."""


def move_limit_s(num_bytes: int, bytes_per_s: float, most_s: float) -> float:
    """Return the seconds after which an exchange is given up.

    Args:
        num_bytes: that move in all.
        bytes_per_s: of a link, each way; 0: unknown.
        most_s: in any case.
    """
    return min(most_s, MOVE_BASE_S + LINK_SLACK * num_bytes / bytes_per_s) if bytes_per_s else most_s


@dataclass(frozen=True, slots=True)
class KvOffer:
    """What one stage's worker brings."""

    layers: LayerRange
    """Held before."""
    room: int
    """Blocks of these layers that its buffer holds, from its device or its host."""
    num_blocks: int
    """That it will have after the change."""
    group: str = ""
    """Name of the group that it was in (`GroupPlace.name`); empty: it was alone."""
    kept: KeptKv = field(default_factory=KeptKv)
    """What should survive, the most wanted first; of a group only its leader says it."""
    link_bytes_per_s: float = 0.0
    """At which KV leaves it, and comes to it; 0: unknown."""
    step_s: float = 0.0
    """That a step took there lately; 0: unknown."""
    ahead_blocks: int = 0
    """First blocks of which it has memory in all layers already, those of others too."""
    card: str = ""
    """Whose memory its pages are, and how large: stages that say the same can hand pages over to each other. Empty: it
    hands over none."""
    num_host_blocks: int = 0
    """Of these layers, in its host memory; `kept` may name them."""
    door: str = ""
    """Path of a socket at which it waits for pages, of who does not lead."""


@dataclass(frozen=True, slots=True)
class KvLot:
    """Blocks that travel together."""

    sources: tuple[int, ...]
    """Stages that have them, each for its layers."""
    targets: tuple[int, ...]
    """Stages that get them."""
    ids: I32
    """[n] At the sources."""
    first: int
    """Id of the first one at the targets; the others follow."""
    names: tuple[bytes, ...]
    """[n]"""
    is_live: bool = False
    """Until they are there, each source attends them for the targets."""
    places: I32 | None = None
    """[n] Ids at the targets, if they do not follow each other; `first` says nothing then."""

    @property
    def target_ids(self) -> I32:
        """[n] At the targets."""
        if self.places is not None:
            return self.places
        return np.arange(self.first, self.first + len(self.ids), dtype=np.int32)

    @property
    def span(self) -> RemoteSpan:
        """Ids at the targets."""
        return RemoteSpan(self.first, self.first + len(self.ids))

    def part(self, first: int, end: int) -> KeptKv:
        """Return blocks [first, end) of it as the targets number them."""
        return KeptKv(self.names[first:end], self.target_ids[first:end])


@dataclass(frozen=True, slots=True)
class KvTable:
    """All that moves; every stage has the same."""

    held: tuple[LayerRange, ...]
    """By stage: layers before the change."""
    lots: tuple[KvLot, ...] = ()
    there: tuple[PlacedKv, ...] = ()
    """By stage: blocks of which the layers of others have come before; none at all: at nobody."""
    by_pages: bool = False
    """All of it is handed over in the pages where it lies (`page_flows.py`), before anything else goes on."""

    @property
    def num_layers(self) -> int:
        """Of the whole model."""
        return max((layers.end for layers in self.held), default=0)

    @property
    def is_live(self) -> bool:
        """A lot is attended where it lies."""
        return any(lot.is_live for lot in self.lots)

    def link_layers(self, lot: KvLot, wanted: Sequence[LayerRange]) -> LinkLayers:
        """Return over whose links how many layers of a lot's block go; `wanted` as in `link_layers`."""
        return link_layers(self.held, wanted, lot.sources, lot.targets)

    def wire_bytes(self, wanted: Sequence[LayerRange], pair_bytes: int) -> int:
        """Return the bytes that go from one stage to another.

        Args:
            wanted: by stage: layers after the change.
            pair_bytes: of a block's keys and values in one layer.
        """
        return sum(len(lot.ids) * self.link_layers(lot, wanted).total for lot in self.lots) * pair_bytes

    def kept_at(self, stage: int) -> KeptKv:
        """Return what a stage's blocks hold once all has arrived."""
        lots = [lot for lot in self.lots if stage in lot.targets]
        there = self.there[stage].kept if self.there else NOTHING_KEPT
        names = (*there.names, *(name for lot in lots for name in lot.names))
        return KeptKv(names, np.concatenate([there.ids, *(lot.target_ids for lot in lots)]))


@dataclass(frozen=True, slots=True)
class MovingKv:
    """Blocks that are to travel together, before it is said how."""

    sources: tuple[int, ...]
    """Stages that have them, each for its layers."""
    kept: KeptKv
    """As the sources number them."""

    def ordered(self, *, is_live: bool) -> MovingKv:
        """Return them in the order in which they travel: live ones with those first that a sequence needs to go on."""
        if not is_live:
            return self
        tails = frozenset(self.kept.tails.tolist())
        order = sorted(range(len(self.kept)), key=lambda place: place not in tails)
        return MovingKv(self.sources, self.kept.only(order))


AreLive = Callable[[Sequence[MovingKv]], Sequence[bool]]
"""Says of all that moves, lot by lot, whether its sources attend it for the others until it has arrived."""


def mode_of(are_live: Sequence[bool]) -> str:
    """Return in one word how lots move, of each of which it is known: `live`, `coordinated`, or some of either."""
    if all(are_live):
        return "live" if are_live else ""
    return "mixed" if any(are_live) else "coordinated"


def none_live(lots: Sequence[MovingKv]) -> Sequence[bool]:
    """Let all sequences wait for their KV."""
    return [False] * len(lots)


def table_to_form(offers: Sequence[KvOffer], num_layers: int, are_live: AreLive = none_live) -> KvTable:
    """Return what moves when workers become a group.

    The first worker's blocks come first; a name that came before does not come again. A worker that was in another
    group has a part of the layers only: its group's blocks go along if all of its stages are here.

    Of blocks that are attended where they lie, those travel first that a sequence needs to go on.

    Args:
        offers: by stage.
        num_layers: of the whole model.
        are_live: chooses how each lot moves.
    """
    num_blocks = min(MAX_EXCHANGED, *(offer.num_blocks for offer in offers))
    seen: set[bytes] = set()
    moving: list[MovingKv] = []
    for stage, offer in enumerate(offers):
        sources = holders(offers, stage, num_layers)
        fresh = [i for i, name in enumerate(offer.kept.names) if name not in seen]
        room = min((offers[source].room for source in sources), default=0)
        fresh = fresh[: max(min(room, num_blocks - len(seen)), 0)]
        if fresh:
            moving.append(MovingKv(sources, offer.kept.only(fresh)))
            seen.update(moving[-1].kept.names)
    lots, first = [], 0
    for lot, is_live in zip(moving, are_live(moving), strict=True):
        kept = lot.ordered(is_live=is_live).kept
        lots.append(KvLot(lot.sources, tuple(range(len(offers))), kept.ids, first, kept.names, is_live))
        first += len(kept)
    return KvTable(tuple(offer.layers for offer in offers), tuple(lots))


def table_to_copy(offers: Sequence[KvOffer], shares: Sequence[PlacedKv]) -> KvTable:
    """Return what moves while a group serves, so that it need not when the group dissolves; nothing if it cannot.

    Args:
        offers: by stage; what they keep is not looked at.
        shares: by stage, of the group's blocks: no more than each stage's buffer holds, at places that have memory.

    Raises:
        ValueError: there are more or fewer shares than stages.
    """
    held = tuple(offer.layers for offer in offers)
    _check_shares(offers, shares)
    if not all(offer.ahead_blocks for offer in offers):
        return KvTable(held)
    every = range(len(offers))
    return KvTable(
        held,
        tuple(
            KvLot((*every[:stage], *every[stage + 1 :]), (stage,), share.ids, 0, share.names, places=share.places)
            for stage, share in enumerate(shares)
            if len(share)
        ),
    )


def table_to_part(offers: Sequence[KvOffer], shares: Sequence[KeptKv], there: Sequence[PlacedKv] = ()) -> KvTable:
    """Return what moves when the stages of a group become whole instances.

    Where buffers do not hold all shares, the longest are cut first.

    Args:
        offers: by stage; what they keep is not looked at.
        shares: by stage, of the group's blocks; none at all: nothing moves.
        there: by stage, what has been copied before, by `table_to_copy`; none at all: nothing.

    Raises:
        ValueError: there are more or fewer shares than stages.
    """
    held = tuple(offer.layers for offer in offers)
    if not shares:
        return KvTable(held)
    _check_shares(offers, shares)
    found: tuple[PlacedKv, ...] = ()
    rest = list(shares)
    free = [np.arange(offer.num_blocks, dtype=np.int32) for offer in offers]
    if there and all(offer.ahead_blocks for offer in offers):
        found = _found(shares, there)
        known = [frozenset(here.names) for here in found]
        rest = [
            share.only([i for i, name in enumerate(share.names) if name not in names])
            for share, names in zip(shares, known, strict=True)
        ]
        free = [np.setdiff1d(ids, here.places) for ids, here in zip(free, found, strict=True)]
    wanted = [min(len(share), len(ids)) for share, ids in zip(rest, free, strict=True)]
    room = min(MAX_EXCHANGED - sum(map(len, found)), *(offer.room for offer in offers))
    sizes = _level(wanted, max(room, 0))
    sources = tuple(range(len(offers)))
    lots = tuple(
        KvLot(sources, (stage,), share.ids[:size], 0, share.names[:size], places=ids[:size] if found else None)
        for stage, (share, ids, size) in enumerate(zip(rest, free, sizes, strict=True))
        if size
    )
    return KvTable(held, lots, found)


def _check_shares(offers: Sequence[KvOffer], shares: Sequence[KeptKv] | Sequence[PlacedKv]) -> None:
    if len(shares) != len(offers):
        raise ValueError(f"{len(shares)} shares for {len(offers)} stages")


def _found(shares: Sequence[KeptKv], there: Sequence[PlacedKv]) -> tuple[PlacedKv, ...]:
    """Return what of each share has been copied before, and lies in the group where it did."""
    found, most = [], MAX_EXCHANGED
    for share, copied in zip(shares, there, strict=True):
        wanted = dict(zip(share.names, share.ids.tolist(), strict=True))
        chosen = [i for i, name in enumerate(copied.names) if wanted.get(name) == int(copied.ids[i])][:most]
        found.append(copied.only(chosen))
        most -= len(chosen)
    return tuple(found)


def check_table(table: KvTable, stage: int, offer: KvOffer, num_blocks: int, wanted: Sequence[LayerRange]) -> None:
    """Check that a stage can do its part of a table that it was sent.

    Args:
        table: as it came.
        stage: who checks.
        offer: its own.
        num_blocks: that it has before the change.
        wanted: by stage: layers after the change.

    Raises:
        ValueError: it cannot; names the first reason.
    """
    if len(table.held) != len(wanted) or table.held[stage] != offer.layers:
        raise ValueError("it is made for other stages")
    known, sent = range(len(wanted)), 0
    for lot in table.lots:
        if not all(index in known for index in (*lot.sources, *lot.targets)) or len(lot.names) != len(lot.ids):
            raise ValueError("a lot is not well formed")
        if stage in lot.sources:
            sent += len(lot.ids)
            if not _are_among(lot.ids, num_blocks, offer.num_host_blocks):
                there = f"{num_blocks}, and {offer.num_host_blocks} on the host"
                raise ValueError(f"blocks are asked for that are not among {there}")
        if stage in lot.targets and not _are_among(lot.target_ids, offer.num_blocks):
            raise ValueError(f"blocks are to come that are not among {offer.num_blocks}")
    if table.by_pages:
        if not offer.card or table.there:
            raise ValueError("pages are asked for, and it hands over none")
        return
    _check_ahead(table, stage, offer, num_blocks)
    if sent > offer.room:
        raise ValueError(f"{sent} blocks are asked for, and there is room for {offer.room}")


def _check_ahead(table: KvTable, stage: int, offer: KvOffer, num_blocks: int) -> None:
    """Check what comes, or has come, while the group serves: to places that have memory of all layers."""
    for lot in table.lots:
        if lot.places is None:
            continue
        if len(lot.places) != len(lot.ids):
            raise ValueError("a lot is not well formed")
        if stage in lot.targets and stage not in lot.sources and not _are_among(lot.places, offer.ahead_blocks):
            raise ValueError(f"there is memory for layers of others in {offer.ahead_blocks} blocks only")
    if not table.there:
        return
    if len(table.there) != len(table.held):
        raise ValueError("it is made for other stages")
    there = table.there[stage]
    if not _are_among(there.ids, num_blocks) or not _are_among(there.places, offer.ahead_blocks):
        raise ValueError(f"blocks are said to be there that are not among {offer.ahead_blocks}")


def _are_among(ids: I32, num_blocks: int, num_host_blocks: int = 0) -> bool:
    return not len(ids) or -num_host_blocks <= int(ids.min()) <= int(ids.max()) < num_blocks


def holders(offers: Sequence[KvOffer], stage: int, num_layers: int) -> tuple[int, ...]:
    """Return the stages that together have all layers of a worker's blocks; none if some are missing."""
    group = offers[stage].group
    found = [stage] if not group else [i for i, offer in enumerate(offers) if offer.group == group]
    try:
        check_tiling(sorted(offers[i].layers for i in found), num_layers)
    except ValueError:
        return ()
    return tuple(found)


def _level(wanted: Sequence[int], room: int) -> list[int]:
    """Cut numbers so that their sum is at most `room`, the largest ones first, and all to the same size but for one."""
    sizes = list(wanted)
    excess = max(sum(sizes) - room, 0)
    while excess:
        top = max(sizes)
        tallest = [i for i, size in enumerate(sizes) if size == top]
        below = max((size for size in sizes if size < top), default=0)
        step = min(top - below, max(excess // len(tallest), 1))
        for i in reversed(tallest):
            cut = min(step, excess)
            sizes[i] -= cut
            excess -= cut
    return sizes
