"""KV that changes hands between modelled devices: when it comes, and how much memory there is meanwhile.

    KvTable ──pieces──► who sends what to whom, by the links' time ──► arrivals, in order

What moves, and how, is decided by the live workers' own functions (`services/worker/kv_moves/`).

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

from services.worker.contract.kept_kv import KeptKv
from services.worker.kv_moves.arrivals import Arrivals, Arrived
from services.worker.kv_moves.kv_table import KvLot, KvOffer, KvTable, check_table, table_to_part
from services.worker.modelled.shadow_kv import ShadowKv
from services.worker.roles.device import Parting
from shared.cost import CostModel
from shared.layers import LayerRange
from sim.devices.modelled_stage import ModelledStage

NO_LIMIT = 2**62
"""Blocks: what goes to others is kept aside where it lies."""
PIECE_S = 0.01
"""Time on the wire of blocks that arrive together."""


@dataclass(frozen=True, slots=True)
class Estate:
    """What a worker brings into a group."""

    offer: KvOffer
    kv: ShadowKv
    """Memory of the layers held before."""
    pair_bytes: int
    """Of a block's keys and values in one layer."""
    cost: CostModel | None = None
    """Of a step of the whole model."""


@dataclass(frozen=True, slots=True)
class Share:
    """A worker that leaves a group in order, or copies ahead what it will have then."""

    offer: KvOffer
    kv: ShadowKv
    """Memory of the layers held in the group."""
    whole: ShadowKv
    """Memory of the whole model, to be filled."""
    pair_bytes: int
    """Of a block's keys and values in one layer."""
    parting: Parting


@dataclass(frozen=True, slots=True)
class _Piece:
    """Blocks [first, end) of a lot."""

    lot: KvLot
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
        table: what moves.
        before: what each brings, by stage.
        stages: what each is.
        bytes_per_s: of each worker's link, each way.
    """

    def __init__(
        self, table: KvTable, before: Sequence[Estate], stages: Sequence[ModelledStage], bytes_per_s: float
    ) -> None:
        self._table = table
        self._before = before
        self._stages = stages
        self._wanted = [stage.layers for stage in stages]
        self._bytes_per_s = bytes_per_s
        _check(table, [each.offer for each in before], [each.kv for each in before], self._wanted)
        self.num_bytes = table.wire_bytes(self._wanted, before[0].pair_bytes)
        """That go from one stage to another."""
        self.is_live = table.is_live
        """Some of it is attended where it lies."""
        unsent = [sum(self._leaving(lot, i) * _on_device(lot) for lot in table.lots) for i in range(len(before))]
        self.num_blocks = max(self._room(unsent), sum(len(lot.ids) for lot in table.lots))
        """Blocks with memory at the beginning, those that wait for KV among them."""
        self.steps = tuple(self._steps(unsent))
        """In order of time."""
        for lot in (lot for lot in table.lots if lot.is_live):
            for stage, holder in self._sources(lot):
                stage.kv.attend_elsewhere(self._before[holder].kv, lot.ids, lot.target_ids)

    def arrivals(self, news: AsyncIterator[Arrived], num_blocks_then: int) -> Arrivals | None:
        """Return what comes, for the leader; None: nothing does."""
        return Arrivals.of(self._table, self.num_bytes, news, self.num_blocks, num_blocks_then)

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
        part = piece.lot.part(piece.first, piece.end)
        for stage, holder in self._sources(piece.lot):
            stage.kv.take_from(self._before[holder].kv, piece.lot.ids[piece.first : piece.end], part.ids)
        return part

    def _sources(self, lot: KvLot) -> Iterator[tuple[ModelledStage, int]]:
        """Yield each target of a lot with each source that has some of its layers."""
        for stage in (self._stages[target] for target in lot.targets):
            for holder in lot.sources:
                if self._table.held[holder].overlap(stage.layers) is not None:
                    yield stage, holder

    def _schedule(self) -> list[tuple[float, _Piece]]:
        """Let workers send and receive one thing at a time, a piece of each lot in rotation; return each arrival."""
        sends_at_s, takes_at_s = [0.0] * len(self._stages), [0.0] * len(self._stages)
        found: list[tuple[float, _Piece]] = []
        for pieces in zip_longest(*(self._pieces(lot) for lot in self._table.lots)):
            for piece in pieces:
                if piece is None:
                    continue
                arrived_s = 0.0
                for holder in piece.lot.sources:
                    for target in piece.lot.targets:
                        num_bytes = len(piece) * self._held_bytes(holder, target)
                        if holder == target or not num_bytes:
                            continue
                        ends_s = max(sends_at_s[holder], takes_at_s[target]) + num_bytes / self._bytes_per_s
                        sends_at_s[holder] = takes_at_s[target] = ends_s
                        arrived_s = max(arrived_s, ends_s)
                found.append((arrived_s, piece))
        return sorted(found, key=lambda each: each[0])

    def _steps(self, unsent: list[int]) -> Iterator[_Step]:
        for at_s, piece in self._schedule():
            for holder in piece.lot.sources:
                unsent[holder] -= _on_device(piece.lot, piece.first, piece.end) * self._leaving(piece.lot, holder)
            yield _Step(at_s, piece, max(self._room(unsent), self.num_blocks))

    def _pieces(self, lot: KvLot) -> Iterator[_Piece]:
        size = len(lot.ids)
        if not isinf(self._bytes_per_s):
            size = max(int(PIECE_S * self._bytes_per_s) // (self._table.num_layers * self._before[0].pair_bytes), 1)
        for first in range(0, len(lot.ids), size):
            yield _Piece(lot, first, min(first + size, len(lot.ids)))

    def _wire_bytes(self, lot: KvLot) -> int:
        """Return the bytes of a lot's block that go from one worker to another."""
        return self._table.link_layers(lot, self._wanted).total * self._before[0].pair_bytes

    def _held_bytes(self, holder: int, target: int) -> int:
        """Return the bytes of a block that one worker has for another."""
        part = self._table.held[holder].overlap(self._wanted[target])
        return 0 if part is None else len(part) * self._before[holder].pair_bytes

    def _leaving(self, lot: KvLot, holder: int) -> int:
        """Return the bytes of a lot's block that are at a worker and do not stay there."""
        if holder not in lot.sources:
            return 0
        return len(self._table.held[holder]) * self._before[holder].pair_bytes - self._held_bytes(holder, holder)

    def _room(self, unsent: Sequence[int]) -> int:
        """Return the blocks that every stage has memory for beside the KV that it has not sent yet."""
        return min(
            stage.capacity.num_blocks - ceil(left / (len(stage.layers) * before.pair_bytes))
            for stage, before, left in zip(self._stages, self._before, unsent, strict=True)
        )


def _on_device(lot: KvLot, first: int = 0, end: int | None = None) -> int:
    """Return how many blocks [first, end) of a lot take device memory at its sources."""
    return int(np.count_nonzero(lot.ids[first:end] >= 0))


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
    parting = members[0].parting
    table = table_to_part([member.offer for member in members], parting.shares, parting.there)
    if table.there:
        for member, there in zip(members, table.there, strict=True):
            member.whole.join(there.places, member.kv, there.ids)
    carry(table, members)
    return [table.kept_at(index) for index in range(len(members))], traffic_of(table, members)


def carry(table: KvTable, members: Sequence[Share]) -> None:
    """Let the members of a group have in their memory of the whole model what a table says."""
    wanted = [LayerRange(0, table.num_layers)] * len(members)
    _check(table, [member.offer for member in members], [member.kv for member in members], wanted)
    for lot in table.lots:
        for target in lot.targets:
            for source in lot.sources:
                members[target].whole.take_from(members[source].kv, lot.ids, lot.target_ids)


def traffic_of(table: KvTable, members: Sequence[Share]) -> Traffic:
    """Return what goes between the members of a group, each of which wants all layers."""
    wanted, layers = [LayerRange(0, table.num_layers)] * len(members), np.zeros((2, len(members)), dtype=np.int64)
    for lot in table.lots:
        each = table.link_layers(lot, wanted)
        layers += len(lot.ids) * np.stack([each.sends, each.takes])
    pair_bytes = members[0].pair_bytes
    return Traffic(int(layers.max()) * pair_bytes, int(layers[0].sum()) * pair_bytes)


def _check(table: KvTable, offers: Sequence[KvOffer], kvs: Sequence[ShadowKv], wanted: Sequence[LayerRange]) -> None:
    """Check as every live stage does that it can do its part of a table."""
    for stage, (offer, kv) in enumerate(zip(offers, kvs, strict=True)):
        check_table(table, stage, offer, kv.num_blocks, wanted)
