"""Real time and best effort by turns, one step each.

    step           0           1             2           3            4
    who            real time   best effort   real time   best effort   real time      as each came, in its own queue

A step decodes all of one class that run and takes its prompts, whole ones as long as they fit; those of the other one
sit out, and keep their KV. If blocks run out, who was admitted last gives way, whoever he is. A class that can do
nothing leaves its turn to the other one.

Source: the baseline Round-Robin of BROS, sections 2.2 and 7.1 ("Efficient LLM serving on hybrid real-time and
best-effort requests"). Deviations: none known; the paper does not say who gives way. Andes calls another policy by that
name (`round_robin.py`).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from services.worker.scheduling.lanes import lane_share
from services.worker.scheduling.plan import StepPlan
from services.worker.scheduling.view import I32, Bool, SchedulerOutput, SchedulerView
from shared.api_keys import Tier


class ClassRoundRobinScheduler:
    """Keeps whose turn it is."""

    reorders: Final = False
    best_effort_gives_way: Final = False

    def __init__(self) -> None:
        self._is_best_effort = False

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        """Choose the next step."""
        is_best_effort = view.columns.tier == Tier.FLEX
        plan = StepPlan(view, max_running=view.columns.order.size)
        for turn in (self._is_best_effort, not self._is_best_effort):
            _serve(plan, is_best_effort if turn else ~is_best_effort)
            if not plan.is_empty or plan.resumes:
                self._is_best_effort = not turn
                break
        if plan.is_empty and not plan.resumes:  # whose turn it is lacks blocks; others may go on without any
            plan.decode(plan.decoding)
            plan.prefill()
            plan.rescue()
        return plan.output()


def _serve(plan: StepPlan, is_meant: Bool) -> None:
    """Choose who is meant.

    Args:
        plan: nobody is chosen yet.
        is_meant: [rows of the table]
    """
    view = plan.view
    decoding = plan.decoding[is_meant[plan.decoding]]
    plan.decode(lane_share(view, decoding))
    begun: I32 = np.fromiter(plan.begun, dtype=np.int32)
    plan.prefill(begun[is_meant[begun]])
    if not plan.preempted.size:
        parked: I32 = np.concatenate([view.preempted, view.waiting])
        plan.admit(parked[is_meant[parked]], whole=True)
