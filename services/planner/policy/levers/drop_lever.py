"""The rung of the ladder that drops parameters: offers the plan that makes room for what is asked for, with its price.

    a worker is throttled ─► R ─► plan ─► its price against what waiting would cost ─► Offer, or why not

It takes a throttled worker to drop: memory that is full without anybody waiting for it, or requests that wait for a
place and not for memory, ask for nothing that a drop could give.

Pure. Source: KunServe v1, sections 4.1 and 4.3, v2, section 4.1; that levers are compared by price, and that a plan may
cost more than it saves, is the project's own design.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from services.planner.policy.levers.ladder import ClusterSnapshot, Declined, Offer
from services.planner.policy.plans.drop import DropStrategy, plan_drop, tokens_short
from services.planner.policy.plans.drop_facts import ClusterFacts, DropParams, groups_of
from services.planner.policy.plans.drop_plan import DropPlan
from services.planner.policy.plans.optimum import MAX_GROUPS


@dataclass(frozen=True, slots=True)
class DropLever:
    """Drops parameters of the snapshot's instances; a `Lever`."""

    name: ClassVar[str] = "drop"
    is_standing: ClassVar[bool] = False
    """It takes pressure, and what it does is undone when that is over."""
    params: DropParams = field(default_factory=DropParams)
    strategy: DropStrategy = DropStrategy.THROUGHPUT_GREEDY
    wait_s: float | None = None
    """Seconds that a request without room is expected to wait if nothing is done; a plan that costs more than all of
    them together is declined. None: any price is paid."""

    def offer(self, snapshot: ClusterSnapshot) -> Offer | Declined:
        """Return the plan for what the throttled instances are short of, or why there is none."""
        facts = snapshot.facts
        if facts is None or not facts.instances:
            return Declined("no instance can drop parameters")
        if snapshot.held_back:
            return Declined(snapshot.held_back)
        if not any(instance.throttled for instance in facts.instances):
            return Declined("no instance is short of memory by the monitor's rules")
        if self.strategy is DropStrategy.OPTIMUM and (count := len(groups_of(facts))) > MAX_GROUPS:
            return Declined(
                f"the optimum is searched for among at most {MAX_GROUPS} groups, not {count}; "
                f"set drop_strategy={DropStrategy.THROUGHPUT_GREEDY}"
            )
        required_tokens = tokens_short(facts)
        worth_s = None if self.wait_s is None else self.wait_s * num_without_room(facts, required_tokens)
        plan = plan_drop(facts, self.params, required_tokens, self.strategy, worth_s)
        if isinstance(plan, DropPlan):
            return Offer(plan.price.total_s, plan.reason, plan, plan.lacking_tokens)
        return Declined(plan.reason)


def num_without_room(facts: ClusterFacts, required_tokens: int) -> int:
    """Return how many requests wait for memory, or will: those queued, or as many as the missing room would hold."""
    num_queued = sum(instance.num_queued for instance in facts.instances)
    num_running = sum(instance.num_running for instance in facts.instances)
    num_tokens = sum(instance.used_tokens for instance in facts.instances)
    tokens_each = max(num_tokens // max(num_running, 1), 1)
    return max(num_queued, -(-required_tokens // tokens_each))
