"""Restoring: every layer comes from somebody who has it, and what the requests hold fits afterwards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.planner.policy.drop_facts import ClusterFacts
from services.planner.policy.restore import Load, RestorePlan, RestoreRefusal, plan_restore
from shared.ids import WorkerId
from shared.layers import LayerRange
from tests.support.drop_builders import literal_blocks, make_facts, make_group, make_instance, make_model, random_facts


def restored(facts: ClusterFacts, *groups: str, largest: int = 1) -> RestorePlan:
    plan = plan_restore(facts, groups, largest)
    assert isinstance(plan, RestorePlan), plan
    return plan


def as_text(loads: tuple[Load, ...]) -> list[str]:
    return [f"{load.instance_id} {load.layers} {load.source_id} {load.num_bytes}" for load in loads]


def test_members_of_a_pair_load_from_each_other() -> None:
    plan = restored(make_facts(make_group(0, (4, 8), link_bytes_per_s=256.0)))
    assert as_text(plan.loads) == ["w00000 [4, 8) w00001 512", "w00001 [0, 4) w00000 512"]
    assert plan.load_s == 2.0
    assert (plan.groups[0].before_tokens, plan.groups[0].after_tokens) == (16 * 7, 2 * 16 * 3)


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


def test_what_no_instance_has_comes_from_host_memory_or_not_at_all() -> None:
    survivor = make_group(0, (4, 8))[:1]
    with_copy = [replace(survivor[0], host_copy=LayerRange(3, 8))]
    assert as_text(restored(make_facts(with_copy)).loads) == ["w00000 [4, 8) None 512"]
    without = plan_restore(make_facts([replace(survivor[0], host_copy=LayerRange(3, 7))]))
    assert isinstance(without, RestoreRefusal)
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
    nothing = plan_restore(facts, ("w00009",))
    assert isinstance(nothing, RestoreRefusal)
    assert nothing.reason == "no group has dropped anything"


def test_a_group_whose_kv_would_not_fit_is_refused() -> None:
    """Whole: 3 blocks of 16 tokens each, 6 in all."""
    first, second = make_group(0, (4, 8))
    assert isinstance(plan_restore(make_facts([replace(first, used_tokens=96), second])), RestorePlan)
    refused = plan_restore(make_facts([replace(first, used_tokens=97), second]))
    assert isinstance(refused, RestoreRefusal)
    assert "would surely find a place" in refused.reason
    # a request of 3 blocks beside two of one block, one on each instance, would have no place
    assert isinstance(plan_restore(make_facts([replace(first, used_tokens=64), second]), (), 48), RestorePlan)
    assert isinstance(plan_restore(make_facts([replace(first, used_tokens=80), second]), (), 48), RestoreRefusal)
    no_room = make_facts([replace(each, num_pages=20) for each in make_group(0, (4, 8))])
    assert isinstance(plan_restore(no_room), RestoreRefusal)


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
        layers = [layer for load in gets for layer in range(load.layers.first, load.layers.end)]
        own = range(held[name].layers.first, held[name].layers.end)
        assert sorted([*layers, *own]) == list(range(facts.model.num_layers))
        for load in gets:
            source = held[WorkerId(load.source_id or name)]
            has = source.host_copy if load.source_id is None else source.layers
            assert has is not None
            assert has.covers(load.layers)
    after = sum(
        literal_blocks(facts.model, facts.model.all_layers, held[name].num_pages, held[name].max_blocks)
        for name in members
    )
    assert sum(group.after_tokens for group in plan.groups) == after * facts.model.block_size


@pytest.mark.parametrize("seed", range(40))
def test_where_a_restore_is_planned_first_fit_finds_every_request_a_place(seed: int) -> None:
    """Random requests in random order, as large as stated, that use just as much as the plan was made for."""
    rng = np.random.default_rng(seed)
    largest = int(rng.integers(1, 4))
    pages = rng.integers(48, 160, 2).tolist()
    first, second = (replace(each, num_pages=size) for each, size in zip(make_group(0, (4, 8)), pages, strict=True))
    for used in range(1, 20):
        facts = make_facts([replace(first, used_tokens=16 * used), second])
        if isinstance(plan_restore(facts, (), 16 * largest), RestoreRefusal):
            return
        free = [(size - 16) // 16 for size in pages]
        left = used
        while left:
            size = min(left, int(rng.integers(1, largest + 1)))
            place = next(place for place, blocks in enumerate(free) if blocks >= size)
            free[place] -= size
            left -= size
    raise AssertionError("so many blocks cannot be there")
