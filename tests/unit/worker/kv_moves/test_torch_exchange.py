"""KV goes along when live groups form and dissolve: to the bit, where it belongs, within its memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.contract.arrays import I32
from services.worker.contract.kept_kv import NOTHING_KEPT, KeptKv
from services.worker.engine.stats import take_stats
from services.worker.kv_moves import kv_wire, torch_exchange
from services.worker.kv_moves.placed_kv import PlacedKv
from services.worker.memory.block_copies import BlockCopies, copy_blocks
from services.worker.memory.host_kv import HostKV
from services.worker.memory.kv_cache import KVCache
from services.worker.roles.device import Parting
from services.worker.roles.torch_device import TorchGroupDevice
from shared.layers import LayerRange
from tests.support.exchanged_kv import (
    BLOCK,
    HALVES,
    Bits,
    Server,
    calm,
    check_bits,
    check_group_bits,
    devices_with_kv,
    numbered,
    pages_of_all,
    rows_of,
    scribble,
    snapshot,
    snapshot_each,
    spoil_after_changes,
)
from tests.support.late_kv import hold_sends
from tests.support.live_groups import (
    SHAPES,
    Group,
    check,
    dissolve,
    form,
    lead_and_join,
    live_devices,
    open_elastic_model,
    prompt_of,
    ranges_of,
)
from tests.support.runners import KERNELS
from tests.support.seeds import first_of

pytestmark = pytest.mark.kernels


@pytest.fixture(autouse=True)
def _spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_after_changes(monkeypatch)


# Text


CASES = sorted({("llama", "float32", KERNELS), ("llama", "float32", "torch"), ("tied", "bfloat16", KERNELS)})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "kernels"), CASES)
@pytest.mark.parametrize("ranges", [HALVES, ranges_of(1, 3, 4)], ids=str)
@pytest.mark.parametrize("by_pages", [False, True])
async def test_sequences_go_on_in_a_group_and_apart_again_without_computing_anything_twice(
    ranges: Sequence[LayerRange], name: str, dtype: str, kernels: str, *, by_pages: bool
) -> None:
    """Three begin at the first; in the group three more, whose prompts the second knows; then they part by halves."""
    expected = await calm(name, dtype, kernels)
    async with live_devices(len(ranges), name, dtype=dtype, kernels=kernels, hands_over=by_pages) as devices:
        first = Server((await devices[0].alone()).executor, [0, 1, 2])
        second = Server((await devices[1].alone()).executor, [3, 4, 5])
        await first.serve(4)
        await second.serve(5)
        assert first.texts
        assert any(len(text) < 8 for text in first.texts.values())
        kept = [first.engine.leave_executor(0.0), second.engine.leave_executor(0.0), NOTHING_KEPT][: len(ranges)]
        assert all(len(each) for each in kept[:2])

        group = await form(devices, ranges, kept)
        assert set(group.kept.names) == set(kept[0].names) | set(kept[1].names)
        assert bool(group.coming) != by_pages
        first.enter(group.executor, group.kept)
        cached = {each: first.num_cached(group.kept, each) for each in range(6)}
        assert min(cached.values()) >= BLOCK
        await first.serve(2)
        first.add([3, 4, 5])  # of the second, from their prompts
        await first.serve(3)
        assert set(first.starts) == set(range(6))
        assert all(start >= cached[each] for each, start in first.starts.items())
        kept_now = first.engine.leave_executor(0.0)

        shares = [first.engine.sharing.kept(rows_of(first.engine, each)) for each in ([0, 3, 5], [1, 2, 4], [])]
        assert set(shares[0].names) | set(shares[1].names) == set(kept_now.names)
        await group.executor.close()
        partings = [Parting(tuple(shares[: len(ranges)])), *[Parting()] * (len(ranges) - 1)]
        alone = await asyncio.gather(*(device.alone(part) for device, part in zip(devices, partings, strict=True)))
        for led, share in zip(alone, shares, strict=False):
            assert led.kept.names == share.names
            assert led.kept.ids.tolist() == list(range(len(share)))
        first.engine.registry.release(rows_of(first.engine, [1, 2, 4]), "w1")
        first.engine.registry.take_events()
        first.enter(alone[0].executor, alone[0].kept)
        left, before = first.left_to_compute(alone[0].kept, [0, 3, 5]), first.num_computed
        await first.serve()
        assert first.num_computed - before <= left
        assert {each: first.texts[each] for each in (0, 3, 5)} == {each: expected[each] for each in (0, 3, 5)}

        third = Server(alone[1].executor, [])
        third.engine.leave_executor(0.0)
        third.enter(alone[1].executor, alone[1].kept)
        third.add([1, 2, 4])
        left = third.left_to_compute(alone[1].kept, [1, 2, 4])
        await third.serve()
        assert third.texts == {each: expected[each] for each in (1, 2, 4)}
        assert third.num_computed <= left < sum(len(prompt_of(each)) + 7 for each in (1, 2, 4))
        check(devices)


@pytest.mark.slow
async def test_a_group_serves_others_while_kv_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody computes what comes; who needs nothing of it is served to the end before the first byte moves."""
    expected = await calm()
    async with live_devices(2) as devices:
        first = Server((await devices[0].alone()).executor, [0, 1, 2])
        second = Server((await devices[1].alone()).executor, [4])
        await first.serve(4)
        await second.serve(5)
        kept = [first.engine.leave_executor(0.0), second.engine.leave_executor(0.0)]
        with monkeypatch.context() as patch:
            over = hold_sends(patch, {0, 1})
            led, _ = await lead_and_join(devices, HALVES, kept)
            arrivals = led.arrivals
            assert arrivals is not None
            assert set(arrivals.coming.names) == set(kept[0].names) | set(kept[1].names)
            first.enter(led.executor, arrivals=arrivals)
            engine, num_free = first.engine, first.engine.blocks.num_free
            assert num_free == arrivals.num_blocks - len(arrivals.coming)
            first.add([3, 4, 5])
            told = dict(first.texts)
            await first.serve()
            assert set(first.starts) == {3}, "the others wait"
            assert first.texts == told | {3: expected[3]}
            assert engine.blocks.num_free == num_free
            over.set()
            left, before = first.left_to_compute(arrivals.coming, [0, 1, 2, 4, 5]), first.num_computed
            async for arrived in arrivals.news:
                engine.sharing.coming.arrived(arrived.blocks)
                await first.serve(1)
        engine.sharing.coming.expect_no_more()
        assert take_stats(engine).num_coming_blocks == 0
        await first.serve()
        assert first.texts == expected
        assert first.num_computed - before <= left, "nothing that came was computed"
        await dissolve(led.executor, devices)


# Bits


def some_kept(device: TorchGroupDevice, rng: np.random.Generator, num_blocks: int, most: int = 12) -> KeptKv:
    """Return some blocks, under names of which others may have the same."""
    count = int(rng.integers(1, most))
    names = tuple(int(number).to_bytes(16, "little") for number in rng.choice(30, count, replace=False))
    return KeptKv(names, rng.choice(num_blocks, count, replace=False).astype(np.int32))


KINDS = ("form", "merge", "part", "part ahead", "broken off")


class Life:
    """Workers that form groups, merge them, and part, as a seed says, and always know which bits are to be where."""

    def __init__(self, devices: list[TorchGroupDevice], seed: int) -> None:
        self.devices = devices
        self.pages = pages_of_all(devices)
        self.rng = np.random.default_rng(seed)
        self.groups: list[tuple[list[TorchGroupDevice], Group]] = []
        self.done: Counter[str] = Counter()

    async def step(self) -> None:
        busy = [device for members, _ in self.groups for device in members]
        free = [device for device in self.devices if device not in busy]
        for device in self.devices:
            scribble(device, self.rng)
        if self.groups and self.rng.random() < 0.4:
            part = self.part if self.rng.random() < 0.5 else self.part_after_copying
            await part(*self.groups.pop(int(self.rng.integers(len(self.groups)))))
        elif self.groups and free:
            await self.merge(*self.groups.pop(int(self.rng.integers(len(self.groups)))), free[0])
        elif len(free) >= 2:
            await self.gather(free)
        check(self.devices)
        assert pages_of_all(self.devices) == self.pages, "every page is somebody's"

    async def gather(self, free: list[TorchGroupDevice]) -> None:
        chosen = [free[i] for i in self.rng.permutation(len(free))[: int(self.rng.integers(2, len(free) + 1))]]
        ends = sorted(int(at) for at in self.rng.choice([1, 2, 3], len(chosen) - 1, replace=False))
        kept = [some_kept(device, self.rng, device.whole_blocks) for device in chosen]
        await self.form(
            chosen, ranges_of(*ends, 4), kept, [([device], each) for device, each in zip(chosen, kept, strict=True)]
        )

    async def merge(self, members: list[TorchGroupDevice], group: Group, new: TorchGroupDevice) -> None:
        """One more comes to a group, and takes a part of the longest stage's layers."""
        longest = max(range(len(members)), key=lambda i: len(members[i].layers))
        layers = members[longest].layers
        if len(layers) < 2:
            self.groups.append((members, group))
            return
        halves = [LayerRange(layers.first, layers.first + 1), LayerRange(layers.first + 1, layers.end)]
        new_first = bool(self.rng.integers(2))
        kept = {id(members[0]): some_kept(members[0], self.rng, group.executor.capacity.num_blocks)}
        kept[id(new)] = some_kept(new, self.rng, new.whole_blocks)
        chosen, ranges = list(members), [device.layers for device in members]
        chosen.insert(longest + (not new_first), new)
        ranges[longest : longest + 1] = halves
        await group.executor.close()
        sources = [([new], kept[id(new)]), (members, kept[id(members[0])])]
        if chosen.index(new) > chosen.index(members[0]):
            sources.reverse()
        await self.form(chosen, ranges, [kept.get(id(device), NOTHING_KEPT) for device in chosen], sources)
        self.done["merge"] += 1

    async def form(
        self,
        chosen: list[TorchGroupDevice],
        ranges: Sequence[LayerRange],
        kept: list[KeptKv],
        sources: Sequence[tuple[list[TorchGroupDevice], KeptKv]],
    ) -> None:
        expected: dict[bytes, Bits] = {}
        for holders, each in sources:
            expected = snapshot(holders, each) | expected
        names = list(dict.fromkeys(name for _, each in sources for name in each.names))
        group = await form(chosen, ranges, kept)
        if group.coming:
            assert list(group.kept.names) == names
            assert group.kept.ids.tolist() == list(range(len(names)))
        else:
            assert set(group.kept.names) == set(names)
            assert len(set(group.kept.ids.tolist())) == len(names)
            self.done["by pages"] += 1
        check_group_bits(chosen, group, expected)
        self.groups.append((chosen, group))
        self.done["form"] += 1

    async def part(self, members: list[TorchGroupDevice], group: Group) -> None:
        num_blocks = group.executor.capacity.num_blocks
        shares = [some_kept(device, self.rng, num_blocks) for device in members]
        expected = [snapshot(members, share) for share in shares]
        lacking = [len(device.facts.layer_bytes) - len(device.layers) for device in members]
        counts = zip(shares, lacking, strict=True)
        num_bytes = sum(len(share) * count for share, count in counts) * 2 * members[0].facts.block_bytes
        await group.executor.close()
        order = self.rng.permutation(len(members)).tolist()
        calls = {i: Parting(tuple(shares)) if i == 0 else Parting() for i in order}
        told = await asyncio.gather(*(members[i].alone(calls[i]) for i in order))
        for i, led in zip(order, told, strict=True):
            assert led.kept.names == shares[i].names
            assert led.kept.ids.tolist() == list(range(len(shares[i])))
            check_bits(members[i], led.kept, expected[i])
            assert led.num_moved_bytes == num_bytes, "of every block what its worker lacks"
        self.done["part"] += 1

    async def part_after_copying(self, members: list[TorchGroupDevice], group: Group) -> None:
        """Some of each share is copied ahead, in rounds; some of that is written anew since, and some breaks off."""
        alone, size = min(device.whole_blocks for device in members), len(members)
        num_blocks = int(self.rng.integers(alone, alone * size * size // (2 * size - 1) + 1))
        places = []
        for device in members:
            assert await device.reside(device._model.whole, num_blocks, is_ahead=True) >= num_blocks
            ahead = device._model.ahead()
            assert ahead is not None
            assert ahead.num_blocks >= min(device.blocks_ahead(device.layers, num_blocks), alone) > 0
            places.append(self.rng.permutation(ahead.num_blocks).astype(np.int32))
            for layer in (layer for layer in ahead.layers if layer not in device.layers):
                ahead.keys[layer].fill_(torch.nan)
                ahead.values[layer].fill_(torch.nan)
        shares = [some_kept(device, self.rng, num_blocks) for device in members]
        all_placed = [
            PlacedKv(share.names[: len(free)], share.ids[: len(free)], free[: len(share)])
            for share, free in zip(shares, places, strict=True)
        ]
        rounds = [
            tuple(part_of(share, self.rng.random(len(share)) < chance) for share in all_placed)
            for chance in self.rng.choice([0.3, 0.9], int(self.rng.integers(1, 4)))
        ]
        rounds = [each for each in rounds if sum(map(len, each))]
        asked = iter(rounds)
        told = [lambda: next(asked, ()), *[None] * (len(members) - 1)]
        done = await asyncio.gather(*(device.copy_ahead(tell) for device, tell in zip(members, told, strict=True)))
        assert all(done)
        there = [joined([each[stage] for each in rounds]) for stage in range(len(members))]
        wrong = [part_of(each, self.rng.random(len(each)) < 0.2) for each in there]
        for each in wrong:  # the places hold something else now, and nobody says that it is there
            for device in members:
                spoil_blocks(device, each.ids, self.rng)
        written = np.concatenate([each.ids for each in wrong])
        known = [part_of(each, ~np.isin(each.ids, written)) for each in there]
        if self.rng.random() < 0.3:
            for device in members:  # the plan was given up, and this is another one
                device.end_copying()
            self.done["broken off"] += 1
        expected = [snapshot(members, share) for share in shares]
        await group.executor.close()
        calls = [Parting(tuple(shares), tuple(known)), *[Parting()] * (len(members) - 1)]
        told_alone = await asyncio.gather(*(device.alone(call) for device, call in zip(members, calls, strict=True)))
        for share, stayed, device, led, bits in zip(shares, known, members, told_alone, expected, strict=True):
            assert set(led.kept.names) == set(share.names)
            assert len(set(led.kept.ids.tolist())) == len(share), "a place each"
            found = dict(zip(led.kept.names, led.kept.ids.tolist(), strict=True))
            assert [found[name] for name in stayed.names] == stayed.places.tolist(), "where it was copied to"
            check_bits(device, led.kept, bits)
        self.done["part ahead"] += 1


def part_of(placed: PlacedKv, chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> PlacedKv:
    return placed.only(np.flatnonzero(chosen).tolist())


def joined(parts: Sequence[PlacedKv]) -> PlacedKv:
    names = [name for part in parts for name in part.names]
    nothing = PlacedKv()
    ids = np.concatenate([nothing.ids, *(part.ids for part in parts)])
    whole = PlacedKv(tuple(names), ids, np.concatenate([nothing.places, *(part.places for part in parts)]))
    return whole.only([i for i, name in enumerate(names) if name not in names[:i]])


def spoil_blocks(device: TorchGroupDevice, ids: I32, rng: np.random.Generator) -> None:
    """Write other numbers into blocks of the layers that a stage computes."""
    for layer in device.layers:
        for pool in (device._model.cache.keys[layer], device._model.cache.values[layer]):
            pool[ids] = float(rng.random())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", first_of(range(2), in_ci=1))
@pytest.mark.parametrize("by_pages", [False, True])
async def test_through_random_changes_every_bit_is_where_it_belongs(
    seed: int, dtype: str, monkeypatch: pytest.MonkeyPatch, *, by_pages: bool
) -> None:
    """By pages where ids fit behind each other; else, and for what parts, by copies."""
    monkeypatch.setattr(kv_wire, "CHUNK_BYTES", 3000)
    kinds = (*KINDS, "by pages") if by_pages else KINDS
    async with live_devices(4, dtype=dtype, hands_over=by_pages) as devices:
        life = Life(devices, seed)
        for number in range(100):  # how much memory there is differs from run to run, and with it what can be done
            await life.step()
            if number >= 13 and all(life.done[name] for name in kinds):
                break
        assert min(life.done[name] for name in kinds) > 0, life.done
        assert by_pages or not life.done["by pages"]
        for _, group in life.groups:
            await group.executor.close()


# Limits


@pytest.mark.parametrize("room", [0, 3])
async def test_kv_is_kept_aside_in_no_more_memory_than_allowed(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for some blocks of four layers, and a bit; in the group each stage has half of them, so twice as many."""
    taken: list[int] = []

    def note(cache: KVCache, ids: I32, host: HostKV | None) -> BlockCopies:
        copies = copy_blocks(cache, ids, host)
        taken.append(copies._data.nbytes)
        return copies

    monkeypatch.setattr(torch_exchange, "copy_blocks", note)
    model = open_elastic_model(SHAPES["llama"])
    block_bytes = 4 * 2 * model.facts.block_bytes
    model.close()
    exchange_bytes = room * block_bytes + block_bytes // 4
    async with devices_with_kv(2, exchange_bytes=exchange_bytes) as (devices, kept):
        expected = snapshot_each(devices, kept)
        group = await form(devices, HALVES, kept)
        check(devices)
        assert group.kept.names == kept[0].names[:room] + kept[1].names[:room]
        check_group_bits(devices, group, expected)
        assert all(num_bytes <= exchange_bytes for num_bytes in taken)
        assert len(taken) == 2 * bool(room)
        await group.executor.close()
        taken.clear()
        shares = (numbered(2), numbered(9, offset=100))
        led = await asyncio.gather(devices[0].alone(Parting(shares)), devices[1].alone(Parting()))
        assert [len(each.kept) for each in led] == [min(2, room), 2 * room - min(2, room)]
        assert sum(taken) <= 2 * exchange_bytes


async def test_a_round_of_copies_is_no_larger_than_the_stage_with_most_layers_keeps_aside() -> None:
    """The leader has one layer of four, and would keep aside three times as many."""
    async with live_devices(2) as devices:
        group = await form(devices, ranges_of(1, 4))
        assert [device.most_copied for device in devices] == [devices[1]._kv._room(len(devices[1].layers))] * 2
        assert devices[0]._kv._room(len(devices[0].layers)) >= 3 * devices[1]._kv._room(len(devices[1].layers)) > 0
        await group.executor.close()
