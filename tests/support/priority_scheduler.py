"""A policy by priority, as one that weighs readers would be: made of the plan's parts and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from services.worker.scheduling.lanes import lane_share
from services.worker.scheduling.plan import StepPlan
from services.worker.scheduling.view import F64, I32, Bool, SchedulerOutput, SchedulerView

Weigh = Callable[[SchedulerView, I32], F64]
Pause = Callable[[SchedulerView, I32], Bool]


def weight_by_name(view: SchedulerView, rows: I32) -> F64:
    """A weight that a sequence keeps for its whole life and that has nothing to do with when it came."""
    return (view.columns.order[rows] * 7919 % 31).astype(np.float64)


def readers_with_text(lead_s: float) -> Pause:
    """Pause sequences whose readers are busy for so long with the text that they have."""

    def pause(view: SchedulerView, rows: I32) -> Bool:
        columns = view.columns
        busy: Bool = columns.arrival_s[rows] + columns.qoe_last_s[rows] > view.now_s + lead_s
        return busy

    return pause


@dataclass
class PriorityScheduler:
    """The highest priority first in everything; among equals who came first.

    One prompt goes on in a step, the others keep what is computed of them; twice as many rows may hold KV as may be in
    steps.

    Args:
        weigh: the priorities of some rows.
        pause: which running rows do not go on in this step though they keep their KV, unless nobody else can.
    """

    weigh: Weigh
    pause: Pause
    reorders: ClassVar[bool] = True
    best_effort_gives_way: ClassVar[bool] = True

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        order, line = self._sorted(view, view.running), self._sorted(view, np.append(view.preempted, view.waiting))
        limits = view.limits
        plan = StepPlan(view, order, 2 * limits.max_batch_rows * limits.num_lanes)
        head, first = plan.head(line), -np.inf
        if head is not None:
            first = self.weigh(view, np.array([head], dtype=np.int32))[0]
            if plan.preempt_for(head, order[self.weigh(view, order) < first][::-1]):
                plan.admit(line)
        decoding = plan.decoding
        plan.decode(lane_share(view, decoding[~self.pause(view, decoding)]))
        begun = self._sorted(view, np.fromiter(plan.begun, dtype=np.int32))
        if not plan.preempted.size and (self.weigh(view, begun) < first).all():
            plan.admit(line)
        plan.prefill(begun[:1])
        if plan.is_empty:
            plan.decode(plan.decoding)
            plan.prefill(begun)
        plan.rescue()
        if not plan.preempted.size:
            plan.admit(line)
        return plan.output()

    def _sorted(self, view: SchedulerView, rows: I32) -> I32:
        rows = rows.astype(np.int32)
        in_order: I32 = rows[np.lexsort((view.columns.order[rows], -self.weigh(view, rows)))]
        return in_order
