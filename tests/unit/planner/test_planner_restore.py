"""Restoring: every layer comes from somebody who has it, and what the requests hold fits afterwards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.planner.policy.plans.capacity import CapacityRule
from services.planner.policy.plans.drop_facts import ClusterFacts
from services.planner.policy.restoring.restore import (
    ParameterFetch,
    RestorePlan,
    RestoreRefusal,
    plan_restore,
    why_no_room,
)
from shared.ids import WorkerId
from shared.layers import LayerRange
from tests.support.drop_builders import literal_blocks, make_facts, make_group, make_instance, make_model, random_facts
from tests.support.kinds import of_kind, some


def restored(facts: ClusterFacts, *groups: str) -> RestorePlan:
    return of_kind(RestorePlan, plan_restore(facts, groups))


def as_text(loads: tuple[ParameterFetch, ...]) -> list[str]:
    return [f"{load.instance_id} {load.layers} {load.source_id} {load.num_bytes}" for load in loads]


def test_members_of_a_pair_load_from_each_other() -> None:
    plan = restored(make_facts(make_group(0, (4, 8), link_bytes_per_s=256.0)))
    assert as_text(plan.loads) == ["w00000 [4, 8) w00001 512", "w00001 [0, 4) w00000 512"]
    assert plan.load_s == 2.0
    assert (plan.groups[0].before_tokens, plan.groups[0].after_tokens) == (16 * 7, 2 * 16 * 3)


def test_what_a_group_has_now_is_the_room_of_its_least_stage() -> None:
    """Of 64 pages a stage of 2 layers has (64 - 4) / 4 = 15 blocks of 16 tokens, one of 6 has (64 - 12) / 12 = 4."""
    plan = restored(make_facts(make_group(0, (2, 8))))
    assert plan.groups[0].before_tokens == 16 * 4


def test_a_link_carries_both_ways_at_once_and_the_busiest_end_counts() -> None:
    """The second of 3 stages loads 4 and 2 layers of 128 bytes, and sends its own 2 to both: 768 and 512 bytes."""
    group = [replace(each, link_bytes_per_s=64.0) for each in make_group(0, (4, 6, 8))]
    plan = restored(make_facts(group))
    sent, received = ({each.instance_id: 0 for each in group} for _ in range(2))
    for load in plan.loads:
        assert load.source_id is not None
        sent[load.source_id] += load.num_bytes
        received[load.instance_id] += load.num_bytes
    assert received == {"w00000": 512, "w00001": 768, "w00002": 768}
    assert sent == {"w00000": 1024, "w00001": 512, "w00002": 512}
    assert plan.load_s == 1024 / 64
    slow = [group[0], group[1], replace(group[2], link_bytes_per_s=8.0)]
    assert restored(make_facts(slow)).load_s == 768 / 8, "what it receives, more than it sends"


def test_outer_parts_come_with_the_layers_of_their_ends() -> None:
    """Embedding [0, 100), head [100, 160) of 160 bytes; tied, both ends need all of it."""
    group = make_group(0, (2, 5, 8))
    apart = make_model(outer_bytes=160, first_stage_end=100, last_stage_begin=100)
    loads = restored(make_facts(group, apart)).loads
    assert sum(load.num_bytes for load in loads if load.instance_id == "w00000") == 6 * 128 + 60
    assert sum(load.num_bytes for load in loads if load.instance_id == "w00001") == 5 * 128 + 160
    assert sum(load.num_bytes for load in loads if load.instance_id == "w00002") == 5 * 128 + 100
    tied = make_model(outer_bytes=160, first_stage_end=160, last_stage_begin=0)
    loads = restored(make_facts(group, tied)).loads
    sizes = [sum(load.num_bytes for load in loads if load.instance_id == f"w0000{i}") for i in range(3)]
    assert sizes == [6 * 128, 5 * 128 + 160, 5 * 128]


def test_a_source_is_of_the_group_then_of_the_host_then_the_least_busy() -> None:
    group = make_group(0, (4, 8), host="a")
    near, far = make_instance(5, host="a"), make_instance(6, host="b")
    assert {load.source_id for load in restored(make_facts([*group, near, far])).loads} == {"w00000", "w00001"}
    survivor = group[:1]
    assert [load.source_id for load in restored(make_facts([*survivor, near, far])).loads] == ["w00005"]
    rest = [replace(near, host="c", link_bytes_per_s=10.0), replace(far, link_bytes_per_s=10.0)]
    shared = restored(make_facts([*survivor, *rest])).loads
    sent = {name: sum(load.num_bytes for load in shared if load.source_id == name) for name in ("w00005", "w00006")}
    assert sent == {"w00005": 256, "w00006": 256}


def test_a_member_of_the_group_goes_before_a_neighbour_on_the_host() -> None:
    """The other member lies on another host, and a whole instance on this one."""
    first, second = make_group(0, (4, 8), host="a")
    group = [first, replace(second, host="b")]
    loads = restored(make_facts([*group, make_instance(5, host="a")])).loads
    assert {(load.instance_id, load.source_id) for load in loads} == {("w00000", "w00001"), ("w00001", "w00000")}


def test_of_two_sources_the_one_that_is_done_sooner_sends() -> None:
    """128 bytes take 12.8 s on the first's link and 1.28 s on the second's: it sends the other three layers."""
    survivor = make_group(0, (4, 8), host="a")[:1]
    slow, fast = make_instance(5, link_bytes_per_s=10.0), make_instance(6, link_bytes_per_s=100.0)
    loads = restored(make_facts([*survivor, slow, fast])).loads
    assert as_text(loads) == ["w00000 [4, 5) w00005 128", "w00000 [5, 8) w00006 384"]


def test_what_is_held_in_the_middle_is_loaded_from_before_and_behind() -> None:
    survivor = make_group(0, (2, 6, 8))[1]
    plan = restored(make_facts([survivor, make_instance(5)]))
    assert as_text(plan.loads) == ["w00001 [0, 2) w00005 256", "w00001 [6, 8) w00005 256"]
    assert plan.groups[0].before_tokens == 0, "layers were missing: it had no room for anything"


def test_no_more_is_promised_than_there_are_addresses_for() -> None:
    (group,) = restored(make_facts(make_group(0, (4, 8), max_blocks=2))).groups
    assert (group.before_tokens, group.after_tokens) == (2 * 16, 2 * 2 * 16)


def test_what_no_instance_has_comes_from_host_memory_or_not_at_all() -> None:
    survivor = make_group(0, (4, 8))[:1]
    with_copy = [replace(survivor[0], host_copy=LayerRange(3, 8))]
    assert as_text(restored(make_facts(with_copy)).loads) == ["w00000 [4, 8) None 512"]
    without = of_kind(RestoreRefusal, plan_restore(make_facts([replace(survivor[0], host_copy=LayerRange(3, 7))])))
    assert without.reason == "layer 7, which w00000 lacks, is in no instance and not in its host's memory"


def test_only_the_named_groups_are_restored() -> None:
    groups = make_group(0, (4, 8)) + make_group(2, (2, 8))
    facts = make_facts([*groups, make_instance(9)])
    assert [group.group_id for group in restored(facts).groups] == ["w00000", "w00002"]
    plan = restored(facts, "w00002")
    assert [group.members for group in plan.groups] == [("w00002", "w00003")]
    assert {load.instance_id for load in plan.loads} == {"w00002", "w00003"}
    with pytest.raises(ValueError, match="no group 'w1'"):
        plan_restore(facts, ("w1",))
    nothing = of_kind(RestoreRefusal, plan_restore(facts, ("w00009",)))
    assert nothing.reason == "no group has dropped anything"


def test_a_group_whose_kv_would_not_fit_is_refused() -> None:
    """Whole: 3 blocks of 16 tokens each, 6 in all."""
    first, second = make_group(0, (4, 8))
    assert isinstance(plan_restore(make_facts([replace(first, used_tokens=96), second])), RestorePlan)
    refused = of_kind(RestoreRefusal, plan_restore(make_facts([replace(first, used_tokens=97), second])))
    assert "would surely find a place" in refused.reason
    # a request of 3 blocks beside two of one block, one on each instance, would have no place
    rule = CapacityRule(make_model())
    assert why_no_room(rule, "g", [replace(first, used_tokens=64), second], 48) is None
    assert why_no_room(rule, "g", [replace(first, used_tokens=80), second], 48) is not None
    no_room = make_facts([replace(each, num_pages=20) for each in make_group(0, (4, 8))])
    assert isinstance(plan_restore(no_room), RestoreRefusal)
    one_without = of_kind(RestoreRefusal, plan_restore(make_facts([first, replace(second, num_pages=20)])))
    assert one_without.reason == "w00000: a whole copy leaves an instance no room for KV"


@pytest.mark.parametrize("seed", range(60))
def test_a_restore_makes_every_instance_whole_from_those_who_have_the_layers(seed: int) -> None:
    facts = random_facts(np.random.default_rng(seed), num_drops=3)
    plan = plan_restore(facts)
    if isinstance(plan, RestoreRefusal):
        return
    held = {instance.instance_id: instance for instance in facts.instances}
    members = [name for group in plan.groups for name in group.members]
    assert sorted(members) == [each.instance_id for each in facts.instances if each.group_id]
    for name in members:
        gets = [load for load in plan.loads if load.instance_id == name]
        layers = [layer for load in gets for layer in load.layers]
        assert sorted([*layers, *held[name].layers]) == list(facts.model.all_layers)
        for load in gets:
            source = held[WorkerId(load.source_id or name)]
            assert some(source.host_copy if load.source_id is None else source.layers).covers(load.layers)
    after = sum(
        literal_blocks(facts.model, facts.model.all_layers, held[name].num_pages, held[name].max_blocks)
        for name in members
    )
    assert sum(group.after_tokens for group in plan.groups) == after * facts.model.block_size


@pytest.mark.parametrize("seed", range(40))
def test_where_there_is_room_first_fit_finds_every_request_a_place(seed: int) -> None:
    """Random requests in random order, as large as stated, that use just as much as the plan was made for."""
    rng = np.random.default_rng(seed)
    largest = int(rng.integers(1, 4))
    pages = rng.integers(48, 160, 2).tolist()
    first, second = (replace(each, num_pages=size) for each, size in zip(make_group(0, (4, 8)), pages, strict=True))
    for used in range(1, 20):
        members = [replace(first, used_tokens=16 * used), second]
        if why_no_room(CapacityRule(make_model()), "g", members, 16 * largest) is not None:
            return
        free = [(size - 16) // 16 for size in pages]
        left = used
        while left:
            size = min(left, int(rng.integers(1, largest + 1)))
            place = next(place for place, blocks in enumerate(free) if blocks >= size)
            free[place] -= size
            left -= size
    raise AssertionError("so many blocks cannot be there")
