"""Whose requests may wait at a worker: none of us more than are free there for others.

A worker lets so many wait. A tier's and tenant's requests take a place only while they have fewer there than are free:

    one of us:   W/2 taken, W/2 free        two of us:   W/3 and W/3 taken, W/3 free        n of us:   W/(n + 1) each

So whoever comes finds places at once, and shares become equal as those that wait begin; nobody is sent away.

Pure. Source: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches" (IEEE/ACM ToN
1998), with a factor of 1.
"""

from __future__ import annotations


def may_wait(num_own: int, num_waiting: int, max_waiting: int) -> bool:
    """Return whether one more of a tier and tenant may wait at a worker.

    Args:
        num_own: of its requests that wait there.
        num_waiting: everybody's.
        max_waiting: most that may wait there; 0: the worker does not say, and refuses itself.
    """
    return not max_waiting or num_own < max_waiting - num_waiting
