"""How long the last steps took, for who has to guess how long the next ones will."""

from __future__ import annotations

from collections import deque

import numpy as np

NUM_RECENT = 256
LONG_RATIO = 0.9


class RecentSteps:
    """Durations of the last steps. One thread notes, another may read when no step is under way."""

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=NUM_RECENT)

    def note(self, duration_s: float) -> None:
        """Remember a step that succeeded."""
        self._durations_s.append(duration_s)

    @property
    def long_s(self) -> float:
        """Of ten steps nine were as short as this; 0 before the first one.

        Where memory is full the last steps have decodes alone. With new room come the prompts that wait, and steps
        become as long as those were in which memory filled.
        """
        return float(np.quantile(self._durations_s, LONG_RATIO, method="inverted_cdf")) if self._durations_s else 0.0
