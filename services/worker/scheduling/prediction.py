"""What readers will have experienced at some instant to come, if they are served and if they are not. Pure.

The experience at time t compares what is displayed by then with what the reader expects to see:

    QoE(t) = Σ over displayed[i] <= t of (t - displayed[i])  /  Σ over ideal[i] <= t of (t - ideal[i])

and is 1 while nothing is expected. All in constant time per request, from the two sums that the sequence table keeps
(`sequences/qoe_columns.py`): `last`, when the newest token is displayed, and `D`, the sum of all delays so far. Times
are seconds since each request's own arrival.

Source: Andes (arXiv 2404.16283), section 2 and equations (3) to (5). Deviation: a request that does not run is served
from when its prompt is computed or its KV is back, where the paper's section 4.1 lets it begin at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from services.worker.scheduling.view import F64, I32, SchedulerView

UNREAD_TTFT_S: Final = 60.0
"""A request that nobody reads counts as one whose reader begins to wait after a minute: it comes last, and ages."""
UNREAD_GAP_S: Final = 1 / 4.8
"""And reads at the default reader's speed."""


@dataclass(frozen=True, slots=True)
class Readers:
    """Of some requests, [n] each: what their readers have seen so far, and what they expect."""

    num: F64
    """Tokens delivered."""
    last_s: F64
    """When the newest one is displayed; before the first: one gap before it is expected."""
    delay_s: F64
    """Sum of all delays."""
    ttft_s: F64
    """When the first token is expected."""
    gap_s: F64
    """Between two tokens, at the reader's speed."""

    @classmethod
    def of(cls, view: SchedulerView, rows: I32) -> Readers:
        """Return what is known of the readers of some rows."""
        columns, speed = view.columns, view.columns.qoe_speed[rows]
        num, nobody = columns.num_output[rows].astype(np.float64), np.isnan(speed)
        if not nobody.any():
            return cls(
                num, columns.qoe_last_s[rows], columns.qoe_delay_sum_s[rows], columns.qoe_ttft_s[rows], 1 / speed
            )
        on_time_s = UNREAD_TTFT_S + (num - 1) * UNREAD_GAP_S
        return cls(
            num,
            np.where(nobody, on_time_s, columns.qoe_last_s[rows]),
            np.where(nobody, 0.0, columns.qoe_delay_sum_s[rows]),
            np.where(nobody, UNREAD_TTFT_S, columns.qoe_ttft_s[rows]),
            np.where(nobody, UNREAD_GAP_S, 1 / speed),
        )

    def expected(self, at_s: F64) -> F64:
        """Return the token-seconds of reading that each reader expects by then."""
        num = np.where(at_s < self.ttft_s, 0.0, np.floor((at_s - self.ttft_s) / self.gap_s) + 1)
        return self._whole(num, at_s)

    def displayed(self, at_s: F64) -> F64:
        """Return the token-seconds of reading that each has by then if nothing more is delivered."""
        late_s = self.last_s - at_s
        buffered = np.clip(np.ceil(late_s / self.gap_s), 0, self.num)
        shown = self._whole(self.num, at_s) - self.delay_s
        seen: F64 = shown + buffered * late_s - self.gap_s * buffered * (buffered - 1) / 2
        return seen

    def served(self, at_s: F64, first_s: F64, period_s: float) -> F64:
        """Return the token-seconds that tokens to come add by then.

        Args:
            at_s: [n] the instant.
            first_s: [n] when the first of them is delivered.
            period_s: between two of them.
        """
        next_s = self.last_s + self.gap_s
        most = np.where(at_s < first_s, 0.0, np.floor((at_s - first_s) / max(period_s, 1e-9)) + 1)
        behind_s = period_s - self.gap_s  # by which a buffer shrinks with each token
        with np.errstate(divide="ignore", invalid="ignore"):
            in_buffer = np.floor((self.last_s - first_s + period_s) / behind_s)
        in_buffer = np.where(behind_s > 0, np.clip(np.nan_to_num(in_buffer), 0, most), 0)
        fast = _series(at_s, np.maximum(first_s, next_s), self.gap_s, most)
        slow = _series(at_s, next_s, self.gap_s, in_buffer)
        slow = slow + _series(at_s, first_s + in_buffer * period_s, np.full_like(at_s, period_s), most - in_buffer)
        added: F64 = np.where(behind_s <= 0, fast, slow)
        return added

    def late_s(self, now_s: F64) -> F64:
        """Return [n]: for how long each reader has been without text; below 0: for how long it has some still."""
        late_s: F64 = now_s - self.last_s - self.gap_s
        return late_s

    def qoe(self, at_s: F64, more: F64 | float = 0.0) -> F64:
        """Return [n]: the experience at an instant, with so many token-seconds more than what is there."""
        expected = self.expected(at_s)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = (self.displayed(at_s) + more) / expected
        known: F64 = np.where(expected > 0, np.clip(found, 0.0, 1.0), 1.0)
        return known

    def _whole(self, num: F64, at_s: F64) -> F64:
        whole: F64 = num * (at_s - self.ttft_s) - self.gap_s * num * (num - 1) / 2
        return whole


def _series(at_s: F64, first_s: F64, gap_s: F64, most: F64) -> F64:
    """Return the token-seconds by `at_s` of at most so many tokens, displayed from `first_s` on with equal gaps."""
    num = np.where(at_s < first_s, 0.0, np.minimum(most, np.floor((at_s - first_s) / gap_s) + 1))
    seen: F64 = num * (at_s - first_s) - gap_s * num * (num - 1) / 2
    return seen
