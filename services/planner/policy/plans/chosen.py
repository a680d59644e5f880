"""A drop by hand: one group of exactly the instances that a person names.

Need and price do not count, but what no plan may do is refused here too: ranges that would have to be loaded, a layer
without a second copy, a group that has less room than its members had.

Pure. Source: the project's own design.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from services.planner.policy.plans.assembly import assemble
from services.planner.policy.plans.drop_facts import ClusterFacts, DropParams
from services.planner.policy.plans.drop_plan import DropPlan, DropRefusal, RefusalKind
from services.planner.policy.plans.merging import Merger, Obstacle
from shared.ids import WorkerId


def plan_chosen(facts: ClusterFacts, params: DropParams, names: Sequence[WorkerId]) -> DropPlan | DropRefusal:
    """Plan one group of these instances, or say why it cannot be."""
    chosen = list(dict.fromkeys(names))
    refusal = _why_not(facts, chosen)
    if refusal is not None:
        return refusal
    merger = Merger(facts, params, required_tokens=1)
    index = [number for number, each in enumerate(facts.instances) if each.instance_id in chosen]
    nodes = [int(node) for node in np.unique(merger.groups.of_instance[index])]
    if nodes[0] < 0:
        return DropRefusal(RefusalKind.NO_PARTNER, "one of them is in a group that lacks layers; it is restored soon")
    if len(nodes) == 1:
        return DropRefusal(RefusalKind.NO_PARTNER, "they are one group already")
    if merger.num_groups - len(nodes) + 1 < merger.min_groups:
        return DropRefusal(RefusalKind.NO_SECOND_COPY, Obstacle.COPIES)
    union = merger.union(nodes)
    if union is None:
        return DropRefusal(RefusalKind.NO_GAIN, "; ".join(merger.obstacles))
    merger.adopt(union, nodes)
    plan = assemble(merger, params, 1)
    if not plan.groups:
        return DropRefusal(RefusalKind.NO_GAIN, "nothing would be gained with the budgets as they are")
    return replace(
        plan,
        reason=f"{'+'.join(chosen)} as asked, with room for {plan.gained_tokens} more tokens; "
        f"readers wait {plan.price.total_s:.2f} s",
    )


def _why_not(facts: ClusterFacts, chosen: Sequence[WorkerId]) -> DropRefusal | None:
    by_id = {each.instance_id: each for each in facts.instances}
    for name in chosen:
        if name not in by_id:
            return DropRefusal(RefusalKind.NO_PARTNER, f"'{name}' is no worker that is ready and can drop parameters")
    if len(chosen) < 2:
        return DropRefusal(RefusalKind.NO_PARTNER, "a group takes two workers at least")
    groups = {by_id[name].group for name in chosen}
    for each in facts.instances:
        if each.group in groups and each.instance_id not in chosen:
            reason = f"'{each.instance_id}' is in a group with some of them; name it too, or restore the group first"
            return DropRefusal(RefusalKind.NO_PARTNER, reason)
    return None
