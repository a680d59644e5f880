"""Which requests to serve when not all of them can be: those that gain most for what they take. Pure.

    batch sizes B ──► gains if B are served, at the pace of such steps ──► greedy ──► the set that gains most

Source: Andes (arXiv 2404.16283), section 4.2 and algorithm 1: by priority, until the first that does not fit; B between
the most that memory holds and the most that are still faster than every reader. Deviations: the size of an item is its
memory and the time of its prompt, each as a share of what there is, where the paper has its length alone; a few sizes
are tried, not all.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from services.worker.scheduling.blocks_math import Places
from services.worker.scheduling.view import F64, I32


def greedy(priority: F64, weights: I32, capacity: int, most: int) -> tuple[Places, int]:
    """Return the items in order of priority, and how many of the first are taken: as long as both limits hold.

    Args:
        priority: [n] higher ones first; equal ones in the order in which they are given.
        weights: [n] memory that each one takes.
        capacity: memory that there is.
        most: items.
    """
    order = np.argsort(-priority, kind="stable")
    fits = int(np.searchsorted(weights[order].cumsum(), capacity, side="right"))
    return order, min(fits, most)


def batch_sizes(least: int, most: int, num_candidates: int) -> list[int]:
    """Return sizes to try, the largest first: both ends, and others between them in equal steps."""
    between = np.linspace(most, min(least, most), num_candidates)
    return sorted({round(size) for size in between.tolist()}, reverse=True)


def most_that_fit(weights: I32, capacity: int, most: int) -> int:
    """Return how many of the items fit together at most."""
    return min(int(np.count_nonzero(np.sort(weights).cumsum() <= capacity)), most)


def most_in_time(period_s: Callable[[int], float], limit_s: float, most: int) -> int:
    """Return the largest batch whose steps are no longer than a limit, at least 1.

    Args:
        period_s: length of a step with so many; it grows with them.
        limit_s: that it may have.
        most: answer.
    """
    low, high = 1, max(most, 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if period_s(middle) <= limit_s else (low, middle - 1)
    return low
