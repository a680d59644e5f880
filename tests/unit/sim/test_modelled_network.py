"""Where modelled workers meet: who hears of whose end, and which blocks hold what after an exchange of KV."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.worker.contract.arrays import I32
from services.worker.contract.kept_kv import NOTHING_KEPT, KeptKv
from services.worker.kv_moves.arrivals import Arrived
from services.worker.kv_moves.kv_table import AreLive, KvOffer, none_live, table_to_form
from services.worker.kv_moves.places import GroupFailedError, GroupPlace, StagePlace
from services.worker.modelled.executor import ModelledExecutor
from services.worker.modelled.shadow_kv import TokenDraw
from services.worker.roles.device import Parting
from shared.cost import load_profile
from shared.ids import WorkerId
from shared.layers import LayerRange, even_split
from sim.devices.channel import ModelledLink
from sim.devices.modelled_device import ModelledDeviceParams, ModelledGroupDevice
from sim.devices.modelled_exchange import NO_LIMIT, Estate, Exchange, Share, hand_out
from sim.devices.modelled_network import ModelledNetwork
from sim.virtual_time import run
from tests.support.group_room import NUM_LAYERS, elastic_facts

pytestmark = pytest.mark.virtual_time

LATENCY_S = 0.1
BLOCK_BYTES = 10
WHOLE, HALVES = LayerRange(0, NUM_LAYERS), even_split(NUM_LAYERS, 2)
NAMES = tuple(WorkerId(f"w{i}") for i in range(3))
PROCESS: ContextVar[int] = ContextVar("process", default=-1)
"""Of which device; -1: of the test."""


class Party:
    """Three devices on one network, and what each was told of its pipeline's end, and when."""

    def __init__(self) -> None:
        cost = load_profile("llama-3-8b-tp1-a100").cost
        draw = TokenDraw.of_vocabulary(32_000, (2,), first_id=256)
        self.network = ModelledNetwork(ModelledLink(LATENCY_S))
        params = ModelledDeviceParams(elastic_facts(), cost, 16, draw)
        self.devices = [ModelledGroupDevice(params, self.network, lambda kv: ModelledExecutor(cost, kv)) for _ in NAMES]
        self.heard: dict[int, tuple[str | None, float]] = {}
        self.heard_in: dict[int, int] = {}
        """By device: in whose process it was told."""

    def place(self, index: int, plan_id: int) -> GroupPlace:
        stages = [StagePlace(name, "", part) for name, part in zip(NAMES, even_split(NUM_LAYERS, 3), strict=True)]
        return GroupPlace(plan_id, tuple(stages), index)

    def come(self, index: int, plan_id: int = 1) -> Awaitable[object]:
        """A device takes its place in the group of all."""

        def on_end(reason: str | None) -> None:
            assert index not in self.heard, "told twice"
            self.heard[index] = reason, asyncio.get_running_loop().time()
            self.heard_in[index] = PROCESS.get()

        device, place = self.devices[index], self.place(index, plan_id)
        coming = device.join(place, on_end, NOTHING_KEPT) if index else device.lead(place, on_end, NOTHING_KEPT)
        process = copy_context()
        process.run(PROCESS.set, index)
        return process.run(asyncio.ensure_future, coming)

    async def gather(self, plan_id: int = 1) -> list[object]:
        """All form a group; return what each says."""
        self.heard.clear()
        comings = (self.come(index, plan_id) for index in range(len(NAMES)))
        return await asyncio.gather(*comings, return_exceptions=True)

    async def check_heard(self, gone: int, why: str, num_ways: int = 1) -> None:
        """Check that the leader and the stage behind hear why, so many ways later, and the rest when the leader closes.

        If the leader is the one that is gone, all hear of it. Each is told in his own process: what he does then must
        go on if the leader's ends a moment later.
        """
        begun_s = asyncio.get_running_loop().time()
        await asyncio.sleep(3 * LATENCY_S)
        at_once = {1, 2} if gone == 0 else {0, 2} - {gone}
        assert at_once <= self.heard.keys()
        for index in sorted(at_once):
            reason, at_s = self.heard[index]
            assert reason is not None
            assert why in reason
            assert at_s - begun_s <= num_ways * LATENCY_S + 1e-9
        if gone:
            await self.devices[0].pipelines[0].close()
        await asyncio.sleep(2 * LATENCY_S)
        assert {0, 1, 2} - {gone} <= self.heard.keys()
        assert gone == 0 or gone not in self.heard, "who goes need not be told"
        assert all(index == told_in for index, told_in in self.heard_in.items())


@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.parametrize("index", range(3))
async def test_the_others_hear_that_a_worker_is_lost_or_has_left(index: int, is_lost: bool) -> None:
    party = Party()
    await party.gather()
    if is_lost:
        party.network.lose(NAMES[index])
        await party.check_heard(index, NAMES[index])
        return
    leaving = asyncio.ensure_future(party.devices[index].alone())
    await party.check_heard(index, "a stage has left the group", num_ways=2)
    await leaving
    assert party.devices[index].layers == WHOLE


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 2), (2, 0)])
async def test_a_cut_ends_the_pipeline_and_no_other_begins_until_it_is_healed(one: int, other: int) -> None:
    party = Party()
    assert not [said for said in await party.gather() if isinstance(said, Exception)]
    party.network.cut(NAMES[one], NAMES[other])
    await asyncio.sleep(3 * LATENCY_S)
    assert 0 in party.heard, "the leader"
    assert party.heard.keys() & {1, 2} & {one, other}, "a stage that had the connection"
    for device in party.devices:
        await device.alone()
    said = await party.gather(plan_id=2)
    assert [str(each) for each in said] == ["a connection did not come within 5 s"] * 3
    for device in party.devices:
        await device.alone()
    party.network.heal(NAMES[one], NAMES[other])
    assert not [each for each in await party.gather(plan_id=3) if isinstance(each, Exception)]


async def test_who_is_lost_while_it_waits_is_not_counted_as_there() -> None:
    party = Party()
    gone = asyncio.ensure_future(party.come(1))
    comings = [party.come(2)]
    await asyncio.sleep(1.0)
    party.network.lose(NAMES[1])
    comings.append(party.come(0))
    for said in await asyncio.gather(*comings, return_exceptions=True):
        assert isinstance(said, GroupFailedError)
        assert str(said) == "w1 did not come within 5 s"
    gone.cancel()


class Memory:
    """Blocks in which it is written what was put there, and from which layers."""

    def __init__(self, names: dict[int, bytes] | None = None, layers: LayerRange | None = None) -> None:
        self.content = {block: [(name, layers, self)] for block, name in (names or {}).items()}
        self.num_blocks = 50
        self.elsewhere: list[tuple[Memory, list[int], list[int]]] = []

    def take_from(self, other: Memory, source: I32, target: I32) -> None:
        for here, there in zip(target.tolist(), source.tolist(), strict=True):
            self.content.setdefault(here, []).extend(other.content[there])

    def attend_elsewhere(self, other: Memory, source: I32, target: I32) -> None:
        """Note who is asked for what lies elsewhere."""
        self.elsewhere.append((other, source.tolist(), target.tolist()))

    def check(self, kept: KeptKv, layers: LayerRange) -> None:
        """Check that every named block has these layers of what its name says, and nothing else."""
        assert len(set(kept.names)) == len(kept) == len(set(kept.ids.tolist()))
        for name, block in zip(kept.names, kept.ids.tolist(), strict=True):
            assert {what for what, _, _ in self.content[block]} == {name}
            found = sorted(layer for _, part, _ in self.content[block] for layer in part or () if layer in layers)
            assert found == list(layers), "each layer once"


def names_of(rng: np.random.Generator, count: int) -> list[bytes]:
    return [bytes([number]) for number in rng.choice(40, count, replace=False).tolist()]


def holder(layers: LayerRange, held: dict[int, bytes], num_blocks: int, group: str = "", stage: int = 0) -> Estate:
    """Return what a worker brings that holds blocks of these names; of a group the leader says so."""
    memory: Any = Memory(held, layers)
    kept = NOTHING_KEPT if stage else KeptKv(tuple(held.values()), np.array(list(held), dtype=np.int32))
    return Estate(KvOffer(layers, NO_LIMIT, num_blocks, group, kept), memory, BLOCK_BYTES)


def estates(rng: np.random.Generator, num_blocks: int) -> list[Estate]:
    """A worker that was alone, the two stages of a group, and another one that was alone; names in common."""
    found: list[Estate] = []
    for leader, ranges in (("a", [WHOLE]), ("b", HALVES), ("d", [WHOLE])):
        names = names_of(rng, int(rng.integers(0, 12)))
        held = dict(zip(rng.permutation(50).tolist(), names, strict=False))
        for index, layers in enumerate(ranges):
            group = leader if len(ranges) > 1 else ""
            found.append(holder(layers, held, num_blocks + len(found), group, index))
    return found


def two_workers(sizes: tuple[int, int], num_blocks: int) -> list[Estate]:
    """Two that were alone; of each block the name begins with its owner's letter."""
    pairs = zip("ab", sizes, strict=True)
    return [holder(WHOLE, {i: f"{owner}{i}".encode() for i in range(size)}, num_blocks) for owner, size in pairs]


@dataclass
class Moving:
    """An exchange of a group of as many equal stages.

    Args:
        before: what each brings.
        num_blocks: that each stage has memory for.
        rate: at which links carry blocks of all layers, per second.
        are_live: chooses how lots move.
    """

    before: Sequence[Estate]
    num_blocks: Sequence[int]
    rate: float
    are_live: AreLive = none_live

    def __post_init__(self) -> None:
        pairs = zip(even_split(NUM_LAYERS, len(self.before)), self.num_blocks, strict=True)
        self.stages: list[Any] = [
            SimpleNamespace(kv=Memory(), layers=layers, capacity=SimpleNamespace(num_blocks=count), remote_wire_s=0.0)
            for layers, count in pairs
        ]
        self.table = table_to_form([each.offer for each in self.before], NUM_LAYERS, self.are_live)
        self.bytes_per_s = self.rate * BLOCK_BYTES * NUM_LAYERS
        self.exchange = Exchange(self.table, self.before, self.stages, self.bytes_per_s)
        self.lost: list[str] = []

    @property
    def took_s(self) -> float:
        return self.exchange.steps[-1].at_s

    def arrived(self, limit_s: float = 1e9, cut_s: float = 1e9) -> list[tuple[float, Arrived]]:
        """Return what arrives, and when, until a limit or a cut of the links."""
        found = []

        async def main() -> None:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            news = self.exchange.news(began_s, limit_s, lambda: loop.time() - began_s >= cut_s, self.lost.append)
            async for each in news:
                found.append((loop.time() - began_s, each))
                for stage in self.stages:
                    stage.kv.check(each.blocks, stage.layers)

        run(main())
        return found


@pytest.mark.parametrize("seed", range(30))
def test_after_an_exchange_every_named_block_has_the_layers_of_its_stage(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_blocks = int(rng.integers(1, 40))
    before = estates(rng, num_blocks)
    rate = float(rng.choice([np.inf, 1000.0, 30.0]))
    moving = Moving(before, range(num_blocks, num_blocks + len(before)), rate)
    wanted = dict.fromkeys(name for each in before for name in each.offer.kept.names)
    coming = moving.table.kept_at(0)
    assert coming.names == tuple(wanted)[:num_blocks], "the first worker's come first, each once"
    assert coming.ids.tolist() == list(range(len(coming)))
    arrived = moving.arrived()
    came = dict(pair for _, each in arrived for pair in zip(each.blocks.names, each.blocks.ids.tolist(), strict=True))
    assert came == dict(zip(coming.names, coming.ids.tolist(), strict=True))
    assert sum(len(each.blocks) for _, each in arrived) == len(coming), "each once"
    sizes = [
        (index, before.index(source), BLOCK_BYTES * len(part))
        for index, stage in enumerate(moving.stages)
        for pieces in stage.kv.content.values()
        for _, held, memory in pieces
        for source in before
        if source.kv is memory and (part := held.overlap(stage.layers)) and source is not before[index]
    ]
    most_bytes = max(
        sum(size for *ends, size in sizes if ends[way] == index) for way in (0, 1) for index in range(len(before))
    )
    if arrived:
        most_s = sum(size for *_, size in sizes) / moving.bytes_per_s
        assert most_bytes / moving.bytes_per_s - 1e-9 <= arrived[-1][0] <= most_s + 1e-9
    room = [moving.exchange.num_blocks, *(each.num_blocks for _, each in arrived)]
    assert max(room) <= num_blocks
    assert room[-1] == num_blocks or not arrived
    assert min(room) == room[0] >= len(coming)


@pytest.mark.parametrize("rate", [50.0, 1000.0])
def test_what_has_not_left_takes_the_room_of_blocks(rate: float) -> None:
    """Two full workers: of the room that the drop makes, what both still have for each other is not there yet."""
    exchange = Moving(two_workers((40, 40), 110), (110, 110), rate).exchange
    assert exchange.num_blocks == 80, "as many as wait for KV; there is memory for 70"
    left = [40, 40]
    for step in exchange.steps:
        left["ab".index(step.piece.lot.names[0][:1].decode())] -= len(step.piece)
        assert step.num_blocks == max(110 - max(left), 80), "each stage has sent half of the layers of what is gone"
    assert left == [0, 0]


def test_what_comes_too_late_or_over_a_cut_link_does_not_come() -> None:
    for limit_ratio, cut_ratio in ((9.0, 9.0), (0.5, 9.0), (9.0, 0.5)):
        moving = Moving(estates(np.random.default_rng(3), 99), [99] * 4, 30.0)
        arrived = moving.arrived(limit_ratio * moving.took_s, cut_ratio * moving.took_s)
        count, num_coming = sum(len(each.blocks) for _, each in arrived), len(moving.table.kept_at(0))
        assert count == num_coming if limit_ratio == cut_ratio else 0 < count < num_coming


@pytest.mark.parametrize("cut_ratio", [0.1, 0.5, 0.9])
def test_a_cut_ends_the_group_only_while_a_live_lot_is_on_its_way(cut_ratio: float) -> None:
    """The first lot is short and live, the second long and coordinated."""
    before = two_workers((10, 40), 99)
    moving = Moving(before, (99, 99), 30.0, lambda _: [True, False])
    ten = list(range(10))
    assert all(stage.kv.elsewhere == [(before[0].kv, ten, ten)] for stage in moving.stages), "of the live lot alone"
    live_s = max(step.at_s for step in moving.exchange.steps if step.piece.lot.is_live)
    assert live_s < moving.took_s / 2
    cut_s = cut_ratio * moving.took_s
    moving.arrived(cut_s=cut_s)
    assert bool(moving.lost) == (cut_s < live_s)


@pytest.mark.parametrize("seed", range(10))
def test_when_a_group_dissolves_each_gets_all_layers_of_its_share(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = names_of(rng, 30)
    ranges = even_split(NUM_LAYERS, 3)
    shares = []
    for part in np.array_split(rng.permutation(30), np.sort(rng.integers(0, 31, 2))):
        shares.append(KeptKv(tuple(names[i] for i in part), part.astype(np.int32)))
    members: list[Share] = []
    rooms: Sequence[int] = rng.integers(0, 15, 3).tolist()
    for index, layers in enumerate(ranges):
        held: Any = Memory(dict(enumerate(names)), layers)
        whole: Any = Memory()
        parting = Parting(tuple(shares) if index == 0 else ())
        members.append(Share(KvOffer(layers, NO_LIMIT, rooms[index]), held, whole, BLOCK_BYTES, parting))
    kept, _ = hand_out(members)
    for member, share, room, got in zip(members, shares, rooms, kept, strict=True):
        assert got.names == share.names[:room]
        memory: Any = member.whole
        memory.check(got, WHOLE)
