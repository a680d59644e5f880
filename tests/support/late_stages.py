"""Stand-ins for devices that compute beside the host: steps that end when they are let, and copies that come late."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest
import torch

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import HostCopy
from services.worker.memory import host_link
from services.worker.pipeline import hidden_link
from services.worker.pipeline.stage import MAX_LAUNCHED, Ended, StageStep
from services.worker.pipeline.stage_messages import Hidden
from sim.devices.modelled_stage import ModelledStage

LIMIT_S = 10.0
"""In which whoever waits gives up."""


class LateStage(ModelledStage):
    """A modelled stage that computes when it launches, and whose steps end later.

    Args:
        stage: whose memory and failures these are; what fails there fails when it is launched.
        hold: called by whoever waits for a step, with its id: returns when it has ended, or raises.

    Attributes:
        notes: what happened, in order.
        num_held: steps that are under way, or whose results are not sent.
        most: of those, at once.
    """

    def __init__(self, stage: ModelledStage, hold: Callable[[int], None]) -> None:
        super().__init__(stage._cost, stage.kv, failure=stage._failure, host=stage._host)
        self.notes: list[str] = []
        self.most = 0
        self._hold = hold
        self.num_held = 0

    def launch(self, batch: Batch, hidden: Hidden | None) -> StageStep:  # type: ignore[override]  # not done at once
        self.notes.append(f"launch {batch.step_id}")
        step = super().launch(batch, hidden)
        self.num_held += 1
        self.most = max(self.most, self.num_held)
        assert self.num_held <= MAX_LAUNCHED
        return _LateStep(self, batch.step_id, step)

    def skip(self, batch: Batch) -> None:
        self.notes.append(f"skip {batch.step_id}")
        super().skip(batch)

    def copy(self, copy: HostCopy) -> None:
        assert not self.num_held
        self.notes.append(f"copy {copy.copy_id}")

    def end_writes(self) -> None:
        assert not self.num_held
        self.notes.append("writes end")

    def close(self) -> None:
        assert not self.num_held, "memory is closed under a step"
        self.notes.append("close")


class _LateStep:
    is_done = False

    def __init__(self, stage: LateStage, step_id: int, step: Ended) -> None:
        self._stage = stage
        self._step_id = step_id
        self._step = step

    def end(self) -> Hidden | BatchOutput:
        self._stage._hold(self._step_id)
        self._stage.notes.append(f"end {self._step_id}")
        return self._step.end()

    def free(self) -> None:
        self._stage.num_held -= 1


class Holding:
    """Lets steps end one after the other, as it is told; a `hold` of a `LateStage`."""

    def __init__(self) -> None:
        self._may_end = threading.Semaphore(0)

    def __call__(self, step_id: int) -> None:
        assert self._may_end.acquire(timeout=LIMIT_S), f"step {step_id} is held for ever"

    def let(self, num_steps: int = 1) -> None:
        """Let so many more steps end."""
        self._may_end.release(num_steps)


class LateEvent:
    """An event that a device gets to some time after it was made."""

    def __init__(self, seconds: float) -> None:
        self._at_s = time.monotonic() + seconds

    def synchronize(self) -> None:
        time.sleep(max(self._at_s - time.monotonic(), 0.0))


def be_beside(patch: pytest.MonkeyPatch, seed: int) -> None:
    """Let the CPU take the paths of a device that computes beside the host, and what it has done be known late."""
    chance = random.Random(seed)
    patch.setattr(host_link, "BESIDE", ("cpu",))
    patch.setattr(host_link, "mark", lambda _device: LateEvent(chance.random() * 0.004))


class LateStream:
    """Does what it is given in order and late, in a thread: what a device does that computes beside the host."""

    def __init__(self, seed: int, most_s: float = 0.002) -> None:
        self._chance = random.Random(seed)
        self._most_s = most_s
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="late stream", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        self._queue.put(work)

    def mark(self, _device: torch.device | None = None) -> _Reached:
        reached = _Reached()
        self._queue.put(reached.set)
        return reached

    def begin_copy(self, source: torch.Tensor, target: torch.Tensor) -> _Reached:
        self.put(lambda: target.copy_(source))
        return self.mark()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            time.sleep(self._chance.random() * self._most_s)
            work()


class _Reached(threading.Event):
    def synchronize(self) -> None:
        assert self.wait(LIMIT_S), "the stream has ended"


@contextmanager
def late_stream(patch: pytest.MonkeyPatch, seed: int) -> Iterator[LateStream]:
    """Let hidden states go to a device and back by way of a stream that is late."""
    stream = LateStream(seed)
    patch.setattr(host_link, "BESIDE", ("cpu",))
    patch.setattr(host_link, "mark", stream.mark)
    patch.setattr(hidden_link, "begin_copy", stream.begin_copy)
    yield stream
    stream.close()
