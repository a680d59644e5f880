"""Live workers that drop layers and join groups over sockets: the text never changes, and faults leave no trace."""

from __future__ import annotations

import asyncio
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.planner.policy.plans.capacity import CapacityRule
from services.planner.policy.plans.drop_facts import ModelFacts
from services.worker.config import KernelKind, WorkerSettings
from services.worker.contract.executor import BatchFailedError
from services.worker.contract.kept_kv import NOTHING_KEPT, KeptKv
from services.worker.engine.loop import ExecutorBrokenError
from services.worker.kv_moves.kv_progress import ArrivedKv
from services.worker.kv_moves.kv_table import KvTable
from services.worker.kv_moves.kv_wire import KvProgress
from services.worker.kv_moves.places import GroupFailedError, StagePlace
from services.worker.load import check_start, load_executor
from services.worker.pipeline.runner_stage import RunnerStage
from services.worker.roles.device import GroupDevice
from services.worker.roles.torch_device import TorchGroupDevice
from shared.errors import StartupError
from shared.ids import WorkerId
from shared.layers import LayerRange, even_split
from shared.messages.report import ElasticFacts
from shared.systems import SYSTEMS, System
from tests.support.checkpoints import stored_checkpoint
from tests.support.live_groups import (
    CASES,
    HALVES,
    LONG,
    PAGE,
    SHAPES,
    Texts,
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
from tests.support.loading import close_loaded
from tests.support.peers import PASSWORD, identity, until_greeted
from tests.support.runner_driver import Driver
from tests.support.runners import KERNELS, MIB

pytestmark = pytest.mark.kernels


def planned(facts: ElasticFacts, layers: LayerRange) -> int:
    """Return the KV blocks that a planner expects, which knows the device by what it reports."""
    sizes = facts.model_dump(exclude={"num_pages", "max_blocks", "link_bytes_per_s", "has_host_copy", "digest"})
    return CapacityRule(ModelFacts(**sizes, block_size=16)).blocks(layers, facts.num_pages, facts.max_blocks)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "kernels"), CASES)
async def test_workers_form_groups_part_and_form_others_and_always_say_the_same(
    name: str, dtype: str, kernels: str
) -> None:
    expected = await calm_texts(name, dtype, kernels)
    assert sorted(len(text) for text in expected.values()) == [8] * 6
    async with live_devices(3, name, dtype=dtype, kernels=kernels) as (first, second, third):
        for devices, ranges in (
            ([first, second], HALVES),
            ([second, third, first], ranges_of(1, 3, 4)),
            ([third, first], ranges_of(3, 4)),
        ):
            claimed = [device._model.blocks_with(layers) for device, layers in zip(devices, ranges, strict=True)]
            assert claimed == [planned(device.facts, layers) for device, layers in zip(devices, ranges, strict=True)]
            assert [device.refusal(layers) for device, layers in zip(devices, ranges, strict=True)] == [None] * len(
                ranges
            )
            group = await form(devices, ranges)
            assert [device.layers for device in devices] == list(ranges)
            check(devices)
            assert group.num_blocks == claimed[1:]
            assert group.executor.capacity.num_blocks == min(claimed) > first._model.info.capacity.num_blocks
            assert group.executor.depth == len(devices)
            assert await texts_of(group.executor) == expected
            assert await texts_of(group.executor) == expected
            await group.executor.close()
            await ended(group.ends)
            assert group.ends == {i: [None] for i in range(1, len(devices))}
            for device in devices:
                assert await texts_of((await device.alone()).executor) == expected
            check(devices)


@pytest.mark.slow
async def test_a_group_can_become_another_without_loading_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of two stages become one of three and a whole one: three keep a part of what they hold."""
    async with live_devices(4) as devices:
        groups = [await form(pair, HALVES) for pair in (devices[:2], devices[2:])]
        for group in groups:
            await group.executor.close()
        with monkeypatch.context() as patch:
            patch.setattr("services.worker.executor.parameter_loading.copy_pieces", None)
            three = [devices[0], devices[1], devices[3]]
            assert devices[0].refusal(LayerRange(2, 4)) == "layers [2, 4) are not all among those held, [0, 2)"
            merged = await form(three, ranges_of(2, 3, 4))
            assert await texts_of(merged.executor) == await calm()
            await merged.executor.close()
        await be_alone(*devices)


@pytest.mark.parametrize("at", [None, 0, 2])
async def test_blocks_are_named_only_if_every_stage_has_all_of_them(
    at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stage never says that it has them."""
    begin, note = ArrivedKv.__init__, ArrivedKv.note

    def begin_at(self: ArrivedKv, table: KvTable, stage: int, wanted: LayerRange) -> None:
        begin(self, table, stage, wanted)
        self.is_silent = stage == at  # type: ignore[attr-defined]

    def note_unless(self: ArrivedKv, *args: int) -> KvProgress | None:
        return None if self.is_silent else note(self, *args)  # type: ignore[attr-defined]

    monkeypatch.setattr(ArrivedKv, "__init__", begin_at)
    monkeypatch.setattr(ArrivedKv, "note", note_unless)
    names = tuple(bytes([number]) * 16 for number in range(3))
    kept = [KeptKv(names, np.arange(3, dtype=np.int32)), NOTHING_KEPT, NOTHING_KEPT]
    limit_s = 30.0 if at is None else 0.3  # who hears of all must have the time to
    async with live_devices(3, exchange_limit_s=limit_s) as devices:
        group = await form(devices, even_split(4, 3), kept)
        assert group.kept.names == (names if at is None else ())
        assert await texts_of(group.executor) == await calm()
        await end_and_be_alone(group, devices)


async def test_threads_of_stages_compute_with_the_threads_that_were_set(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, int] = {}
    launch = RunnerStage.launch

    def note(self: RunnerStage, *args: object) -> object:
        seen[threading.current_thread().name] = torch.get_num_threads()
        return launch(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(RunnerStage, "launch", note)
    async with live_devices(2) as devices:
        group = await form(devices, HALVES)
        await texts_of(group.executor, num_tokens=2)
        await group.executor.close()
        assert seen == {"stage [0, 2)": 1, "stage [2, 4)": 1}


# Faults


async def failure_of(*changes: object) -> list[str]:
    """Return what each of some changes failed with."""
    results = await asyncio.gather(*changes, return_exceptions=True)  # type: ignore[call-overload]
    assert all(isinstance(result, GroupFailedError) for result in results), results
    return [str(result) for result in results]


async def test_a_member_that_does_not_come_fails_the_group_for_all() -> None:
    async with live_devices(3, limit_s=0.3) as devices:
        own = places(devices, ranges_of(1, 2, 4))
        said = await failure_of(devices[0].lead(own[0], unheard), devices[1].join(own[1], unheard))
        assert any("w2" in text for text in said)
        assert [device.layers for device in devices] == [LayerRange(0, 4)] * 3, "nothing is dropped for no group"
        await be_alone(*devices)


async def test_a_leader_that_does_not_come_is_named() -> None:
    async with live_devices(2, limit_s=0.2) as devices:
        own = places(devices, HALVES)
        (said,) = await failure_of(devices[1].join(own[1], unheard))
        assert said == "the leader, w0, w0 as the stage before, w0 for KV did not come within 0.2 s"
        await be_alone(devices[1])


async def test_a_member_whose_process_is_gone_fails_the_group_at_once() -> None:
    async with live_devices(2, limit_s=60) as devices:
        own = places(devices, HALVES)
        await devices[1].close()
        async with asyncio.timeout(20):
            (said,) = await failure_of(devices[0].lead(own[0], unheard))
        assert said == f"w1 at {own[1].own.address}: Connection refused"
        await be_alone(devices[0])


async def test_members_of_another_plan_or_cluster_do_not_come_together() -> None:
    """Of another cluster is told at once, however late it joins; of another plan, when nobody has joined in time."""
    async with live_devices(2, limit_s=10) as devices:
        own, other = places(devices, HALVES), places(devices, HALVES)
        not_joined = f"it refuses: this worker has not joined plan {own[0].plan_id} within 0.05 s"
        for theirs, secret, wait_s, reason in (
            (own[1], "another cluster's secret", 5.0, "the listener does not know the secret of this cluster"),
            (other[1], PASSWORD, 0.05, not_joined),
        ):
            devices[1]._peers._identity = identity(1, secret)
            devices[1]._peers._wait_s = wait_s
            joining = asyncio.create_task(devices[1].join(theirs, unheard))
            (said,) = await failure_of(devices[0].lead(own[0], unheard))
            assert said == f"w1 at {own[1].own.address}: {reason}"
            joining.cancel()
            with pytest.raises(asyncio.CancelledError):  # it waits still: nobody came to it
                await joining
        await be_alone(*devices)


async def test_early_callers_wait_for_a_member_that_joins_late() -> None:
    async with live_devices(2) as devices:
        own, ends = places(devices, HALVES), list[str | None]()
        leading = asyncio.create_task(devices[0].lead(own[0], unheard))
        await until_greeted(devices[1]._peers, 2)
        await devices[1].join(own[1], ends.append)
        executor = (await leading).executor
        assert await texts_of(executor) == await calm()
        await executor.close()


async def test_a_member_that_dies_in_a_step_breaks_the_group_and_all_are_whole_again() -> None:
    async with live_devices(3) as devices:
        group = await form(devices, ranges_of(1, 2, 4))
        dying: list[asyncio.Task[None]] = []

        def die() -> None:
            dying.append(asyncio.create_task(devices[1].close()))

        with pytest.raises(ExecutorBrokenError):
            await texts_of(group.executor, num_tokens=LONG, steps_until=4, then=die)
        await ended({2: group.ends[2]})
        assert len(group.ends[2]) == 1
        assert group.ends[2][0]
        assert group.ends[1] == [], "who leaves by itself need not be told"
        await asyncio.gather(*dying)
        await be_alone(devices[0], devices[2])


async def test_a_member_that_leaves_is_not_told_and_breaks_the_group() -> None:
    async with live_devices(2) as devices:
        group = await form(devices, HALVES)
        await devices[1].alone()
        batch = Driver(devices[1]._model._runner).batch([])
        with pytest.raises(BatchFailedError) as lost:
            await group.executor.submit(batch)
        assert lost.value.is_lost
        await group.executor.close()
        assert group.ends == {1: []}
        await be_alone(*devices)


async def test_a_leader_that_is_gone_is_told_to_every_member() -> None:
    async with live_devices(3) as devices:
        group = await form(devices, ranges_of(1, 2, 4))
        for channel in group.executor._stages._channels[:2]:  # type: ignore[attr-defined]
            channel._frames.shut()
        await ended(group.ends)
        assert all(len(reasons) == 1 and reasons[0] for reasons in group.ends.values())
        await end_and_be_alone(group, devices)


async def test_a_leader_that_is_cancelled_while_it_dials_can_be_whole_again() -> None:
    async with live_devices(2, limit_s=60) as devices:
        leading = asyncio.create_task(devices[0].lead(places(devices, HALVES)[0], unheard))
        await until_greeted(devices[1]._peers, 2)
        leading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leading
        await be_alone(devices[0])


@pytest.mark.parametrize("num_turns", range(0, 10, 2))
async def test_a_member_that_is_cancelled_anywhere_can_be_whole_again(num_turns: int) -> None:
    """After some turns of the event loop: while the executor ends, while layers are dropped, while it waits."""
    async with live_devices(2, limit_s=60) as devices:
        joining = asyncio.create_task(devices[1].join(places(devices, HALVES)[1], unheard))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        await be_alone(devices[1])


@pytest.mark.parametrize("guilty", range(2))
async def test_memory_that_refuses_a_drop_fails_the_group_and_nothing_else(
    guilty: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_more: object) -> None:
        raise OSError(12, "too many mappings")

    async with live_devices(2) as devices:
        own, ends = places(devices, HALVES), list[str | None]()
        with monkeypatch.context() as patch:
            patch.setattr(devices[guilty]._model._memory, "drop", fail)
            led, joined = await asyncio.gather(
                devices[0].lead(own[0], unheard), devices[1].join(own[1], ends.append), return_exceptions=True
            )
        assert isinstance(led, GroupFailedError)
        if guilty == 0:
            assert "too many mappings" in str(led)
            if isinstance(joined, int):
                await ended({1: ends})
                assert ends[0]
        else:
            assert "too many mappings" in str(joined)
            assert "w1 has left before the first step" in str(led)
        assert devices[guilty].layers == LayerRange(0, 4)
        await be_alone(*devices)


async def test_a_stage_that_has_fewer_blocks_than_it_promised_fails_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    async with live_devices(2) as devices:
        own, ends = places(devices, HALVES), list[str | None]()
        with monkeypatch.context() as patch:
            patch.setattr(devices[1]._model, "blocks_with", lambda _layers: 10**6)
            said = await failure_of(devices[0].lead(own[0], unheard), devices[1].join(own[1], ends.append))
        assert "w1 has left before the first step" in said[0]
        assert "blocks fit, 1000000 were promised" in said[1]
        await be_alone(*devices)


async def test_layers_that_cannot_be_loaded_end_the_worker_and_not_before(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(stored_checkpoint(SHAPES["llama"])[0], tmp_path / "model"))
    async with live_devices(2, folder=folder) as devices:
        group = await form(devices, HALVES)
        away = (folder / "model.safetensors").rename(tmp_path / "away")
        assert await texts_of(group.executor) == await calm()
        await group.executor.close()
        with pytest.raises(StartupError, match="is not the file that was loaded"):
            await devices[0].alone()
        away.rename(folder / "model.safetensors")
        await be_alone(*devices)


async def test_what_a_device_cannot_hold_is_refused_by_name() -> None:
    async with live_devices(2) as devices:
        device, own = devices[0], places(devices, HALVES)
        assert device.refusal(LayerRange(0, 4)) is None
        assert "are not all among those held" in str(device.refusal(LayerRange(2, 5)))
        torn = replace(own[0], stages=(own[0].stages[0], replace(own[0].stages[1], layers=LayerRange(3, 4))))
        single = replace(own[0], stages=(StagePlace(WorkerId("w0"), "", LayerRange(0, 4)),))
        for place, reason in (
            (own[1], "stage 1 cannot lead"),
            (torn, "do not begin where those before them end"),
            (single, "a group of one stage"),
        ):
            with pytest.raises(GroupFailedError, match=reason):
                await device.lead(place, unheard)
        with pytest.raises(GroupFailedError, match="the first stage leads"):
            await device.join(own[0], unheard)
        await be_alone(device)
        await device.close()
        assert device.refusal(LayerRange(0, 2)) == "the device is closed"


async def test_too_little_memory_for_the_longest_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with live_devices(1) as (device,):
        longest = device._model.info.max_model_len
        monkeypatch.setattr(device._model, "blocks_with", lambda _layers: longest // 16 - 1)
        assert str(device.refusal(LayerRange(0, 2))).endswith("too few for the longest request")
        monkeypatch.setattr(device._model, "blocks_with", lambda _layers: longest // 16)
        assert device.refusal(LayerRange(0, 2)) is None


async def test_a_leader_and_a_member_can_be_closed_as_they_are() -> None:
    async with live_devices(2) as devices:
        await form(devices, HALVES)
        await asyncio.gather(*(device.close() for device in devices))


# Loading


async def test_a_worker_whose_system_drops_is_loaded_in_pages_with_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SYSTEMS, "dropping", System("dropping", "chunked", "least-loaded", drops=True))
    folder = stored_checkpoint(SHAPES["llama"])[0]
    told: list[float] = []

    def settings(system: str, **changes: object) -> WorkerSettings:
        sizes = {"memory": 8 * MIB, "page_bytes": PAGE, "max_batch_tokens": 96, "max_batch_rows": 8, "max_sequences": 8}
        more = {"threads": 1, "kernels": KernelKind(KERNELS), "nats_user": "worker", "nats_password": PASSWORD}
        named = {"instance_id": "w0", "model": folder, "system": system}
        return WorkerSettings.model_validate(named | sizes | more | changes)

    async def load(chosen: WorkerSettings) -> tuple[GroupDevice | None, Texts]:
        loaded = await load_executor(chosen, check_start(chosen), lambda done, _what: told.append(done))
        texts = await texts_of(loaded.executor)
        if loaded.device is None:
            await close_loaded(loaded)
        else:
            await loaded.executor.close()
        assert loaded.model.fitting is not None
        assert loaded.model.fitting.sample.steps, "measured while it was loaded"
        return loaded.device, texts

    limits = {"exchange_memory": "3KiB", "exchange_limit_s": 7}
    device, texts = await load(settings("dropping", deterministic=True, stage_advertise="worker-0", **limits))
    assert isinstance(device, TorchGroupDevice)
    assert (device._kv._params.memory_bytes, device._kv.limit_s) == (3072, 7)
    assert told[-1] == 1
    assert device.layers == LayerRange(0, 4)
    assert device.facts.page_bytes == PAGE
    assert device.facts.has_host_copy
    assert device.address.startswith("worker-0:")
    assert texts == await calm()
    assert await texts_of((await device.alone()).executor) == texts, (
        "an executor that was closed is not handed out again"
    )
    await device.close()
    assert await load(settings("fcfs-chunked", deterministic=True)) == (None, texts)
    with pytest.raises(StartupError, match=r"other workers cannot be heard at 192\.0\.2\.1:0"):
        await load(settings("dropping", stage_host="192.0.2.1"))
