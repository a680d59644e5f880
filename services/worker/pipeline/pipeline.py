"""The leader of a pipeline as an `Executor`: it hands every batch to all stages, and takes in what the last one says.

              submit(batch)                     stage 0 ──activation──► stage 1 ──activation──► stage 2
    engine ──────────────────► post to all ──►    ▲                       ▲                       │
           ◄────────────────── future ◄───────────┼───── StepDone or StepFailed, in order ────────┘

Several batches are in flight, one per stage. A step that fails fails alone: it goes through the remaining stages as a
failure, so the order is kept and the other lanes are not touched. A stage or a channel that dies breaks the pipeline:
all futures fail, and all that come later; no stage goes on by itself. Copies to host memory and back are done when
every stage has done its layers' share.

Source: KunServe v2, sections 3 and 4.3 (a group runs its requests as a pipeline). Deviations: none.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import BatchFailedError, CopyFailedError, HostCopy, KvCapacity
from services.worker.executor.recent_steps import RecentSteps
from services.worker.pipeline.stage_messages import CopyEnded, Durations, KvOver, StageMessage, StepDone, StepFailed


class StageGroup(Protocol):
    """The stages, as the leader reaches them: its own and, over channels, the members'."""

    @property
    def num_stages(self) -> int:
        """How many there are."""

    @property
    def capacity(self) -> KvCapacity:
        """What every stage has, so the least of all."""

    def attach(self, on_message: Callable[[StageMessage], None], on_lost: Callable[[str], None]) -> None:
        """Name who hears what stages say, and once, with the reason, that the pipeline is broken; both on the loop."""

    def post(self, message: Batch | HostCopy | KvOver) -> None:
        """Send to every stage, behind what was sent before. Does not block, and raises nothing."""

    async def close(self) -> None:
        """End all stages; nothing is in flight, or the pipeline is broken. Idempotent."""


@dataclass(frozen=True, slots=True)
class PipelineStats:
    """How busy the stages were, since the pipeline was made."""

    busy_s: Durations
    """By stage: time that it spent in steps, failed ones included, by its own clock."""
    span_s: float
    """Time during which a batch was in flight, by the leader's clock."""


@dataclass(slots=True)
class _Copying:
    future: Future[None]
    num_left: int
    """Stages that have not answered."""
    cause: str | None = None
    """Of the first failure."""


class PipelineExecutor:
    """An `Executor` over the stages of a group. Lives on the running event loop.

    Args:
        stages: wired; owned from now on.
        now: the leader's clock, seconds, for `stats`.
        on_broken: called once, with the reason, if the pipeline breaks before it is closed.
    """

    def __init__(
        self, stages: StageGroup, now: Callable[[], float], on_broken: Callable[[str], None] = lambda _: None
    ) -> None:
        self._stages = stages
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._pending: deque[tuple[Batch, Future[BatchOutput]]] = deque()
        self._copies: dict[int, _Copying] = {}
        self._lost: str | None = None
        self._on_broken = on_broken
        self._busy_s = [0.0] * stages.num_stages
        self._span_s = 0.0
        self._began_s = 0.0
        self._recent = RecentSteps()
        stages.attach(self._on_message, self._on_lost)

    @property
    def depth(self) -> int:
        """One batch in flight per stage."""
        return self.num_lanes

    @property
    def num_lanes(self) -> int:
        """One per stage."""
        return self._stages.num_stages

    @property
    def capacity(self) -> KvCapacity:
        """KV memory that every stage has."""
        return self._stages.capacity

    @property
    def stats(self) -> PipelineStats:
        """How busy the stages were up to now."""
        running_s = self._now() - self._began_s if self._pending else 0.0
        return PipelineStats(tuple(self._busy_s), self._span_s + running_s)

    @property
    def recent_step_s(self) -> float:
        """How long a step with prompts was in the stages lately, seconds; 0 before the first one."""
        return self._recent.long_s

    def submit(self, batch: Batch) -> Future[BatchOutput]:
        """Queue a step; see `Executor`. Once the pipeline is broken the future fails at once."""
        future: Future[BatchOutput] = self._loop.create_future()
        if self._lost is not None:
            future.set_exception(BatchFailedError(batch.step_id, self._lost, is_lost=True))
            return future
        if not self._pending:
            self._began_s = self._now()
        self._pending.append((batch, future))
        self._stages.post(batch)
        return future

    def copy(self, copy: HostCopy) -> Future[None]:
        """Begin to copy blocks on every stage; see `Executor`."""
        future: Future[None] = self._loop.create_future()
        if self._lost is not None:
            future.set_exception(CopyFailedError(copy.copy_id, self._lost))
            return future
        self._copies[copy.copy_id] = _Copying(future, self._stages.num_stages)
        self._stages.post(copy)
        return future

    def end_writes(self) -> None:
        """Let no stage write KV that comes late: steps that are submitted from now on may use its blocks."""
        if self._lost is None:
            self._stages.post(KvOver())

    async def close(self) -> None:
        """Finish what is queued and end the stages. Idempotent."""
        if self._pending:
            await asyncio.wait([future for _, future in self._pending])
        if self._copies:
            await asyncio.wait([copying.future for copying in self._copies.values()])
        self._lost = self._lost or "the executor is closed"
        await self._stages.close()

    def _on_message(self, message: StageMessage) -> None:
        if self._lost is not None:
            return
        if isinstance(message, CopyEnded):
            self._end_copy(message)
        elif isinstance(message, StepDone | StepFailed):
            self._end_step(message)
        else:
            self._on_lost(f"a stage sent the leader a {type(message).__name__}")

    def _end_step(self, message: StepDone | StepFailed) -> None:
        step_id = message.output.step_id if isinstance(message, StepDone) else message.step_id
        is_expected = self._pending and self._pending[0][0].step_id == step_id
        if not is_expected or len(message.durations_s) != len(self._busy_s):
            self._on_lost(f"the last stage answered step {step_id} out of order")
            return
        _, future = self._pending.popleft()
        for stage, duration_s in enumerate(message.durations_s):
            self._busy_s[stage] += duration_s
        if not self._pending:
            self._span_s += self._now() - self._began_s
        if isinstance(message, StepDone):
            self._recent.note(sum(message.durations_s))
        if future.cancelled():
            return
        if isinstance(message, StepFailed):
            future.set_exception(BatchFailedError(step_id, message.cause, message.rows))
        else:
            future.set_result(replace(message.output, duration_s=sum(message.durations_s)))

    def _end_copy(self, message: CopyEnded) -> None:
        copying = self._copies.get(message.copy_id)
        if copying is None:
            self._on_lost(f"a stage answered copy {message.copy_id}, which nobody asked for")
            return
        copying.num_left -= 1
        copying.cause = copying.cause or message.cause
        if copying.num_left:
            return
        del self._copies[message.copy_id]
        if copying.future.cancelled():
            return
        if copying.cause is None:
            copying.future.set_result(None)
        else:
            copying.future.set_exception(CopyFailedError(message.copy_id, copying.cause))

    def _on_lost(self, reason: str) -> None:
        """Fail everything that is under way, the oldest first."""
        if self._lost is not None:
            return
        self._lost = reason
        if self._pending:
            self._span_s += self._now() - self._began_s
        pending, self._pending = self._pending, deque()
        for batch, future in pending:
            if not future.cancelled():
                future.set_exception(BatchFailedError(batch.step_id, reason, is_lost=True))
        copies, self._copies = self._copies, {}
        for copy_id, copying in copies.items():
            if not copying.future.cancelled():
                copying.future.set_exception(CopyFailedError(copy_id, reason))
        self._on_broken(reason)
