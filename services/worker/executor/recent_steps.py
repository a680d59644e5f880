"""How long the last steps took, for who has to guess how long the next ones will."""

from __future__ import annotations

from collections import deque
from statistics import median

NUM_RECENT = 32


class RecentSteps:
    """Durations of the last steps. One thread notes, another may read when no step is under way."""

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=NUM_RECENT)

    def note(self, duration_s: float) -> None:
        """Remember a step that succeeded."""
        self._durations_s.append(duration_s)

    @property
    def median_s(self) -> float:
        """The middle one, so that a long prompt among decodes does not count; 0 before the first step."""
        return median(self._durations_s) if self._durations_s else 0.0
