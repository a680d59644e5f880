"""One stage of a pipeline: contiguous layers of the model, and the order in which it runs its steps. No clock, no I/O.

    from the leader   batch 7 ─ batch 8 ─ batch 9            every stage runs every batch, in the leader's order
    from the stage before     activation 7                   so batch 7 can run now; 8 waits for its activation
                                  │
                             launch_step ─► end_step ─► activation 7 behind these layers, or the step's tokens

Where a device computes beside the host, a stage launches the next step that it can run while the one before computes.
A step that fails on one stage goes on through the others as a failure: each of them takes in what its batch says of
rows and blocks, as the executor's contract demands, and computes nothing. The steps before and behind it are not
touched.

Source: KunServe v2, section 4.3 and figure 8 (pipelined execution after a drop). Deviations: none; what a stage does
with the batch ahead of its activation is left open there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import BatchFailedError, HostCopy, KvCapacity
from services.worker.contract.remote import RemoteLostError
from services.worker.pipeline.stage_messages import Activation, Hidden, StepDone, StepFailed
from shared.layers import LayerRange

T = TypeVar("T")
MAX_LAUNCHED = 2
"""Steps of a stage that are launched and not said yet, at most: one that computes, and one behind it."""


class StageStep(Protocol):
    """A step that a stage has launched."""

    @property
    def is_done(self) -> bool:
        """`end` has nothing to wait for."""

    def end(self) -> Hidden | BatchOutput:
        """Return what the step has produced, once, in the order of the steps; from any thread.

        Returns:
            Hidden states behind these layers, which hold until `free`, or on the last stage the step's tokens.

        Raises:
            BatchFailedError: it did not finish.
        """

    def free(self) -> None:
        """Let what `end` has returned be overwritten. Once, behind `end`, whatever that did; from any thread."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A step whose result is known."""

    result: Hidden | BatchOutput | BatchFailedError
    is_done: bool = True

    def end(self) -> Hidden | BatchOutput:
        """Return the result, or raise it; see `StageStep`."""
        if isinstance(self.result, BatchFailedError):
            raise self.result
        return self.result

    def free(self) -> None:
        """Nothing is used again."""


class StageDevice(Protocol):
    """What computes a stage. The first one embeds, the last one samples. Called from one thread at a time."""

    @property
    def layers(self) -> LayerRange:
        """Its layers, numbered in the whole model."""

    @property
    def is_last(self) -> bool:
        """Its layers are the model's last."""

    @property
    def capacity(self) -> KvCapacity:
        """KV memory of its layers. A block of the group is usable if every stage has it."""

    def launch(self, batch: Batch, hidden: Hidden | None) -> StageStep:
        """Begin to compute a step's layers; where the device is the host, they are computed then.

        What the batch says of rows, tables and copies is applied also when the step fails, now or at its end.

        Args:
            batch: the whole step's, as the leader made it.
            hidden: behind the stage before; None on the first stage. Read before this returns.

        Returns:
            The step. No more than `MAX_LAUNCHED` of them have not been freed.

        Raises:
            BatchFailedError: the step did not finish.
        """

    def skip(self, batch: Batch) -> None:
        """Only apply what a batch says of rows, tables and copies: its step has failed on an earlier stage.

        Raises:
            BatchFailedError: it could not be applied; steps after it fail as well.
        """

    def copy(self, copy: HostCopy) -> None:
        """Copy these layers of some blocks between device and host; no step is under way.

        Raises:
            CopyFailedError: it did not finish.
        """

    def end_writes(self) -> None:
        """Let nothing but steps and copies write KV from now on; return when nothing else does. Idempotent.

        No step is under way.
        """

    def close(self) -> None:
        """Give back memory; no step is under way. Idempotent."""


class StageOrderError(Exception):
    """What the leader and the stage before say do not fit together: the pipeline is broken."""


@dataclass(frozen=True, slots=True)
class Work:
    """A step that a stage can run now."""

    batch: Batch
    upstream: Activation | StepFailed | None
    """What the stage before said of it; None on the first stage."""


Outcome = Activation | StepFailed | StepDone
"""What a stage says of a step: to the next one, or the last one to the leader."""


class StageInbox:
    """Joins the two streams of a stage: batches from the leader, and what the stage before says of them.

    It holds no more batches than the leader has in flight, one per stage.

    Args:
        is_first: there is no stage before.
    """

    def __init__(self, *, is_first: bool) -> None:
        self._is_first = is_first
        self._batches: deque[Batch] = deque()
        self._upstream: deque[Activation | StepFailed] = deque()

    def put(self, message: Batch | Activation | StepFailed) -> None:
        """Take a message in; each stream is in order."""
        if isinstance(message, Batch):
            self._batches.append(message)
        elif self._is_first:
            raise StageOrderError("an activation for the first stage")
        else:
            self._upstream.append(message)

    def pop(self) -> Work | None:
        """Return the next step if all of it is here.

        Raises:
            StageOrderError: the two streams speak of different steps.
        """
        if not self._batches or not (self._is_first or self._upstream):
            return None
        batch = self._batches.popleft()
        if self._is_first:
            return Work(batch, None)
        upstream = self._upstream.popleft()
        if upstream.step_id != batch.step_id:
            raise StageOrderError(f"step {upstream.step_id} of the stage before meets step {batch.step_id}")
        return Work(batch, upstream)


def launch_step(device: StageDevice, work: Work) -> StageStep:
    """Launch a step on a device, or take it in if it has failed before; whatever goes wrong fails this step only.

    Raises:
        RemoteLostError: KV that the step needs is lost; no other step of these sequences could succeed.
    """
    batch, upstream = work.batch, work.upstream

    def launch() -> StageStep:
        if isinstance(upstream, StepFailed):
            device.skip(batch)
            return Ended(BatchFailedError(batch.step_id, upstream.cause, upstream.rows))
        return device.launch(batch, None if upstream is None else upstream.hidden)

    launched = _tried(batch, launch)
    return Ended(launched) if isinstance(launched, BatchFailedError) else launched


def end_step(work: Work, step: StageStep) -> Hidden | BatchOutput | BatchFailedError:
    """Wait for a step that `launch_step` has launched; whatever goes wrong fails this step only.

    Raises:
        RemoteLostError: as in `launch_step`.
    """
    return _tried(work.batch, step.end)


def run_step(device: StageDevice, work: Work) -> Hidden | BatchOutput | BatchFailedError:
    """Launch a step on a device that is done with it then, and return its result; see `launch_step`."""
    step = launch_step(device, work)
    assert step.is_done, "somebody has to wait for this device"
    return end_step(work, step)


def _tried(batch: Batch, act: Callable[[], T]) -> T | BatchFailedError:
    """Return what `act` does, or how it has failed."""
    try:
        return act()
    except BatchFailedError as error:
        return error
    except RemoteLostError:
        raise
    except Exception as error:  # the stage's supervisor: the engine looks for the guilty row
        return BatchFailedError(batch.step_id, f"{type(error).__name__}: {error}")


def outcome(work: Work, result: Hidden | BatchOutput | BatchFailedError, duration_s: float) -> Outcome:
    """Return what a stage says of a step that took it so long."""
    durations_s = (*(() if work.upstream is None else work.upstream.durations_s), duration_s)
    if isinstance(result, BatchFailedError):
        return StepFailed(work.batch.step_id, result.cause, result.rows, durations_s)
    if isinstance(result, BatchOutput):
        return StepDone(result, durations_s)
    return Activation(work.batch.step_id, int(work.batch.tokens.size), np.asarray(result), durations_s)
