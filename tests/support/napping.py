"""A policy that pauses everybody from time to time, and says when it wants to look again."""

from __future__ import annotations

from dataclasses import replace

from services.worker.scheduling.registry import make_scheduler
from services.worker.scheduling.view import EMPTY_ROWS, NO_WAYS, SchedulerOutput, SchedulerView

STEPS_AWAKE = 3
"""Between two naps."""


class Napping:
    """Serves as `chunked` does, but that all sit out for a while after each few steps."""

    reorders = best_effort_gives_way = False

    def __init__(self, nap_s: float = 60.0) -> None:
        self._chunked, self._nap_s, self._left, self._until_s = make_scheduler("chunked"), nap_s, STEPS_AWAKE, 0.0
        self.num_naps = 0

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        if not self._left:
            self._left, self._until_s = STEPS_AWAKE, view.now_s + self._nap_s
            self.num_naps += 1
        if view.now_s < self._until_s:
            nobody = (EMPTY_ROWS, EMPTY_ROWS, EMPTY_ROWS, NO_WAYS, EMPTY_ROWS)
            return SchedulerOutput(*nobody, "nap", next_look_s=self._until_s)
        self._left -= 1
        return replace(self._chunked.schedule(view), holds=False, next_look_s=view.now_s)
