"""The rung of the ladder that drops parameters: offers the plan that makes room for what is asked for, with its price.

Pure. Source: KunServe; that levers are compared by price is the project's own design.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.planner.policy.drop import DropStrategy, plan_drop, tokens_short
from services.planner.policy.drop_facts import ClusterFacts, DropParams, ModelFacts
from services.planner.policy.drop_plan import DropPlan
from services.planner.policy.ladder import ClusterSnapshot, Declined, Offer

DROP_LEVER = "drop"


@dataclass(frozen=True, slots=True)
class DropLever:
    """Drops parameters of the snapshot's instances; a `Lever`."""

    model: ModelFacts
    throughput: tuple[float, ...]
    """Profile: tokens per second of one group of s instances at index s - 1."""
    params: DropParams = field(default_factory=DropParams)
    strategy: DropStrategy = DropStrategy.THROUGHPUT_GREEDY
    wait_s: float | None = None
    """Seconds that a queued request is expected to wait if nothing is done; a plan that costs more than all of them
    together is declined. None: any price is paid."""

    @property
    def name(self) -> str:
        """Name in plans and events."""
        return DROP_LEVER

    def offer(self, snapshot: ClusterSnapshot) -> Offer | Declined:
        """Return the plan for what the snapshot's instances are short of, or why there is none."""
        if not snapshot.instances:
            return Declined("no instance can drop parameters")
        facts = ClusterFacts(self.model, snapshot.instances, self.throughput)
        num_queued = sum(instance.num_queued for instance in snapshot.instances)
        worth_s = None if self.wait_s is None else self.wait_s * num_queued
        plan = plan_drop(facts, self.params, tokens_short(facts), self.strategy, worth_s)
        if isinstance(plan, DropPlan):
            return Offer(plan.price.total_s, plan.reason, plan)
        return Declined(plan.reason)
