"""Stall-free batching: every step decodes all running sequences and fills the rest of its token budget with prefill.

Source: Sarathi-Serve (Agrawal et al., 2024), section 4 and its scheduling algorithm: decodes first, then the prefills
that are under way, then new ones, each cut to what the token budget leaves. Deviations: KV memory is given block by
block, so a sequence may be preempted (the one admitted last first), as in vLLM; and a sequence is admitted only when
all its known tokens fit.
"""

from __future__ import annotations

from math import inf
from typing import Final

from services.worker.scheduling.lanes import decode_lane
from services.worker.scheduling.plain import plain_decode
from services.worker.scheduling.plan import StepPlan
from services.worker.scheduling.view import SchedulerOutput, SchedulerView


class ChunkedScheduler:
    """First come, first served, with chunked prefill."""

    reorders: Final = False

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        """Choose the next step."""
        if (plain := plain_decode(view)) is not None:
            return plain
        plan = StepPlan(view)
        decode_lane(plan)
        plan.prefill()
        plan.rescue()
        if not plan.preempts:
            plan.admit()
        return plan.output(holds_s=inf)
