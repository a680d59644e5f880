"""What readers will have experienced at some instant to come, if they are served and if they are not. Pure.

The experience at time t compares what is displayed by then with what the reader expects to see:

    QoE(t) = Σ over displayed[i] <= t of (t - displayed[i])  /  Σ over ideal[i] <= t of (t - ideal[i])

and is 1 while nothing is expected. All in constant time per request, from the two sums that the sequence table keeps
(`sequences/qoe_columns.py`): `last`, when the newest token is displayed, and `D`, the sum of all delays so far. Times
are seconds since each request's own arrival.

Who thinks has no reader, and QoE counts nothing of it. Here its tokens count as if they were read at the speed v at
which its thinking is wanted (`ReaderTarget.thinking_speed_tokens_per_s`):

    ideal[i] = ttft + (i - 1) / v        i = 1 .. the tokens of the thinking so far

So it gains by being served as who waits for text does, by at most 1, and can pause while it is ahead of v; who is late
stays late, and ages. By its own QoE it would gain nothing before the thinking ends, whenever that is, and never be
served; counted from the arrival at the reader's speed it would gain less and less, and nothing after a minute.

Source: Andes (arXiv 2404.16283), section 2 and equations (3) to (5). Deviations: a request that does not run is served
from when its prompt is computed or its KV is back, where the paper's section 4.1 lets it begin at once; thinking.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from services.worker.contract.arrays import AnyRows
from services.worker.scheduling.blocks_math import num_known
from services.worker.scheduling.view import F64, SchedulerView

UNREAD_TTFT_S: Final = 60.0
"""A request that nobody reads counts as one whose reader begins to wait after a minute: it comes last, and ages."""
_NOTHING: Final = 1e-300
UNREAD_GAP_S: Final = 1 / 4.8
"""And reads at the default reader's speed."""


@dataclass(frozen=True, slots=True)
class Readers:
    """Of some requests, [n] each: what their readers have seen so far, and what they expect."""

    num: F64
    """Tokens delivered; behind a thinking that has ended, those of the text."""
    last_s: F64
    """When the newest one is displayed; before the first: one gap before it is expected."""
    delay_s: F64
    """Sum of all delays."""
    ttft_s: F64
    """When the first token is expected."""
    gap_s: F64
    """Between two tokens as they are wanted: at the reader's speed, or at that of the thinking."""

    @classmethod
    def of(cls, view: SchedulerView, rows: AnyRows) -> Readers:
        """Return what is known of the readers of some rows."""
        columns = view.columns
        num = (columns.num_output.take(rows) - columns.num_thought.take(rows)).astype(np.float64)
        last_s, delay_s = columns.qoe_last_s.take(rows), columns.qoe_delay_sum_s.take(rows)
        ttft_s, gap_s = columns.qoe_ttft_s.take(rows), columns.qoe_gap_s.take(rows)
        nobody = np.isnan(gap_s)
        if np.count_nonzero(nobody):
            ttft_s[nobody], gap_s[nobody], delay_s[nobody] = UNREAD_TTFT_S, UNREAD_GAP_S, 0.0
            last_s[nobody] = UNREAD_TTFT_S + (num[nobody] - 1) * UNREAD_GAP_S
        return cls(num, last_s, delay_s, ttft_s, gap_s)

    def expected(self, at_s: F64) -> F64:
        """Return the token-seconds of reading that each reader expects by then."""
        return _series(at_s - self.ttft_s, self.gap_s)

    def displayed(self, at_s: F64) -> F64:
        """Return the token-seconds of reading that each has by then if nothing more is delivered."""
        late_s = self.last_s - at_s
        seen: F64 = self.num * (at_s - self.ttft_s - self.gap_s * (self.num - 1) / 2) - self.delay_s
        if np.count_nonzero(late_s > 0):
            buffered = np.minimum(np.ceil(np.maximum(late_s, 0.0) / self.gap_s), self.num)
            seen += buffered * (late_s - self.gap_s * (buffered - 1) / 2)
        return seen

    def served(self, at_s: F64, first_s: F64, period_s: float) -> F64:
        """Return the token-seconds that tokens to come add by then.

        Args:
            at_s: [n] the instant.
            first_s: [n] when the first of them is delivered.
            period_s: between two of them.
        """
        next_s, most = self.last_s + self.gap_s, np.floor((at_s - first_s) / max(period_s, 1e-9)) + 1
        behind_s = period_s - self.gap_s  # by which a buffer shrinks with each token
        num_behind = np.count_nonzero(behind_s > 0)
        if num_behind < behind_s.size:
            fast = _series(at_s - np.maximum(first_s, next_s), self.gap_s, most)
            if not num_behind:
                return fast
        in_buffer = np.floor((self.last_s - first_s + period_s) / np.maximum(behind_s, 1e-9))
        in_buffer = np.maximum(np.minimum(in_buffer, most), 0.0)
        slow = _series(at_s - next_s, self.gap_s, in_buffer)
        slow += _series(at_s - first_s - in_buffer * period_s, period_s, most - in_buffer)
        return slow if num_behind == behind_s.size else np.where(behind_s > 0, slow, fast)

    def late_s(self, now_s: F64) -> F64:
        """Return [n]: for how long each reader has been without text; below 0: for how long it has some still."""
        late_s: F64 = now_s - self.last_s - self.gap_s
        return late_s

    def qoe(self, at_s: F64, more: F64 | float = 0.0) -> F64:
        """Return [n]: the experience at an instant, with so many token-seconds more than what is there."""
        return experience(self.displayed(at_s) + more, self.expected(at_s))


def period_s(view: SchedulerView) -> float:
    """Return how long a step takes in which all who run decode; 0 if nobody knows."""
    running, cost = view.running, view.cost
    return 0.0 if cost is None else cost.step_s(running.size, float(num_known(view.columns, running).sum()), 0)


def experience(seen: F64, expected: F64) -> F64:
    """Return [n] QoE of token-seconds that are seen, of those expected; 1 where nothing is expected yet."""
    known: F64 = np.minimum(np.maximum(seen, 0.0) / np.maximum(expected, _NOTHING), 1.0)
    known[expected <= 0] = 1.0
    return known


def _series(since_s: F64, gap_s: F64 | float, most: F64 | None = None) -> F64:
    """Return the token-seconds of tokens that are displayed with equal gaps, the first of them so long ago.

    Args:
        since_s: [n] below 0: it is still to come.
        gap_s: [n]
        most: [n] tokens that there are; None: as many as have time.
    """
    num = np.floor(since_s / gap_s) + 1
    num = np.maximum(num if most is None else np.minimum(num, most), 0.0)
    seen: F64 = num * (since_s - gap_s * (num - 1) / 2)
    return seen
