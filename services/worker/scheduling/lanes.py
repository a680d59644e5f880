"""Decodes spread over the lanes of a pipeline: steps that are in flight together, each with other sequences.

    lane 0   ■ ■ ■ ■ in flight        9 sequences over 2 lanes: 5 in one step, 4 in the other. Whoever is left out is
    lane 1   □ □ □ □ □ this step      the first of the step after, so all go on about equally fast, and lanes that have
                                      become unequal are soon equal again.

`lane_share_by_cost` gives each lane the same cost instead of the same number: who has much KV to read takes longer.

Source: KunServe v2, section 4.3, and design of vLLM's pipelines: as many microbatches as stages. Deviations: none.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.worker.scheduling.blocks_math import num_known
from services.worker.scheduling.view import I32, SchedulerView
from shared.cost import CostModel

Places = NDArray[np.intp]

_LEEWAY = 1e-9
"""Relative; keeps rounding from asking for one decode more."""


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


def lane_share_by_cost(view: SchedulerView, running: I32, decodes: Places, cost: CostModel) -> Places:
    """Return which of the decodes the next step takes, in their order: this lane's part of what all of them cost.

    As few as cost at least the lane's part, so that all lanes together take everybody.

    Args:
        view: of this moment.
        running: rows that run.
        decodes: places in `running` of those with one token to compute.
        cost: of a token, and of reading KV.
    """
    if view.limits.num_lanes == 1 or not decodes.size:
        return decodes
    columns, rows = view.columns, running[decodes]
    cost_s = cost.token_s + cost.d_s * columns.num_computed[rows]
    ends = view.in_flight_ends[num_known(columns, view.in_flight) <= view.in_flight_ends]
    ends_s = cost.token_s + cost.d_s * ends
    due_s = (float(cost_s.sum()) + float(ends_s.sum())) / view.limits.num_lanes
    longest_ago = np.argsort(columns.last_step[rows], kind="stable")
    count = int(np.searchsorted(cost_s[longest_ago].cumsum(), due_s * (1 - _LEEWAY))) + 1
    chosen: Places = np.sort(decodes[longest_ago[:count]])
    return chosen
