"""The rung of a static pipeline: instances are joined as soon as they are there, load or no load, and stay together.

    w0  w1  w2  w3  w4   alone; neighbours on a host first ─► w0+w1, w2+w3; w4 serves alone until there is a partner
    w0+w1 breaks         each is a whole instance again by itself ─► w0+w1, as soon as both are ready

It is the machinery of a drop without its reasons: neither need nor price count. What no plan may do is not done here
either: ranges that would have to be loaded, a layer without a second copy, a group with less room than its members had.
Requests that run when a pipeline forms go along as in a drop.

Pure. Source: the second baseline of KunServe (v1, section 5.1, and v2, section 5.1: vLLM with pipeline parallelism).
Deviation: a baseline loads each half once, here whole instances drop the other half when they are ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from services.planner.policy.levers.ladder import ClusterSnapshot, Declined, Offer
from services.planner.policy.plans.assembly import assemble
from services.planner.policy.plans.drop_facts import ClusterFacts, DropParams, InstanceFacts
from services.planner.policy.plans.drop_plan import DropPlan
from services.planner.policy.plans.merging import Merger, Obstacle


@dataclass(frozen=True, slots=True)
class PipelineLever:
    """Joins instances that are alone to pipelines of one length; a `Lever`."""

    name: ClassVar[str] = "pipeline"
    is_standing: ClassVar[bool] = True
    """It needs no pressure, and what it forms is not restored."""
    num_stages: int
    params: DropParams = field(default_factory=DropParams)
    """What its price is made of; its limits of size and balance do not count: pipelines have `num_stages` stages, as
    even as they can be."""

    def __post_init__(self) -> None:
        if self.num_stages < 2:
            raise ValueError(f"a pipeline has two stages at least, not {self.num_stages}")

    def offer(self, snapshot: ClusterSnapshot) -> Offer | Declined:
        """Return the plan that joins those who are alone, or why there is none."""
        facts = snapshot.facts
        if facts is None or not facts.instances:
            return Declined("no instance can drop parameters")
        if snapshot.held_back:
            return Declined(snapshot.held_back)
        alone = whole_and_alone(facts)
        if len(alone) < self.num_stages:
            names = ", ".join(each.instance_id for each in alone)
            return Declined(f"{names} waits for others to join" if alone else "every instance is in a pipeline")
        return self._join(facts, alone)

    def _join(self, facts: ClusterFacts, alone: Sequence[InstanceFacts]) -> Offer | Declined:
        params = replace(self.params, max_group_size=self.num_stages, max_imbalance_ratio=0.0)
        merger = Merger(facts, params, required_tokens=1)
        node_of = dict(zip((each.instance_id for each in facts.instances), merger.groups.of_instance, strict=True))
        for members in _partners(alone, self.num_stages):
            nodes = [int(node_of[each.instance_id]) for each in members]
            if merger.num_groups - self.num_stages + 1 < merger.min_groups:
                merger.obstacles[Obstacle.COPIES] = None
                break
            union = merger.union(nodes)
            if union is not None:
                merger.adopt(union, nodes)
        if not merger.unions:
            return Declined("; ".join(merger.obstacles))
        plan = assemble(merger, params, required_tokens=1)
        if not plan.groups:
            return Declined(Obstacle.GAIN)
        plan = replace(plan, reason=_reason(plan))
        return Offer(plan.price.total_s, plan.reason, plan, plan.lacking_tokens)


def whole_and_alone(facts: ClusterFacts) -> list[InstanceFacts]:
    """Return the instances that hold the whole model and are in no group, by name."""
    return [each for each in facts.instances if not each.group_id and each.layers == facts.model.all_layers]


def _partners(alone: Sequence[InstanceFacts], size: int) -> Iterator[list[InstanceFacts]]:
    """Yield who joins whom: on one host as long as there are enough there, then who is left."""
    by_host: dict[str, list[InstanceFacts]] = {}
    for each in alone:
        by_host.setdefault(each.host, []).append(each)
    left: list[InstanceFacts] = []
    for neighbours in by_host.values():
        whole = len(neighbours) // size * size
        yield from _chunks(neighbours[:whole], size)
        left += neighbours[whole:]
    yield from _chunks(left[: len(left) // size * size], size)


def _chunks(instances: list[InstanceFacts], size: int) -> Iterator[list[InstanceFacts]]:
    for begin in range(0, len(instances), size):
        yield instances[begin : begin + size]


def _reason(plan: DropPlan) -> str:
    names = ", ".join("+".join(stage.instance_id for stage in group.stages) for group in plan.groups)
    return f"{names} serve as pipelines from now on, with room for {plan.gained_tokens} more tokens"
