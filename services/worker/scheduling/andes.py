"""Readers first: whoever's experience gains most for what serving it takes comes first, others wait for memory.

    all ongoing ── gain: QoE if served - QoE if not, at a horizon ──► priority = gain / (memory + prompt)
        by priority ──► served, while memory lasts and steps stay fast  │  not served: sit out if steps are too slow,
                        and give way if somebody who is served lacks memory
        a step ──► who is served decodes; prompts by priority, as long as the readers' slack allows

While memory is enough for all and steps are as fast as every reader, all are served: then priority only says whose
prompt is computed first. A step of decodes is the same again for a while (`holds_s`), unless something happens.

Source: Andes (arXiv 2404.16283), section 4: the knapsack of token-level scheduling, greedy packing, selective
triggering and the overhead-aware refiner. Deviations: instead of the refiner rows that run count more (`keeps`), which
is its cheap form (`refines` is the paper's); what triggers is the memory that all would need, and not a share of it in
use; a step is bounded by the readers' slack (`StepBudget`), which decides more than who is preempted (measured:
`docs/results/andes.md`).
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, Final

import numpy as np

from services.worker.scheduling.andes_settings import AndesSettings
from services.worker.scheduling.best_effort import Remainder
from services.worker.scheduling.blocks_math import Places, among
from services.worker.scheduling.gain import Gains
from services.worker.scheduling.going_on import go_on
from services.worker.scheduling.lanes import decode_lane, lane_decodes
from services.worker.scheduling.plain import plain_decode
from services.worker.scheduling.plan import StepPlan
from services.worker.scheduling.prediction import period_s
from services.worker.scheduling.ranking import Ranking, rank
from services.worker.scheduling.recompute_or_swap import again_s
from services.worker.scheduling.step_budget import LONGEST_STEP_S, StepBudget
from services.worker.scheduling.view import EMPTY_ROWS, F64, I32, Bool, SchedulerOutput, SchedulerView

MOST_COMING: Final = 128
"""Rows that may come in with one step, the first of the line."""


class AndesScheduler:
    """Keeps nothing from call to call.

    Args:
        **settings: of `AndesSettings`.
    """

    reorders: Final = True
    best_effort_gives_way: Final = True

    def __init__(self, **settings: Any) -> None:
        self._settings = AndesSettings(**settings)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        """Choose the next step."""
        if (plain := plain_decode(view)) is not None and not _is_slow(view):
            return plain
        left = self._left(view)
        ranking, gains = rank(view, self._settings, left, self._weights(view))
        rows, order, is_running = gains.rows.astype(np.int32), ranking.order, ranking.order < view.running.size
        kept, line = order[is_running], rows[order[~is_running]]
        num_kept = np.count_nonzero(is_running[: ranking.num_served])
        plan, victims = StepPlan(view, rows[kept]), kept[num_kept:][::-1]
        served = rows[kept[:num_kept]] if ranking.is_slow else None
        if left is not None:
            num_first = np.count_nonzero(is_running[: ranking.num_first])
            plan.keep_for(rows[kept[:num_first]], rows[kept[num_first:]][::-1])
            line = line[: ranking.num_first - num_first]
        head = plan.head(line) if victims.size and not plan.preempted.size else None
        if head is not None and (not self._settings.refines or _is_worth(view, gains, ranking, rows == head, victims)):
            plan.preempt_for(head, rows[victims])
        plan.budget = budget = self._budget(view, gains)
        if left is None:
            decode_lane(plan, view.cost, served)
            go_on(plan)
            _compute_prompts(plan, np.fromiter(plan.begun, dtype=np.int32), line, rows[order])
        else:
            decodes = lane_decodes(plan, view.cost, served)
            _serve_in_turn(plan, left, decodes, rows[order], ranking.num_in_time, budget)
        if not plan.resumes:  # who gave way now could hold what those share
            plan.rescue()
        return plan.output(self._settings.holds_s)

    def _left(self, view: SchedulerView) -> Remainder | None:
        """Return what is left for those who come last; None: nobody does."""
        return None

    def _weights(self, view: SchedulerView) -> F64 | None:
        """Return [rows of the table] by how much more each request counts; None: all count alike."""
        return None

    def _budget(self, view: SchedulerView, gains: Gains) -> StepBudget | None:
        """Return how much of the prompts the step takes: until the first reader of those who decode has no text.

        Nobody reads what thinks.
        """
        if not self._settings.bounds_steps or view.cost is None or view.cost.token_s <= 0:
            return None
        num_running = view.running.size
        known = gains.known[:num_running]
        decodes = known - view.columns.num_computed.take(view.running) == 1
        read = decodes & ~(np.isnan(view.columns.qoe_speed.take(view.running)) | view.columns.thinks.take(view.running))
        slack_s = -float(gains.late_s[:num_running][read].max(initial=-LONGEST_STEP_S))
        spent_s = view.cost.step_s(int(np.count_nonzero(decodes)), float(known[decodes].sum()), 0)
        return StepBudget(view.cost, spent_s, max(slack_s, self._settings.least_step_s))


def _serve_in_turn(
    plan: StepPlan, left: Remainder, decodes: I32, rows: I32, num_in_time: int, budget: StepBudget | None
) -> None:
    """Choose decodes and prompts, and of those who come last what still fits beside the others'.

    Args:
        plan: nobody is chosen yet.
        left: who comes last, and what they may have.
        decodes: those of the step.
        rows: [n] all rows, who comes first first.
        num_in_time: see `Ranking`.
        budget: of the plan.
    """
    view, is_last = plan.view, left.last
    begun: I32 = np.fromiter(plan.begun, dtype=np.int32)
    line = rows[among(view, rows, np.concatenate([view.preempted, view.waiting]))]
    line, last_line = line[~is_last[line]], line[is_last[line]]
    plan.decode(decodes[~is_last[decodes]])
    go_on(plan)
    _compute_prompts(plan, begun[~is_last[begun]], line, rows)
    plan.decode(decodes[is_last[decodes]][: max(num_in_time - plan.num_decodes, 0)])
    plan.leave_free(left.num_kept_free, line)
    if budget is not None:
        budget.limit_s = min(budget.limit_s, left.step_s)
    _compute_prompts(plan, begun[is_last[begun]], last_line, rows)
    if plan.is_empty:  # who is served lacks blocks; others may go on without any
        plan.decode(plan.decoding)
    if plan.is_empty and not (view.running.size or view.num_in_flight or plan.resumes):
        plan.leave_free(0, EMPTY_ROWS)
        plan.admit(last_line)


def _compute_prompts(plan: StepPlan, begun: I32, line: I32, rows: I32) -> None:
    """Choose prompts that were begun, and rows that come in, by priority; nobody comes in after who does not fit.

    Args:
        plan: decodes are chosen.
        begun: prompts that were begun.
        line: the rows that may come in, who comes first first.
        rows: [n] all of them, and those that run, who comes first first.
    """
    line = line[:MOST_COMING]
    if not begun.size:
        plan.admit(line)
        return
    place = dict(zip(rows.tolist(), range(rows.size), strict=True))  # but for those with a chunk in flight
    coming = set(line.tolist())
    is_full = False
    both = sorted([*begun.tolist(), *coming], key=lambda row: place.get(row, -1))
    for comes_in, group in groupby(both, coming.__contains__):
        some = np.fromiter(group, dtype=np.int32)
        if not comes_in:
            plan.prefill(some)
        elif not is_full:
            is_full = plan.admit(some) is not None


def _is_worth(view: SchedulerView, gains: Gains, ranking: Ranking, is_head: Bool, victims: Places) -> bool:
    """Return whether it gains more to let rows give way for another one than the delay costs all who are served.

    Source: Andes, section 4.3. Deviation: a decision has one such pair at most, for the first who wants to come in.

    Args:
        view: of this moment.
        gains: of all rows.
        ranking: who is served.
        is_head: [n] which row comes in.
        victims: places of those that may give way, in the order in which they go.
    """
    lacking = int(gains.num_blocks[is_head][0]) - view.free_blocks
    going = victims[: int(np.searchsorted(gains.num_blocks[victims].cumsum(), lacking)) + 1]
    gained = ranking.gain[is_head][0] - ranking.gain[going].sum()
    delay_s = float(again_s(view, gains.known[going]).sum())
    return bool(gained > gains.loss(ranking.order[: ranking.num_served], delay_s))


def _is_slow(view: SchedulerView) -> bool:
    """Return whether steps in which all who run decode are slower than some reader."""
    return period_s(view) * float(np.fmax.reduce(view.columns.qoe_speed[view.running], initial=0.0)) > 1
