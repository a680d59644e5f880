"""KV that changes hands between modelled devices: which blocks, when, and how much memory there is meanwhile.

    lots of names ──pieces──► who sends what to whom, by the links' time ──► arrivals, in order

A group's KV comes while it serves. Until a stage has sent the KV of layers that it dropped, that KV takes the place of
blocks: so of the room that a drop makes only a part is there at once, and what has to arrive has its blocks from the
beginning. Each worker sends at its link's rate, and receives at the same time.

Of a live lot, KV that has not arrived is read where it lies; what that takes of the links comes first.

Source: KunServe v2, section 4.2 (pieces of about a stage's execution time); v1, section 4.2 (live exchange).
Deviations: a link carries KV as if no activation went over it; activations are a few percent of it. Remote attention
takes no time of the device that has the keys beside what the model's attention takes anyway.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import ceil, isinf

import numpy as np

from services.worker.blocks.remote_kv import RemoteSpan
from services.worker.contract.arrays import I32
from services.worker.contract.kept_kv import KeptKv
from services.worker.kv_moves.arrivals import Arrived
from services.worker.kv_moves.kv_table import (
    AreLive,
    KvOffer,
    MovingKv,
    mode_of,
    moving_layers,
    none_live,
    table_to_part,
)
from services.worker.kv_moves.placed_kv import PlacedKv
from services.worker.modelled.shadow_kv import ShadowKv
from shared.cost import CostModel
from shared.ids import WorkerId
from shared.layers import LayerRange
from sim.devices.modelled_stage import ModelledStage

NO_LIMIT = 2**62
"""Blocks: copies are kept aside nowhere here."""
PIECE_S = 0.01
"""Time on the wire of blocks that arrive together."""


@dataclass(frozen=True, slots=True)
class Estate:
    """What a worker brings into a group."""

    layers: LayerRange
    """Held before."""
    kv: ShadowKv
    """Their memory."""
    group: WorkerId
    """Who led the group that it was in, itself if it was alone: that one says which blocks are kept."""
    kept: KeptKv
    block_bytes: int
    """Of a block's keys and values in one layer."""
    step_s: float = 0.0
    """That a step took lately; 0: unknown."""
    cost: CostModel | None = None
    """Of a step of the whole model."""


@dataclass(frozen=True, slots=True)
class Share:
    """A worker that leaves a group in order."""

    layers: LayerRange
    """Held in the group."""
    kv: ShadowKv
    """Their memory."""
    whole: ShadowKv
    """Memory of the whole model, to be filled."""
    shares: tuple[KeptKv, ...]
    """Of the leader: what goes to whom."""
    block_bytes: int
    """Of a block's keys and values in one layer."""
    there: tuple[PlacedKv, ...] = ()
    """Of the leader: what was copied ahead, by stage."""
    ahead_blocks: int = 0
    """First blocks of `whole` that there is memory for already."""


@dataclass(frozen=True, slots=True)
class _Lot:
    """Blocks of one worker, or of the group that it led."""

    holders: tuple[int, ...]
    """Places of the workers that have them, each for its layers."""
    source: I32
    """[n] ids there"""
    first: int
    """Id of the first one in the group; the others follow."""
    names: tuple[bytes, ...]
    is_live: bool
    """What has not arrived is attended where it lies."""

    @property
    def span(self) -> RemoteSpan:
        """Ids in the group."""
        return RemoteSpan(self.first, self.first + len(self.names))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Blocks [first, end) of a lot."""

    lot: _Lot
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class _Step:
    """A piece that has arrived on all stages."""

    at_s: float
    """Since the beginning."""
    piece: _Piece
    num_blocks: int
    """That there is memory for."""


class Exchange:
    """The KV that goes along when workers become a group.

    Args:
        before: what each brings, by stage.
        stages: what each is.
        bytes_per_s: of each worker's link, each way.
        are_live: chooses whose KV is attended where it lies until it has arrived.
    """

    def __init__(
        self,
        before: Sequence[Estate],
        stages: Sequence[ModelledStage],
        bytes_per_s: float,
        are_live: AreLive = none_live,
    ) -> None:
        self._before = before
        self._stages = stages
        self._bytes_per_s = bytes_per_s
        self._num_blocks = min(stage.capacity.num_blocks for stage in stages)
        self._lots = _lots(before, sum(len(stage.layers) for stage in stages), self._num_blocks, are_live)
        self.is_live = any(lot.is_live for lot in self._lots)
        """Some of it is attended where it lies."""
        unsent = [sum(self._leaving(lot, i) * len(lot.names) for lot in self._lots) for i in range(len(before))]
        self.num_blocks = max(self._room(unsent), sum(len(lot.names) for lot in self._lots))
        """Blocks with memory at the beginning, those that wait for KV among them."""
        self.steps = tuple(self._steps(unsent))
        """In order of time."""
        for lot in (lot for lot in self._lots if lot.is_live):
            target = np.arange(lot.first, lot.first + len(lot.names), dtype=np.int32)
            for stage, holder in self._sources(lot):
                stage.kv.attend_elsewhere(self._before[holder].kv, lot.source, target)

    @property
    def spans(self) -> tuple[RemoteSpan, ...]:
        """What can be attended where it lies."""
        return tuple(lot.span for lot in self._lots if lot.is_live)

    @property
    def coming(self) -> KeptKv:
        """All blocks, as the group numbers them."""
        names = tuple(name for lot in self._lots for name in lot.names)
        return KeptKv(names, np.arange(len(names), dtype=np.int32))

    @property
    def num_bytes(self) -> int:
        """That go from one worker to another."""
        return sum(len(lot.names) * self._wire_bytes(lot) for lot in self._lots)

    @property
    def sources(self) -> tuple[int, ...]:
        """Places of the workers whose KV goes along."""
        return tuple(sorted({holder for lot in self._lots for holder in lot.holders}))

    @property
    def mode(self) -> str:
        """How it moves, in one word."""
        return mode_of([lot.is_live for lot in self._lots])

    @property
    def took_s(self) -> float:
        """From the beginning to the last arrival."""
        return self.steps[-1].at_s if self.steps else 0.0

    async def news(
        self,
        began_s: float,
        limit_s: float,
        is_cut: Callable[[], bool],
        on_lost: Callable[[str], None] = lambda _: None,
    ) -> AsyncIterator[Arrived]:
        """Yield what arrives, when it does.

        Args:
            began_s: on the running loop's clock.
            limit_s: after so many seconds nothing more comes; if a lot is live there is no limit while something comes.
            is_cut: likewise.
            on_lost: called if it ends before all live lots have come: sequences lack KV then.
        """
        loop = asyncio.get_running_loop()
        last_s = math.inf if self.is_live else limit_s
        for index, step in enumerate(self.steps):
            while (wait_s := began_s + min(step.at_s, last_s) + self._attention_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            if step.at_s > last_s or is_cut():
                if any(left.piece.lot.is_live for left in self.steps[index:]):
                    on_lost("a connection over which KV comes is cut")
                return
            piece = step.piece
            yield Arrived(self._carry(piece), step.num_blocks, len(piece) * self._wire_bytes(piece.lot))

    @property
    def _attention_s(self) -> float:
        """Return for how long remote attention has kept the links from carrying KV."""
        return max(stage.remote_wire_s for stage in self._stages) if self.is_live else 0.0

    def _carry(self, piece: _Piece) -> KeptKv:
        lot = piece.lot
        target = np.arange(lot.first + piece.first, lot.first + piece.end, dtype=np.int32)
        for stage, holder in self._sources(lot):
            stage.kv.take_from(self._before[holder].kv, lot.source[piece.first : piece.end], target)
        return KeptKv(lot.names[piece.first : piece.end], target)

    def _sources(self, lot: _Lot) -> Iterator[tuple[ModelledStage, int]]:
        """Yield each stage with each holder of a lot that has some of its layers."""
        for stage in self._stages:
            for holder in lot.holders:
                if self._before[holder].layers.overlap(stage.layers) is not None:
                    yield stage, holder

    def _schedule(self) -> list[tuple[float, _Piece]]:
        """Let every worker send and receive one thing at a time, the lots taking turns; return who arrives when."""
        sends_at_s, takes_at_s = [0.0] * len(self._stages), [0.0] * len(self._stages)
        found: list[tuple[float, _Piece]] = []
        for turn in zip_longest(*(self._pieces(lot) for lot in self._lots)):
            for piece in turn:
                if piece is None:
                    continue
                arrived_s = 0.0
                for holder in piece.lot.holders:
                    for target in range(len(self._stages)):
                        num_bytes = len(piece) * self._block_bytes(holder, target)
                        if holder == target or not num_bytes:
                            continue
                        ends_s = max(sends_at_s[holder], takes_at_s[target]) + num_bytes / self._bytes_per_s
                        sends_at_s[holder] = takes_at_s[target] = ends_s
                        arrived_s = max(arrived_s, ends_s)
                found.append((arrived_s, piece))
        return sorted(found, key=lambda each: each[0])

    def _steps(self, unsent: list[int]) -> Iterator[_Step]:
        for at_s, piece in self._schedule():
            for holder in piece.lot.holders:
                unsent[holder] -= len(piece) * self._leaving(piece.lot, holder)
            yield _Step(at_s, piece, max(self._room(unsent), self.num_blocks))

    def _pieces(self, lot: _Lot) -> Iterator[_Piece]:
        size = len(lot.names)
        if not isinf(self._bytes_per_s):
            layers = sum(len(stage.layers) for stage in self._stages)
            size = max(int(PIECE_S * self._bytes_per_s) // (layers * self._before[0].block_bytes), 1)
        for first in range(0, len(lot.names), max(size, 1)):
            yield _Piece(lot, first, min(first + size, len(lot.names)))

    def _wire_bytes(self, lot: _Lot) -> int:
        """Return the bytes of a lot's block that go from one worker to another."""
        held, wanted = [each.layers for each in self._before], [stage.layers for stage in self._stages]
        return moving_layers(held, wanted, lot.holders, range(len(wanted))) * self._before[0].block_bytes

    def _block_bytes(self, holder: int, target: int) -> int:
        """Return the bytes of a block that one worker has for another."""
        part = self._before[holder].layers.overlap(self._stages[target].layers)
        return 0 if part is None else len(part) * self._before[holder].block_bytes

    def _leaving(self, lot: _Lot, holder: int) -> int:
        """Return the bytes of a lot's block that are at a worker and do not stay there."""
        if holder not in lot.holders:
            return 0
        before = self._before[holder]
        return len(before.layers) * before.block_bytes - self._block_bytes(holder, holder)

    def _room(self, unsent: Sequence[int]) -> int:
        """Return the blocks that every stage has memory for beside the KV that it has not sent yet."""
        return min(
            stage.capacity.num_blocks - ceil(left / (len(stage.layers) * before.block_bytes))
            for stage, before, left in zip(self._stages, self._before, unsent, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that go between the members of a group."""

    most_bytes: int
    """That one of them sends or receives."""
    num_bytes: int
    """In all."""


def hand_out(members: Sequence[Share]) -> tuple[list[KeptKv], Traffic]:
    """Give every member of a group that dissolves all layers of the blocks that are its share.

    Returns:
        What each one's blocks hold, and what goes between them.
    """
    offers = [
        KvOffer(member.layers, NO_LIMIT, member.whole.num_blocks, ahead_blocks=member.ahead_blocks)
        for member in members
    ]
    table = table_to_part(offers, members[0].shares, members[0].there, most_named=NO_LIMIT)
    if table.there:
        for member, there in zip(members, table.there, strict=True):
            member.whole.join(there.places, member.kv, there.ids)
    counts = [0] * len(members)
    for lot in table.lots:
        for target in lot.targets:
            counts[target] += len(lot.ids)
            for source in lot.sources:
                members[target].whole.take_from(members[source].kv, lot.ids, lot.target_ids)
    return [table.kept_at(index) for index in range(len(members))], traffic_of(members, counts)


def copy_shares(members: Sequence[Share], shares: Sequence[PlacedKv]) -> None:
    """Let every member of a group have some blocks of the others, whose layers are not its own, at their places."""
    for index, (member, share) in enumerate(zip(members, shares, strict=True)):
        assert not len(share) or int(share.places.max()) < member.ahead_blocks, "there is no memory at a place"
        for holder, other in enumerate(members):
            if holder != index:
                member.whole.take_from(other.kv, share.ids, share.places)


def traffic_of(members: Sequence[Share], counts: Sequence[int]) -> Traffic:
    """Return what goes between members of which each gets so many blocks, but for the layers that it has."""
    sent, received = [0] * len(members), [0] * len(members)
    for index, count in enumerate(counts):
        for holder, other in enumerate(members):
            num_bytes = count * other.block_bytes * len(other.layers) if holder != index else 0
            sent[holder] += num_bytes
            received[index] += num_bytes
    return Traffic(max(*sent, *received), sum(sent))


def _lots(before: Sequence[Estate], num_layers: int, num_blocks: int, are_live: AreLive) -> list[_Lot]:
    """Return whose blocks go along: the first worker's first, each name once, as many as the group has room for.

    Of a live lot first those that sequences need to go on.
    """
    names: set[bytes] = set()
    moving: list[MovingKv] = []
    for owner in before:
        fresh = [i for i, name in enumerate(owner.kept.names) if name not in names][: num_blocks - len(names)]
        holders = tuple(i for i, other in enumerate(before) if other.group == owner.group)
        if fresh and sum(len(before[holder].layers) for holder in holders) == num_layers:
            moving.append(MovingKv(holders, owner.kept.only(fresh)))
            names.update(moving[-1].kept.names)
    lots, first = list[_Lot](), 0
    for lot, is_live in zip(moving, are_live(moving), strict=True):
        kept = lot.ordered(is_live=is_live).kept
        lots.append(_Lot(lot.sources, kept.ids, first, kept.names, is_live))
        first += len(kept)
    return lots
