"""The lever of static pipelines: who is joined and when, that groups stay, and that they come about again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.planner.policy.levers.ladder import (
    ClusterSnapshot,
    Declined,
    LadderParams,
    MemoryLoad,
    Offer,
    Situation,
    decide,
)
from services.planner.policy.levers.pipeline_lever import PipelineLever
from services.planner.policy.plans.drop_facts import ClusterFacts, InstanceFacts
from services.planner.policy.plans.drop_plan import DropPlan
from shared.ids import WorkerId
from tests.support.drop_builders import carry_out, make_facts, make_group, make_instance, make_model, random_facts
from tests.support.kinds import of_kind
from tests.support.plan_cluster import clustered
from tests.support.plan_workers import PlanCluster

PAIRS = PipelineLever(2)
CALM_S = 300.0
"""Far longer than any hold after which a dropped group is restored."""


def offered(facts: ClusterFacts, lever: PipelineLever = PAIRS) -> Offer | Declined:
    return lever.offer(ClusterSnapshot(0.1, facts=facts))


def plan_of(facts: ClusterFacts, lever: PipelineLever = PAIRS) -> DropPlan:
    offer = of_kind(Offer, offered(facts, lever))
    assert isinstance(offer.order, DropPlan)
    assert offer.cost_s == offer.order.price.total_s
    return offer.order


def copied(number: int, **fields: Any) -> InstanceFacts:
    """An instance whose host has a copy of the whole model."""
    return make_instance(number, host_copy=make_model().all_layers, **fields)


def members(plan: DropPlan) -> list[list[WorkerId]]:
    return [[stage.instance_id for stage in group.stages] for group in plan.groups]


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("seed", range(40))
def test_pipelines_are_of_whole_instances_that_were_alone_and_can_be_carried_out(seed: int, num_stages: int) -> None:
    """Groups that there are already stay as they are; a second round finds nobody whom the first could have joined."""
    facts, lever = random_facts(np.random.default_rng(seed)), PipelineLever(num_stages)
    alone = {each.instance_id for each in facts.instances if not each.group_id}
    offer = offered(facts, lever)
    if isinstance(offer, Declined):
        assert offer.reason
        return
    assert isinstance(offer.order, DropPlan)
    offer.order.check_invariants(facts)
    joined = [name for group in members(offer.order) for name in group]
    assert all(len(group) == num_stages for group in members(offer.order))
    assert set(joined) <= alone
    after = carry_out(facts, offer.order)
    again = offered(after, lever)
    if isinstance(again, Offer):
        assert isinstance(again.order, DropPlan)
        assert not set(joined) & {name for group in members(again.order) for name in group}


@pytest.mark.parametrize("count", range(2, 10))
def test_all_are_joined_but_the_one_without_a_partner(count: int) -> None:
    facts = make_facts([copied(number, host=f"h{number % 2}") for number in range(count)])
    plan = plan_of(facts)
    assert len(plan.groups) == count // 2
    hosts = {each.instance_id: each.host for each in facts.instances}
    near = sum(len({hosts[name] for name in group}) == 1 for group in members(plan))
    on_hosts = [list(hosts.values()).count(host) for host in ("h0", "h1")]
    assert near == sum(number // 2 for number in on_hosts), "only who is left on its host is joined across hosts"
    rest = of_kind(Declined, offered(carry_out(facts, plan)))
    assert rest.reason.endswith("waits for others to join") == (count % 2 == 1)


@pytest.mark.parametrize("num_layers", [2, 7, 20])
def test_halves_differ_by_a_layer_at_most_whatever_room_another_cut_would_make(num_layers: int) -> None:
    """One instance has a fifth more memory: with 20 layers, 9 and 11 of them would leave room for more."""
    model = make_model(num_layers, layer_bytes=(8 * 64,) * num_layers)
    instances = [
        make_instance(number, end=num_layers, pages=pages * num_layers, host_copy=model.all_layers)
        for number, pages in enumerate((20, 24))
    ]
    (group,) = plan_of(make_facts(instances, model)).groups
    assert abs(len(group.stages[0].layers) - len(group.stages[1].layers)) <= 1


def test_need_and_price_do_not_count() -> None:
    """Instances with nothing to do, and instances that have to move all that they hold."""
    idle = make_facts([copied(0), copied(1)])
    busy = make_facts([copied(n, used_tokens=40, num_running=4, link_bytes_per_s=1.0) for n in range(2)])
    assert members(plan_of(idle)) == members(plan_of(busy)) == [["w00000", "w00001"]]
    assert plan_of(busy).price.total_s > 1.0


@pytest.mark.parametrize(
    ("instances", "reason"),
    [
        ([], "no instance can drop parameters"),
        ([copied(0)], "w00000 waits for others to join"),
        ([make_instance(0), make_instance(1)], "a layer would be left without a second copy"),
        ([copied(0, pages=64), copied(1, end=4, pages=64)], "w00000 waits for others to join"),
        ([copied(0, group_id="w00009"), copied(1)], "w00001 waits for others to join"),
        (make_group(0, (4, 8)), "every instance is in a pipeline"),
    ],
)
def test_nothing_is_offered_without_a_partner_or_a_second_copy(instances: list[InstanceFacts], reason: str) -> None:
    assert offered(make_facts(instances)) == Declined(reason)


def test_nothing_is_offered_while_groups_may_not_change() -> None:
    snapshot = ClusterSnapshot(0.1, facts=make_facts([copied(0), copied(1)]), held_back="not now")
    assert PAIRS.offer(snapshot) == Declined("not now")


def test_the_ladder_pulls_it_in_calm() -> None:
    loads = tuple(MemoryLoad(WorkerId(f"w{number:05d}"), 3, 0, 0) for number in range(2))
    snapshot = ClusterSnapshot(0.1, loads, facts=make_facts([copied(0), copied(1)]))
    decision = decide(LadderParams(), (PAIRS,), snapshot)
    assert (decision.lever, decision.situation) == ("pipeline", Situation.CALM)
    assert decision.reason.startswith(
        "0 of 6 KV blocks wanted on 2 workers; w00000+w00001 serve as pipelines from now on, with room for 16 more"
    )
    joined = decide(LadderParams(), (PAIRS,), replace(snapshot, facts=make_facts(make_group(0, (4, 8)))))
    assert joined.reason.endswith("2 workers; pipeline: every instance is in a pipeline")


def test_a_pipeline_of_one_is_none() -> None:
    with pytest.raises(ValueError, match="two stages at least, not 1"):
        PipelineLever(1)


# --- in a cluster ----------------------------------------------------------------------------------------------------


BOTH_PAIRS = [("w0", "w1"), ("w2", "w3")]


@pytest.mark.slow
@clustered(system="fcfs-pp")
async def test_workers_are_joined_at_the_start_and_stay_together_with_nothing_to_do(cluster: PlanCluster) -> None:
    await cluster.burst(after_s=2)
    assert cluster.groups() == BOTH_PAIRS
    await asyncio.sleep(CALM_S)
    for name in ("w0", "w2"):
        await cluster.strain(name, queued=9, demanded=99)
    await asyncio.sleep(CALM_S)
    assert cluster.groups() == BOTH_PAIRS
    assert cluster.levers == ["pipeline"], "one plan, and never another"


@pytest.mark.parametrize("victim", ["w0", "w1"])
@clustered(system="fcfs-pp")
async def test_a_pair_is_joined_again_when_a_member_that_died_is_back(cluster: PlanCluster, victim: str) -> None:
    await cluster.burst(after_s=2)
    cluster.workers[WorkerId(victim)].die()
    await asyncio.sleep(20)
    assert cluster.groups() == [("w2", "w3")], "the survivor serves alone"
    await cluster.restart(WorkerId(victim))
    await asyncio.sleep(20)
    assert cluster.groups() == BOTH_PAIRS


@clustered(system="fcfs-pp")
async def test_an_odd_worker_serves_alone_until_another_comes(cluster: PlanCluster) -> None:
    cluster.workers[WorkerId("w1")].die()
    await asyncio.sleep(5)
    await cluster.burst(after_s=20)
    assert cluster.groups() == [("w0", "w2")]
    await cluster.restart(WorkerId("w1"))
    await asyncio.sleep(20)
    assert cluster.groups() == [("w0", "w2"), ("w1", "w3")]


@clustered(system="fcfs-pp")
async def test_what_a_person_restores_is_joined_again(cluster: PlanCluster) -> None:
    await cluster.burst(after_s=2)
    answer = await cluster.ask("restore", {"groups": ["w2"]})
    assert answer["done"], answer
    await asyncio.sleep(2)
    assert cluster.groups() == BOTH_PAIRS
    assert cluster.levers == ["pipeline", "restore", "pipeline"]
