"""The driver: submits the engine's batches, takes in what comes back, passes events on. Its only wait is `wake`."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections import deque
from collections.abc import Callable
from enum import Enum
from math import isinf

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import BatchFailedError, CopyFailedError, Executor
from services.worker.engine.engine import Engine
from services.worker.engine.gate import StepGate
from services.worker.sequences.events import NO_EVENTS, StepEvents

_MIN_TIMER_S = 0.001
"""Event loops do not keep shorter timers."""


class StepPace(Enum):
    """What a step loop is at."""

    STEPPING = "stepping"  # a step or a copy is under way, or the next one is about to be chosen
    AT_REST = "at rest"  # the scheduler has found nobody to run
    HELD_UP = "held up"  # no step can be made: the gate is wanted or held, or there is no executor


class ExecutorBrokenError(Exception):
    """The fault is not a sequence's but the executor's: too many steps failed in a row, or it is lost."""

    def __init__(self, num_failures: int, cause: str) -> None:
        super().__init__(f"{num_failures} steps failed in a row, the last one with: {cause}")
        self.num_failures = num_failures
        self.cause = cause


class StepLoop:
    """Runs one engine on one executor. Who changes the engine from outside calls `wake`."""

    def __init__(  # noqa: PLR0913  one argument per part that is joined here
        self,
        engine: Engine,
        executor: Executor,
        emit: Callable[[StepEvents], None],
        now: Callable[[], float],
        gate: StepGate,
        *,
        max_failures: int = 16,
        on_step: Callable[[Batch, BatchOutput], None] | None = None,
        on_lost: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Begin with nothing in flight.

        Args:
            engine: driven by this loop alone.
            executor: runs the batches.
            emit: takes the events of a step while the next step runs; must not block.
            now: the worker's clock, seconds.
            gate: handed over between steps to whoever wants it.
            max_failures: steps that may fail in a row before the executor counts as broken. One guilty row costs about
                log2(max_batch_rows) + 2.
            on_step: told of every step that succeeded, after it was absorbed; must be quick.
            on_lost: told why the executor is lost. True: somebody sees to another one, and calls `mended`; no step is
                made until then. False: the loop ends.
        """
        self._engine = engine
        self._executor = executor
        self._emit = emit
        self._now = now
        self._gate = gate
        self._max_failures = max_failures
        self._on_step = on_step
        self._on_lost = on_lost
        self._is_lost = False
        self._num_failures = 0
        self._flight: deque[tuple[Batch, Future[BatchOutput]]] = deque()
        self._copies: dict[int, Future[None]] = {}
        self._events = NO_EVENTS
        self._begun_s = 0.0
        self._has_nobody = self._is_held = False
        self._wake = asyncio.Event()
        self._closing = False
        gate.attach(self.wake)

    @property
    def step_age_s(self) -> float:
        """Seconds for which the executor has been busy with the step that it runs now; 0 if it has none."""
        return self._now() - self._begun_s if self._flight else 0.0

    @property
    def pace(self) -> StepPace:
        """What it is at."""
        if self._flight or self._copies:
            return StepPace.STEPPING
        if self._is_held or self._gate.wanted or self._is_lost:
            return StepPace.HELD_UP
        return StepPace.AT_REST if self._has_nobody and not self._wake.is_set() else StepPace.STEPPING

    def wake(self) -> None:
        """Look at the engine again."""
        self._wake.set()

    def mended(self) -> None:
        """There is an executor again."""
        self._is_lost = False
        self.wake()

    def close(self) -> None:
        """Submit nothing more; `run` returns once what is in flight has come back and its events are emitted.

        Copies to host memory are not waited for: the executor ends them when it is closed.
        """
        self._closing = True
        self.wake()

    async def run(self) -> None:
        """Drive the engine until `close`.

        Raises:
            ExecutorBrokenError: too many steps failed in a row, or the executor is lost.
        """
        try:
            while not (self._closing and not self._flight):
                self._wake.clear()
                if self._copies:
                    self._take_in_copies()
                self._fill()
                self.flush()
                if self._flight and self._flight[0][1].done():
                    self._begun_s = self._now()  # of the next one, if one is queued
                    self._take_in(*self._flight.popleft())
                    continue
                await self._rest()
            self.flush()
        finally:
            self._gate.close()

    def _fill(self) -> None:
        while not (self._gate.wanted or self._closing or self._is_lost) and len(self._flight) < self._executor.depth:
            batch = self._engine.next_batch(self._now())
            self._has_nobody = batch is None
            for copy in self._engine.take_copies():
                self._copies[copy.copy_id] = copying = self._executor.copy(copy)
                copying.add_done_callback(self._on_done)
            if batch is None:
                return
            future = self._executor.submit(batch)
            future.add_done_callback(self._on_done)
            if not self._flight:
                self._begun_s = self._now()
            self._flight.append((batch, future))

    def flush(self) -> None:
        """Pass on what has happened to sequences and was not passed on yet.

        The loop does so by itself: the events of a step while the next one runs.
        """
        events, ends = self._events, self._engine.registry.take_events()
        self._events = NO_EVENTS
        if len(ends):
            events = StepEvents.concatenate([events, ends])
        if len(events):
            self._emit(events)

    def _take_in(self, batch: Batch, future: Future[BatchOutput]) -> None:
        try:
            output = future.result()
        except BatchFailedError as error:
            self._num_failures += 1
            self._events = self._engine.roll_back(batch, error, self._now())
            if error.is_lost:
                self._give_up()
                self._is_lost = self._on_lost(error.cause)
            if self._is_lost:
                self._num_failures = 0
            elif error.is_lost or self._num_failures >= self._max_failures:
                raise ExecutorBrokenError(self._num_failures, error.cause) from error
        else:
            self._num_failures = 0
            self._events = self._engine.absorb(batch, output, self._now())
            if self._on_step is not None:
                self._on_step(batch, output)

    def _give_up(self) -> None:
        """Roll the other lanes back, which have failed as well, and say what is left to say."""
        while self._flight:
            batch, future = self._flight.popleft()
            error = future.exception() if future.done() else None
            if isinstance(error, BatchFailedError):
                self._num_failures += 1
                events = self._engine.roll_back(batch, error, self._now())
                self._events = StepEvents.concatenate([self._events, events])
        self.flush()

    def _take_in_copies(self) -> None:
        """Let the engine know of the copies that have ended, in the order in which they began."""
        for copy_id in [copy_id for copy_id, copying in self._copies.items() if copying.done()]:
            error = self._copies.pop(copy_id).exception()
            if error is not None and not isinstance(error, CopyFailedError):
                raise error
            self._engine.copied(copy_id, done=error is None)

    async def _rest(self) -> None:
        if self._gate.wanted and not (self._flight or self._copies):
            self._is_held = True
            await self._gate.hand_over()
            self._is_held = False
            return
        timer = None if self._flight else self._timer()
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _timer(self) -> asyncio.TimerHandle | None:
        """Wake when a sequence that cannot run now expires, or the scheduler wants to look again."""
        engine, now_s = self._engine, self._now()
        at_s = min(engine.registry.next_expiry_s, engine.ahead.next_look_s)
        if not engine.table.num_sequences or isinf(at_s):
            return None
        return asyncio.get_running_loop().call_later(max(at_s - now_s, _MIN_TIMER_S), self.wake)

    def _on_done(self, _future: Future[BatchOutput] | Future[None]) -> None:
        self._wake.set()
