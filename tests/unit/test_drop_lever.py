"""The drop lever on the ladder: a price and a plan, or the reason why not."""

from __future__ import annotations

from typing import Any

from services.planner.policy.drop_facts import InstanceFacts
from services.planner.policy.drop_lever import DropLever
from services.planner.policy.drop_plan import DropPlan
from services.planner.policy.ladder import ClusterSnapshot, Declined, LadderParams, Offer, WorkerLoad, decide
from tests.support.drop_builders import PROFILE, make_instance, make_model

LEVER = DropLever(make_model(), PROFILE)


def make_snapshot(*instances: InstanceFacts) -> ClusterSnapshot:
    loads = tuple(
        WorkerLoad(each.instance_id, 3, each.used_tokens // 16, each.demanded_tokens // 16) for each in instances
    )
    return ClusterSnapshot(0.1, loads, instances=instances)


def busy(number: int, demanded: int = 32, **fields: Any) -> InstanceFacts:
    """3 blocks of 16 tokens, all in use; 2 more are asked for."""
    return make_instance(number, used_tokens=48, demanded_tokens=demanded, num_running=3, num_queued=2, **fields)


def test_the_ladder_pulls_the_lever_and_gets_its_plan() -> None:
    snapshot = make_snapshot(busy(0), busy(1), busy(2, 0))
    decision = decide(LadderParams(), (LEVER,), snapshot)
    assert decision.lever == "drop"
    assert isinstance(decision.plan, DropPlan)
    assert decision.plan.required_tokens == 64
    offer = LEVER.offer(snapshot)
    assert isinstance(offer, Offer)
    assert (offer.plan, offer.cost_s) == (decision.plan, decision.plan.price.total_s)
    assert decision.plan.reason in decision.reason


def test_the_ladder_says_why_the_lever_is_not_pulled() -> None:
    decision = decide(LadderParams(), (LEVER,), make_snapshot(busy(0), busy(1)))
    assert (decision.lever, decision.plan) == ("none", None)
    assert decision.reason.endswith(
        "none of drop can help now; drop: room for 64 tokens is required; a layer would be left without a second copy"
    )


def test_nothing_is_offered_without_instances_or_need() -> None:
    assert LEVER.offer(ClusterSnapshot(0.1)) == Declined("no instance can drop parameters")
    calm = LEVER.offer(make_snapshot(make_instance(0), make_instance(1)))
    assert calm == Declined("there is room for all that is asked for")


def test_a_drop_is_offered_only_if_waiting_costs_more() -> None:
    snapshot = make_snapshot(busy(0), busy(1), busy(2, 0))
    offer = LEVER.offer(snapshot)
    assert isinstance(offer, Offer)
    wait_s = offer.cost_s / 6  # 6 queued requests
    assert isinstance(DropLever(make_model(), PROFILE, wait_s=wait_s * 1.01).offer(snapshot), Offer)
    declined = DropLever(make_model(), PROFILE, wait_s=wait_s * 0.99).offer(snapshot)
    assert isinstance(declined, Declined)
    assert "the room would save" in declined.reason


def test_another_plan_is_another_decision_newer_figures_are_not() -> None:
    first = decide(LadderParams(), (LEVER,), make_snapshot(busy(0), busy(1), busy(2, 0)))
    same = decide(LadderParams(), (LEVER,), make_snapshot(busy(0), busy(1, 20), busy(2, 0)))
    assert same.plan != first.plan
    assert not same.differs_from(first)
    more = decide(LadderParams(), (LEVER,), make_snapshot(busy(0), busy(1, throttled=True), busy(2, throttled=True)))
    assert more.differs_from(first)
