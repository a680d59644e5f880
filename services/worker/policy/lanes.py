"""Decodes spread over the lanes of a pipeline: steps that are in flight together, each with other sequences.

    lane 0   ■ ■ ■ ■ in flight        9 sequences over 2 lanes: 5 in one step, 4 in the other. Whoever is left out is
    lane 1   □ □ □ □ □ this step      the first of the step after, so all go on about equally fast, and lanes that have
                                      become unequal are soon equal again.

A formation by cost, of prefills too, would take this one's place in a scheduler of its own.

Source: KunServe v2, section 4.3, and design of vLLM's pipelines: as many microbatches as stages. Deviations: none.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.worker.policy.view import I32, SchedulerView

Places = NDArray[np.intp]


def lane_share(view: SchedulerView, running: I32, decodes: Places) -> Places:
    """Return which of the decodes the next step takes, in their order: all of them with one lane.

    Args:
        view: of this moment.
        running: rows that run.
        decodes: places in `running` of those with one token to compute.
    """
    if view.limits.num_lanes == 1 or not decodes.size:
        return decodes
    least, rest = divmod(int(decodes.size) + view.num_in_flight, view.limits.num_lanes)
    num_larger = sum(rows.size > least for rows in view.flights)
    share = least + int(num_larger < rest)  # as many lanes as the rest have one more
    if decodes.size <= share:
        return decodes
    longest_ago = np.argsort(view.columns.last_step[running[decodes]], kind="stable")[:share]
    chosen: Places = np.sort(decodes[longest_ago])
    return chosen
