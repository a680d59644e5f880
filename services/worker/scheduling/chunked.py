"""Stall-free batching: every step decodes all running sequences and fills the rest of its token budget with prefill.

Source: Sarathi-Serve (Agrawal et al., 2024), section 4 and its scheduling algorithm: decodes first, then the prefills
that are under way, then new ones, each cut to what the token budget leaves. Deviations: KV memory is given block by
block, so a sequence may be preempted (the one admitted last first), as in vLLM; and a sequence is admitted only when
all its known tokens fit.
"""

from __future__ import annotations

from math import inf
from typing import Final

from services.worker.scheduling.flex_last import FlexLast, runs_best_effort
from services.worker.scheduling.going_on import go_on
from services.worker.scheduling.lanes import decode_lane
from services.worker.scheduling.plain import plain_decode
from services.worker.scheduling.plan import StepPlan
from services.worker.scheduling.view import SchedulerOutput, SchedulerView


class ChunkedScheduler:
    """First come, first served, with chunked prefill.

    Args:
        best_effort_gives_way: best effort comes behind all others (`flex_last.py`).
    """

    reorders: Final = False

    def __init__(self, *, best_effort_gives_way: bool = False) -> None:
        self.best_effort_gives_way = best_effort_gives_way

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        """Choose the next step."""
        is_plain = not (self.best_effort_gives_way and runs_best_effort(view))
        if is_plain and (plain := plain_decode(view)) is not None:
            return plain
        output = self._next(view, flex_last=self.best_effort_gives_way)
        if self.best_effort_gives_way and not (output.rows.size or output.resume.size or view.num_in_flight):
            return self._next(view, flex_last=False)  # who gave way would have been for nothing
        return output

    def _next(self, view: SchedulerView, *, flex_last: bool) -> SchedulerOutput:
        in_turn = FlexLast(view) if flex_last else None
        plan = StepPlan(view) if in_turn is None else in_turn.plan
        decode_lane(plan, some=None if in_turn is None else in_turn.served)
        go_on(plan)
        plan.prefill(None if in_turn is None else in_turn.begun)
        plan.rescue()
        if in_turn is not None:
            in_turn.admit()
        elif not plan.preempted.size:
            plan.admit()
        return plan.output(holds_s=0.0 if in_turn is not None and in_turn.runs_last.size else inf)
