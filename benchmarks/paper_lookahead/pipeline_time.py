"""How long a pipeline is busy with a sequence of microbatches, and how much of that its stages stand idle.

    stage 0   | b1 | b2 b2 | b3 .. | b4 |            F[k][s] = max(F[k-1][s], F[k][s-1]) + cost[k][s]
    stage 1        | b1 .. | b2 b2 | b3 | b4 |       ..: bubbles, where neighbours differ

Stages work first in, first out. How many microbatches may be in flight at once (`depth`, the lanes of the engine)
matters too: with as many as there are stages, one enters only when one has come back, so that all stages move in step.

Source: KunServe, version 2, appendix, equation (4), which is two stages at depth two; the recurrence is
the same for any number of stages. Deviations: without a depth, finished activations wait in front of the next stage
instead of holding the stage before it, which equation (4) does not allow, and which is never slower.
"""

from __future__ import annotations

import numpy as np

from services.worker.scheduling.view import F64


def over_stages(cost_s: F64, num_stages: int) -> F64:
    """Return [m, num_stages]: the cost of each microbatch when every stage has the same share of the layers.

    Args:
        cost_s: [m] seconds for all layers.
        num_stages: 1 or more.
    """
    if num_stages < 1:
        raise ValueError(f"a pipeline has at least one stage, not {num_stages}")
    return np.repeat(cost_s[:, None] / num_stages, num_stages, axis=1)


def finish_times(cost_s: F64, depth: int | None = None) -> F64:
    """Return [m, num_stages]: when each stage has done each microbatch, seconds after the first one began.

    Args:
        cost_s: [m, num_stages] seconds, at least 0 each; a row of zeros is a turn in which a lane has nothing to do.
        depth: microbatches that may be in flight at once, at least 1; None: as many as there are.

    Raises:
        ValueError: the costs are no such table, or the depth is below 1.
    """
    if cost_s.ndim != 2 or not cost_s.shape[1] or (cost_s < 0).any():
        raise ValueError("costs are a table of microbatches and stages, none of them negative")
    if depth is not None and depth < 1:
        raise ValueError(f"at least one microbatch is in flight, not {depth}")
    finish = np.zeros(cost_s.shape)
    stage_free = [0.0] * cost_s.shape[1]
    for k, row in enumerate(cost_s.tolist()):
        ready = 0.0 if depth is None or k < depth else float(finish[k - depth, -1])
        for s, seconds in enumerate(row):
            ready = stage_free[s] = max(stage_free[s], ready) + seconds
        finish[k] = stage_free
    return finish


def makespan_s(cost_s: F64, depth: int | None = None) -> float:
    """Return when the last microbatch leaves the last stage; the arguments are those of `finish_times`."""
    return float(finish_times(cost_s, depth)[-1, -1]) if cost_s.size else 0.0


def bubble_ratio(cost_s: F64, depth: int | None = None) -> float:
    """Return the share of all stages' time in which they stand idle, from the first begin to the last end; 0 to 1."""
    total_s = makespan_s(cost_s, depth) * (cost_s.shape[1] if cost_s.ndim == 2 else 1)
    return 1.0 - float(cost_s.sum()) / total_s if total_s else 0.0


def inner_bubble_ratio(cost_s: F64, depth: int | None = None) -> float:
    """Return the same without filling and draining: each stage counts from its first begin to its last end.

    What remains comes from microbatches of unequal cost, or from lanes with nothing to do.
    """
    if not cost_s.sum():
        return 0.0
    finish = finish_times(cost_s, depth)
    works = cost_s > 0
    first, last = works.argmax(axis=0), len(works) - 1 - works[::-1].argmax(axis=0)
    stages = np.flatnonzero(works.any(axis=0))
    begun = finish[first[stages], stages] - cost_s[first[stages], stages]
    span_s = float((finish[last[stages], stages] - begun).sum())
    return 1.0 - float(cost_s.sum()) / span_s
