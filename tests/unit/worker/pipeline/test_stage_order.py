"""Stages that launch steps before those before them have ended: order, limits, failures and ends of every kind."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from services.worker.contract.arrays import EMPTY_I32
from services.worker.contract.batch import Batch, RowInit, TableDelta
from services.worker.contract.executor import BatchFailedError, HostCopy
from services.worker.contract.remote import RemoteLostError
from services.worker.modelled.executor import FailureInjector
from services.worker.peers.frames import PeerLostError
from services.worker.pipeline.pipeline import PipelineExecutor
from services.worker.pipeline.stage import MAX_LAUNCHED
from services.worker.pipeline.stage_messages import Activation, CopyEnded, KvOver, StageClose, StageMessage, StepDone
from services.worker.pipeline.thread_stage import StageThread
from shared.types import SamplingParams
from sim.devices.modelled_stage import ModelledStage
from tests.support.late_stages import LIMIT_S, Holding, LateStage
from tests.support.leaks import whats_open
from tests.support.thread_pipeline import wire_up
from tests.unit.worker.pipeline.test_thread_stage import bad_luck, devices, make_pipeline_engine, serve_undisturbed


def stages(num_stages: int, hold: Callable[[int], None], failure: FailureInjector | None = None) -> list[LateStage]:
    """The last stage fails as told, when a step is launched."""
    return [LateStage(device, hold) for device in devices(num_stages, failure)]


def batches(count: int) -> list[Batch]:
    """Return steps of one row, each of one token."""
    row = np.array([1], dtype=np.int32)
    table = TableDelta(np.repeat(row, 5), np.arange(5, dtype=np.int32), np.arange(5, dtype=np.int32))
    first = Batch(0, row, row, row * 0, row, row == 1, table, admits=(RowInit(1, SamplingParams(max_tokens=99)),))
    return [first, *(Batch(i, row, row, row * i, row, row == 1) for i in range(1, count))]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():
            await asyncio.sleep(0.001)


def copy_of(copy_id: int) -> HostCopy:
    return HostCopy(copy_id, EMPTY_I32, EMPTY_I32, to_host=True)


@dataclass
class Heard:
    """Who hears a stage; the `fails_at`th message cannot be sent, nor those behind it."""

    fails_at: int | None = None
    error: Exception = field(default_factory=lambda: PeerLostError("nobody is there"))
    said: list[StageMessage] = field(default_factory=list)
    is_closed: bool = False

    def send(self, message: StageMessage) -> None:
        if len(self.said) == self.fails_at:
            raise self.error
        self.said.append(message)

    def close(self) -> None:
        self.is_closed = True


class Alone:
    """A stage thread without sockets, which is sent steps that it can run."""

    def __init__(self, stage: LateStage, to_next: Heard | None, to_leader: Heard | None = None) -> None:
        self.stage = stage
        self.to_leader = to_leader or Heard()
        self.ends: list[str | None] = []
        self.before = whats_open()[0]
        self.thread = StageThread(stage, to_next, self.to_leader, on_end=self.ends.append)

    def receive(self, messages: Sequence[StageMessage], until: str) -> None:
        """Send messages, and wait until something has happened."""
        for message in messages:
            self.thread.receive(message)
        limit_s = time.monotonic() + LIMIT_S
        while until not in self.stage.notes:
            assert time.monotonic() < limit_s, until
            time.sleep(0.001)

    def join(self) -> None:
        self.thread._thread.join(LIMIT_S)
        assert self.ends, "it goes on"
        assert whats_open()[0] == self.before, "a thread is left"
        assert self.stage.notes[-1] == "close"


async def test_a_step_is_launched_while_the_one_before_it_computes_and_no_third_one() -> None:
    hold = Holding()
    (stage,) = stages(1, hold)
    executor = wire_up([stage], asyncio.get_running_loop()).executor
    futures = [executor.submit(batch) for batch in batches(6)]
    for number in range(6):
        launched = [f"launch {i}" for i in range(min(number + MAX_LAUNCHED, 6))]
        await until(lambda launched=launched: launched[-1] in stage.notes)  # type: ignore[misc]  # no default's type
        assert [note for note in stage.notes if note.startswith("launch")] == launched, "a third one"
        assert not futures[number].done()
        hold.let()
        assert (await futures[number]).step_id == number
    assert stage.most == MAX_LAUNCHED
    await executor.close()


@pytest.mark.parametrize("num_stages", [1, 3])
async def test_copies_ends_of_writes_and_the_close_come_when_no_step_is_under_way(num_stages: int) -> None:
    """On the stages behind the first they may come before steps whose activations are not there yet."""
    chance = random.Random(num_stages)
    group = stages(num_stages, lambda _: time.sleep(chance.random() * 0.004))
    pipeline = wire_up(group, asyncio.get_running_loop())
    executor, steps, ended = pipeline.executor, batches(6), list[str]()

    def submit(step_id: int) -> None:
        executor.submit(steps[step_id]).add_done_callback(lambda _: ended.append(f"step {step_id}"))

    def copy(copy_id: int) -> None:
        done = executor.copy(copy_of(copy_id))
        done.add_done_callback(lambda done: ended.append(str(done.exception() or f"copy {copy_id}")))

    submit(0)
    submit(1)
    copy(0)
    submit(2)
    submit(3)
    executor.end_writes()
    submit(4)
    submit(5)
    copy(1)
    await pipeline.close()
    assert [each for each in ended if each.startswith("step")] == [f"step {i}" for i in range(6)]
    if num_stages == 1:
        assert ended == ["step 0", "step 1", "copy 0", *(f"step {i}" for i in range(2, 6)), "copy 1"]
    for stage in group:
        assert stage.notes[-1] == "close"
        assert [note for note in stage.notes if note.startswith("end")] == [f"end {i}" for i in range(6)]
        place = {note: index for index, note in enumerate(stage.notes)}
        for alone, before, behind in (("copy 0", 1, 2), ("writes end", 3, 4)):
            assert place[alone] < place[f"launch {behind}"]
            assert place[f"end {before}"] < place[alone] or stage is not group[0], "what it has begun, it ends first"
    assert group[0].most == MAX_LAUNCHED


@pytest.mark.parametrize("message", [copy_of(0), KvOver(), StageClose()])
def test_what_waits_for_steps_lets_a_failure_of_their_ends_break_the_pipeline(message: StageMessage) -> None:
    """The result could not be said, so nothing is said behind it, neither an answer nor an end in order."""
    hold, to_next = Holding(), Heard(fails_at=0, error=OverflowError("much"))
    alone = Alone(stages(2, hold)[0], to_next)
    alone.receive([*batches(2), message], until="launch 1")
    hold.let(2)
    alone.join()
    assert alone.ends == ["stage [0, 3) ended with OverflowError: much"]
    assert to_next.said == alone.to_leader.said == []
    assert to_next.is_closed
    assert alone.to_leader.is_closed
    assert alone.stage.notes == ["launch 0", "launch 1", "end 0", "end 1", "close"]


@pytest.mark.parametrize(("num_steps", "fails_at"), [(9, 1), (2, 0)])
def test_a_channel_that_is_lost_ends_a_stage_that_waits_for_room_to_launch_or_for_messages(
    num_steps: int, fails_at: int
) -> None:
    hold, to_next = Holding(), Heard(fails_at)
    alone = Alone(stages(2, hold)[0], to_next)
    alone.receive(batches(num_steps), until="launch 1")
    hold.let(num_steps)
    alone.join()
    assert alone.ends == ["nobody is there"]
    assert [message.step_id for message in to_next.said if isinstance(message, Activation)] == list(range(fails_at))
    launched, ended = ([note for note in alone.stage.notes if note.startswith(what)] for what in ("launch", "end"))
    assert len(launched) == len(ended) < 9, "steps are not launched for nobody"


def test_what_a_step_has_produced_holds_until_it_is_sent() -> None:
    stage, held = stages(2, lambda _: None)[0], list[int]()

    class Counting(Heard):
        def send(self, message: StageMessage) -> None:
            held.append(stage.num_held)
            super().send(message)

    alone = Alone(stage, Counting())
    alone.receive([*batches(1), StageClose()], until="close")
    alone.join()
    assert held == [1, 0], "an activation, and an end in order"


def test_keys_that_are_lost_at_the_end_of_a_step_break_the_pipeline() -> None:
    def lose(step_id: int) -> None:
        if step_id == 1:
            raise RemoteLostError("they are gone")

    alone = Alone(stages(2, lose)[0], to_next := Heard())
    for step in batches(3):
        alone.thread.receive(step)
    alone.join()
    assert alone.ends == ["they are gone"]
    assert len(to_next.said) == 1


def test_memory_is_closed_when_no_step_is_under_way_though_the_stage_is_lost() -> None:
    hold = Holding()
    alone = Alone(stages(2, hold)[0], to_next := Heard())
    alone.receive(batches(2), until="launch 1")
    alone.thread.lose("it is gone")
    while not to_next.is_closed:
        time.sleep(0.001)
    assert "close" not in alone.stage.notes
    hold.let(2)
    alone.join()
    assert alone.ends == ["it is gone"]
    assert to_next.said == []


def test_durations_of_steps_that_overlap_do_not_count_the_same_time_twice() -> None:
    hold, to_leader = Holding(), Heard()
    alone = Alone(stages(1, hold)[0], None, to_leader)
    began_s = time.perf_counter()
    alone.receive(batches(2), until="launch 1")
    time.sleep(0.05)
    hold.let(2)
    alone.thread.receive(StageClose())
    alone.join()
    took_s = time.perf_counter() - began_s
    durations_s = [said.durations_s[0] for said in to_leader.said if isinstance(said, StepDone)]
    assert len(durations_s) == 2
    assert 0.05 < sum(durations_s) < took_s


def test_a_stage_whose_steps_are_done_when_they_are_launched_has_one_thread() -> None:
    seen = set[str]()
    stage = stages(1, lambda _: None)[0]
    before = set(whats_open()[0])

    class Watching(Heard):
        def send(self, message: StageMessage) -> None:
            seen.add(threading.current_thread().name)
            seen.update(set(whats_open()[0]) - before)
            super().send(message)

    to_leader = Watching()
    thread = StageThread(ModelledStage(stage._cost, stage.kv), None, to_leader)
    for step in batches(4):
        thread.receive(step)
    thread.receive(copy_of(0))
    thread.receive(StageClose())
    thread.join()
    assert [type(said) for said in to_leader.said] == [StepDone] * 4 + [CopyEnded]
    assert seen == {"stage [0, 6)"}


# Failures, over sockets


@pytest.mark.parametrize("where", [0, 2])
@pytest.mark.parametrize(
    "error", [BatchFailedError(2, "bad luck", (1,)), ValueError("bad luck")], ids=["told", "unexpected"]
)
async def test_a_step_that_fails_at_its_end_fails_alone(error: Exception, where: int) -> None:
    def fail(step_id: int) -> None:
        if step_id == 2:
            raise error

    group = stages(3, lambda _: time.sleep(0.001))
    group[where]._hold = fail
    pipeline = wire_up(group, asyncio.get_running_loop())
    results = await asyncio.gather(*map(pipeline.executor.submit, batches(6)), return_exceptions=True)
    failed = results.pop(2)
    assert isinstance(failed, BatchFailedError)
    assert failed.cause == ("bad luck" if isinstance(error, BatchFailedError) else "ValueError: bad luck")
    assert failed.rows == ((1,) if isinstance(error, BatchFailedError) else ())
    assert not failed.is_lost
    assert not any(isinstance(result, BaseException) for result in results)
    for behind in group[where + 1 :]:
        assert "skip 2" in behind.notes
        assert "launch 2" not in behind.notes
    await pipeline.close()


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("more", [0, 3])
async def test_texts_survive_steps_that_end_late_and_fail_at_launch_or_at_the_end(
    monkeypatch: pytest.MonkeyPatch, num_stages: int, more: int
) -> None:
    """With more lanes than stages a step waits behind the one that computes, so that steps overlap all the time."""
    chance = random.Random(num_stages + more)

    def hold(step_id: int) -> None:
        time.sleep(chance.random() * 0.003)
        if step_id % 11 == 5:
            raise BatchFailedError(step_id, "worse luck")

    monkeypatch.setattr(PipelineExecutor, "num_lanes", num_stages + more)
    before, group = whats_open(), stages(num_stages, hold, bad_luck)
    engine = make_pipeline_engine(num_stages + more, num_host_blocks=0)
    await serve_undisturbed(group, engine, [chance.randrange(1, 30) for _ in range(10)], max_tokens=20)
    assert engine.totals.num_failed_steps
    assert max(stage.most for stage in group) == MAX_LAUNCHED or not more
    assert whats_open() == before


@pytest.mark.parametrize("end", ["member leaves", "leader is cut off"])
async def test_a_pipeline_that_breaks_while_steps_are_under_way_ends_every_thread(end: str) -> None:
    before, first, behind = whats_open(), Holding(), Holding()
    group = stages(3, behind)
    group[0]._hold = first
    pipeline = wire_up(group, asyncio.get_running_loop())
    futures = [pipeline.executor.submit(batch) for batch in batches(6)]
    first.let(2)
    await until(lambda: "launch 1" in group[1].notes and "launch 3" in group[0].notes)
    if end == "member leaves":
        leaving = threading.Thread(target=pipeline.servers[1].close)
        leaving.start()
    else:
        leaving = None
        pipeline.control[1].shutdown(socket.SHUT_RDWR)
    async with asyncio.timeout(LIMIT_S):
        results = await asyncio.gather(*futures, return_exceptions=True)
    broken = results[-1]
    assert isinstance(broken, BatchFailedError)
    assert broken.is_lost
    first.let(99)
    behind.let(99)
    await pipeline.executor.close()
    await asyncio.to_thread(pipeline.join)
    if leaving is not None:
        leaving.join()
    for stage in group:
        assert stage.notes[-1] == "close"
        launched, ended = ([note for note in stage.notes if note.startswith(what)] for what in ("launch", "end"))
        assert len(launched) == len(ended)
    assert all(server.reason for server in pipeline.servers)
    await until(lambda: whats_open() == before)
