"""Quality of experience of one streamed answer: the definition, and the same in constant time per token.

Plain arithmetic on floats: no clock, no I/O, no third-party package. All times are seconds since the request's arrival;
tokens are numbered 1..n. With the reader's target (ttft, speed):

    ideal[i]     = ttft + (i - 1) / speed
    displayed[i] = max(ideal[i], delivered[i], displayed[i-1] + 1 / speed)
    S_delay      = sum(displayed[i] - ideal[i])
    S_whole      = sum(displayed[n] - ideal[i])
    QoE          = 1 - S_delay / S_whole

The functions compute this literally and serve as reference; `QoeState` does it in O(1) per token with three numbers.

An answer that thinks first has no reader until its thinking ends. Its tokens are those of its text, and ttft is

    max(ttft, end of the thinking + 1 / speed)

Source: Andes (arXiv 2404.16283), section 3.1, equations (1) to (3). Deviations: an answer without a token scores 0 when
it is over (the paper leaves it undefined); thinking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PERFECT_DELAY_S = 1e-3
"""Largest S_delay of a stream that still counts as perfect, in token-seconds (rounding alone reaches 4e-12)."""


@dataclass(frozen=True, slots=True)
class QoeTarget:
    """What the reader expects: the first token in time, the following ones at reading speed.

    Raises:
        ValueError: a field is not a finite positive number.
    """

    ttft_s: float = 1.0
    """Expected time to the first token, seconds from the request's arrival."""
    speed_tokens_per_s: float = 4.8
    """Expected speed of consumption, tokens per second (mean of the paper's readers)."""

    def __post_init__(self) -> None:
        for name in ("ttft_s", "speed_tokens_per_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a finite number above 0, not {value!r}")


def ideal_times(target: QoeTarget, num_tokens: int) -> list[float]:
    """The instants at which the reader expects tokens 1..num_tokens."""
    return [target.ttft_s + i / target.speed_tokens_per_s for i in range(num_tokens)]


def displayed_times(target: QoeTarget, delivered_s: Sequence[float]) -> list[float]:
    """The instants at which the reading pacer shows the tokens that were delivered at `delivered_s` (in order)."""
    displayed: list[float] = []
    for ideal, delivered in zip(ideal_times(target, len(delivered_s)), delivered_s, strict=True):
        earliest = displayed[-1] + 1 / target.speed_tokens_per_s if displayed else ideal
        displayed.append(max(ideal, delivered, earliest))
    return displayed


def delay_sum(target: QoeTarget, delivered_s: Sequence[float]) -> float:
    """S_delay: how late the displayed timeline runs, summed over tokens, in token-seconds."""
    ideal = ideal_times(target, len(delivered_s))
    return math.fsum(d - i for d, i in zip(displayed_times(target, delivered_s), ideal, strict=True))


def whole_sum(target: QoeTarget, delivered_s: Sequence[float]) -> float:
    """S_whole: the delay if every token were shown with the last one, in token-seconds."""
    if not delivered_s:
        return 0.0
    last = displayed_times(target, delivered_s)[-1]
    return math.fsum(last - i for i in ideal_times(target, len(delivered_s)))


def final_qoe(target: QoeTarget, delivered_s: Sequence[float]) -> float:
    """QoE of a finished answer, in [0, 1] up to rounding; 0 when nothing was delivered.

    One token scores 1 in time and 0 with any delay (S_whole = S_delay): report one-token answers apart.
    """
    if not delivered_s:
        return 0.0
    whole = whole_sum(target, delivered_s)
    return 1.0 if whole <= 0 else 1 - delay_sum(target, delivered_s) / whole


def qoe_at(target: QoeTarget, delivered_s: Sequence[float], t_s: float, *, finished: bool) -> float:
    """QoE of an answer as seen at `t_s`, in [0, 1] up to rounding; 1 while nothing is expected yet.

    Args:
        target: what the reader expects.
        delivered_s: every delivery up to `t_s`, in order.
        t_s: the instant to look at, at or after the last delivery.
        finished: no token will follow; else the ideal timeline runs on past the tokens that exist.
    """
    speed = target.speed_tokens_per_s
    shown = math.fsum(t_s - d for d in displayed_times(target, delivered_s) if d <= t_s)
    num_expected = max(0, math.floor((t_s - target.ttft_s) * speed) + 1)
    if finished:
        num_expected = min(num_expected, len(delivered_s))
    expected = math.fsum(max(0.0, t_s - i) for i in ideal_times(target, num_expected))
    return 1.0 if expected <= 0 else shown / expected


def is_perfect(delay_s: float) -> bool:
    """Whether a stream with this S_delay counts as perfect."""
    return delay_s <= PERFECT_DELAY_S


class QoeState:
    """QoE of one answer, in constant time and space per token.

    Three numbers describe the past: the count n, the lag of the last token behind its ideal instant (so that
    `last_s` = ideal[n] + lag), and the sum D of all lags (S_delay). A token's lag never falls below the one before it,
    since tokens are shown at reading speed at most; hence the tokens still waiting in the pacer all have the last one's
    lag. This form loses no digits just after ttft, where the textbook form subtracts two large sums.
    """

    __slots__ = ("delay_s", "has_thought", "lag_s", "num_tokens", "target", "ttft_s")

    def __init__(self, target: QoeTarget) -> None:
        self.target = target
        self.ttft_s = target.ttft_s
        """When the first token of the text is expected."""
        self.has_thought = False
        self.num_tokens = 0
        """Tokens of the text that were delivered so far (n)."""
        self.lag_s = 0.0
        """Seconds by which the last token is displayed after its ideal instant."""
        self.delay_s = 0.0
        """S_delay so far (D), in token-seconds."""

    @property
    def last_s(self) -> float:
        """Instant at which the last delivered token is displayed; one reading gap before ttft when there is none."""
        return self.ttft_s + (self.num_tokens - 1) / self.target.speed_tokens_per_s + self.lag_s

    @property
    def is_perfect(self) -> bool:
        """Whether the reader has noticed no delay so far."""
        return is_perfect(self.delay_s)

    def think(self, t_s: float) -> None:
        """Record that what reached the client until `t_s` was thinking: the text begins behind it."""
        self.ttft_s = max(self.target.ttft_s, t_s + 1 / self.target.speed_tokens_per_s)
        self.has_thought, self.num_tokens, self.lag_s, self.delay_s = True, 0, 0.0, 0.0

    def deliver(self, t_s: float, count: int = 1) -> float:
        """Record that the next `count` tokens reached the client at `t_s`.

        Returns:
            The instant at which the last of them is displayed.
        """
        assert count >= 1, "a delivery has at least one token"
        target, lag_s = self.target, self.lag_s
        ideal = self.ttft_s + self.num_tokens / target.speed_tokens_per_s
        if t_s - ideal > lag_s:
            lag_s = self.lag_s = t_s - ideal
        self.num_tokens += count
        self.delay_s += count * lag_s
        return self.ttft_s + (self.num_tokens - 1) / target.speed_tokens_per_s + lag_s

    def qoe_at(self, t_s: float, *, finished: bool = False) -> float:
        """QoE as seen at `t_s` (at or after the last delivery), in [0, 1]; see the function of the same name."""
        num_expected = self._count(t_s)
        if finished:
            num_expected = min(num_expected, self.num_tokens)
        expected = self._area(num_expected, t_s)
        if expected <= 0:
            return 1.0
        num_shown = min(self.num_tokens, self._count(t_s - self.lag_s))
        shown_delay = self.delay_s - (self.num_tokens - num_shown) * self.lag_s
        return _clamp_unit((self._area(num_shown, t_s) - shown_delay) / expected)

    def final(self) -> float:
        """QoE of the answer if it ends with the last delivered token, in [0, 1].

        0 when nothing was delivered; 1 when it was thinking alone, of which nothing is expected.
        """
        if self.num_tokens == 0:
            return float(self.has_thought)
        n = self.num_tokens
        whole = n * self.lag_s + n * (n - 1) / (
            2 * self.target.speed_tokens_per_s
        )  # W(n, last_s), without cancellation
        return 1.0 if whole <= 0 else _clamp_unit(1 - self.delay_s / whole)

    def _count(self, t_s: float) -> int:
        """How many tokens are ideal at or before `t_s`."""
        return max(0, math.floor((t_s - self.ttft_s) * self.target.speed_tokens_per_s) + 1)

    def _area(self, count: int, t_s: float) -> float:
        """W(count, t): the sum of t - ideal[i] over the first `count` tokens."""
        return count * (t_s - self.ttft_s) - count * (count - 1) / (2 * self.target.speed_tokens_per_s)


def _clamp_unit(value: float) -> float:
    return min(1.0, max(0.0, value))
