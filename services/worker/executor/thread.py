"""Runs a model in a thread of its own, so that a step never blocks the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol, TypeVar

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import BatchFailedError, CopyFailedError, HostCopy, KvCapacity
from services.worker.executor.launched import Launched
from services.worker.executor.recent_steps import RecentSteps

T = TypeVar("T")
R = TypeVar("R")


class Runner(Protocol):
    """What the thread calls; `ModelRunner`, or a fake of it."""

    @property
    def capacity(self) -> KvCapacity:
        """KV memory."""

    @property
    def overlaps(self) -> bool:
        """Whether a step is to be launched before the one before it has ended; it may hold `OWN_SAMPLE` then."""

    def launch(self, batch: Batch) -> Launched:
        """Begin one step, or raise `BatchFailedError`; always called from the same thread."""

    def copy(self, copy: HostCopy) -> None:
        """Copy blocks between device and host, or raise `CopyFailedError`."""

    @property
    def copies_beside(self) -> bool:
        """Whether `copy` may be called while a step runs, in each direction from a thread of its own."""

    def close(self) -> None:
        """Give back memory."""


class ThreadExecutor:
    """An `Executor` of one lane over a runner: batches run in the order in which they were submitted.

    Where steps overlap, one thread launches them and another waits for those that are not done by then, so that a step
    is laid out while the device computes the one before.

    A copy begins when the steps submitted before it have run. Where the runner copies beside steps, those behind it go
    on meanwhile, and copies to the host run beside those back; else a copy delays the steps behind it.
    May be created in any thread, is used on `loop`. Owns the runner and closes it.
    """

    num_lanes = 1

    def __init__(self, runner: Runner, loop: asyncio.AbstractEventLoop) -> None:
        self._runner = runner
        self._loop = loop
        self._recent = RecentSteps()
        self.is_closed = False
        """It takes no more steps."""
        self._ended: asyncio.Future[None] = loop.create_future()
        self._copiers = {True: _Thread("copies out"), False: _Thread("copies back")} if runner.copies_beside else {}
        self._lander = _Thread("step ends") if runner.overlaps else None
        self.depth = 1 if self._lander is None else 2
        """One batch, and another one behind it where steps overlap."""
        self._thread = _Thread("executor")

    @property
    def capacity(self) -> KvCapacity:
        """KV memory."""
        return self._runner.capacity

    @property
    def recent_step_s(self) -> float:
        """How long a step with prompts took lately, seconds; 0 before the first one."""
        return self._recent.long_s

    def submit(self, batch: Batch) -> asyncio.Future[BatchOutput]:
        """Queue a step; see `Executor`. After `close` the future fails at once."""
        future: asyncio.Future[BatchOutput] = self._loop.create_future()
        if self.is_closed:
            future.set_exception(BatchFailedError(batch.step_id, "the executor is closed"))
        else:
            self._thread.put(lambda: self._run(batch, future))
        return future

    def copy(self, copy: HostCopy) -> asyncio.Future[None]:
        """Queue a copy; see `Executor`. After `close` the future fails at once."""
        future: asyncio.Future[None] = self._loop.create_future()
        if self.is_closed:
            future.set_exception(CopyFailedError(copy.copy_id, "the executor is closed"))
        else:
            self._thread.put(lambda: self._begin_copy(copy, future))
        return future

    async def close(self) -> None:
        """Finish what is queued, end the thread and close the runner. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            self._thread.put(self._end)
            self._thread.put(None)
        await asyncio.shield(self._ended)
        self._thread.join()

    def _end(self) -> None:
        """Close the runner behind all that is under way."""
        if self._lander is not None:
            self._lander.close()
        for copier in self._copiers.values():
            copier.close()
        self._runner.close()
        self._call(_succeed, self._ended, None)

    def _run(self, batch: Batch, future: asyncio.Future[BatchOutput]) -> None:
        launched = self._tried(batch, future, lambda: self._runner.launch(batch))
        if launched is None:
            return
        if self._lander is None or launched.is_done:
            self._land(batch, launched, future)
        else:
            self._lander.put(lambda: self._land(batch, launched, future))

    def _land(self, batch: Batch, launched: Launched, future: asyncio.Future[BatchOutput]) -> None:
        output = self._tried(batch, future, launched.end)
        if output is not None:
            self._call(self._succeed_step, future, output)

    def _succeed_step(self, future: asyncio.Future[BatchOutput], output: BatchOutput) -> None:
        self._recent.note(output.duration_s)
        _succeed(future, output)

    def _tried(self, batch: Batch, future: asyncio.Future[BatchOutput], act: Callable[[], T]) -> T | None:
        """Return what `act` does; None: it has failed, and the future knows."""
        try:
            return act()
        except BatchFailedError as error:
            self._call(_fail, future, error)
        except Exception as error:  # the thread's supervisor: whatever went wrong fails this batch
            cause = f"{type(error).__name__}: {error}"
            self._call(_fail, future, BatchFailedError(batch.step_id, cause))
        return None

    def _begin_copy(self, copy: HostCopy, future: asyncio.Future[None]) -> None:
        """Copy, or have it copied beside the steps to come."""
        if self._copiers:
            self._copiers[copy.to_host].put(lambda: self._copy(copy, future))
        else:
            self._copy(copy, future)

    def _copy(self, copy: HostCopy, future: asyncio.Future[None]) -> None:
        try:
            self._runner.copy(copy)
        except CopyFailedError as error:
            self._call(_fail, future, error)
        except Exception as error:  # as above
            self._call(_fail, future, CopyFailedError(copy.copy_id, f"{type(error).__name__}: {error}"))
        else:
            self._call(_succeed, future, None)

    def _call(self, settle: Callable[[asyncio.Future[T], R], None], future: asyncio.Future[T], result: R) -> None:
        """Settle a future on its loop."""
        try:
            self._loop.call_soon_threadsafe(settle, future, result)
        except RuntimeError:
            return  # the loop is closed: nobody is left to hear of it


class _Thread:
    """A thread that does one thing after the other."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None] | None) -> None:
        """Have something done behind what is queued; None: the thread ends then."""
        self._queue.put(work)

    def join(self) -> None:
        """Return when the thread has ended."""
        self._thread.join()

    def close(self) -> None:
        """Return when everything is done and the thread has ended."""
        self.put(None)
        self.join()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work()


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():  # it may have been cancelled
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: BatchFailedError | CopyFailedError) -> None:
    if not future.done():
        future.set_exception(error)
