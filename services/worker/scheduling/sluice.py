"""One urgency for all: readers by what they gain, limits that can be kept, and best effort in what these leave.

    tier `priority`, then all others, by what they gain (`andes.py`; a limit that can be kept
    is a whole experience) ──► memory, tokens, time
        what is left, less a reserve for those to come (`best_effort.py`) ──► best effort, as it came

Source: the project's own design; BROS ("Efficient LLM serving on hybrid real-time and best-effort requests", sections
4 and 5) has two classes in one batch, and its order by residual time is that of limits here. Deviations: its residuals
are per iteration, limits here are part of what a request gains; its blocks that two requests share are not here.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from services.worker.scheduling.andes import AndesScheduler
from services.worker.scheduling.best_effort import BestEffortRule, Remainder
from services.worker.scheduling.sluice_settings import SluiceSettings
from services.worker.scheduling.view import F64, SchedulerView
from shared.api_keys import Tier

URGENT: Final = 2.0**60
"""More than the ratio of any two requests' urgency: tier `priority` comes before all but best effort that is old."""


class SluiceScheduler(AndesScheduler):
    """Keeps what arrives, and who of best effort is the oldest.

    Args:
        **settings: of `SluiceSettings`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._settings = SluiceSettings(**settings)
        self._best_effort = BestEffortRule(self._settings)

    def _left(self, view: SchedulerView) -> Remainder | None:
        """Return what is left for best effort; None: there is none."""
        return self._best_effort.left(view)

    def _weights(self, view: SchedulerView) -> F64 | None:
        """Return by how much more each request counts; None: all are equally urgent, or best effort."""
        is_urgent = view.columns.tier == Tier.PRIORITY
        return np.where(is_urgent, URGENT, 1.0) if is_urgent.any() else None
