"""A drop plan: which groups form, and which layers each member keeps; or why there is none.

Pure values. Source: KunServe v1, section 4.1; v2, section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from services.planner.policy.levers.price import Price
from services.planner.policy.plans.drop_facts import ClusterFacts
from shared.ids import WorkerId
from shared.layers import LayerRange


class Stage(NamedTuple):
    """One member's part."""

    instance_id: WorkerId
    held: LayerRange
    """What the plan was made for: a worker that holds something else refuses it."""
    layers: LayerRange
    """What it serves from now on; it drops the rest."""


class NewGroup(NamedTuple):
    """A group that forms."""

    stages: tuple[Stage, ...]
    """In the order of the pipeline; the first one leads."""
    before_tokens: int
    """Capacity of the groups that it is made of, together."""
    after_tokens: int
    """Its own, once the KV of running requests is where it is needed: exchanged, or computed again."""
    exchange_s: float
    """How long that takes."""
    price_s: float
    """Its part of the plan's price."""


@dataclass(frozen=True, slots=True)
class DropPlan:
    """What is to be done."""

    groups: tuple[NewGroup, ...]
    """Those that form, in the order in which they were chosen; nothing changes for the others."""
    required_tokens: int
    gained_tokens: int
    slowdown: float
    """Throughput of the cluster without any drop, over that with this plan: v1's objective."""
    price: Price
    reason: str = ""

    @property
    def lacking_tokens(self) -> int:
        """Of what was required; not above 0: nothing."""
        return self.required_tokens - self.gained_tokens

    @property
    def is_satisfied(self) -> bool:
        """Whether the gain is what was required; else more instances are needed besides."""
        return self.lacking_tokens <= 0

    @property
    def instance_ids(self) -> tuple[WorkerId, ...]:
        """Instances that change, group by group."""
        return tuple(stage.instance_id for group in self.groups for stage in group.stages)

    def check_invariants(self, facts: ClusterFacts) -> None:
        """Check that these instances can carry the plan out; raises AssertionError naming the law that is broken."""
        held = {instance.instance_id: instance.layers for instance in facts.instances}
        named = [stage.instance_id for group in self.groups for stage in group.stages]
        assert len(named) == len(set(named)), "an instance has two places"
        for group in self.groups:
            reached = 0
            for stage in group.stages:
                assert held[stage.instance_id] == stage.held, f"{stage.instance_id} holds {held[stage.instance_id]}"
                assert stage.held.covers(stage.layers), f"{stage.instance_id} would have to load layers"
                assert stage.layers.first == reached, f"behind layer {reached} comes {stage.layers}"
                reached = stage.layers.end
            assert reached == facts.model.num_layers, f"nobody serves the layers from {reached} on"
            assert group.after_tokens > group.before_tokens, "a group gains nothing"
        gained = sum(group.after_tokens - group.before_tokens for group in self.groups)
        assert gained == self.gained_tokens, "the gain is not that of the groups"


class RefusalKind(StrEnum):
    """Why there is no plan."""

    NOT_NEEDED = "not-needed"
    NO_PARTNER = "no-partner"
    NO_RANGES = "no-ranges"
    NO_GAIN = "no-gain"
    NO_SECOND_COPY = "no-second-copy"
    NOT_WORTH_IT = "not-worth-it"


@dataclass(frozen=True, slots=True)
class DropRefusal:
    """Why nothing is dropped."""

    kind: RefusalKind
    reason: str
