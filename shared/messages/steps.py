"""What a worker remembers of its last steps, and knows of their cost: for whoever fits a cost model. JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.cost import CostModel
from shared.ids import WorkerId
from shared.messages.base import ControlMessage
from shared.types import Value

_Count = Annotated[int, Field(ge=0)]


class StepRecord(Value):
    """One step that succeeded."""

    step_id: _Count
    """Grows with every step; those of failed steps are missing."""
    num_decodes: _Count
    """Rows that computed one token."""
    kv_decode_tokens: _Count
    """KVdec: sum of these rows' context lengths, the new token counted."""
    chunks: tuple[tuple[_Count, _Count], ...] = ()
    """Of each prefill chunk of more than one token: tokens before it (p), tokens in it (c)."""
    duration_s: Annotated[float, Field(ge=0)]
    """By the executor's own clock."""
    period_s: Annotated[float, Field(ge=0)] | None = None
    """From when the step loop had taken in the step before to when it had this one: the duration, what the loop itself
    took, and the time in which there was nothing to run. None for the first step."""

    @property
    def num_tokens(self) -> int:
        """N: tokens that the step computed."""
        return self.num_decodes + sum(size for _, size in self.chunks)


class StepLogPage(ControlMessage):
    """Answer to a worker's `steps`: recent steps from an id on, oldest first, as many as fit one message."""

    kind: Literal["step_log"] = "step_log"
    worker_id: WorkerId
    max_steps: _Count
    """Steps that the worker keeps; 0: it keeps none."""
    next_step_id: _Count
    """What to ask for next: one more than the last step here, or than the last one done."""
    steps: tuple[StepRecord, ...] = ()
    cost: CostModel | None = None
    """What the worker holds a step to cost just now; None: it does not know, or does not say."""
