"""Best effort behind all others, under policies that take who waits as he came.

    running    others, as they came │ best effort      when blocks run out, those go first that came last of the latter
    parked     others, as they came │ best effort      the first of the others that does not fit has best effort give
                                                       way; none of it comes in while one of them does not fit

Without best effort it is as if this were not here. Nobody of it grows old here: it ends when others leave room.
"""

from __future__ import annotations

import numpy as np

from services.worker.scheduling.plan import StepPlan
from services.worker.scheduling.view import I32, SchedulerView
from shared.api_keys import Tier


class FlexLast:
    """One step in the making, and who may come in.

    Args:
        view: of this moment. Of best effort who runs gives way already if one of the others who wait needs its blocks.
    """

    def __init__(self, view: SchedulerView) -> None:
        running, self._runs_last = _split(view, view.running)
        self._others, self._last = _split(view, np.concatenate([view.preempted, view.waiting]))
        self.plan = StepPlan(view, np.concatenate([running, self._runs_last]) if self._runs_last.size else None)
        head = self.plan.head(self._others) if self._runs_last.size else None
        if head is not None:
            self.plan.preempt_for(head, self._runs_last[::-1])

    @property
    def line(self) -> I32:
        """[n] parked rows, who comes in first first."""
        return np.concatenate([self._others, self._last])

    def admit(self) -> None:
        """Let come in who fits; nobody while one of the others gives way."""
        gone = self.plan.preempted
        if np.isin(gone, self._runs_last).all() and self.plan.admit(self._others) is None and not gone.size:
            self.plan.admit(self._last)


def _split(view: SchedulerView, rows: I32) -> tuple[I32, I32]:
    """Return the rows that are not best effort, and those that are."""
    is_last = view.columns.tier.take(rows) == Tier.FLEX
    return rows[~is_last], rows[is_last]
