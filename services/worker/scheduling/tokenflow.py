"""Buffers first: who has least unread text is served, whoever has enough of it may be parked. A rival of `andes`.

    all ongoing ── unread tokens, value of more, rate ──► in this order, as many as memory holds: the working set
        running and not in it ──► parked, if what is unread lasts until it could be back
        readers together faster than the machine ──► who runs goes on, nobody new comes in

Source: TokenFlow (arXiv 2510.02758, no public code), from its description: working set, parking by buffer, utility
v·t - γ·exp(-buffer) by greedy choice and swaps of neighbours, and first come, first served in overload. Deviations: the
length of an answer is not known beforehand, so the value of a token falls with the share of the tokens so far that is
unread; a decision holds for a while instead of being taken at an interval; swaps are tried where the working set ends;
KV is copied to the host when it gives way and not before, which showed nothing here (`host-copies.md`).
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field

from services.worker.scheduling.blocks_math import Places, blocks_taken, num_known
from services.worker.scheduling.lanes import decode_lane
from services.worker.scheduling.packing import greedy
from services.worker.scheduling.plain import plain_decode
from services.worker.scheduling.plan import StepPlan
from services.worker.scheduling.prediction import Readers
from services.worker.scheduling.view import F64, I32, Bool, SchedulerOutput, SchedulerView
from shared.qoe import token_value
from shared.types import Value

MOST_SWAPS: Final = 16
"""Of neighbours, where the working set ends."""


class TokenflowSettings(Value):
    """What can be set."""

    buffer_factor: Annotated[float, Field(ge=0)] = 2.0
    """µ: who is parked has text for this many times as long as it takes to bring it back."""
    stall_weight: Annotated[float, Field(ge=0)] = 10.0
    """γ: what an empty buffer costs, in tokens."""
    interval_s: Annotated[float, Field(gt=0)] = 0.5
    """t: for so long a choice is looked at, and holds while nothing happens."""


class TokenflowScheduler:
    """Keeps nothing from call to call.

    Args:
        **settings: of `TokenflowSettings`.
    """

    reorders: Final = True

    def __init__(self, **settings: Any) -> None:
        self._settings = TokenflowSettings(**settings)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        """Choose the next step."""
        if (plain := plain_decode(view)) is not None:
            return plain
        running: I32 = view.running
        rows: I32 = np.concatenate([running, view.preempted, view.waiting])
        if running.size and _is_overloaded(view):
            plan = StepPlan(view)
            decode_lane(plan, view.cost)
            plan.prefill()
            plan.rescue()
            return plan.output(self._settings.interval_s)
        num_blocks, capacity = blocks_taken(view, rows)
        order, count, stays = self._working_set(view, rows, num_blocks, capacity)
        is_running, outside = order < running.size, order[count:]
        plan, line = StepPlan(view, rows[order[is_running]]), rows[order[~is_running]]
        victims = outside[(outside < running.size) & ~stays[outside]][::-1]
        if victims.size and (~is_running[:count]).any() and (head := plan.head(line)) is not None:
            plan.preempt_for(head, rows[victims])
        decode_lane(plan, view.cost)
        plan.prefill()
        plan.rescue()
        plan.admit(line)
        return plan.output(self._settings.interval_s)

    def _working_set(self, view: SchedulerView, rows: I32, num_blocks: I32, capacity: int) -> tuple[Places, int, Bool]:
        """Return places of rows, first those of the working set; how many these are; [n] who must not be parked."""
        readers, settings, num_running = Readers.of(view, rows), self._settings, view.running.size
        now_s: F64 = view.now_s - view.columns.arrival_s[rows]
        unread = np.clip(np.ceil((readers.last_s - now_s) / readers.gap_s), 0.0, readers.num)
        value = token_value(unread, readers.num) * settings.interval_s / max(_period_s(view), 1e-3)
        text_s = unread * readers.gap_s
        stays: Bool = text_s < settings.buffer_factor * _back_s(view, rows)
        stays[num_running:] = False
        first = np.lexsort((readers.gap_s, -value, unread, ~stays))
        rank = np.empty(rows.size)
        rank[first] = np.arange(rows.size)
        most = max(view.limits.max_batch_rows * view.limits.num_lanes - view.num_in_flight, 0)
        order, count = greedy(-rank, num_blocks, capacity + 1, most)
        left_s = np.maximum(text_s - settings.interval_s, 0.0)
        utility = value + settings.stall_weight * (np.exp(-left_s) - np.exp(-text_s))
        utility[stays] = np.inf
        _swap_neighbours(order, count, utility, num_blocks, capacity + 1)
        return order, max(count, 1), stays


def _swap_neighbours(order: Places, count: int, utility: F64, num_blocks: I32, capacity: int) -> None:
    """Let rows behind the end of the working set change places with those before it while that is worth more and fits.

    Args:
        order: [n] places; changed.
        count: of the first, which are the working set.
        utility: [n] of having each in it.
        num_blocks: [n] that each takes.
        capacity: blocks that there are.
    """
    free = capacity - int(num_blocks[order[:count]].sum())
    for i in range(min(MOST_SWAPS, count, order.size - count)):
        inside, outside = order[count - 1 - i], order[count + i]
        more = int(num_blocks[outside] - num_blocks[inside])
        if utility[outside] > utility[inside] and more <= free:
            order[count - 1 - i], order[count + i] = outside, inside
            free -= more


def _period_s(view: SchedulerView) -> float:
    """Return how long a step of those who run takes; 0 if nobody knows."""
    known = float(num_known(view.columns, view.running).sum())
    return 0.0 if view.cost is None else view.cost.step_s(max(view.running.size, 1), known, 0)


def _back_s(view: SchedulerView, rows: I32) -> F64:
    """Return [n]: how long it takes until a row that is parked now can be back: copied there and back, or computed."""
    known = num_known(view.columns, rows).astype(np.float64)
    if view.host is not None:
        return 2 * view.host.block_copy_s * known / view.block_size + _period_s(view)
    return np.zeros(rows.size) if view.cost is None else known * view.cost.token_s + _period_s(view)


def _is_overloaded(view: SchedulerView) -> bool:
    """Return whether those who run read faster together than steps of all of them give."""
    speed = view.columns.qoe_speed[view.running]
    return _period_s(view) * float(np.nansum(speed)) > max(view.running.size, 1)
