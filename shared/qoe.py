"""QoE of a whole answer as `sluice_client.qoe` defines it, over numpy columns.

All times are seconds since the answer's own arrival. An answer without a reader has NaN for its target and its QoE.
One that thinks has none until its thinking has ended. Tokens of the thinking are neither displayed nor late, and the
text is expected from then on:

    ideal[1] = max(ttft, end of the thinking + 1 / speed)

Counted from the arrival instead, 40 s of thinking would leave a QoE of 0 whatever anybody does.

Source: Andes (arXiv 2404.16283), section 2; checked against the sums of the definition. Deviation: thinking.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
_ROUNDING = 1e-9
"""Of a token: what is displayed at the instant of a delivery is read then."""
_FULL_VALUE_RATIO = 0.1
"""Of an answer's length: with fewer tokens unread a new one is of full value to its reader."""
_NO_VALUE_RATIO = 0.2
"""With as many unread it is of none; in between its value falls in a line."""


def text_ttft_s(ttft_s: float, speed: float, thought_s: float | None) -> float:
    """Return when the reader expects the first token of the text.

    Args:
        ttft_s: when it would be without thinking.
        speed: tokens per second that the reader reads.
        thought_s: when the thinking has ended; None: there was none, or nobody knows.
    """
    return ttft_s if thought_s is None else max(ttft_s, thought_s + 1 / speed)


def text_of(delivered_s: F64, ttft_s: float, speed: float, num_thought: int) -> tuple[F64, float]:
    """Return when the text of an answer came, and when its first token is expected.

    Args:
        delivered_s: [num_tokens] of the whole answer.
        ttft_s: see `text_ttft_s`.
        speed: tokens per second that the reader reads.
        num_thought: of these tokens, the first ones, those of a thinking that has ended.
    """
    if not num_thought:
        return delivered_s, ttft_s
    return delivered_s[num_thought:], text_ttft_s(ttft_s, speed, float(delivered_s[num_thought - 1]))


def answer_qoe(delivered_s: F64, ttft_s: float, speed: float, num_thought: int = 0) -> float:
    """Return the QoE of one answer that ends with these tokens, in [0, 1]; 0 without any, NaN without a reader.

    A token's lag behind its ideal instant never falls below the one before, since nobody reads faster than `speed`.

    Args:
        delivered_s: [num_tokens] seconds since its arrival, ascending.
        ttft_s: when the reader expects the first token.
        speed: tokens per second that the reader reads.
        num_thought: of the tokens, the first ones, which are thinking; if it is all of them, nobody has read anything.
    """
    if not delivered_s.size:
        return 0.0
    delivered_s, ttft_s = text_of(delivered_s, ttft_s, speed, num_thought)
    num = delivered_s.size
    if not num:
        return float("nan")
    lag_s = _lag_s(delivered_s, ttft_s, speed)
    whole_s = num * lag_s[-1] + num * (num - 1) / (2 * speed)
    if np.isnan(whole_s):
        return float("nan")
    return 1.0 if whole_s <= 0 else float(np.clip(1 - lag_s.sum() / whole_s, 0.0, 1.0))


def qoe_by_now(delivered_s: F64, ttft_s: float, speed: float, at_s: float) -> float:
    """Return what the reader of an answer that goes on has experienced at an instant, in [0, 1].

    1 while nothing is expected; tokens that are delivered and not displayed yet do not count. Arguments as
    `answer_qoe`; of an answer that thinks, those of its text (`text_of`).

    Source: Andes (arXiv 2404.16283), section 2. Deviations: none.
    """
    num_expected = max(0, math.floor((at_s - ttft_s) * speed) + 1)
    expected_s = num_expected * (at_s - ttft_s) - num_expected * (num_expected - 1) / (2 * speed)
    if expected_s <= 0:
        return 1.0
    shown_s = ttft_s + np.arange(delivered_s.size) / speed + _lag_s(delivered_s, ttft_s, speed)
    return float(np.clip(np.maximum(at_s - shown_s, 0.0).sum() / expected_s, 0.0, 1.0))


def displayed(delivered_s: F64, ttft_s: float, speed: float) -> tuple[float, float]:
    """Return when the newest of these tokens is displayed, and the sum of all delays; arguments as `qoe_by_now`.

    At least one has been delivered.
    """
    lag_s = _lag_s(delivered_s, ttft_s, speed)
    return float(ttft_s + (lag_s.size - 1) / speed + lag_s[-1]), float(lag_s.sum())


def unread_tokens(delivered_s: F64, ttft_s: float, speed: float) -> F64:
    """Return [num_tokens]: tokens that are delivered and not displayed at the instant of each one, itself included.

    Tokens that come together count one by one. Those not displayed all have the newest one's lag, so they are displayed
    at reading speed up to it. Arguments as `qoe_by_now`.
    """
    num_delivered = np.arange(1, delivered_s.size + 1)
    ideal_s = ttft_s + (num_delivered - 1) / speed
    ahead_s = _lag_s(delivered_s, ttft_s, speed) - (delivered_s - ideal_s)
    unread: F64 = np.minimum(np.ceil(ahead_s * speed - _ROUNDING), num_delivered)
    return unread


def token_value(unread: F64, num_tokens: F64 | int) -> F64:
    """Return [n] what one more token is worth to who has so many unread: 1 below a tenth of all, 0 from a fifth on.

    Source: TokenFlow (arXiv 2510.02758), effective throughput.
    """
    value = (_NO_VALUE_RATIO - unread / np.maximum(num_tokens, 1)) / (_NO_VALUE_RATIO - _FULL_VALUE_RATIO)
    clipped: F64 = np.clip(value, 0.0, 1.0)
    return clipped


def _lag_s(delivered_s: F64, ttft_s: float, speed: float) -> F64:
    """Return [num_tokens]: how late each is displayed."""
    ideal_s = ttft_s + np.arange(delivered_s.size) / speed
    lag_s: F64 = np.maximum.accumulate(np.maximum(delivered_s - ideal_s, 0.0))
    return lag_s
