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
from services.worker.scheduling.going_on import go_on
from services.worker.scheduling.lanes import decode_lane
from services.worker.scheduling.packing import greedy
from services.worker.scheduling.plain import plain_decode
from services.worker.scheduling.plan import StepPlan
from services.worker.scheduling.prediction import Readers, period_s
from services.worker.scheduling.recompute_or_swap import again_s
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
    best_effort_gives_way: Final = True

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
        order, count = self._working_set(view, rows, num_blocks, capacity)
        is_running, outside = order < running.size, order[count:]
        plan, line = StepPlan(view, rows[order[is_running]]), rows[order[~is_running]]
        victims = outside[outside < running.size][::-1]
        if victims.size and (~is_running[:count]).any() and (head := plan.head(line)) is not None:
            plan.preempt_for(head, rows[victims])
        decode_lane(plan, view.cost)
        go_on(plan)
        plan.prefill()
        plan.rescue()
        plan.admit(line)
        return plan.output(self._settings.interval_s)

    def _working_set(self, view: SchedulerView, rows: I32, num_blocks: I32, capacity: int) -> tuple[Places, int]:
        """Return places of rows, first those of the working set, and how many these are.

        Before all others come those that run and must not be parked: nobody who waits is in the set if not all of them
        are.
        """
        readers, settings, num_running = Readers.of(view, rows), self._settings, view.running.size
        now_s: F64 = view.now_s - view.columns.arrival_s[rows]
        unread = np.clip(np.ceil((readers.last_s - now_s) / readers.gap_s), 0.0, readers.num)
        value = token_value(unread, readers.num) * settings.interval_s / max(period_s(view), 1e-3)
        text_s = unread * readers.gap_s
        stays: Bool = text_s < settings.buffer_factor * (again_s(view, num_known(view.columns, rows)) + period_s(view))
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
        return order, max(count, 1)


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


def _is_overloaded(view: SchedulerView) -> bool:
    """Return whether those who run read faster together than steps of all of them give."""
    speed = view.columns.qoe_speed[view.running]
    return period_s(view) * float(np.nansum(speed)) > max(view.running.size, 1)
