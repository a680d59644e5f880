"""Decodes spread over the lanes of a pipeline: steps that are in flight together, each with other sequences.

    lane 0   ■ ■ ■ ■ in flight        9 sequences over 2 lanes: 5 in one step, 4 in the other. Whoever is left out is
    lane 1   □ □ □ □ □ this step      the first of the step after, so all go on about equally fast, and lanes that have
                                      become unequal are soon equal again.

`lane_share_by_cost` gives each lane the same cost instead of the same number: who has much KV to read takes longer.

Source: KunServe v2, section 4.3, and design of vLLM's pipelines: as many microbatches as stages. Deviations: none.
"""

from __future__ import annotations

import numpy as np

from services.worker.scheduling.blocks_math import among, num_known
from services.worker.scheduling.plan import StepPlan
from services.worker.scheduling.view import I32, SchedulerView
from shared.cost import CostModel

_LEEWAY = 1e-9
"""Relative; keeps rounding from asking for one decode more."""


def decode_lane(plan: StepPlan, cost: CostModel | None = None, some: I32 | None = None) -> None:
    """Choose this lane's share of the running rows that decode. Nobody is chosen yet; see `lane_decodes`."""
    plan.decode(lane_decodes(plan, cost, some))
    if not plan.num_decodes:  # they lack blocks; others may go on without any
        plan.decode(plan.decoding)


def lane_decodes(plan: StepPlan, cost: CostModel | None = None, some: I32 | None = None) -> I32:
    """Return this lane's share of the running rows that decode.

    Args:
        plan: nobody is chosen yet.
        cost: to share them by; None: lanes have equal numbers.
        some: rows that do not sit out; None, or if none of them decodes: all.
    """
    decoding = plan.decoding
    if some is not None and (meant := among(plan.view, decoding, some)).any():
        decoding = decoding[meant]
    return lane_share(plan.view, decoding) if cost is None else lane_share_by_cost(plan.view, decoding, cost)


def lane_share(view: SchedulerView, decodes: I32) -> I32:
    """Return which of the decodes the next step takes, in their order: all of them with one lane.

    Args:
        view: of this moment.
        decodes: rows with one token to compute.
    """
    if view.limits.num_lanes == 1 or not decodes.size:
        return decodes
    least, rest = divmod(int(decodes.size) + view.num_in_flight, view.limits.num_lanes)
    num_larger = sum(rows.size > least for rows in view.flights)
    share = least + int(num_larger < rest)  # as many lanes as the rest have one more
    if decodes.size <= share:
        return decodes
    longest_ago = np.argsort(view.columns.last_step[decodes], kind="stable")[:share]
    chosen: I32 = decodes[np.sort(longest_ago)]
    return chosen


def lane_share_by_cost(view: SchedulerView, decodes: I32, cost: CostModel) -> I32:
    """Return which of the decodes the next step takes, in their order: this lane's part of what all of them cost.

    As few as cost at least the lane's part, so that all lanes together take everybody.

    Args:
        view: of this moment.
        decodes: rows with one token to compute.
        cost: of a token, and of reading KV.
    """
    if view.limits.num_lanes == 1 or not decodes.size:
        return decodes
    columns = view.columns
    cost_s = cost.token_s + cost.d_s * columns.num_computed[decodes]
    ends_s = cost.token_s + cost.d_s * view.in_flight_ends[num_known(columns, view.in_flight) <= view.in_flight_ends]
    due_s = (float(cost_s.sum()) + float(ends_s.sum())) / view.limits.num_lanes
    longest_ago = np.argsort(columns.last_step[decodes], kind="stable")
    count = int(np.searchsorted(cost_s[longest_ago].cumsum(), due_s * (1 - _LEEWAY))) + 1
    chosen: I32 = decodes[np.sort(longest_ago[:count])]
    return chosen
