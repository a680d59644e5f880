"""Back to whole instances: what each member of a group must load, from whom, and whether the KV fits afterwards.

    before   A [0, 24)   B [24, 48)        one group, room for 574 000 tokens
    loads    A: 24-47 from B, which has them; B: 0-23 from A
    after    A [0, 48)   B [0, 48)         two groups of one, room for 212 000 each

The outer parts travel with the layers of their end: who loads layer 0 loads the embedding, who loads the last layer the
norm and the head. A source is a member of the same group if one has the layer, then another instance on the same host,
then any other; of several, the one that has least to send so far. What no instance has comes from the host's own
memory.

Whether the KV fits: every request must find an instance that takes all of it. First-fit never fails if

    used ≤ Σ over instances max(0, C - r + 1) + r - 1        in blocks; C: room of an instance, r: largest request

because when it fails, every instance has less than r free. (With r = 1: used ≤ Σ C.) Best effort that gives way counts
for nothing: it has what room is left then, and waits if there is none.

Pure and deterministic. Source: KunServe v1, section 4.2 (live KVCache restore); v2, section 4.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.planner.policy.plans.capacity import CapacityRule
from services.planner.policy.plans.drop_facts import ClusterFacts, InstanceFacts, ModelFacts, groups_of, missing_layers
from shared.ids import WorkerId
from shared.layers import LayerRange


@dataclass(frozen=True, slots=True)
class ParameterFetch:
    """Parameters that one instance must get."""

    instance_id: WorkerId
    layers: LayerRange
    source_id: WorkerId | None
    """The instance that sends them; None: they come from the memory of the instance's own host."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RestoredGroup:
    """One group that is dissolved."""

    group_id: str
    members: tuple[WorkerId, ...]
    before_tokens: int
    after_tokens: int
    """Capacity of its members, each alone."""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What is to be done."""

    groups: tuple[RestoredGroup, ...]
    loads: tuple[ParameterFetch, ...]
    """By instance, then by layers."""
    load_s: float
    """Until the last instance is whole, if the links carry nothing else; what comes from host memory is not in it."""
    reason: str


@dataclass(frozen=True, slots=True)
class RestoreRefusal:
    """Why nothing is restored."""

    reason: str


def plan_restore(facts: ClusterFacts, group_ids: Sequence[str] = ()) -> RestorePlan | RestoreRefusal:
    """Plan to make the members of groups whole instances again.

    Args:
        facts: of the cluster, now.
        group_ids: which groups; () means all.

    Raises:
        ValueError: there is no group of that name.
    """
    chosen = _choose(facts, group_ids)
    if not chosen:
        return RestoreRefusal("no group has dropped anything")
    rule = CapacityRule(facts.model)
    for name, members in chosen.items():
        refusal = why_no_room(rule, name, members)
        if refusal is not None:
            return refusal
    loads = _Sources(facts).loads([member for members in chosen.values() for member in members])
    if isinstance(loads, RestoreRefusal):
        return loads
    groups = tuple(_restored(rule, name, members) for name, members in chosen.items())
    load_s = _load_s(facts, loads)
    before, after = sum(group.before_tokens for group in groups), sum(group.after_tokens for group in groups)
    reason = (
        f"{', '.join(chosen)}: {sum(len(group.members) for group in groups)} instances become whole; "
        f"{_loaded(loads, load_s)}; room for {after} tokens, now {before}"
    )
    return RestorePlan(groups, loads, load_s, reason)


def _loaded(loads: Sequence[ParameterFetch], load_s: float) -> str:
    if not loads:
        return "their parameters are loaded already"
    num_bytes = sum(load.num_bytes for load in loads)
    return f"{num_bytes / 2**30:.2f} GiB of parameters are loaded in {load_s:.2f} s"


def _choose(facts: ClusterFacts, group_ids: Sequence[str]) -> dict[str, list[InstanceFacts]]:
    """Return the members of the groups, in the order of the facts."""
    groups = groups_of(facts)
    for name in group_ids:
        if name not in groups:
            raise ValueError(f"there is no group '{name}'")
    whole = facts.model.all_layers
    wanted = group_ids or list(groups)
    return {
        name: groups[name] for name in dict.fromkeys(wanted) if len(groups[name]) > 1 or groups[name][0].layers != whole
    }


def why_no_room(
    rule: CapacityRule, name: str, members: Sequence[InstanceFacts], largest_tokens: int = 1
) -> RestoreRefusal | None:
    """Return why the KV of a group's requests would not fit whole instances; None: it does.

    Args:
        rule: of the model.
        name: of the group, for the reason.
        members: all of it.
        largest_tokens: most KV that one running request has.
    """
    model = rule.model
    used = sum(-(-member.used_tokens // model.block_size) for member in members)
    largest = -(-largest_tokens // model.block_size)
    rooms = [rule.blocks(model.all_layers, member.num_pages, member.max_blocks) for member in members]
    if min(rooms) < 1:
        return RestoreRefusal(f"{name}: a whole copy leaves an instance no room for KV")
    if used and used > sum(max(room - largest + 1, 0) for room in rooms) + largest - 1:
        return RestoreRefusal(
            f"{name}: its requests hold {rule.tokens(used)} tokens of KV, one of them up to {largest_tokens}; whole "
            f"instances have room for {rule.tokens(sum(rooms))}, and not all would surely find a place"
        )
    return None


def _restored(rule: CapacityRule, name: str, members: Sequence[InstanceFacts]) -> RestoredGroup:
    broken = missing_layers(rule.model, members) is not None
    beside = rule.model.all_layers if any(member.is_beside for member in members) else None
    return RestoredGroup(
        group_id=name,
        members=tuple(member.instance_id for member in members),
        before_tokens=0 if broken else rule.tokens(rule.group_blocks(members, beside)),
        after_tokens=rule.tokens(rule.whole_blocks(members)),
    )


class _Sources:
    """Chooses who sends which layer, and counts what each has to send."""

    def __init__(self, facts: ClusterFacts) -> None:
        self._facts = facts
        self._sent_bytes: dict[WorkerId, int] = {}
        self._holders: list[list[InstanceFacts]] = [[] for _ in facts.model.layer_bytes]
        self._near: dict[tuple[int, str, str], list[InstanceFacts]] = {}
        """By layer, and group or host: of thousands of holders the nearest are found among few."""
        for instance in facts.instances:
            for layer in range(instance.layers.first, instance.layers.end):
                self._holders[layer].append(instance)
                self._near.setdefault((layer, "group", instance.group), []).append(instance)
                self._near.setdefault((layer, "host", instance.host), []).append(instance)

    def loads(self, instances: Sequence[InstanceFacts]) -> tuple[ParameterFetch, ...] | RestoreRefusal:
        """Return what these instances must load, or why they cannot."""
        loads: list[ParameterFetch] = []
        for instance in sorted(instances, key=lambda each: each.instance_id):
            for layer in range(self._facts.model.num_layers):
                if layer in instance.loaded:
                    continue
                load = self._load(instance, layer)
                if load is None:
                    where = "is in no instance and not in its host's memory"
                    return RestoreRefusal(f"layer {layer}, which {instance.instance_id} lacks, {where}")
                _append(loads, load)
        return tuple(loads)

    def _load(self, instance: InstanceFacts, layer: int) -> ParameterFetch | None:
        layers = LayerRange(layer, layer + 1)
        num_bytes = _bytes(self._facts.model, instance, layer)
        if self._holders[layer]:
            near = self._near.get((layer, "group", instance.group)) or self._near.get((layer, "host", instance.host))
            source = min(near or self._holders[layer], key=lambda holder: self._distance(instance, holder))
            self._sent_bytes[source.instance_id] = self._sent_bytes.get(source.instance_id, 0) + num_bytes
            return ParameterFetch(instance.instance_id, layers, source.instance_id, num_bytes)
        if instance.host_copy is not None and instance.host_copy.covers(layers):
            return ParameterFetch(instance.instance_id, layers, None, num_bytes)
        return None

    def _distance(self, instance: InstanceFacts, holder: InstanceFacts) -> tuple[bool, bool, float, WorkerId]:
        sent = self._sent_bytes.get(holder.instance_id, 0)
        busy_s = sent / holder.link_bytes_per_s if holder.link_bytes_per_s > 0 else float(sent)
        return holder.group != instance.group, holder.host != instance.host, busy_s, holder.instance_id


def missing_bytes(model: ModelFacts, instance: InstanceFacts) -> int:
    """Return the bytes of parameters that the instance must load to be whole."""
    return sum(_bytes(model, instance, layer) for layer in model.all_layers if layer not in instance.loaded)


def _bytes(model: ModelFacts, instance: InstanceFacts, layer: int) -> int:
    """Return what the instance must load with this layer; outer parts that both ends need come once, with layer 0."""
    num_bytes = model.layer_bytes[layer]
    shared_bytes = max(model.first_stage_end - model.last_stage_begin, 0)
    if layer == 0:
        has_last = instance.layers.end == model.num_layers
        num_bytes += model.first_stage_end - (shared_bytes if has_last else 0)
    if layer == model.num_layers - 1:
        num_bytes += model.outer_bytes - model.last_stage_begin - shared_bytes
    return num_bytes


def _append(loads: list[ParameterFetch], load: ParameterFetch) -> None:
    """Add a load of one layer, to the last one if it goes on there."""
    if loads:
        last = loads[-1]
        follows = last.layers.end == load.layers.first
        if (last.instance_id, last.source_id) == (load.instance_id, load.source_id) and follows:
            layers = LayerRange(last.layers.first, load.layers.end)
            loads[-1] = ParameterFetch(last.instance_id, layers, last.source_id, last.num_bytes + load.num_bytes)
            return
    loads.append(load)


def _load_s(facts: ClusterFacts, loads: Sequence[ParameterFetch]) -> float:
    """Return when the busiest link is done: each carries both ways at once."""
    links: Mapping[WorkerId, float] = {each.instance_id: each.link_bytes_per_s for each in facts.instances}
    sent: dict[WorkerId, int] = {}
    received: dict[WorkerId, int] = {}
    for load in loads:
        if load.source_id is not None:
            sent[load.source_id] = sent.get(load.source_id, 0) + load.num_bytes
            received[load.instance_id] = received.get(load.instance_id, 0) + load.num_bytes
    busy = [*sent.items(), *received.items()]
    return max((num_bytes / links[name] for name, num_bytes in busy if links[name] > 0), default=0.0)
