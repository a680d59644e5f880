"""Parameters of a log-normal distribution that is cut at a largest value, from its moments after the cut. Pure.

X = exp(mu + sigma Z)      Y = min(X, c)
E[Y^k] = exp(k mu + k² sigma² / 2) · Φ((ln c - mu - k sigma²) / sigma) + c^k · Φ((mu - ln c) / sigma)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

_SIGMAS: Final = (0.01, 6.0)
"""Deviations of the logarithm that are tried."""
_HALVINGS: Final = 60


def moment(order: int, mu: float, sigma: float, largest: float) -> float:
    """Return E[Y^order]."""
    distance = math.log(largest) - mu
    below = math.exp(order * mu + (order * sigma) ** 2 / 2) * _phi(distance / sigma - order * sigma)
    return below + largest**order * _phi(-distance / sigma)


def fit_log_normal(
    mean: float, largest: float, *, std: float | None = None, sigma: float | None = None
) -> tuple[float, float]:
    """Return (mu, sigma) such that Y has this mean, and this deviation if it is given rather than sigma.

    Raises:
        ValueError: no such distribution exists, or its sigma lies outside 0.01 to 6.
    """
    if not 0 < mean < largest:
        raise ValueError("the mean must lie between 0 and the largest value")

    def mu_for(sigma: float) -> float:
        low, high = math.log(mean) - sigma * sigma / 2 - 1, math.log(largest) + 10 * sigma
        return _root(lambda mu: moment(1, mu, sigma, largest) - mean, low, high)

    def std_for(sigma: float) -> float:
        return math.sqrt(max(0.0, moment(2, mu_for(sigma), sigma, largest) - mean * mean))

    if sigma is None:
        assert std is not None, "either std or sigma"
        if not std_for(_SIGMAS[0]) < std < std_for(_SIGMAS[1]):
            raise ValueError("no log-normal distribution cut there has this mean and this deviation")
        sigma = _root(lambda value: std_for(value) - std, *_SIGMAS)
    return mu_for(sigma), sigma


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Return where a rising function crosses 0, by bisection."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


def _phi(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))
