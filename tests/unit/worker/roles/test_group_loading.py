"""Groups of live workers that go on serving while parameters come back beside their stages, and go again."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.engine.loop import ExecutorBrokenError
from services.worker.executor.parameter_sources import SourceLostError
from services.worker.kv_moves.places import GroupFailedError, GroupPlace
from services.worker.roles.parameter_lending import PeerSource
from services.worker.roles.torch_device import TorchGroupDevice
from shared.errors import StartupError
from tests.support.checkpoints import stored_checkpoint
from tests.support.live_groups import (
    CASES,
    HALVES,
    LONG,
    SHAPES,
    WHOLE,
    Group,
    be_alone,
    calm,
    calm_texts,
    check,
    end_and_be_alone,
    ended,
    form,
    live_devices,
    places,
    ranges_of,
    texts_of,
    unheard,
)
from tests.support.loading_gate import LoadingGate, wait_until_loaded
from tests.support.runners import KERNELS

pytestmark = pytest.mark.kernels


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> LoadingGate:
    return LoadingGate(monkeypatch)


async def all_beside(devices: Sequence[TorchGroupDevice]) -> int:
    """Have all parameters beside each stage, members first; return the blocks that the group may use."""
    blocks = min(device._model.blocks_with(device.layers, WHOLE) for device in devices)
    for device in reversed(devices):
        assert await device.reside(WHOLE, blocks) == device._model._memory.num_blocks >= blocks
        assert device.resident == WHOLE
    return blocks


async def own_only(devices: Sequence[TorchGroupDevice]) -> None:
    """Have only the own parameters."""
    blocks = min(device._model.blocks_with(device.layers) for device in devices)
    for device in reversed(devices):
        assert await device.reside(device.layers, blocks) >= blocks
        assert (device.resident, device.loaded_ratio) == (device.layers, 1)


async def loaded(devices: Sequence[TorchGroupDevice]) -> None:
    """Wait until nothing is being loaded."""
    for device in devices:
        await asyncio.to_thread(wait_until_loaded, device._model)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "kernels"), CASES)
async def test_the_text_is_the_same_beside_a_loading_after_it_and_after_the_restore(
    name: str, dtype: str, kernels: str, gate: LoadingGate
) -> None:
    expected = await calm_texts(name, dtype, kernels)
    async with live_devices(3, name, dtype=dtype, kernels=kernels) as devices:
        group = await form(devices, ranges_of(1, 2, 4))
        before = [device._model._memory.num_blocks for device in devices]
        gate.hold(5)
        blocks = await all_beside(devices)
        assert blocks < min(before)
        assert all(device.loaded_ratio < 1 for device in devices)
        assert await texts_of(group.executor, num_blocks=blocks) == expected
        serving = asyncio.create_task(texts_of(group.executor, num_blocks=blocks))
        while not serving.done():
            gate.hold(1)
            await asyncio.sleep(0)
        assert await serving == expected
        await own_only(devices)
        check(devices)
        assert [device._model._memory.num_blocks for device in devices] == before
        assert await texts_of(group.executor) == expected
        gate.open()
        blocks = await all_beside(devices)
        assert await texts_of(group.executor, num_blocks=blocks) == expected
        await loaded(devices)
        check(devices)
        num_read = gate.num_pieces
        await group.executor.close()
        for device in devices:
            assert (device.layers == WHOLE, device.loaded_ratio) == (False, 1)
            assert await texts_of((await device.alone()).executor) == expected
        assert gate.num_pieces == num_read, "there was nothing to load"
        check(devices)


@pytest.mark.parametrize("guilty", range(2))
async def test_a_group_that_breaks_while_layers_load_becomes_whole_instances(guilty: int, gate: LoadingGate) -> None:
    """A stage leaves in the middle of a step: what was loaded is not loaded again, and nobody waits for the rest.

    Each lacks two layers, of 15 pieces each, and 9 pieces or more outside of them. So of 38 pieces none gets all
    that it needs, and one gets a layer at least.
    """
    async with live_devices(2) as devices:
        group = await form(devices, HALVES)
        gate.hold(38)
        blocks = await all_beside(devices)
        await asyncio.to_thread(gate.wait, 2)
        lacking = sum(len(device._model._loading._lacking) for device in devices)
        assert lacking < 3 + 3
        gate.read.clear()
        leaving: list[asyncio.Task[object]] = []

        def leave() -> None:
            leaving.append(asyncio.create_task(devices[guilty].alone()))

        if guilty:
            with pytest.raises(ExecutorBrokenError):
                await texts_of(group.executor, num_tokens=LONG, num_blocks=blocks, steps_until=4, then=leave)
        else:
            leave()
        await asyncio.gather(*leaving)
        await be_alone(*devices)
        assert len(gate.read) <= lacking


@pytest.mark.slow
async def test_a_stage_of_a_larger_group_gives_up_what_lies_beside(gate: LoadingGate) -> None:
    """While it is being loaded, in two groups of two that become one of three and a whole worker."""
    async with live_devices(4) as devices:
        groups = [await form(pair, HALVES) for pair in (devices[:2], devices[2:])]
        gate.hold(9)
        for pair in (devices[:2], devices[2:]):
            await all_beside(pair)
        for group in groups:
            await group.executor.close()
        three = [devices[0], devices[1], devices[3]]
        ranges = ranges_of(2, 3, 4)
        claimed = [device._model.blocks_with(layers) for device, layers in zip(three, ranges, strict=True)]
        merged = await form(three, ranges)
        assert gate.num_pieces <= 9 + 3, "nobody loads for a group"
        assert [(device.resident, device.loaded_ratio) for device in three] == [(layers, 1) for layers in ranges]
        assert [device._model._memory.num_blocks for device in three] == claimed
        check(three)
        assert await texts_of(merged.executor) == await calm()
        await end_and_be_alone(merged, devices)


async def test_what_a_device_cannot_have_beside_is_refused_and_the_group_goes_on(gate: LoadingGate) -> None:
    async with live_devices(2) as devices:
        with pytest.raises(GroupFailedError, match="a stage of no group"):
            await devices[0].reside(WHOLE, 0)
        group = await form(devices, HALVES)
        blocks = devices[1]._model.blocks_with(HALVES[1], WHOLE)
        for layers, wanted, reason in (
            (WHOLE, blocks + 1, f"{blocks} blocks fit beside"),
            (HALVES[0], 0, "not all among the resident ones"),
        ):
            with pytest.raises(GroupFailedError, match=reason):
                await devices[1].reside(layers, wanted)
        assert [device.resident for device in devices] == list(HALVES)
        assert await texts_of(group.executor) == await calm()
        await end_and_be_alone(group, devices)


async def test_layers_that_cannot_be_loaded_beside_are_no_matter_until_the_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(stored_checkpoint(SHAPES["llama"])[0], tmp_path / "model"))
    monkeypatch.setattr(PeerSource, "fill", lost_peer)
    async with live_devices(2, folder=folder) as devices:
        group = await form(devices, HALVES)
        away = (folder / "model.safetensors").rename(tmp_path / "away")
        blocks = await all_beside(devices)
        await loaded(devices)
        assert all(device.loaded_ratio < 1 for device in devices)
        assert await texts_of(group.executor, num_blocks=blocks) == await calm()
        away.rename(folder / "model.safetensors")
        await devices[0].reside(WHOLE, blocks)
        await loaded(devices)
        assert [device.loaded_ratio < 1 for device in devices] == [False, True], "who is asked again tries again"
        (folder / "model.safetensors").rename(away)
        assert await texts_of(group.executor, num_blocks=blocks) == await calm()
        await group.executor.close()
        await be_alone(devices[0])
        with pytest.raises(StartupError, match="is not the file that was loaded"):
            await devices[1].alone()
        away.rename(folder / "model.safetensors")
        await be_alone(*devices)


def lost_peer(source: PeerSource, *_args: object) -> Iterator[int]:
    raise SourceLostError(f"made up: {source.name} gives nothing")


async def test_the_other_stages_have_what_the_checkpoint_does_not_give(tmp_path: Path, gate: LoadingGate) -> None:
    folder = Path(shutil.copytree(stored_checkpoint(SHAPES["llama"])[0], tmp_path / "model"))
    async with live_devices(3, folder=folder) as devices:
        group = await form(devices, ranges_of(1, 2, 4))
        (folder / "model.safetensors").rename(tmp_path / "away")
        blocks = await all_beside(devices)
        assert await texts_of(group.executor, num_blocks=blocks) == await calm()
        await loaded(devices)
        assert [device.loaded_ratio for device in devices] == [1, 1, 1]
        await end_and_be_alone(group, devices)
        assert not gate.num_pieces, "no file was read"


async def test_parameters_can_come_from_the_other_stages_first(gate: LoadingGate) -> None:
    async with live_devices(2, "tied", dtype="bfloat16", peers_first=True) as devices:
        group = await form(devices, HALVES)
        for _ in range(2):
            blocks = await all_beside(devices)
            assert await texts_of(group.executor, num_blocks=blocks) == await calm_texts("tied", "bfloat16", KERNELS)
            await loaded(devices)
            assert [device.loaded_ratio for device in devices] == [1, 1]
            await own_only(devices)
        await all_beside(devices)
        await loaded(devices)
        await group.executor.close()
        for device in devices:
            executor = (await device.alone()).executor
            assert await texts_of(executor) == await calm_texts("tied", "bfloat16", KERNELS)
        assert not gate.num_pieces, "no file was read"


@pytest.mark.parametrize("num_pieces", [0, 1, 4, 11])
@pytest.mark.parametrize("is_wrong", [False, True])
async def test_a_source_that_dies_halfway_or_lies_is_replaced(
    num_pieces: int, is_wrong: bool, gate: LoadingGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 29. What has come, or comes with other bytes, is served by nobody; the group goes on meanwhile."""
    receive, counts = PeerSource._receive_into, Counter[PeerSource]()

    def receiving(source: PeerSource, piece: torch.Tensor) -> None:
        receive(source, piece)
        counts[source] += 1
        if counts[source] > num_pieces:
            if is_wrong:
                piece[len(piece) // 2] ^= 16
            else:
                source._sock.shut()

    monkeypatch.setattr(PeerSource, "_receive_into", receiving)
    async with live_devices(2, peers_first=True) as devices:
        group = await form(devices, HALVES)
        blocks = await all_beside(devices)
        assert await texts_of(group.executor, num_blocks=blocks) == await calm()
        await loaded(devices)
        assert len(counts) == 2, "each asked the other"
        assert gate.num_pieces, "the checkpoint gave the rest"
        assert [device.loaded_ratio for device in devices] == [1, 1]
        read = gate.num_pieces
        await end_and_be_alone(group, devices)
        assert gate.num_pieces == read


async def test_a_stage_that_lends_can_leave(gate: LoadingGate) -> None:
    """While others load from it: they have the checkpoint, and a group that is over."""
    async with live_devices(2, peers_first=True) as devices:
        group = await form(devices, HALVES)
        await all_beside(devices)
        lender = devices[1]._sources._lender
        assert lender is not None
        await devices[1].alone()
        assert lender._is_closed
        assert not devices[1]._peers._expected, "nobody is let in any more"
        with pytest.raises(ExecutorBrokenError):
            await texts_of(group.executor)
        await be_alone(*devices)


async def test_devices_can_be_closed_while_layers_load(gate: LoadingGate) -> None:
    async with live_devices(2) as devices:
        await form(devices, HALVES)
        gate.hold(7)
        await all_beside(devices)
        await asyncio.gather(*(device.close() for device in devices))


class Life:
    """Workers that form groups, end them, leave them and fail to form them, as a seed says.

    While groups serve, parameters come back beside them and go again.

    Args:
        devices: alone.
        gate: that holds up what is loaded, or lets it fail.
        seed: of all that happens.
    """

    def __init__(self, devices: list[TorchGroupDevice], gate: LoadingGate, seed: int) -> None:
        self.devices, self.gate = devices, gate
        self.rng = np.random.default_rng(seed)
        self.groups: list[tuple[list[TorchGroupDevice], Group]] = []
        self.done: set[str] = set()

    async def step(self) -> None:
        busy = [device for members, _ in self.groups for device in members]
        free = [device for device in self.devices if device not in busy]
        self.gate.mend()
        self.gate.open()
        if len(free) >= 2 and (not self.groups or self.rng.random() < 0.5):
            await self.gather(free, misses=bool(self.rng.random() < 0.3))
        elif self.rng.random() < 0.5:
            await self.change(*self.groups[int(self.rng.integers(len(self.groups)))])
        else:
            members, group = self.groups.pop(int(self.rng.integers(len(self.groups))))
            name = ("end", "leave", "part")[int(self.rng.integers(3))]
            await getattr(self, name)(members, group)
            self.done.add(name)
        check(self.devices)

    async def gather(self, free: list[TorchGroupDevice], *, misses: bool) -> None:
        chosen = [free[i] for i in self.rng.permutation(len(free))[: int(self.rng.integers(2, len(free) + 1))]]
        ends = sorted(int(at) for at in self.rng.choice([1, 2, 3], len(chosen) - 1, replace=False))
        ranges = ranges_of(*ends, 4)
        for device, layers in zip(chosen, ranges, strict=True):
            if device.refusal(layers) is not None:
                await device.alone()
        if misses:
            own = places(chosen, ranges)
            for device in chosen:
                device._limit_s = 0.05
            await self.fail(chosen, own)
            for device in chosen:
                device._limit_s = 5.0
            self.done.add("miss")
            return
        group = await form(chosen, ranges)
        self.groups.append((chosen, group))
        await self.say(group)

    async def change(self, members: list[TorchGroupDevice], group: Group) -> None:
        """Have all parameters beside, or the own ones only."""
        if self.rng.random() < 0.5:
            self.gate.hold(int(self.rng.integers(0, 60)))
        elif self.rng.random() < 0.5:
            self.gate.fail_after(int(self.rng.integers(0, 60)))
        if self.rng.random() < 0.6:
            blocks = await all_beside(members)
            self.done.add("beside")
        else:
            await own_only(members)
            blocks = min(device._model._memory.num_blocks for device in members)
            self.done.add("own only")
        check(members)
        await self.say(group, blocks)

    async def say(self, group: Group, num_blocks: int = 0) -> None:
        said = await texts_of(group.executor, num_tokens=2, num_blocks=num_blocks)
        assert said == {i: text[:2] for i, text in (await calm()).items()}

    async def fail(self, chosen: list[TorchGroupDevice], own: list[GroupPlace]) -> None:
        """The last one does not come. Who has all its own connections by then has joined, and hears of the end."""
        told: dict[int, list[str | None]] = {i: [] for i in range(1, len(own) - 1)}
        leading = asyncio.ensure_future(chosen[0].lead(own[0], unheard))
        joined = await asyncio.gather(*(chosen[i].join(own[i], told[i].append) for i in told), return_exceptions=True)
        with pytest.raises(GroupFailedError):
            await leading
        for i, result in zip(list(told), joined, strict=True):
            if isinstance(result, GroupFailedError):
                assert told.pop(i) == []
        await ended(told)
        assert all(len(reasons) == 1 and reasons[0] for reasons in told.values())

    async def end(self, members: list[TorchGroupDevice], group: Group) -> None:
        await group.executor.close()
        await ended(group.ends)
        assert group.ends == {i: [None] for i in range(1, len(members))}

    async def leave(self, members: list[TorchGroupDevice], group: Group) -> None:
        index = int(self.rng.integers(1, len(members)))
        await members[index].alone()
        del group.ends[index]
        await ended(group.ends)
        assert all(len(said) == 1 and said[0] for said in group.ends.values())
        await group.executor.close()

    async def part(self, members: list[TorchGroupDevice], group: Group) -> None:
        """The leader is whole again, and has closed nothing before."""
        await members[0].alone()
        await self.end(members, group)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_random_lives_of_workers_end_with_whole_ones(seed: int, gate: LoadingGate) -> None:
    async with live_devices(4) as devices:
        life = Life(devices, gate, seed)
        for _ in range(50):
            await life.step()
        gate.mend()
        assert life.done == {"miss", "end", "leave", "part", "beside", "own only"}
        for _, group in life.groups:
            await group.executor.close()
        await be_alone(*devices)
