"""Arrival times that are drawn: Poisson processes whose rate is constant, cyclic, or has a burst. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.workload.workload import F64

Piece = tuple[float, float]
"""Length in seconds, rate per second."""


def poisson(pieces: Sequence[Piece], random: np.random.Generator) -> F64:
    """Return arrivals of a Poisson process whose rate is constant in each piece, seconds, ascending.

    In a piece the number of arrivals is Poisson-distributed and their times are uniform.
    """
    begin_s, parts = 0.0, [np.zeros(0)]
    for length_s, rate_per_s in pieces:
        count = random.poisson(rate_per_s * length_s)
        parts.append(begin_s + np.sort(length_s * random.random(count)))
        begin_s += length_s
    return np.concatenate(parts)


def cyclic_bursts(
    rate_per_s: float, intensity: float, burst_ratio: float, cycle_s: float, duration_s: float
) -> list[Piece]:
    """Return the pieces of Andes's cyclic burst pattern.

    The burst lies in the middle of each cycle: the paper's figure 14 shows one cycle, its text does not say where.

    Args:
        rate_per_s: mean over a cycle.
        intensity: rate in the burst over the mean rate; `intensity * burst_ratio` is at most 1.
        burst_ratio: share of the cycle that the burst lasts.
        cycle_s: length of a cycle.
        duration_s: of the whole; the last cycle may be cut.

    Source: Andes, section 6.3; deviations: none.
    """
    calm_rate = rate_per_s * (1 - intensity * burst_ratio) / (1 - burst_ratio)
    calm_s = cycle_s * (1 - burst_ratio) / 2
    cycle = [(calm_s, calm_rate), (cycle_s * burst_ratio, rate_per_s * intensity), (calm_s, calm_rate)]
    pieces: list[Piece] = []
    left_s = duration_s
    while left_s > 0:
        for length_s, rate in cycle:
            pieces.append((min(length_s, left_s), rate))
            left_s = max(0.0, left_s - length_s)
    return [piece for piece in pieces if piece[0] > 0]


def one_burst(rate_per_s: float, factor: float, start_s: float, end_s: float, duration_s: float) -> list[Piece]:
    """Return the pieces of a steady load that is `factor` times as high between two instants."""
    start_s, end_s = min(start_s, duration_s), min(end_s, duration_s)
    return [(start_s, rate_per_s), (end_s - start_s, rate_per_s * factor), (duration_s - end_s, rate_per_s)]
