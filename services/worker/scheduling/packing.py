"""Which requests to serve when not all of them fit: those that gain most for what they take. Pure.

Source: Andes (arXiv 2404.16283), algorithm 1: by priority, until the first that does not fit. Deviation: the size of an
item is its memory and the time of its prompt, each as a share of what there is, where the paper has its length alone.
"""

from __future__ import annotations

import numpy as np

from services.worker.scheduling.view import F64, I32, Bool


def greedy(priority: F64, weights: I32, capacity: int, most: int) -> Bool:
    """Return [n] which items are taken: the first in order of priority, while both limits hold.

    Args:
        priority: [n] higher ones first; equal ones in the order in which they are given.
        weights: [n] memory that each one takes.
        capacity: memory that there is.
        most: items.
    """
    order = np.argsort(-priority, kind="stable")
    fits = weights[order].cumsum() <= capacity
    count = min(int(fits.size if fits.all() else np.argmin(fits)), most)
    taken = np.zeros(priority.size, dtype=np.bool_)
    taken[order[:count]] = True
    return taken
