"""Which instances give up which layers, so that queued requests find room.

    facts ─► groups merge (greedy, or the optimum) ─► ranges by stage ─► room and price ─► DropPlan
                                                                                       └─► DropRefusal, and why

A plan that gains less than was asked for is still a plan, and says so: then more instances are needed. Refused is a
plan that gains nothing, or that would leave a layer without a second copy. Of one that costs more than it is worth a
part may be worth it: then that is the plan.

Pure and deterministic. Source: KunServe v1, section 4.1; v2, section 4.1. Deviations: room is counted by the smallest
stage in whole pages (`capacity`), ranges are parts of what is held now (`tiling`), and there is always a second copy of
every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum

import numpy as np

from services.planner.policy.plans.assembly import assemble
from services.planner.policy.plans.capacity import CapacityRule
from services.planner.policy.plans.columns import group_columns, instance_columns
from services.planner.policy.plans.drop_facts import ClusterFacts, DropParams
from services.planner.policy.plans.drop_plan import DropPlan, DropRefusal, RefusalKind
from services.planner.policy.plans.greedy import merge_largest, merge_smallest
from services.planner.policy.plans.merging import Merger, Obstacle
from services.planner.policy.plans.optimum import merge_best


class DropStrategy(StrEnum):
    """How groups are chosen."""

    THROUGHPUT_GREEDY = "throughput-greedy"
    MEMORY_GREEDY = "memory-greedy"
    OPTIMUM = "optimum"


_STRATEGIES: dict[DropStrategy, Callable[[Merger], None]] = {
    DropStrategy.THROUGHPUT_GREEDY: merge_smallest,
    DropStrategy.MEMORY_GREEDY: merge_largest,
    DropStrategy.OPTIMUM: merge_best,
}
NUM_PARTS = 6
"""How often the room that is asked for is halved in search of a plan that is worth its price."""
_KINDS = {
    Obstacle.COPIES: RefusalKind.NO_SECOND_COPY,
    Obstacle.GAIN: RefusalKind.NO_GAIN,
    Obstacle.RANGES: RefusalKind.NO_RANGES,
    Obstacle.SIZE: RefusalKind.NO_PARTNER,
}
"""The first one that was met names the refusal."""


def tokens_short(facts: ClusterFacts) -> int:
    """Return R: the tokens of KV for which throttled groups have no room, now and over the horizon.

    Of each throttled group that can serve all that is queued and the growth of what runs, less what is free there. What
    is free elsewhere does not count against it: a queued request waits at its own instance, and one that is throttled
    is reason enough (v1, section 4.1; v2, section 4.1: "the memory demand of all queuing requests"). What waits at an
    instance that is not throttled waits for something else than memory, so it asks for none: a deviation. Where
    requests wait, at least one block is missing, whatever the sums say; where none does, and none is missing over the
    horizon, the monitor's forecast was of another kind than this one, and nothing is done.
    """
    columns = instance_columns(facts.instances)
    groups = group_columns(facts.model, CapacityRule(facts.model), facts.instances, columns)
    serves = groups.of_instance >= 0
    wanted = np.zeros(len(groups.size), dtype=np.int64)
    by_instance = columns.used_tokens + columns.demanded_tokens + columns.growth_tokens
    np.add.at(wanted, groups.of_instance[serves], by_instance[serves])
    queued = np.zeros(len(groups.size), dtype=np.int64)
    np.add.at(queued, groups.of_instance[serves], columns.num_queued[serves])
    missing = wanted - groups.num_blocks * facts.model.block_size
    least = np.where(queued > 0, facts.model.block_size, 0)
    return int(np.maximum(missing, least)[groups.throttled].sum())


def plan_drop(
    facts: ClusterFacts,
    params: DropParams,
    required_tokens: int,
    strategy: DropStrategy = DropStrategy.THROUGHPUT_GREEDY,
    worth_s: float | None = None,
) -> DropPlan | DropRefusal:
    """Choose the groups that form, and the layers that each member keeps.

    Args:
        facts: of the cluster, now.
        params: limits, and what the price is made of.
        required_tokens: R, room for KV besides what there is (see `tokens_short`).
        strategy: how groups are chosen.
        worth_s: seconds of stalls that the room would save; a plan that costs more is not made, but one for a part of
            the room that is worth its price, if there is one. None: any price is paid.

    Raises:
        ValueError: the optimum is asked for in a cluster that is too large for it.
    """
    if required_tokens <= 0:
        return DropRefusal(RefusalKind.NOT_NEEDED, "there is room for all that is asked for")
    plan = _plan(facts, params, required_tokens, strategy)
    if worth_s is None or isinstance(plan, DropRefusal) or plan.price.total_s <= worth_s:
        return plan
    part = _best_part(facts, params, plan, strategy, worth_s)
    if part is not None:
        return part
    reason = f"{plan.reason}; the room would save {worth_s:.2f} s, and no part of it is worth its price"
    return DropRefusal(RefusalKind.NOT_WORTH_IT, reason)


def _plan(
    facts: ClusterFacts, params: DropParams, required_tokens: int, strategy: DropStrategy
) -> DropPlan | DropRefusal:
    """Return the plan for so much room at any price, or why there is none."""
    merger = Merger(facts, params, required_tokens)
    _STRATEGIES[strategy](merger)
    plan = assemble(merger, params, required_tokens) if merger.unions else None
    if plan is None or not plan.groups:
        return _refusal(merger, required_tokens)
    return replace(plan, reason=_reason(merger, plan))


def _best_part(
    facts: ClusterFacts, params: DropParams, whole: DropPlan, strategy: DropStrategy, worth_s: float
) -> DropPlan | None:
    """Return the plan for a part of the room that saves most beyond its price; None: none is worth its price.

    Tried are the plans for a half of the room that the whole plan makes, a quarter, and so on. A part of the room saves
    that part of the stalls.
    """
    all_tokens = min(whole.required_tokens, whole.gained_tokens)
    best: tuple[float, DropPlan] | None = None
    for halvings in range(1, NUM_PARTS + 1):
        part_tokens = all_tokens >> halvings
        plan = _plan(facts, params, part_tokens, strategy) if part_tokens else None
        if not isinstance(plan, DropPlan):
            break
        saved_s = worth_s * min(plan.gained_tokens / all_tokens, 1.0)
        left_s = saved_s - plan.price.total_s
        if left_s >= 0 and (best is None or left_s > best[0]):
            reason = (
                f"{plan.reason}, of {whole.required_tokens}: that saves {saved_s:.2f} s; "
                f"room for {all_tokens} would cost {whole.price.total_s:.2f} s and save {worth_s:.2f} s"
            )
            best = left_s, replace(plan, required_tokens=whole.required_tokens, reason=reason)
    return None if best is None else best[1]


def _reason(merger: Merger, plan: DropPlan) -> str:
    num_members = sum(len(group.stages) for group in plan.groups)
    largest = max(len(group.stages) for group in plan.groups)
    text = (
        f"{num_members} of {len(merger.facts.instances)} instances form {_count(len(plan.groups), 'group')} of up to "
        f"{largest}, with room for {plan.gained_tokens} more tokens; throughput falls by {1 - 1 / plan.slowdown:.1%}, "
        f"readers wait {plan.price.total_s:.2f} s"
    )
    if plan.is_satisfied:
        return f"{text}; {plan.required_tokens} are required"
    return f"{text}; not satisfiable, gained {plan.gained_tokens} of {plan.required_tokens}{_because(merger)}"


def _refusal(merger: Merger, required_tokens: int) -> DropRefusal:
    required = f"room for {required_tokens} tokens is required"
    num_groups = len(merger.groups.size)
    if num_groups < 2:
        reason = f"{required}; {_count(num_groups, 'group')} can serve, and none has a partner"
        return DropRefusal(RefusalKind.NO_PARTNER, reason)
    kind = next((_KINDS[obstacle] for obstacle in _KINDS if obstacle in merger.obstacles), RefusalKind.NO_GAIN)
    return DropRefusal(kind, f"{required}{_because(merger)}")


def _because(merger: Merger) -> str:
    return "".join(f"; {obstacle}" for obstacle in merger.obstacles)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
