"""Curves from one run's records: over time, over values, over scales of an SLO. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Final

import numpy as np

from sim.experiment.records import Records
from sim.workload.workload import F64

SHARES: Final = np.concatenate([np.geomspace(1e-3, 1e-2, 20, endpoint=False), np.linspace(0.01, 1.0, 199)])
"""Those of a distribution that are told: closest where few fare worst."""


def windowed_mean(at_s: F64, values: F64, window_s: float) -> tuple[F64, F64]:
    """Return (middle of each window, mean of the values in it that are numbers); NaN for windows without any.

    Args:
        at_s: [n] when each value was; of a request's, when it arrived.
        values: [n]
        window_s: length of each window.
    """
    known = ~np.isnan(values)
    window = (at_s[known] / window_s).astype(np.int64)
    counts = np.bincount(window)
    sums = np.bincount(window, weights=values[known])
    means = np.full(counts.size, np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return _middles(counts.size, window_s), means


def windowed_max(at_s: F64, values: F64, window_s: float) -> tuple[F64, F64]:
    """Return (middle of each window, greatest value in it), as `windowed_mean`."""
    window = (at_s / window_s).astype(np.int64)
    greatest = np.full(int(window.max(initial=-1)) + 1, np.nan)
    np.fmax.at(greatest, window, values)
    return _middles(greatest.size, window_s), greatest


def kept(at_s: F64, values: F64, hold_s: float) -> F64:
    """Return how many of a thing there are if none is given back before it was idle for a time: [n].

    Args:
        at_s: [n] when each value was, ascending.
        values: [n] how many are needed; the one that was needed last is needed again first.
        hold_s: the time.
    """
    found = np.empty_like(values)
    largest: deque[int] = deque()
    for i, value in enumerate(values):
        while largest and values[largest[-1]] <= value:
            largest.pop()
        largest.append(i)
        while at_s[largest[0]] < at_s[i] - hold_s:
            largest.popleft()
        found[i] = values[largest[0]]
    return found


def windowed_tokens_per_s(records: Records, window_s: float) -> tuple[F64, F64]:
    """Return (middle of each window, output tokens that came in it, per second)."""
    counts = np.bincount((records.token_s / window_s).astype(np.int64))
    return _middles(counts.size, window_s), counts / window_s


def cdf(values: F64) -> tuple[F64, F64]:
    """Return (the values below which these shares of those that are numbers lie; `SHARES`), or nothing of nothing."""
    known = values[~np.isnan(values)]
    return (np.quantile(known, SHARES), SHARES) if known.size else (known, known)


def slo_violations(values: F64, limits: F64) -> F64:
    """Return for each limit the share of requests above it, [num_limits]; a value that is missing is above all.

    Args:
        values: [num_requests] latency of each; NaN where there was none.
        limits: [num_limits] most that is allowed.
    """
    kept = (values[None, :] <= limits[:, None]).mean(axis=1) if values.size else np.ones(limits.size)
    return np.asarray(1.0 - kept)


def best_median(values: Mapping[str, F64], bounds: Collection[str] = ()) -> float | None:
    """Return the least median over the systems, the unit of SLO scales; None where nobody has a value.

    Args:
        values: latencies by system.
        bounds: systems that count only where there are no others, since their memory never runs out.

    Source: KunServe (arXiv 2412.18169v2), section 5.2: a scale of N allows N times the P50 of the best baseline.
    """
    real = [each for name, each in values.items() if name not in bounds] or values.values()
    return min((float(np.nanmedian(each)) for each in real if not np.isnan(each).all()), default=None)


def _middles(count: int, window_s: float) -> F64:
    return np.asarray((np.arange(count) + 0.5) * window_s, dtype=np.float64)
