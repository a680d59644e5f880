"""Real time by what is left until its limit, and best effort beside it: BROS's request scheduler.

    real time    residual = limit - since its last group of tokens - what the rest of the group takes
                 by residual, the least first: those who have begun, and those who wait
    best effort  by what of it lies on the host, the fewest blocks first
                 ──► one batch (`residual_packing.py`) of at most so many rows: twice as many as in the last step, or as
                     many as at first, if the least residual was in the way

Who is not chosen sits out, and keeps its KV. Real time that comes in has others give way if it lacks blocks: first best
effort that is not chosen, then best effort that is, then real time that is not, who has most time first; but who comes
back has only best effort give way.

Source: BROS ("Efficient LLM serving on hybrid real-time and best-effort requests"), section 4. Deviations: those of
`residual_packing.py`; one sort, which takes less time here than polling two queues; the oldest of best effort ages
(`best_effort.py`), or it could starve; requests that named no limits have their readers', or the paper's; of a prompt
that waits the whole work counts, as if none of it was cached; one row at a time has others give way, and of real time
only for a first token, or those who are late would take turns in memory, a token each; KV comes back from the host
beside a step, and the row computes in a later one; the mean duration of steps is of those that the worker's model of
its steps foretells, since policies are not asked for all of those that overlap.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from services.worker.scheduling.best_effort import Patience
from services.worker.scheduling.blocks_math import Places, among, missing_blocks, num_known
from services.worker.scheduling.bros_settings import BrosSettings
from services.worker.scheduling.lanes import lane_share
from services.worker.scheduling.plan import StepPlan
from services.worker.scheduling.prediction import period_s
from services.worker.scheduling.residual_packing import BatchRoom, Packed, RowWork, pack
from services.worker.scheduling.view import EMPTY_ROWS, F64, I32, SchedulerOutput, SchedulerView
from shared.api_keys import Tier
from shared.cost import CostModel
from shared.phase_cost import PhaseCost, StepCost, fit_steps

NEWEST_WEIGHT: Final = 0.1
"""Of the newest step in the mean of their durations."""
FREE: Final = StepCost(PhaseCost(0.0, 0.0, 0.0), PhaseCost(0.0, 0.0, 0.0))
"""Nobody knows what a step takes."""


class BrosScheduler:
    """Keeps how many rows a batch may have, how long steps take, and where each request's group of tokens began.

    Args:
        **settings: of `BrosSettings`.
    """

    reorders: Final = True
    best_effort_gives_way: Final = True

    def __init__(self, **settings: Any) -> None:
        self._settings = BrosSettings(**settings)
        self._num_rows = self._settings.base_rows
        self._patience = Patience(self._settings.patience_s)
        self._groups = _Groups(self._settings.group_tokens)
        self._fitted: tuple[CostModel | None, StepCost] = (None, FREE)
        self._period_s = 0.0

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        """Choose the next step."""
        self._period_s = self._period_s or period_s(view)
        rows: I32 = np.concatenate([view.running, view.preempted, view.waiting])
        is_last = view.columns.tier.take(rows) == Tier.FLEX
        others = rows[is_last]
        first = self._patience.overdue(view, others) if others.size else None
        real_time, residual_s = self._by_residual(view)
        if first is not None and (others == first).any():  # it may be in a batch in flight
            others = others[others != first]
            real_time = np.concatenate([np.array([first], dtype=np.int32), real_time])
            residual_s = np.concatenate([[-np.inf], residual_s])
        others = _by_host(view, others)
        packed = self._pack(view, real_time, residual_s, others)
        output = _carry_out(view, packed, real_time, others)
        if self._settings.swaps_whole:
            output = replace(output, preempt_kept=np.zeros_like(output.preempt_kept))
        if output.rows.size:
            self._period_s += NEWEST_WEIGHT * (packed.lasts_s - self._period_s)
        return output

    def _by_residual(self, view: SchedulerView) -> tuple[I32, F64]:
        """Return the rows of real time, and their residuals, the least first; of equal ones those that have begun."""
        rows: I32 = np.concatenate([view.running, view.preempted, view.waiting])
        rows = rows[view.columns.tier.take(rows) != Tier.FLEX]
        residual_s = self._groups.residual_s(view, rows, self._settings, self._period_s)
        order = residual_s.argsort(kind="stable")
        return rows[order], residual_s[order]

    def _pack(self, view: SchedulerView, real_time: I32, residual_s: F64, others: I32) -> Packed:
        """Choose the batch, and how many rows the next one may have."""
        lent = others[view.columns.held_blocks.take(others) > 0]
        room = BatchRoom(
            num_rows=min(self._num_rows, view.limits.max_batch_rows),
            num_free_blocks=view.free_blocks,
            num_lent_blocks=int(view.blocks.freeable(lent).sum()) if lent.size else 0,
            block_copy_s=0.0 if view.host is None else view.host.block_copy_s,
            period_s=self._period_s,
            late_step_s=self._settings.tpot_s,
        )
        if view.cost is not self._fitted[0]:
            self._fitted = view.cost, FREE if view.cost is None else fit_steps(view.cost)
        packed = pack(_work(view, real_time), residual_s, _work(view, others), self._fitted[1], room)
        base = self._settings.base_rows
        self._num_rows = base if packed.is_too_long else min(2 * self._num_rows, max(view.limits.max_batch_rows, base))
        return packed


class _Groups:
    """When each request's last whole group of tokens was there.

    Args:
        num_tokens: of a group; the first token is one by itself.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._order = np.full(0, -1, dtype=np.int64)
        self._begun_s: F64 = np.zeros(0)

    def residual_s(self, view: SchedulerView, rows: I32, settings: BrosSettings, step_s: float) -> F64:
        """Return [n] the seconds that each has for its next token, if the rest of its group follows without a pause."""
        columns, size = view.columns, self._num_tokens
        num_output = columns.num_output.take(rows)
        in_group = np.maximum(num_output - 1, 0) % size
        ttft_s, tpot_s = (columns.slo_ttft_s.take(rows), columns.slo_tpot_s.take(rows))
        ttft_s = _else(_else(ttft_s, columns.qoe_ttft_s.take(rows)), settings.ttft_s)
        tpot_s = _else(_else(tpot_s, 1 / columns.qoe_speed.take(rows)), settings.tpot_s)
        begun_s = self._begun(view, rows, in_group) if size > 1 else columns.last_token_s.take(rows)
        is_first = num_output == 0
        limit_s = np.where(is_first, columns.arrival_s.take(rows) + ttft_s, begun_s + size * tpot_s)
        num_left = np.where(is_first, 1, size - in_group)
        residual: F64 = limit_s - view.now_s - (num_left - 1) * step_s
        return residual

    def _begun(self, view: SchedulerView, rows: I32, in_group: I32) -> F64:
        columns, known = view.columns, self._order.size
        if known < columns.order.size:
            more = columns.order.size - known
            self._order = np.concatenate([self._order, np.full(more, -1, dtype=np.int64)])
            self._begun_s = np.concatenate([self._begun_s, np.zeros(more)])
        new = rows[(in_group == 0) | (self._order[rows] != columns.order[rows])]
        self._order[new], self._begun_s[new] = columns.order[new], columns.last_token_s[new]
        return self._begun_s[rows]


class _Budget:
    """So many tokens of prompts."""

    def __init__(self, num_tokens: int) -> None:
        self._num_left = num_tokens

    def most(self, begin: int) -> int:
        """See `Budget`."""
        return self._num_left

    def take(self, begin: int, num_tokens: int, *, is_cut: bool) -> None:
        """See `Budget`."""
        self._num_left -= num_tokens


def _carry_out(view: SchedulerView, packed: Packed, real_time: I32, others: I32) -> SchedulerOutput:
    """Return the step that has the chosen ones."""
    chosen, added = real_time[packed.real_time], others[packed.best_effort]
    is_running = among(view, np.arange(view.columns.order.size), view.running)
    left, idle = real_time[~among(view, real_time, chosen)], others[~among(view, others, added)]
    kept = np.concatenate([chosen, left, added, idle])
    plan = StepPlan(view, kept[is_running[kept]], max_running=view.columns.order.size)
    line, last_line = chosen[~is_running[chosen]], added[~is_running[added]]
    head = plan.head(line) if line.size else None
    if head is not None:
        is_back = view.columns.num_output[head] > 0 and view.columns.tier[head] != Tier.FLEX
        victims = np.concatenate([idle[::-1], added[::-1], EMPTY_ROWS if is_back else left[::-1]])
        plan.preempt_for(head, victims[is_running[victims]])
    wanted = np.concatenate([chosen, added])
    cut = wanted[wanted.size - (packed.num_cut is not None) :]  # the last one, or nobody
    plan.decode(lane_share(view, plan.decoding[among(view, plan.decoding, wanted)]))
    plan.prefill(wanted[: wanted.size - cut.size])
    others_fit = all(plan.admit(each[~among(view, each, cut)]) is None for each in (line, last_line))
    if others_fit and packed.num_cut is not None:
        plan.budget = _Budget(packed.num_cut)
        plan.prefill(cut)
        plan.admit(cut[~is_running[cut]])
        plan.budget = None
    if plan.is_empty and not plan.resumes:  # who is chosen lacks blocks
        plan.decode(plan.decoding)
        plan.prefill()
        plan.rescue()
        if view.host is None or not (view.host.leaving_blocks or view.host.arriving.size):
            plan.admit()  # else copies make room for who is chosen
    return plan.output()


def _work(view: SchedulerView, rows: I32) -> RowWork:
    """Return what rows would have computed."""
    columns = view.columns
    known = num_known(columns, rows)
    on_host = -(-columns.host_tokens.take(rows) // view.block_size)
    there = np.where(on_host > 0, columns.host_tokens.take(rows), columns.num_computed.take(rows))
    num_tokens = np.maximum(known - there, 1)
    lacking = missing_blocks(view, rows, known)
    return RowWork(
        is_decode=num_tokens == 1,
        num_tokens=num_tokens.astype(np.float64),
        num_context=known.astype(np.float64),
        num_blocks=lacking.astype(np.float64),
        num_on_host=on_host.astype(np.float64),
    )


def _by_host(view: SchedulerView, rows: I32) -> I32:
    """Return rows, with the fewest blocks on the host first; of equal ones who holds blocks, then who came first."""
    columns = view.columns
    on_host = -(-columns.host_tokens.take(rows) // view.block_size)
    order: Places = np.lexsort((columns.order.take(rows), columns.held_blocks.take(rows) == 0, on_host))
    return rows[order]


def _else(limit_s: F64, other: F64 | float) -> F64:
    """Return the limits that are known, and others for the rest."""
    return np.where(np.isfinite(limit_s), limit_s, other)
