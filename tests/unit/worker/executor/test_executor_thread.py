"""The thread around a runner: order, failures, cancelled futures, closing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

import numpy as np
import pytest

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import BatchFailedError, CopyFailedError, Executor, HostCopy, KvCapacity
from services.worker.executor.launched import EndedStep, Launched
from services.worker.executor.thread import ThreadExecutor
from tests.support.checkpoints import CheckpointShape
from tests.support.runner_driver import Driver
from tests.support.runners import open_runner

pytestmark = pytest.mark.kernels


@dataclass
class FakeRunner:
    """Notes what it runs, waits for `gate` if it `is_held`, and fails the steps that it is told to fail."""

    failures: dict[int, Exception] = field(default_factory=dict)
    late_failures: dict[int, Exception] = field(default_factory=dict)
    done_at_once: Sequence[int] = ()
    copies_beside: bool = False
    overlaps: bool = False
    is_held: InitVar[bool] = False
    capacity = KvCapacity(7, 16)
    closed = 0

    def __post_init__(self, is_held: bool) -> None:
        self.to_go_on = {True: threading.Event(), False: threading.Event()}
        self.gate, self.device = threading.Event(), threading.Semaphore(0)
        self.steps, self.ended, self.threads = list[int](), list[int](), set[int]()
        if not is_held:
            self.gate.set()

    def launch(self, batch: Batch) -> Launched:
        assert self.gate.wait(10)
        self.steps.append(batch.step_id)
        self.threads.add(threading.get_ident())
        if batch.step_id in self.failures:
            raise self.failures[batch.step_id]
        done = EndedStep(BatchOutput(batch.step_id, batch.tokens, 0.001))
        return Late(self, done) if self.overlaps and batch.step_id not in self.done_at_once else done

    def copy(self, copy: HostCopy) -> None:
        assert self.gate.wait(10)
        if self.copies_beside:
            assert self.to_go_on[copy.to_host].wait(10)
        self.steps.append(-copy.copy_id)
        if copy.copy_id in self.failures:
            raise self.failures[copy.copy_id]

    def close(self) -> None:
        self.closed += 1


class Late:
    """A step that a device computes when it is allowed to."""

    is_done = False

    def __init__(self, runner: FakeRunner, done: EndedStep) -> None:
        self._runner = runner
        self._done = done

    def end(self) -> BatchOutput:
        assert self._runner.device.acquire(timeout=10)
        step_id = self._done.output.step_id
        self._runner.ended.append(step_id)
        if step_id in self._runner.late_failures:
            raise self._runner.late_failures[step_id]
        return self._done.output


def make_batch(step_id: int) -> Batch:
    one = np.ones(1, dtype=np.int32)
    return Batch(step_id, one, one, one, one, np.ones(1, dtype=np.bool_))


def make(runner: FakeRunner) -> ThreadExecutor:
    return ThreadExecutor(runner, asyncio.get_running_loop())


async def test_batches_run_in_order_in_one_other_thread() -> None:
    runner = FakeRunner()
    executor: Executor = make(runner)
    futures = [executor.submit(make_batch(step)) for step in range(5)]
    assert [(await future).step_id for future in futures] == list(range(5))
    assert runner.steps == list(range(5))
    assert runner.threads != {threading.get_ident()}
    assert len(runner.threads) == 1
    assert (executor.depth, executor.capacity) == (1, KvCapacity(7, 16))
    await executor.close()


async def launched(runner: FakeRunner, count: int) -> None:
    async with asyncio.timeout(10):
        while len(runner.steps) < count:
            await asyncio.sleep(0.001)


async def test_where_steps_overlap_one_is_launched_before_the_one_before_it_has_ended() -> None:
    runner = FakeRunner(overlaps=True)
    executor: Executor = make(runner)
    assert (executor.depth, executor.num_lanes) == (2, 1)
    first, second = executor.submit(make_batch(1)), executor.submit(make_batch(2))
    await launched(runner, 2)
    assert not first.done()
    runner.device.release()
    assert (await first).step_id == 1
    third = executor.submit(make_batch(3))
    await launched(runner, 3)
    assert not second.done()
    runner.device.release(2)
    assert [(await future).step_id for future in (second, third)] == [2, 3]
    assert (runner.steps, runner.ended) == ([1, 2, 3], [1, 2, 3])
    assert len(runner.threads) == 1
    await executor.close()


async def test_a_step_that_is_done_when_it_is_launched_waits_for_nobody() -> None:
    runner = FakeRunner(done_at_once=[2], overlaps=True)
    executor = make(runner)
    first, second = executor.submit(make_batch(1)), executor.submit(make_batch(2))
    assert (await second).step_id == 2
    assert not first.done()
    runner.device.release()
    await first
    await executor.close()


async def test_a_step_fails_when_it_is_launched_or_when_it_ends_and_the_others_go_on() -> None:
    known = BatchFailedError(2, "at once")
    late = {1: BatchFailedError(1, "late", rows=(4,)), 5: RuntimeError("device lost")}
    runner = FakeRunner({2: known, 3: ValueError("odd")}, late, overlaps=True)
    executor = make(runner)
    futures = [executor.submit(make_batch(step)) for step in range(1, 7)]
    runner.device.release(6)
    said = await asyncio.gather(*futures, return_exceptions=True)
    causes = [error.cause if isinstance(error, BatchFailedError) else None for error in said]
    assert causes == ["late", "at once", "ValueError: odd", None, "RuntimeError: device lost", None]
    assert isinstance(said[0], BatchFailedError)
    assert said[0].rows == (4,)
    assert said[1] is known
    assert [type(each) for each in (said[3], said[5])] == [BatchOutput] * 2
    await executor.close()


async def test_closing_waits_for_the_steps_that_a_device_computes() -> None:
    runner = FakeRunner(overlaps=True)
    executor = make(runner)
    steps = [executor.submit(make_batch(step)) for step in (1, 2)]
    closing = asyncio.create_task(executor.close())
    await launched(runner, 2)
    await asyncio.sleep(0.05)
    assert (closing.done(), runner.closed) == (False, 0)
    runner.device.release(2)
    await closing
    assert (closing.done(), runner.closed) == (True, 1)
    assert [(await step).step_id for step in steps] == [1, 2]


def make_copy(copy_id: int, *, to_host: bool = True) -> HostCopy:
    one = np.ones(1, dtype=np.int32)
    return HostCopy(copy_id, one, one, to_host=to_host)


async def test_copies_take_their_turn_between_steps() -> None:
    runner = FakeRunner()
    executor: Executor = make(runner)
    first, copied, last = executor.submit(make_batch(1)), executor.copy(make_copy(7)), executor.submit(make_batch(2))
    await copied
    assert first.done()
    await last
    assert runner.steps == [1, -7, 2]
    await executor.close()


async def test_copies_beside_steps_wait_for_those_before_and_hold_up_none_behind() -> None:
    """Nor does one direction wait for the other."""
    runner = FakeRunner(copies_beside=True, is_held=True)
    executor = make(runner)
    first = executor.submit(make_batch(1))
    out, back = executor.copy(make_copy(7)), executor.copy(make_copy(8, to_host=False))
    last = executor.submit(make_batch(2))
    for event in runner.to_go_on.values():
        event.set()
    await asyncio.sleep(0.05)
    assert not any(future.done() for future in (first, out, back)), "the step before has not run"
    for event in runner.to_go_on.values():
        event.clear()
    runner.gate.set()
    await last
    runner.to_go_on[False].set()
    await back
    assert not out.done()
    assert runner.steps == [1, 2, -8]
    closing = asyncio.create_task(executor.close())
    await asyncio.sleep(0.05)
    assert not runner.closed, "a copy is under way"
    runner.to_go_on[True].set()
    await closing
    await out
    assert (runner.steps, runner.closed) == ([1, 2, -8, -7], 1)


@pytest.mark.parametrize("copies_beside", [False, True])
async def test_a_failed_copy_fails_its_future_only(*, copies_beside: bool) -> None:
    known = CopyFailedError(8, "x")
    runner = FakeRunner({8: known, 9: MemoryError("no room")}, copies_beside=copies_beside)
    runner.to_go_on[True].set()
    executor = make(runner)
    outcomes = await asyncio.gather(*(executor.copy(make_copy(i)) for i in (7, 8, 9)), return_exceptions=True)
    assert (await executor.submit(make_batch(1))).step_id == 1
    await executor.close()
    assert outcomes[:2] == [None, known]
    assert isinstance(outcomes[2], CopyFailedError)
    assert (outcomes[2].copy_id, outcomes[2].cause) == (9, "MemoryError: no room")
    with pytest.raises(CopyFailedError, match="closed"):
        await executor.copy(make_copy(10))


async def test_a_cancelled_future_does_not_disturb_the_thread() -> None:
    runner = FakeRunner(is_held=True)
    executor = make(runner)
    first, second = executor.submit(make_batch(0)), executor.submit(make_batch(1))
    first.cancel()
    runner.gate.set()
    assert (await second).step_id == 1
    await executor.close()


async def test_close_finishes_what_is_queued_and_may_be_called_again() -> None:
    runner = FakeRunner(is_held=True)
    executor = make(runner)
    futures = [executor.submit(make_batch(step)) for step in range(3)]
    closing = [asyncio.ensure_future(executor.close()) for _ in range(2)]
    await asyncio.sleep(0)
    late = executor.submit(make_batch(9))
    with pytest.raises(BatchFailedError, match="closed"):
        await late
    assert not any(task.done() for task in closing)
    runner.gate.set()
    await asyncio.gather(*closing)
    await executor.close()
    assert [future.result().step_id for future in futures] == [0, 1, 2]
    assert runner.closed == 1
    assert not any(thread.name == "executor" for thread in threading.enumerate())


async def test_an_interrupted_close_can_be_repeated() -> None:
    runner = FakeRunner(is_held=True)
    executor = make(runner)
    future = executor.submit(make_batch(0))
    closing = asyncio.ensure_future(executor.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    runner.gate.set()
    await executor.close()
    assert future.result().step_id == 0


def test_a_thread_whose_loop_is_gone_still_finishes_and_closes_its_runner() -> None:
    runner = FakeRunner(is_held=True)

    async def start() -> ThreadExecutor:
        executor = make(runner)
        executor.submit(make_batch(0)).cancel()
        return executor

    executor = asyncio.run(start())
    runner.gate.set()
    executor._thread.put(executor._end)
    executor._thread.close()
    assert (runner.steps, runner.closed) == ([0], 1)


async def test_a_model_runs_in_the_thread() -> None:
    runner = open_runner(CheckpointShape(seed=7))
    executor = ThreadExecutor(runner, asyncio.get_running_loop())
    driver = Driver(runner)
    sequence = driver.add(range(10, 60))
    output = await executor.submit(driver.batch([(sequence, 50)]))
    expected = Driver(runner)
    again = expected.add(range(10, 60))
    expected.step([(again, 50)])
    assert output.tokens.tolist() == again.output
    await executor.close()
    with pytest.raises(BatchFailedError, match="closed"):
        runner.run(driver.batch([(driver.add([5], row=1), 1)]))
