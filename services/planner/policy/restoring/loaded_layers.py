"""Parameters beside those that a group computes with: what its members hold then, and what room is left meanwhile.

    restore in one step    stop ─► load ─────────────────► whole instances            readers wait for the load
    restore beside         load, while the group serves with less KV ─► whole instances, which have nothing to load

A group whose members have the whole model resident has room for as many tokens as its *least* stage:

    pages of parameters    all layers, in every member
    blocks                 KV of its own layers only, in what is left of the budget (`capacity`)

With stages of equal size that is what its members have alone, together; with others it is less. So a load is planned
only if what the group wants is below the ratio of that room too.

If what it wants fits in fewer blocks (`AHEAD_RATIO`), the group gets along with those meanwhile, and each member has
memory for all layers of its share too, so most of the KV can move before the group dissolves. Of n stages alike, each
with room for C blocks alone, the group then has

    C                      and each of them room for any share
    n² / (2 n - 1) · C     if that is too little: 1.33 C of two, 2.29 C of four; room for an nth of it at each:
                           an nth of the layers of all, and all others of an nth
    what it wants          if that is too little still: room at each for a part of its share, the rest moves at the end

The workers know by the number of blocks: what memory those leave is for KV that moves ahead.

Pure. Source: KunServe v1, section 4.2, v2, section 4.4 (parameters are pulled beside serving). Deviations: room is made
before the first byte is loaded, and all of a group's members load, or none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from services.planner.policy.plans.capacity import CapacityRule
from services.planner.policy.plans.drop_facts import (
    ClusterFacts,
    InstanceFacts,
    ModelFacts,
    expected_tokens,
    groups_of,
    wanted_tokens,
)
from services.planner.policy.restoring.restore import RestoreRefusal, missing_bytes, why_no_room
from shared.ids import WorkerId
from shared.layers import LayerRange, check_tiling

AHEAD_RATIO = 0.85
"""Share of the room meanwhile that a group may want for its KV to move ahead; the rest is for what comes."""
AHEAD_HORIZON_S = 2.0
"""And so may it so many seconds ahead, if none of its requests ends: about what the load and the copies take."""


class LoadedLayers(StrEnum):
    """What the members of a group have beside the layers that they compute with."""

    NOTHING = "nothing"
    BY_HALF = "by half"  # some have room for the whole model, others not: a plan did not come to its end
    LOADING = "loading"  # all have room for the whole model, and not all of it is there
    LOADED = "loaded"


@dataclass(frozen=True, slots=True)
class ResidentGroup:
    """A group whose members change what they hold, and not what they compute."""

    group_id: str
    members: tuple[WorkerId, ...]
    """In the order of the pipeline; the first one leads."""
    num_blocks: int
    """KV blocks that each of them has afterwards, at least."""


@dataclass(frozen=True, slots=True)
class LoadedLayersPlan:
    """What is to be done."""

    groups: tuple[ResidentGroup, ...]
    resident: LayerRange | None
    """Layers whose parameters the members have afterwards, or load; None: those that they compute with."""
    reason: str

    def check_invariants(self, facts: ClusterFacts) -> None:
        """Check that these groups can carry the plan out; raises AssertionError naming the law that is broken."""
        groups = groups_of(facts)
        rule = CapacityRule(facts.model)
        named = [member for group in self.groups for member in group.members]
        assert len(named) == len(set(named)), "an instance has two places"
        for group in self.groups:
            stages = pipeline_of(facts.model, groups[group.group_id])
            assert group.members == tuple(each.instance_id for each in stages), "the stages are not those that stand"
            assert 0 < group.num_blocks <= rule.group_blocks(stages, self.resident), "there is no memory for so much KV"
            if self.resident is not None:
                wanted = -(-wanted_tokens(stages) // facts.model.block_size)
                assert wanted <= group.num_blocks, "what is in use does not fit"


def pipeline_of(model: ModelFacts, members: Sequence[InstanceFacts]) -> tuple[InstanceFacts, ...]:
    """Return the members of a group by stage; () if they are no whole pipeline: one is missing, or it is alone."""
    stages = sorted(members, key=lambda each: each.layers)
    try:
        check_tiling([stage.layers for stage in stages], model.num_layers)
    except ValueError:
        return ()
    leads = stages[0].instance_id == stages[0].group
    return tuple(stages) if len(stages) > 1 and leads else ()


def loaded_layers_of(model: ModelFacts, members: Iterable[InstanceFacts]) -> LoadedLayers:
    """Return what the members of a group have beside."""
    beside = [member.is_beside for member in members]
    if not any(beside):
        return LoadedLayers.NOTHING
    if not all(member.resident == model.all_layers for member in members):
        return LoadedLayers.BY_HALF
    is_loaded = all(member.loaded_ratio == 1.0 for member in members)
    return LoadedLayers.LOADED if is_loaded else LoadedLayers.LOADING


def beside_groups(facts: ClusterFacts, instance_ids: Iterable[WorkerId]) -> tuple[str, ...]:
    """Return the groups that stand, have a member among these instances, and parameters beside; sorted."""
    named = dict.fromkeys(instance_ids)
    return tuple(
        sorted(
            name
            for name, members in groups_of(facts).items()
            if any(member.instance_id in named for member in members)
            and loaded_layers_of(facts.model, members) is not LoadedLayers.NOTHING
            and pipeline_of(facts.model, members)
        )
    )


def can_load(model: ModelFacts, members: Iterable[InstanceFacts]) -> bool:
    """Return whether each member can load what it lacks beside serving: from its own host."""
    whole = model.all_layers
    return all(
        member.resident is not None and member.host_copy is not None and member.host_copy.covers(whole)
        for member in members
    )


def beside_tokens(rule: CapacityRule, stages: Sequence[InstanceFacts]) -> int:
    """Return the KV that a group has room for while each of its members has the whole model, tokens."""
    return rule.tokens(rule.group_blocks(stages, rule.model.all_layers))


def ahead_blocks(rule: CapacityRule, stages: Sequence[InstanceFacts]) -> int:
    """Return the most blocks of a group beside the whole model with which each member can have its share ahead."""

    def suffices(num_blocks: int) -> bool:
        return all(
            rule.blocks_ahead(stage.layers, stage.num_pages, num_blocks, stage.max_blocks) * len(stages) >= num_blocks
            for stage in stages
        )

    most = rule.group_blocks(stages, rule.model.all_layers)
    return bisect_left(range(1, most + 1), 1, key=lambda num_blocks: int(not suffices(num_blocks)))


def fits_ahead(rule: CapacityRule, stages: Sequence[InstanceFacts], horizon_s: float = 0.0) -> bool:
    """Return whether a group gets along with so much room that its KV can move ahead, and for long enough."""
    return _fits(rule, stages, ahead_blocks(rule, stages), horizon_s)


def room_beside(rule: CapacityRule, stages: Sequence[InstanceFacts]) -> tuple[int, bool]:
    """Return the KV that a group has room for that has parameters beside, tokens, and whether KV can move ahead."""
    num_blocks = stages[0].num_blocks
    all_pages = rule.kv_pages(rule.group_blocks(stages, rule.model.all_layers))
    is_ahead = 0 < rule.kv_pages(num_blocks) < all_pages  # whole pages are left to copies
    return (rule.tokens(num_blocks), True) if is_ahead else (beside_tokens(rule, stages), False)


def why_not_loaded(
    rule: CapacityRule, group_id: str, stages: Sequence[InstanceFacts], max_use_ratio: float, horizon_s: float = 0.0
) -> RestoreRefusal | None:
    """Return why a group cannot load the whole model beside serving; None: it can.

    Args:
        rule: of the model.
        group_id: for the reason.
        stages: of the group.
        max_use_ratio: what requests want is below this share of the room that is left meanwhile.
        horizon_s: and so is what they want so many seconds ahead if none of them ends.
    """
    if not can_load(rule.model, stages):
        return RestoreRefusal(f"{group_id}: not all of its members can load parameters beside serving")
    room, wanted = beside_tokens(rule, stages), expected_tokens(stages, horizon_s)
    if room == 0 or wanted >= max_use_ratio * room:
        return RestoreRefusal(
            f"{group_id}: its requests want {wanted} tokens of KV; beside the whole model it has room for {room}"
        )
    return why_no_room(rule, group_id, stages)


def plan_load(
    facts: ClusterFacts, group_id: str, max_use_ratio: float, horizon_s: float = 0.0
) -> LoadedLayersPlan | RestoreRefusal:
    """Plan that the members of a group that stands load what they lack while they serve; see `why_not_loaded`."""
    model, rule = facts.model, CapacityRule(facts.model)
    stages = pipeline_of(model, groups_of(facts)[group_id])
    if not stages:
        return RestoreRefusal(f"{group_id} is no group that stands")
    refusal = why_not_loaded(rule, group_id, stages, max_use_ratio, horizon_s)
    if refusal is not None:
        return refusal
    alone = min(rule.whole_blocks((stage,)) for stage in stages)
    rooms = (alone, ahead_blocks(rule, stages), _needed(rule, stages, horizon_s))
    all_blocks = rule.group_blocks(stages, model.all_layers)
    num_blocks = next((room for room in rooms if room and _fits(rule, stages, room, horizon_s)), all_blocks)
    num_bytes = sum(missing_bytes(model, stage) for stage in stages)
    reason = (
        f"{num_bytes / 2**30:.2f} GiB of parameters are loaded beside serving; "
        f"room for {rule.tokens(num_blocks)} tokens meanwhile, {rule.tokens(rule.group_blocks(stages))} before"
    )
    return LoadedLayersPlan((_resident(group_id, stages, num_blocks),), model.all_layers, reason)


def plan_unload(facts: ClusterFacts, group_ids: Sequence[str], why: str) -> LoadedLayersPlan:
    """Plan that groups give what they have beside back to KV; each is a whole pipeline.

    Args:
        facts: of the cluster, now.
        group_ids: which; at least one.
        why: in words.
    """
    rule, groups = CapacityRule(facts.model), groups_of(facts)
    changes = []
    before = after = 0
    for name in group_ids:
        stages = pipeline_of(facts.model, groups[name])
        assert stages, f"{name} is no group that stands"
        changes.append(_resident(name, stages, rule.group_blocks(stages)))
        before += room_beside(rule, stages)[0]
        after += changes[-1].num_blocks
    reason = f"{why}; room for {rule.tokens(after)} tokens, now {before}"
    return LoadedLayersPlan(tuple(changes), None, reason)


def _fits(rule: CapacityRule, stages: Sequence[InstanceFacts], num_blocks: int, horizon_s: float) -> bool:
    expected = expected_tokens(stages, max(horizon_s, AHEAD_HORIZON_S))
    return expected <= AHEAD_RATIO * rule.tokens(num_blocks)


def _needed(rule: CapacityRule, stages: Sequence[InstanceFacts], horizon_s: float) -> int:
    """Return the fewest blocks with which the group gets along, if there are as many beside the whole model; else 0."""
    expected = expected_tokens(stages, max(horizon_s, AHEAD_HORIZON_S))
    needed = ceil(expected / (AHEAD_RATIO * rule.model.block_size))
    return needed if needed <= rule.group_blocks(stages, rule.model.all_layers) else 0


def _resident(group_id: str, stages: Sequence[InstanceFacts], num_blocks: int) -> ResidentGroup:
    return ResidentGroup(group_id, tuple(stage.instance_id for stage in stages), num_blocks)
