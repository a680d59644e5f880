"""Stages on a device that computes beside the host: the same texts, and nothing overwritten that is still read.

The CPU stands in for such a device: it takes the paths of one, and what it has done is known late. Or copies and
arithmetic are done late as well, by a stream in a thread of its own (`LateStream`).
"""

from __future__ import annotations

import asyncio
import random
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import BatchFailedError
from services.worker.executor.thread import ThreadExecutor
from services.worker.memory.host_link import DeviceEvent
from services.worker.peers.frames import FrameSocket
from services.worker.pipeline import hidden_link
from services.worker.pipeline.hidden_link import HiddenLink, HiddenShape
from services.worker.pipeline.pipeline import PipelineExecutor
from services.worker.pipeline.runner_stage import RunnerStage
from services.worker.pipeline.stage import MAX_LAUNCHED, StageStep
from services.worker.pipeline.stage_messages import Hidden
from shared.layers import even_split
from tests.support.late_runner import MAX_TOKENS, LateRunner, sums_of
from tests.support.late_stages import LateStream, be_beside, late_stream
from tests.support.leaks import whats_open
from tests.support.live_groups import SHAPES, calm_texts, end_and_be_alone, form, live_devices, new_engine
from tests.support.live_groups import texts_of as group_texts
from tests.support.runners import open_runner
from tests.support.stage_texts import stages_of, texts_of
from tests.support.thread_pipeline import WiredPipeline, wire_up
from tests.support.waiting import rounds

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")


class UnderWay:
    """Counts, of every stage, the steps that were launched and have not ended; and whether they end in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.most = 0
        self.num_at_once = 0
        """Steps that were done when they were launched."""
        launch = RunnerStage.launch
        steps: dict[RunnerStage, list[int]] = {}

        def watch(stage: RunnerStage, batch: Batch, hidden: Hidden | None) -> StageStep:
            step, under_way = launch(stage, batch, hidden), steps.setdefault(stage, [])
            under_way.append(batch.step_id)
            self.most = max(self.most, len(under_way))
            self.num_at_once += step.is_done
            return _Watched(step, under_way, batch.step_id)

        patch.setattr(RunnerStage, "launch", watch)


class _Watched:
    def __init__(self, step: StageStep, under_way: list[int], step_id: int) -> None:
        self._step, self._under_way, self._step_id = step, under_way, step_id
        self.is_done = step.is_done

    def end(self) -> Hidden | BatchOutput:
        assert self._under_way[0] == self._step_id, "the step before has not ended"
        return self._step.end()

    def free(self) -> None:
        del self._under_way[0]
        self._step.free()


@pytest.mark.slow
@pytest.mark.parametrize(("num_stages", "more"), [(2, 0), (2, 2), (3, 0), (3, 3)])
async def test_a_pipeline_beside_the_host_says_what_the_whole_model_says(
    monkeypatch: pytest.MonkeyPatch, num_stages: int, more: int
) -> None:
    """With more lanes than stages a step waits behind the one that computes. The host chooses for rows with filters."""
    loop, dtype = asyncio.get_running_loop(), "bfloat16" if num_stages == 2 else "float32"
    runner = open_runner(SHAPES["llama"], deterministic=True, dtype=dtype, kernels="torch")
    expected = await texts_of(new_engine(1), ThreadExecutor(runner, loop))
    before = whats_open()
    be_beside(monkeypatch, seed=num_stages)
    monkeypatch.setattr(PipelineExecutor, "num_lanes", num_stages + more)
    under_way = UnderWay(monkeypatch)
    for _ in rounds("a step is launched while another is under way"):
        pipeline = wire_up(stages_of("llama", even_split(4, num_stages), dtype, "torch"), loop)
        assert await texts_of(new_engine(num_stages + more), pipeline.executor) == expected
        pipeline.join()
        assert [server.reason for server in pipeline.servers] == [None] * (num_stages - 1)
        assert whats_open() == before
        if under_way.most == MAX_LAUNCHED or not more:
            break
    assert under_way.most <= MAX_LAUNCHED


@pytest.mark.slow
async def test_on_the_host_itself_every_step_is_done_when_it_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way = UnderWay(monkeypatch)
    pipeline = wire_up(stages_of("llama", even_split(4, 2), "float32", "torch"), asyncio.get_running_loop())
    await texts_of(new_engine(2), pipeline.executor)
    pipeline.join()
    assert under_way.most == 1
    assert under_way.num_at_once > 20


@pytest.mark.slow
async def test_groups_of_devices_beside_the_host_form_serve_and_part(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = await calm_texts("llama", "float32", "torch")
    be_beside(monkeypatch, seed=1)
    async with live_devices(3, kernels="torch", overlap=False) as devices:
        for _ in range(2):
            group = await form(devices, even_split(4, 3))
            assert await group_texts(group.executor) == expected
            await end_and_be_alone(group, devices)


# Copies that are late


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateStream]:
    with late_stream(monkeypatch, seed=3) as stream:
        yield stream


def send_late(patch: pytest.MonkeyPatch, seed: int) -> None:
    """Let sockets read what they send some time after they were given it."""
    chance, send = random.Random(seed), FrameSocket._send

    def late(sock: FrameSocket, parts: list[memoryview]) -> None:
        time.sleep(chance.random() * 0.004)
        send(sock, parts)

    patch.setattr(FrameSocket, "_send", late)


def random_batch(step_id: int, chance: np.random.Generator) -> Batch:
    counts = chance.integers(1, MAX_TOKENS // 3 + 1, int(chance.integers(1, 4))).astype(np.int32)
    rows = np.arange(len(counts), dtype=np.int32)
    tokens = chance.integers(0, 20, int(counts.sum())).astype(np.int32)
    return Batch(step_id, rows, counts, rows * 0, tokens, rows >= 0)


def late_pipeline(streams: list[LateStream], dtype: torch.dtype) -> tuple[list[LateRunner], WiredPipeline]:
    ranges = even_split(6, len(streams))
    runners = [LateRunner(layers, 6, stream, dtype) for layers, stream in zip(ranges, streams, strict=True)]
    stages: list[Any] = [RunnerStage(runner) for runner in runners]  # type: ignore[arg-type]  # stands in for one
    return runners, wire_up(stages, asyncio.get_running_loop())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_stages", [2, 3])
async def test_no_hidden_states_are_overwritten_while_a_device_or_a_socket_reads_them(
    monkeypatch: pytest.MonkeyPatch, stream: LateStream, num_stages: int, dtype: torch.dtype
) -> None:
    """All stages on one device, as two workers on one card: its one stream takes their work in turn."""
    send_late(monkeypatch, num_stages)
    _, pipeline = late_pipeline([stream] * num_stages, dtype)
    chance = np.random.default_rng(num_stages)
    batches = [random_batch(step_id, chance) for step_id in range(60)]
    outputs = await asyncio.gather(*map(pipeline.executor.submit, batches))
    assert [output.tokens.tolist() for output in outputs] == [sums_of(batch, 6) for batch in batches]
    await pipeline.close()


async def test_steps_that_fail_give_back_what_they_were_to_use(stream: LateStream) -> None:
    """Twice as many as there are pieces: when they are launched, on the way to the device, and on the way back."""
    runners, pipeline = late_pipeline([stream] * 2, torch.float32)
    chance, executor = np.random.default_rng(1), pipeline.executor

    async def failing(first_id: int, count: int) -> list[str]:
        batches = [random_batch(first_id + i, chance) for i in range(count)]
        results = await asyncio.gather(*map(executor.submit, batches), return_exceptions=True)
        return [result.cause for result in results if isinstance(result, BatchFailedError)]

    count = 2 * MAX_LAUNCHED
    for place, runner in enumerate(runners):
        runner.num_refused = count
        assert await failing(place * count, count) == ["RuntimeError: the device has no memory left"] * count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hidden_link, "begin_copy", lambda *_: 1 / 0)
        assert await failing(2 * count, count) == ["ZeroDivisionError: division by zero"] * count
        patch.setattr(hidden_link, "begin_copy", lambda *copied: Broken(stream.begin_copy(*copied)))
        assert await failing(3 * count, count) == ["RuntimeError: the device is lost"] * count
    assert runners[1].skipped == [*range(count), *range(2 * count, 4 * count)]
    assert await failing(4 * count, count) == []
    await pipeline.close()


class Broken:
    """An event of a device that is lost."""

    def __init__(self, event: DeviceEvent) -> None:
        self._event = event

    def synchronize(self) -> None:
        self._event.synchronize()
        raise RuntimeError("the device is lost")


async def test_hidden_states_that_do_not_get_to_the_device_fail_the_step_which_is_taken_in(stream: LateStream) -> None:
    """Else the blocks of its rows would not be known to the steps behind it."""
    runners, pipeline = late_pipeline([stream] * 2, torch.float32)
    batch = random_batch(0, np.random.default_rng(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HiddenLink, "to_device", lambda *_: torch.empty(2**62))
        with pytest.raises(BatchFailedError):
            await pipeline.executor.submit(batch)
    assert runners[1].skipped == [0]
    await pipeline.close()


def test_hidden_states_that_arrive_are_read_before_the_next_ones_take_their_place(stream: LateStream) -> None:
    """Nobody waits for a step between them; and an array belongs to its owner again at once."""
    link = HiddenLink(HiddenShape(4, 5, torch.float32), CPU, arrive=True, leave=False)
    arrived = []
    for i in range(20):
        given = np.full((4, 5), i, np.float32)
        arrived.append(link.to_device(given, 4))
        given[:] = -1
    stream.mark().synchronize()
    assert [set(each.flatten().tolist()) for each in arrived] == [{i} for i in range(20)]


def test_what_the_device_computes_is_not_kept_for_the_copy(stream: LateStream) -> None:
    """A step behind it finds the memory that was measured: the device frees and takes in the order of its stream."""
    link = HiddenLink(HiddenShape(4, 5, torch.float32), CPU, arrive=True, leave=True)
    hidden = torch.ones(4, 5)
    kept, step = weakref.ref(hidden), link.to_host(hidden)
    del hidden
    result = step.end()
    assert isinstance(result, np.ndarray)
    assert (result == 1).all()
    stream.mark().synchronize()
    assert kept() is None


def test_more_steps_than_may_be_launched_are_refused(stream: LateStream) -> None:
    link = HiddenLink(HiddenShape(4, 5, torch.float32), CPU, arrive=False, leave=True)
    steps = [link.to_host(torch.full((4, 5), float(i))) for i in range(MAX_LAUNCHED)]
    with pytest.raises(AssertionError, match="more steps are launched"):
        link.to_host(torch.zeros(4, 5))
    for i, step in enumerate(steps):
        result = step.end()
        assert isinstance(result, np.ndarray)
        assert (result == i).all()
        step.free()
    link.to_host(torch.zeros(4, 5))


def test_no_memory_is_taken_for_hidden_states_that_do_not_come_or_go(stream: LateStream) -> None:
    link = HiddenLink(HiddenShape(4, 5, torch.float32), CPU, arrive=False, leave=False)
    assert link._arriving is None
    assert link._leaving is None
