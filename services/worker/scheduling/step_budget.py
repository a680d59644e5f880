"""How long a step may take, as a `Budget` of prompts."""

from __future__ import annotations

from typing import Final

from shared.cost import CostModel

LONGEST_STEP_S: Final = 3600.0
"""No limit."""


class StepBudget:
    """Takes prompts as long as the step takes no longer than it may.

    Args:
        cost: of a step.
        spent_s: what it takes already.
        limit_s: what it may take; one token is always taken.
    """

    def __init__(self, cost: CostModel, spent_s: float, limit_s: float) -> None:
        self._cost = cost
        self._spent_s = spent_s
        self.limit_s = limit_s
        self._is_untouched = True

    def most(self, begin: int) -> int:
        """See `Budget`."""
        return max(self._cost.largest(begin, self.limit_s - self._spent_s), int(self._is_untouched))

    def take(self, begin: int, num_tokens: int, *, is_cut: bool) -> None:
        """See `Budget`."""
        self._spent_s += self._cost.chunk_s(begin, num_tokens)
        self._is_untouched = False
