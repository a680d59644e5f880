"""Best effort behind all others, under policies that take who waits as he came.

    running    others, as they came │ best effort      when blocks run out, those go first that came last of the latter
    parked     others, as they came │ best effort      the first of the others that does not fit has best effort give
                                                       way; none of it comes in while one of them does not fit

While others need more than a quarter of the memory best effort sits out steps, with what KV it has, and none of it
comes in: it would slow their steps, so that they stay longer, with their KV, and come to need all of it.

Without best effort it is as if this were not here. Nobody of it grows old here: it ends when others leave room.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from services.worker.scheduling.blocks_math import blocks_taken
from services.worker.scheduling.plan import StepPlan
from services.worker.scheduling.view import EMPTY_ROWS, I32, Bool, SchedulerView
from shared.api_keys import Tier

MOST_NEEDED: Final = 0.25
"""Of the memory, by others, beside whom best effort is in steps. Higher leaves it more, and others slower steps."""


class FlexLast:
    """One step in the making, and who may come in.

    Args:
        view: of this moment. Of best effort who runs gives way already if one of the others who wait needs its blocks.
    """

    def __init__(self, view: SchedulerView) -> None:
        running, self.runs_last = _split(view, view.running)
        """[n] best effort that runs."""
        self._others, self._last = _split(view, np.concatenate([view.preempted, view.waiting]))
        self.plan = StepPlan(view, np.concatenate([running, self.runs_last]) if self.runs_last.size else None)
        is_here = self.runs_last.size or self._last.size or _split(view, view.extensible)[1].size
        self._sits_out = bool(is_here) and _need_much(view)
        if self._sits_out:
            self._last = EMPTY_ROWS
        head = self.plan.head(self._others) if self.runs_last.size else None
        if head is not None:
            self.plan.preempt_for(head, self.runs_last[::-1])

    @property
    def line(self) -> I32:
        """[n] parked rows that may come in, who does first first."""
        return np.concatenate([self._others, self._last])

    @property
    def served(self) -> I32 | None:
        """[n] running rows that may be in the step; None: all."""
        return _split(self.plan.view, self.plan.view.running)[0] if self._sits_out else None

    @property
    def begun(self) -> I32 | None:
        """[n] prompts that were begun and may be in the step; None: all."""
        if not self._sits_out:
            return None
        return _split(self.plan.view, np.fromiter(self.plan.begun, dtype=np.int32))[0]

    def takes_part(self, rows: I32) -> Bool:
        """Return [n]: which rows may be in the step."""
        takes_part: Bool = (self.plan.view.columns.tier.take(rows) != Tier.FLEX) | (not self._sits_out)
        return takes_part

    def admit(self) -> None:
        """Let come in who fits; nobody while one of the others gives way."""
        gone = self.plan.preempted
        if np.isin(gone, self.runs_last).all() and self.plan.admit(self._others) is None and not gone.size:
            self.plan.admit(self._last)


def runs_best_effort(view: SchedulerView) -> bool:
    """Return whether some of those that run are best effort."""
    return bool((view.columns.tier.take(view.running) == Tier.FLEX).any())


def _need_much(view: SchedulerView) -> bool:
    """Return whether those that are not best effort need so much memory that it sits out."""
    rows = np.concatenate([view.running, view.preempted, view.waiting])
    num_blocks, capacity = blocks_taken(view, rows)
    return int(num_blocks[view.columns.tier.take(rows) != Tier.FLEX].sum()) > MOST_NEEDED * capacity


def _split(view: SchedulerView, rows: I32) -> tuple[I32, I32]:
    """Return the rows that are not best effort, and those that are."""
    is_last = view.columns.tier.take(rows) == Tier.FLEX
    return rows[~is_last], rows[is_last]
