"""The drop lever on the ladder: a price and a plan, or the reason why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from services.planner.config import PlannerSettings
from services.planner.policy.levers.drop_lever import DropLever, num_without_room
from services.planner.policy.levers.ladder import (
    ClusterSnapshot,
    Declined,
    LadderParams,
    MemoryLoad,
    Offer,
    Situation,
    decide,
)
from services.planner.policy.plans.drop import DropStrategy, plan_drop, tokens_short
from services.planner.policy.plans.drop_facts import InstanceFacts
from services.planner.policy.plans.drop_plan import DropPlan
from tests.support.drop_builders import make_facts, make_instance
from tests.support.kinds import of_kind, some

LEVER = DropLever()


def make_snapshot(*instances: InstanceFacts) -> ClusterSnapshot:
    loads = tuple(
        MemoryLoad(each.instance_id, 3, each.used_tokens // 16, each.demanded_tokens // 16, throttled=each.throttled)
        for each in instances
    )
    return ClusterSnapshot(0.1, loads, facts=make_facts(instances))


def busy(number: int, demanded: int = 32, **fields: Any) -> InstanceFacts:
    """3 blocks of 16 tokens, all in use; 2 more are asked for, by requests that wait for memory."""
    common = {"used_tokens": 48, "num_running": 3, "num_queued": 2, "throttled": True}
    return make_instance(number, demanded_tokens=demanded, **(common | fields))


def calm(number: int) -> InstanceFacts:
    """All in use, and nobody waits for memory."""
    return busy(number, 0, num_queued=0, throttled=False)


def test_the_ladder_pulls_the_lever_and_gets_its_plan() -> None:
    snapshot = make_snapshot(busy(0), busy(1), calm(2))
    decision = decide(LadderParams(), (LEVER,), snapshot)
    assert decision.lever == "drop"
    assert isinstance(decision.order, DropPlan)
    assert decision.order.required_tokens == 64
    offer = of_kind(Offer, LEVER.offer(snapshot))
    assert (offer.order, offer.cost_s) == (decision.order, decision.order.price.total_s)
    assert decision.order.reason in decision.reason


def test_the_ladder_says_why_the_lever_is_not_pulled() -> None:
    decision = decide(LadderParams(), (LEVER,), make_snapshot(busy(0), busy(1)))
    assert (decision.lever, decision.order) == ("none", None)
    assert decision.reason.endswith(
        "none of drop can help now; drop: room for 64 tokens is required; a layer would be left without a second copy"
    )


def test_nothing_is_offered_without_instances_or_need() -> None:
    assert LEVER.offer(ClusterSnapshot(0.1)) == Declined("no instance can drop parameters")
    full = LEVER.offer(make_snapshot(calm(0), busy(1, throttled=False)))
    assert full == Declined("no instance is short of memory by the monitor's rules")


def test_one_throttled_instance_is_reason_enough_however_much_the_others_have_free() -> None:
    """KunServe v1, section 4.1: one or more instances. 5 of 9 blocks are wanted."""
    snapshot = make_snapshot(busy(0), make_instance(1), make_instance(2))
    decision = decide(LadderParams(), (LEVER,), snapshot)
    assert (decision.lever, decision.situation) == ("drop", Situation.PRESSURE)
    assert isinstance(decision.order, DropPlan)
    assert decision.order.required_tokens == 32
    assert "w00000" in [stage.instance_id for group in decision.order.groups for stage in group.stages]


def test_nothing_is_offered_while_groups_may_not_change() -> None:
    snapshot = replace(make_snapshot(busy(0), busy(1), calm(2)), held_back="not now")
    assert LEVER.offer(snapshot) == Declined("not now")


def test_a_drop_is_offered_only_if_waiting_costs_more() -> None:
    snapshot = make_snapshot(busy(0), busy(1), calm(2))
    offer = of_kind(Offer, LEVER.offer(snapshot))
    wait_s = offer.cost_s / 4  # 4 queued requests
    assert isinstance(DropLever(wait_s=wait_s * 1.01).offer(snapshot), Offer)
    declined = of_kind(Declined, DropLever(wait_s=wait_s * 0.99).offer(snapshot))
    assert "the room would save" in declined.reason


def test_requests_that_will_queue_count_as_those_that_do() -> None:
    """9 requests hold 16 tokens each; 64 tokens are missing, and a seventeenth of them would be one request more."""
    facts = some(make_snapshot(busy(0, num_queued=0), busy(1, num_queued=0), calm(2)).facts)
    assert [num_without_room(facts, tokens) for tokens in (1, 64, 65)] == [1, 4, 5]
    queued = some(make_snapshot(busy(0, num_queued=7)).facts)
    assert num_without_room(queued, 1) == 7


def test_another_plan_is_another_decision_newer_figures_are_not() -> None:
    first = decide(LadderParams(), (LEVER,), make_snapshot(busy(0), busy(1), calm(2)))
    same = decide(LadderParams(), (LEVER,), make_snapshot(busy(0), busy(1, 20), calm(2)))
    assert same.order != first.order
    assert not same.differs_from(first)
    more = decide(LadderParams(), (LEVER,), make_snapshot(busy(0, throttled=False), busy(1), busy(2)))
    assert more.differs_from(first)


def test_the_strategy_is_the_one_of_the_settings() -> None:
    """Eight, one of which is short of a little: each strategy offers its own plan, and they are not the same one."""
    snapshot = make_snapshot(busy(0), *(calm(number) for number in range(1, 8)))
    assert snapshot.facts is not None
    required = tokens_short(snapshot.facts)
    plans = []
    for strategy in DropStrategy:
        (lever,) = PlannerSettings(instance_id="planner", system="kunserve", drop_strategy=strategy).levers()
        assert isinstance(lever, DropLever)
        offer = of_kind(Offer, replace(lever, params=LEVER.params, wait_s=None).offer(snapshot))
        assert offer.order == plan_drop(snapshot.facts, LEVER.params, required, strategy)
        plans.append(offer.order)
    assert any(plan != plans[0] for plan in plans)


def test_the_optimum_of_many_groups_is_declined_and_not_an_error() -> None:
    lever = DropLever(strategy=DropStrategy.OPTIMUM)
    declined = of_kind(Declined, lever.offer(make_snapshot(*(busy(number) for number in range(10)))))
    assert declined.reason == (
        "the optimum is searched for among at most 9 groups, not 10; set drop_strategy=throughput-greedy"
    )
    assert isinstance(LEVER.offer(make_snapshot(*(busy(number) for number in range(10)))), Offer)
