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
use; a step is bounded by the readers' slack (`SlackBudget`), which decides more than who is preempted (measured:
`docs/results/andes.md`).
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np

from services.worker.scheduling.andes_settings import AndesSettings
from services.worker.scheduling.blocks_math import Places, blocks_taken
from services.worker.scheduling.gain import Gains
from services.worker.scheduling.lanes import decode_lane
from services.worker.scheduling.packing import batch_sizes, greedy, most_in_time, most_that_fit
from services.worker.scheduling.plain import plain_decode
from services.worker.scheduling.plan import StepPlan
from services.worker.scheduling.prediction import period_s
from services.worker.scheduling.recompute_or_swap import again_s
from services.worker.scheduling.view import F64, I32, Bool, SchedulerOutput, SchedulerView
from shared.cost import CostModel

MOST_COMING: Final = 128
"""Rows that may come in with one step, the first of the line."""


class SlackBudget:
    """Takes prompts as long as the step ends before a reader who decodes runs out of text."""

    def __init__(self, cost: CostModel, limit_s: float) -> None:
        self._cost = cost
        self._left_s = limit_s
        self._is_untouched = True

    def most(self, begin: int) -> int:
        """See `Budget`."""
        return max(self._cost.largest(begin, self._left_s), int(self._is_untouched))

    def take(self, begin: int, num_tokens: int, *, is_cut: bool) -> None:
        """See `Budget`."""
        self._left_s -= self._cost.chunk_s(begin, num_tokens)
        self._is_untouched = False


class Ranking(NamedTuple):
    """Who is served, of some rows, by their places."""

    order: Places
    """[n] who comes first first."""
    num_served: int
    """The first of them."""
    gain: F64
    """[n] what it gains to serve each."""
    is_slow: bool
    """Steps with as many as memory holds are slower than some reader: who is not served sits out."""


class AndesScheduler:
    """Keeps nothing from call to call.

    Args:
        **settings: of `AndesSettings`.
    """

    reorders: Final = True

    def __init__(self, **settings: Any) -> None:
        self._settings = AndesSettings(**settings)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        """Choose the next step."""
        if (plain := plain_decode(view)) is not None and not _is_slow(view):
            return plain
        ranking, gains = self.rank(view)
        rows, order, is_running = gains.rows.astype(np.int32), ranking.order, ranking.order < view.running.size
        kept, line = order[is_running], rows[order[~is_running]]
        num_kept = np.count_nonzero(is_running[: ranking.num_served])
        plan, victims = StepPlan(view, rows[kept]), kept[num_kept:][::-1]
        head = plan.head(line) if victims.size else None
        if head is not None and (not self._settings.refines or _is_worth(view, gains, ranking, rows == head, victims)):
            plan.preempt_for(head, rows[victims])
        if self._settings.bounds_steps:
            plan.budget = _budget(view, gains, self._settings.least_step_s)
        decode_lane(plan, view.cost, rows[kept[:num_kept]] if ranking.is_slow else None)
        _compute_prompts(plan, line, rows[order])
        return plan.output(self._settings.holds_s)

    def rank(self, view: SchedulerView) -> tuple[Ranking, Gains]:
        """Return who of all rows is served: all while memory is enough and steps are as fast as every reader.

        It is at least one: alone a row may use every block.
        """
        rows = np.concatenate([view.running, view.preempted, view.waiting]).astype(np.intp)
        num_blocks, capacity = blocks_taken(view, rows)
        gains, num = Gains(view, rows, num_blocks, capacity, self._settings), rows.size
        most = max(view.limits.max_batch_rows * view.limits.num_lanes - view.num_in_flight, 0)
        fits = num <= most and int(num_blocks.sum()) <= capacity + 1
        largest = num if fits else most_that_fit(num_blocks, capacity + 1, most)
        quickest_s = float(gains.readers.gap_s.min(initial=np.inf))
        is_slow = gains.period_s(largest) > quickest_s
        if fits and not is_slow:
            gain = gains.gain(gains.period_s(num))
            return Ranking(np.argsort(-gains.priority(gain), kind="stable"), num, gain, is_slow), gains
        sizes = [largest]
        if is_slow:
            in_time = most_in_time(gains.period_s, quickest_s, largest)
            sizes = batch_sizes(in_time, largest, self._settings.num_batch_sizes)
        best, most_gained = None, -1.0
        for size in sizes:
            gain = gains.gain(gains.period_s(size))
            order, count = greedy(gains.priority(gain), num_blocks, capacity + 1, size)
            if (gained := float(gain[order[:count]].sum())) > most_gained:
                best, most_gained = Ranking(order, max(count, 1), gain, is_slow), gained
        assert best is not None, "there is a size to try"
        return best, gains


def _compute_prompts(plan: StepPlan, line: I32, rows: I32) -> None:
    """Choose prompts that were begun, and rows that come in, by priority; nobody comes in after who does not fit.

    Args:
        plan: decodes are chosen.
        line: the rows that may come in, who comes first first.
        rows: [n] all of them, and those that run, who comes first first.
    """
    begun, line = np.fromiter(plan.begun, dtype=np.int32), line[:MOST_COMING]
    if not begun.size:
        plan.rescue()
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
    if not plan.resumes:  # who gave way now could hold what those share
        plan.rescue()


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


def _budget(view: SchedulerView, gains: Gains, least_s: float) -> SlackBudget | None:
    """Return how much of the prompts the step takes: until the first reader of those who decode runs out of text."""
    num_running = view.running.size
    known, late_s = gains.known[:num_running], gains.late_s[:num_running]
    decodes = known - view.columns.num_computed.take(view.running) == 1
    count = int(np.count_nonzero(decodes))
    if view.cost is None or view.cost.token_s <= 0 or not count:
        return None
    slack_s = -float(late_s[decodes].max())
    return SlackBudget(view.cost, max(slack_s, least_s) - view.cost.step_s(count, float(known[decodes].sum()), 0))
