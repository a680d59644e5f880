"""The last steps' shapes and durations, in a bounded ring, for `sluice profile` and for operators.

Noting a step costs an append: the arrays are the batch's own, and are added up only when somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from services.worker.contract.arrays import I32
from services.worker.contract.batch import Batch, BatchOutput
from services.worker.cost.estimate import CostEstimate
from shared.hot import hot_dataclass
from shared.ids import WorkerId
from shared.messages.steps import StepLogPage, StepRecord
from shared.transport.bus import Message
from shared.wire import encode_json, read_index

MAX_PAGE_BYTES = 64 * 1024
"""About the size of an answer: some 500 steps, so that making it does not hold up the event loop."""
_RECORD_BYTES, _CHUNK_BYTES = 144, 16


@hot_dataclass(frozen=True, slots=True)
class _Step:
    step_id: int
    start: I32
    num_tokens: I32
    duration_s: float
    period_s: float | None


class StepLog:
    """Written by the step loop, read on the bus; both on the event loop.

    Args:
        worker_id: named in the answers.
        max_steps: kept; the oldest are forgotten. 0 keeps none.
        now: the worker's clock, seconds.
        cost: what the worker knows of it, told with the steps.
    """

    def __init__(self, worker_id: WorkerId, max_steps: int, now: Callable[[], float], cost: CostEstimate) -> None:
        self._worker_id = worker_id
        self._cost = cost
        self._max_steps = max_steps
        self._now = now
        self._noted_s: float | None = None
        self._steps: deque[_Step] = deque(maxlen=max_steps)
        self._next_step_id = 0

    def note(self, batch: Batch, output: BatchOutput) -> None:
        """Remember a step that succeeded."""
        now_s = self._now()
        period_s = None if self._noted_s is None else now_s - self._noted_s
        self._noted_s = now_s
        self._steps.append(_Step(batch.step_id, batch.start, batch.num_tokens, output.duration_s, period_s))
        self._next_step_id = batch.step_id + 1

    async def read(self, message: Message) -> bytes:
        """Answer with the steps from an id on: the payload is the id in decimal digits, or empty for 0.

        Raises:
            WireError: the payload is no id.
        """
        return encode_json(self.page(read_index(message.data)))

    def page(self, first_step_id: int) -> StepLogPage:
        """Return the steps from this id on, as many as fit one message."""
        records: list[StepRecord] = []
        num_bytes, next_step_id = 0, self._next_step_id
        for step in self._steps:
            if step.step_id < first_step_id:
                continue
            record = _record(step)
            num_bytes += _RECORD_BYTES + _CHUNK_BYTES * len(record.chunks)
            if records and num_bytes > MAX_PAGE_BYTES:
                next_step_id = step.step_id
                break
            records.append(record)
        return StepLogPage(
            worker_id=self._worker_id,
            max_steps=self._max_steps,
            next_step_id=next_step_id,
            steps=tuple(records),
            cost=self._cost.now,
        )


def _record(step: _Step) -> StepRecord:
    """Return the step's figures: rows of one token count as decodes, as in the modelled executor."""
    is_chunk = step.num_tokens > 1
    starts = step.start.astype(np.int64)
    return StepRecord(
        step_id=step.step_id,
        num_decodes=int(np.count_nonzero(~is_chunk)),
        kv_decode_tokens=int((starts[~is_chunk] + 1).sum()),
        chunks=tuple(zip(starts[is_chunk].tolist(), step.num_tokens[is_chunk].tolist(), strict=True)),
        duration_s=step.duration_s,
        period_s=step.period_s,
    )
