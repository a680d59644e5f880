"""Readers first: whoever's experience gains most for what serving it takes comes first, others wait for memory.

    all ongoing ── gain: QoE if served - QoE if not, at a horizon ──► priority = gain / (memory + prompt)
        by priority ──► served, while memory lasts  │  not served: give way if somebody who is served lacks memory
        a step ──► all who run decode; prompts by priority, as long as the readers' slack allows

While memory is enough for all, nobody gives way: then priority only says whose prompt is computed first.

Source: Andes (arXiv 2404.16283), section 4: the knapsack of token-level scheduling and its greedy packing. Deviations:
the overhead-aware refiner is replaced by its cheap form, since rows that run count more (`keeps`); a step is bounded by
the readers' slack (`SlackBudget`), which decides more than who is preempted (measured: `docs/results/andes.md`); the
batch size is not searched over.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import groupby
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field

from services.worker.scheduling.blocks_math import num_known
from services.worker.scheduling.lanes import decode_lane
from services.worker.scheduling.packing import greedy
from services.worker.scheduling.plain import plain_decode
from services.worker.scheduling.plan import StepPlan
from services.worker.scheduling.prediction import Readers
from services.worker.scheduling.view import F64, I32, Bool, SchedulerOutput, SchedulerView
from shared.cost import CostModel
from shared.types import Value

LEAST_GAIN: Final = 1e-6
"""Of who gains nothing, so that among them too who takes least comes first."""
PERFECT: Final = 1 - 1e-9
MOST_COMING: Final = 128
"""Rows that may come in with one step, the first of the line."""


class Weighing(StrEnum):
    """What a row's gain is divided by."""

    DENSITY = "density"  # memory and the time of its prompt
    GAIN = "gain"  # nothing: least QoE slack first


class Objective(StrEnum):
    """What is to become best over all readers (section 4.2 of the paper)."""

    AVERAGE = "average"
    MAX_MIN = "max-min"  # the worst experience
    PERFECT = "perfect"  # how many experiences are perfect


class AndesSettings(Value):
    """What can be set, for ablations."""

    horizon_s: Annotated[float, Field(gt=0)] = 30.0
    """How far ahead experiences are compared, beyond the prompt of each."""
    keeps: Annotated[float, Field(ge=1)] = 2.0
    """By how much more a row counts that runs: to preempt it and to bring it back costs something."""
    least_step_s: Annotated[float, Field(gt=0)] = 0.15
    """A step may take so long whatever the slack of readers who are late already."""
    aging_s: Annotated[float, Field(gt=0)] = 600.0
    """Who has been without text for so long counts as if serving it gained all that there is: else who is late already,
    and so gains little, might wait for ever."""
    objective: Objective = Objective.AVERAGE
    weighing: Weighing = Weighing.DENSITY


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
        if (plain := plain_decode(view)) is not None:
            return plain
        running, parked = view.running, np.concatenate([view.preempted, view.waiting])
        rows: I32 = np.concatenate([running, parked])
        num_blocks, capacity = _num_blocks(view, rows)
        priority = self._priority(view, rows, num_blocks / max(capacity, 1))
        is_served = _served(view, rows, num_blocks, capacity, priority)
        order = np.lexsort((-priority, ~is_served))
        kept, line = (rows[order[side]] for side in (order < running.size, order >= running.size))
        plan = StepPlan(view, kept)
        victims: I32 = kept[np.count_nonzero(is_served[: running.size]) :][::-1]
        if victims.size and (head := plan.head(line)) is not None:
            plan.preempt_for(head, victims)
        plan.budget = _budget(view, self._settings.least_step_s)
        decode_lane(plan, view.cost)
        _compute_prompts(plan, line, rows, priority)
        return plan.output()

    def _priority(self, view: SchedulerView, rows: I32, memory: F64) -> F64:
        """Return [n]: what serving each row gains, for the share of the memory and of the time that it takes."""
        columns, cost, horizon_s = view.columns, view.cost, self._settings.horizon_s
        known = num_known(columns, rows)
        done = np.maximum(columns.num_computed[rows], columns.host_tokens[rows]).astype(np.float64)
        prompt_s, period_s = np.zeros(rows.size), 0.0
        if cost is not None:
            left = known - done
            prompt_s = np.where(left > 1, cost.token_s * left + cost.a_s * left * (done + (left + 1) / 2), 0.0)
            period_s = cost.step_s(max(view.running.size, 1), float(known[: view.running.size].sum()), 0)
        if view.host is not None:
            prompt_s = prompt_s + view.host.block_copy_s * columns.host_tokens[rows] / view.block_size
        now_s = view.now_s - columns.arrival_s[rows]
        at_s = now_s + prompt_s + horizon_s
        readers = Readers.of(view, rows)
        gain = self._gain(readers, now_s, now_s + prompt_s + period_s, at_s, period_s) + LEAST_GAIN
        gain += np.clip(readers.late_s(now_s) / self._settings.aging_s, 0.0, 1.0)
        gain[: view.running.size] *= self._settings.keeps
        if self._settings.weighing is Weighing.GAIN:
            return gain
        weighed: F64 = gain / (memory + prompt_s / horizon_s)
        return weighed

    def _gain(self, readers: Readers, now_s: F64, first_s: F64, at_s: F64, period_s: float) -> F64:
        """Return [n]: what it gains to serve each reader, as the objective counts it.

        Args:
            readers: of the rows.
            now_s: [n] this moment.
            first_s: [n] when the next token comes to a row that is served.
            at_s: [n] when experiences are compared.
            period_s: between its tokens.
        """
        waits, objective = readers.qoe(at_s), self._settings.objective
        if objective is Objective.MAX_MIN:
            gain: F64 = np.maximum(readers.qoe(now_s).min() - waits, 0.0)
        else:
            serves = readers.qoe(at_s, readers.served(at_s, first_s, period_s))
            if objective is Objective.PERFECT:
                is_kept = (serves >= PERFECT) & (waits < PERFECT) & (readers.qoe(now_s) >= PERFECT)
                gain = is_kept.astype(np.float64)
            else:
                gain = np.maximum(serves - waits, 0.0)
        return gain


def _compute_prompts(plan: StepPlan, line: I32, rows: I32, priority: F64) -> None:
    """Choose prompts that were begun, and rows that come in, by priority; nobody comes in after who does not fit.

    Args:
        plan: decodes are chosen.
        line: the rows that may come in, who comes first first.
        rows: [n] all of them, and those that run.
        priority: [n]
    """
    begun, line = np.fromiter(plan.begun, dtype=np.int32), line[:MOST_COMING]
    if not begun.size:
        plan.rescue()
        plan.admit(line)
        return
    by_row = dict(zip(rows.tolist(), priority.tolist(), strict=True))  # but for those with a chunk in flight
    coming = set(line.tolist())
    is_full = False
    both = sorted([*begun.tolist(), *coming], key=lambda row: -by_row.get(row, np.inf))
    for comes_in, group in groupby(both, coming.__contains__):
        some = np.fromiter(group, dtype=np.int32)
        if not comes_in:
            plan.prefill(some)
        elif not is_full:
            is_full = plan.admit(some) is not None
    if not plan.resumes:  # who gave way now could hold what those share
        plan.rescue()


def _num_blocks(view: SchedulerView, rows: I32) -> tuple[I32, int]:
    """Return the blocks that each row takes, and the most that they can have together.

    It takes those for its known tokens and one of headroom. What it shares is counted once, for one of those who run.

    Args:
        view: of this moment.
        rows: [n] those that run, and behind them the parked ones.
    """
    needed = -(-num_known(view.columns, rows) // view.block_size)
    missing = np.maximum(needed - view.columns.held_blocks[rows], 0)
    holding: I32 = np.concatenate([view.running, view.preempted])
    own = view.blocks.freeable(holding)
    num_blocks: I32 = needed + 1
    num_blocks[: holding.size] = own + missing[: holding.size] + 1
    coming = 0 if view.host is None else view.host.leaving_blocks
    return num_blocks, view.free_blocks + coming + int(own.sum())


def _served(view: SchedulerView, rows: I32, num_blocks: I32, capacity: int, priority: F64) -> Bool:
    """Return [n] which rows are served, all of them while memory is enough; alone a row may use every block."""
    most = max(view.limits.max_batch_rows * view.limits.num_lanes - view.num_in_flight, 0)
    if rows.size <= most and int(num_blocks.sum()) <= capacity + 1:
        return np.ones(rows.size, dtype=np.bool_)
    taken = greedy(priority, num_blocks, capacity + 1, most)
    if rows.size and not taken.any():
        taken[int(np.argmax(priority))] = True
    return taken


def _budget(view: SchedulerView, least_s: float) -> SlackBudget | None:
    """Return how much of the prompts the step takes: until the first reader of those who decode runs out of text."""
    columns, running = view.columns, view.running
    decodes: I32 = running[num_known(columns, running) - columns.num_computed[running] == 1]
    if view.cost is None or view.cost.token_s <= 0 or not decodes.size:
        return None
    readers = Readers.of(view, decodes)
    slack_s = float((columns.arrival_s[decodes] + readers.last_s + readers.gap_s - view.now_s).min())
    context = float(num_known(columns, decodes).sum())
    return SlackBudget(view.cost, max(slack_s, least_s) - view.cost.step_s(int(decodes.size), context, 0))
