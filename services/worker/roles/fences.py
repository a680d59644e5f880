"""What an order may ask of a worker, whoever sends it: which epoch, and how long steps are held up. Pure.

    epoch    newest ≤ epoch ≤ newest + 2^20      taken once the order has passed all other checks, never before
    hold     ▓▓▓▓▓.....................▓.......  5 s at once, and a fifth of the time over longer

Source: none; of the protocol and its limits the papers say nothing.
"""

from __future__ import annotations

from shared.messages.base import MAX_EPOCH_STEP
from shared.messages.plan import MAX_HOLD_S

HOLD_RATIO = 0.2
"""Share of the time for which plans may hold a worker's steps up while they wait for their planner's word."""
MIN_HOLD_S = 0.5
"""Less is of no use to a plan."""


class EpochFence:
    """The newest epoch that a worker has taken: it only grows, and by no more than `MAX_EPOCH_STEP` an order."""

    def __init__(self) -> None:
        self.newest = 0

    def refusal(self, epoch: int, plan_id: int = 0) -> str | None:
        """Return why nothing is done under an epoch; None: it may be.

        Args:
            epoch: of the order.
            plan_id: that it is about; 0: none.
        """
        if epoch < self.newest:
            return f"epoch {epoch} is over: a planner of epoch {self.newest} has spoken"
        if epoch > self.newest + MAX_EPOCH_STEP:
            return f"epoch {epoch} is more than {MAX_EPOCH_STEP} above {self.newest}, the newest one known here"
        if plan_id > epoch:
            return f"plan {plan_id} is named by a newer epoch than {epoch}, which asks for it"
        return None

    def take(self, epoch: int) -> None:
        """Take the epoch of an order that has passed all checks."""
        self.newest = max(self.newest, epoch)


class HoldBudget:
    """For how long a worker's steps may be held up by plans that wait for a word: spent by waiting, given back by time.

    Args:
        now_s: of this moment.
    """

    def __init__(self, now_s: float) -> None:
        self._left_s = MAX_HOLD_S
        self._at_s = now_s
        self._is_waiting = False

    def left_s(self, now_s: float) -> float:
        """Return how long the next hold may last."""
        return min(self._left_s + HOLD_RATIO * max(now_s - self._at_s, 0.0), MAX_HOLD_S)

    def refusal(self, now_s: float) -> str | None:
        """Return why no plan may hold the steps up now; None: one may."""
        left_s = self.left_s(now_s)
        if left_s >= MIN_HOLD_S:
            return None
        wait_s = (MIN_HOLD_S - left_s) / HOLD_RATIO
        return f"plans that waited for their planners have held its steps up for long; again in {wait_s:.1f} s"

    def begin(self, now_s: float) -> None:
        """A plan holds the steps up from now on."""
        self._left_s, self._at_s, self._is_waiting = self.left_s(now_s), now_s, True

    def end(self, now_s: float) -> None:
        """It has its word, or is given up. Idempotent."""
        if self._is_waiting:
            self._left_s -= max(now_s - self._at_s, 0.0)
            self._at_s, self._is_waiting = now_s, False
