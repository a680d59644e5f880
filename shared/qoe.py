"""QoE of many streams at once: the constant-time form of `sluice_client.qoe.QoeState` over numpy columns.

Per stream three numbers describe the past: n tokens delivered, `last` (when the newest of them is displayed) and D (the
sum of the display delays). All times are seconds since the stream's own arrival. A stream without a reader has NaN for
its target; NaN then goes through every result and disturbs no other row.

    lag     = last - ideal[n] ≥ 0                         ideal[i] = ttft + (i - 1) / speed
    deliver k tokens at d:   lag ← max(lag, d - ideal[n + 1]);   n ← n + k;   D ← D + k · lag
    W(m, t) = m · (t - ttft) - m · (m - 1) / (2 · speed)  the area that the first m ideal tokens have gathered by t
    QoE(t)  = (W(shown, t) - (D - (n - shown) · lag)) / W(expected, t)

Source: Andes (arXiv 2404.16283), section 2; checked against the sums of the definition. Deviations: none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Bool = NDArray[np.bool_]


def initial_last_s(ttft_s: F64, speed: F64) -> F64:
    """Return `last` of streams without a token: one reading gap before the first token is expected."""
    return ttft_s - 1.0 / speed


def answer_qoe(delivered_s: F64, ttft_s: float, speed: float) -> float:
    """Return the QoE of one answer that ends with these tokens, in [0, 1]; 0 without any, NaN without a reader.

    A token's lag behind its ideal instant never falls below the one before, since nobody reads faster than `speed`.

    Args:
        delivered_s: [num_tokens] seconds since its arrival, ascending.
        ttft_s: when the reader expects the first token.
        speed: tokens per second that the reader reads.
    """
    num = delivered_s.size
    if not num:
        return 0.0
    ideal_s = ttft_s + np.arange(num) / speed
    lag_s = np.maximum.accumulate(np.maximum(delivered_s - ideal_s, 0.0))
    whole_s = num * lag_s[-1] + num * (num - 1) / (2 * speed)
    if np.isnan(whole_s):
        return float("nan")
    return 1.0 if whole_s <= 0 else float(np.clip(1 - lag_s.sum() / whole_s, 0.0, 1.0))


@dataclass(frozen=True, slots=True)
class QoeColumns:
    """State of m streams. Methods return new arrays and change nothing."""

    ttft_s: F64
    """[m] expected time to first token; NaN when no reader follows."""
    speed: F64
    """[m] expected tokens per second; NaN when no reader follows."""
    num_tokens: NDArray[np.integer]
    """[m] tokens delivered so far."""
    last_s: F64
    """[m] when the newest token is displayed; `initial_last_s` before any."""
    delay_sum_s: F64
    """[m] D, the sum of the display delays."""

    def take(self, rows: NDArray[np.integer]) -> QoeColumns:
        """Return the state of these rows, in their order."""
        return QoeColumns(
            self.ttft_s[rows], self.speed[rows], self.num_tokens[rows], self.last_s[rows], self.delay_sum_s[rows]
        )

    def lag_s(self) -> F64:
        """Return [m]: by how much the newest token is displayed after its ideal instant, at least 0."""
        lag: F64 = np.maximum(self.last_s - self.ttft_s - (self.num_tokens - 1) / self.speed, 0.0)
        return lag

    def deliver(self, at_s: F64 | float, count: NDArray[np.integer] | int = 1) -> QoeColumns:
        """Return the state after each stream got `count` more tokens at `at_s`.

        Args:
            at_s: [m] or one for all; when they reached the client, not before any delivery so far.
            count: [m] or one for all; 0 leaves a stream as it is.
        """
        before = self.lag_s()
        lag = np.maximum(before, at_s - self.ttft_s - self.num_tokens / self.speed)
        num_tokens = self.num_tokens + count
        last = self.ttft_s + (num_tokens - 1) / self.speed + lag
        unchanged = np.equal(count, 0)
        return replace(
            self,
            num_tokens=num_tokens,
            last_s=np.where(unchanged, self.last_s, last),
            delay_sum_s=np.where(unchanged, self.delay_sum_s, self.delay_sum_s + count * lag),
        )

    def qoe_at(self, t_s: F64 | float, finished: Bool | None = None) -> F64:
        """Return [m]: QoE in [0, 1] as seen at `t_s`; NaN without a reader, 1 while nothing is expected yet.

        Args:
            t_s: [m] or one for all; at or after the last delivery.
            finished: [m] streams that get no more tokens, whose ideal timeline stops at n; None means none of them.
        """
        expected_count = self._ideal_count(t_s)
        if finished is not None:
            expected_count = np.where(finished, np.minimum(expected_count, self.num_tokens), expected_count)
        expected = self._area(expected_count, t_s)
        lag = self.lag_s()
        shown_count = np.minimum(self.num_tokens, self._ideal_count(t_s - lag))
        shown = self._area(shown_count, t_s) - (self.delay_sum_s - (self.num_tokens - shown_count) * lag)
        return self._ratio(shown, expected)

    def final(self) -> F64:
        """Return [m]: QoE if each stream ends with the tokens it has; 0 without any, NaN without a reader."""
        num = self.num_tokens
        lag = self.lag_s()
        whole = num * lag + num * (num - 1) / (2 * self.speed)
        qoe = self._ratio(whole - self.delay_sum_s, whole)
        return np.where((num == 0) & ~np.isnan(self.speed), 0.0, qoe)

    def _ideal_count(self, t_s: F64 | float) -> F64:
        """Return [m]: tokens whose ideal instant is at or before `t_s`."""
        count: F64 = np.maximum(np.floor((t_s - self.ttft_s) * self.speed) + 1, 0.0)
        return count

    def _area(self, count: NDArray[np.integer] | F64, t_s: F64 | float) -> F64:
        area: F64 = count * (t_s - self.ttft_s) - count * (count - 1) / (2 * self.speed)
        return area

    def _ratio(self, part: F64, whole: F64) -> F64:
        """Return part / whole cut to [0, 1]; 1 where the whole is 0, NaN where there is no reader."""
        qoe = np.ones_like(whole)
        np.divide(part, whole, out=qoe, where=whole > 0)
        return np.where(np.isnan(self.speed), np.nan, np.clip(qoe, 0.0, 1.0))
