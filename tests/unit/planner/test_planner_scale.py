"""When more instances are asked for, how many, and when no more; and that people hear of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.policy.levers.ladder import NO_LEVER, Decision, Situation
from services.planner.policy.plans.drop import plan_drop, tokens_short
from services.planner.policy.plans.drop_facts import ClusterFacts, DropParams
from services.planner.policy.plans.drop_plan import DropPlan
from services.planner.policy.scale_signal import ScaleParams, ScaleSignal, ScaleWish
from shared.layers import LayerRange
from tests.support.drop_builders import make_facts, make_instance, make_pair
from tests.support.kinds import of_kind, some
from tests.support.plan_cluster import clustered
from tests.support.plan_workers import PlanCluster

PARAMS = ScaleParams(max_instances=10, wait_s=5.0, window_s=30.0, hold_s=60.0)
CALM = Decision(NO_LEVER, Situation.CALM, "calm")
IN_NEED = Decision(NO_LEVER, Situation.PRESSURE, "nothing helps")
BLIND = Decision(NO_LEVER, Situation.BLIND, "blind")


def short(number: int, demanded: int = 100, **fields: Any) -> Any:
    """A whole instance of 3 blocks, 48 tokens, all in use, with requests that wait."""
    common: dict[str, Any] = {"used_tokens": 48, "demanded_tokens": demanded, "num_queued": 2, "throttled": True}
    return make_instance(number, host_copy=LayerRange(0, 8), **(common | fields))


def two_short(demanded: int = 100) -> ClusterFacts:
    return make_facts([short(0, demanded), short(1, demanded)])


def pair(wanted: int, **fields: Any) -> ClusterFacts:
    """A group of two: 7 blocks, 112 tokens; apart they have 2 x 48."""
    return make_facts(make_pair(used_tokens=wanted, **fields))


def drop_of(facts: ClusterFacts) -> Decision:
    plan = of_kind(DropPlan, plan_drop(facts, DropParams(), tokens_short(facts)))
    return Decision("drop", Situation.PRESSURE, plan.reason, plan, plan.lacking_tokens)


def wish_of(
    facts: ClusterFacts, decision: Decision, params: ScaleParams = PARAMS, held_back: str = ""
) -> ScaleWish | None:
    """Return what is wanted at once with a plan, without one after the wait."""
    signal = ScaleSignal(params)
    signal.apply(facts, decision, 0.0, held_back)
    if decision.order is None:
        signal.apply(facts, decision, 4.9, held_back)
        assert signal.wish is None, "it may end by itself"
        signal.apply(facts, decision, 5.0, held_back)
    return signal.wish


def num_wanted(signal: ScaleSignal) -> int:
    """Return how many instances are wanted; 0: no more than there are."""
    return 0 if signal.wish is None else signal.wish.num_instances


def look(signal: ScaleSignal, facts: ClusterFacts | None, decision: Decision, *at_s: float) -> int:
    """Look at these facts at these times; return how many instances are wanted then."""
    for time_s in at_s:
        signal.apply(facts, decision, time_s)
    return num_wanted(signal)


# --- how many --------------------------------------------------------------------------------------------------------


def test_what_a_drop_cannot_make_room_for_is_asked_for_in_instances() -> None:
    """100 tokens too many at each of two, 112 - 96 = 16 are gained: 184 are lacking, 4 instances of 48."""
    facts = two_short()
    wish = some(wish_of(facts, drop_of(facts)))
    assert (wish.num_instances, wish.lacking_tokens) == (6, 184)
    assert wish.reason.startswith("not satisfiable by a drop: 2 of 2 instances form 1 group")
    assert "not satisfiable, gained 16 of 200" in wish.reason
    assert wish.reason.endswith(
        "; 184 tokens of KV are lacking, an instance has room for 48: 6 instances are wanted, there are 2"
    )


@pytest.mark.parametrize(("most", "expected"), [(0, None), (1, None), (2, None), (3, 3), (5, 5), (6, 6), (9, 6)])
def test_no_more_are_asked_for_than_there_may_be(most: int, expected: int | None) -> None:
    facts = two_short()
    wish = wish_of(facts, drop_of(facts), replace(PARAMS, max_instances=most))
    assert (None if wish is None else wish.num_instances) == expected
    if wish is not None:
        assert wish.reason.endswith(f"and may be {most}") == (most in (3, 5, 6))


def test_a_drop_that_satisfies_asks_for_nothing() -> None:
    facts = make_facts([short(0, 8), make_instance(1, used_tokens=48, host_copy=LayerRange(0, 8))])
    decision = drop_of(facts)
    assert isinstance(decision.order, DropPlan)
    assert decision.order.is_satisfied
    assert wish_of(facts, decision) is None


def test_what_is_free_at_whoever_joins_is_not_lacking() -> None:
    """100 tokens are short, 16 are gained, and 38 of 48 are free at the other one: 46 are lacking."""
    facts = make_facts([short(0), make_instance(1, used_tokens=10, host_copy=LayerRange(0, 8))])
    wish = some(wish_of(facts, drop_of(facts)))
    assert (wish.num_instances, wish.lacking_tokens) == (3, 46)


def test_without_a_drop_all_that_is_short_is_lacking_but_for_what_is_free_elsewhere() -> None:
    """200 tokens; the third instance has 48 - 8 - 3 = 37 left: 163 are 4 instances."""
    idle = make_instance(2, used_tokens=8, growth_tokens=3)
    wish = some(wish_of(make_facts([short(0), short(1), idle]), IN_NEED))
    assert (wish.num_instances, wish.lacking_tokens) == (7, 163)
    assert wish_of(make_facts([short(0, 30), idle]), IN_NEED) is None, "30 find room there"
    broken = replace(idle, layers=LayerRange(0, 4), group_id="w00002")
    found = wish_of(make_facts([short(0, 30), broken]), IN_NEED)
    assert found is not None, "who lacks layers serves nobody"
    assert found.lacking_tokens == 30


def test_what_waits_for_its_turn_is_not_lacking() -> None:
    facts = two_short()
    assert wish_of(facts, IN_NEED, held_back="groups were restored a moment ago") is None
    assert wish_of(facts, CALM) is None
    standing = replace(drop_of(facts), situation=Situation.CALM)
    assert wish_of(facts, standing) is None, "a static pipeline asks for nothing"


@pytest.mark.parametrize("meanwhile", ["calm", "dropped", "blind", "room"])
def test_the_wait_begins_anew_when_room_is_found(meanwhile: str) -> None:
    signal, facts = ScaleSignal(PARAMS), two_short()
    enough = make_facts([short(0, 8), make_instance(1, used_tokens=48, host_copy=LayerRange(0, 8))])
    looks = {
        "calm": (facts, CALM),
        "dropped": (enough, drop_of(enough)),
        "blind": (None, BLIND),
        "room": (make_facts([short(0, 30), make_instance(2)]), IN_NEED),
    }
    look(signal, facts, IN_NEED, 0.0)
    look(signal, *looks[meanwhile], 3.0)
    assert not look(signal, facts, IN_NEED, 4.0, 8.9)
    assert look(signal, facts, IN_NEED, 9.0)


def test_a_pause_does_not_end_the_wait() -> None:
    signal, facts = ScaleSignal(PARAMS), two_short()
    look(signal, facts, IN_NEED, 0.0)
    signal.apply(facts, IN_NEED, 4.0, "the last plan did not come about")
    assert look(signal, facts, IN_NEED, 6.0)


# --- growth after a drop ---------------------------------------------------------------------------------------------


def grown(*wanted: int, every_s: float = 15.0, alone_until: int = 0) -> ScaleWish | None:
    """Return what is wanted after looks at these loads; the group forms after so many of them."""
    signal = ScaleSignal(PARAMS)
    for at, tokens in enumerate(wanted):
        whole = make_facts([make_instance(0, used_tokens=tokens // 2), make_instance(1, used_tokens=tokens // 2)])
        signal.apply(whole if at < alone_until else pair(tokens), CALM, at * every_s)
    return signal.wish


def test_use_that_grew_over_a_window_after_a_drop_is_asked_for_before_it_overruns_the_group() -> None:
    """60, 80, 100 of 112 tokens: 140 after another window, 28 too many."""
    wish = some(grown(60, 80, 100))
    assert (wish.num_instances, wish.lacking_tokens) == (3, 28)
    assert wish.reason.startswith(
        "use has grown for 30 s although parameters were dropped; 28 tokens of KV are lacking"
    )


@pytest.mark.parametrize(
    ("wanted", "alone_until"),
    [
        ((60, 80), 0),
        ((60, 60, 100), 0),
        ((60, 100, 100), 0),
        ((60, 110, 100), 0),
        ((40, 50, 60), 0),
        ((60, 80, 100), 1),
        ((60, 80, 100), 3),
    ],
)
def test_other_growth_asks_for_nothing(wanted: tuple[int, ...], alone_until: int) -> None:
    """Too short, only at the end, over already, down again, with room for it, and before there was a group."""
    assert grown(*wanted, alone_until=alone_until) is None


def test_growth_is_that_of_the_last_window_however_often_one_looks() -> None:
    """Flat for a long time; then a token a second, from 60: after 26 s of it 30 s have not passed."""
    signal = ScaleSignal(PARAMS)
    assert not look(signal, pair(60), CALM, *(0.5 * half for half in range(1000)))
    later_s = (0.5 * half for half in range(120))
    seen_s = next(at_s for at_s in later_s if look(signal, pair(60 + int(at_s)), CALM, 500.0 + at_s))
    assert 26.0 <= seen_s <= 32.0, "60 + t + t > 112 from 26 s on, and the window's middle must have grown"


# --- taken back ------------------------------------------------------------------------------------------------------


def asked() -> ScaleSignal:
    """Six instances are wanted where two are, since 0 s."""
    signal, facts = ScaleSignal(PARAMS), two_short()
    assert look(signal, facts, drop_of(facts), 0.0)
    return signal


LONG_S = range(0, 300, 10)
"""Looks for longer than any hold."""


def test_a_wish_is_taken_back_when_demand_has_fitted_the_first_instances_for_the_hold() -> None:
    """2 x 48 = 96 tokens; 96 fit, 97 do not, and growth counts."""
    signal = asked()
    assert look(signal, pair(96), CALM, 10.0, 69.9)
    assert not look(signal, pair(96), CALM, 70.0)
    for facts in (pair(97), pair(90, growth_tokens=7)):
        assert look(asked(), facts, CALM, *LONG_S)


@pytest.mark.parametrize(("facts", "decision"), [(pair(100), CALM), (two_short(), IN_NEED), (None, BLIND)])
def test_the_hold_begins_anew_when_it_breaks(facts: ClusterFacts | None, decision: Decision) -> None:
    signal = asked()
    look(signal, pair(50), CALM, 0.0)
    assert look(signal, facts, decision, 50.0)
    assert look(signal, pair(50), CALM, 51.0, 110.9)
    assert not look(signal, pair(50), CALM, 111.0)


def test_instances_that_have_come_do_not_take_the_wish_back_by_themselves() -> None:
    """Three more serve what two could not: 200 tokens. Who takes them away would need them again."""
    more = make_facts([make_instance(i, used_tokens=40) for i in range(5)])
    assert look(asked(), more, CALM, *LONG_S) == 6


def test_a_wish_grows_with_the_need_and_does_not_shrink_with_it() -> None:
    signal = asked()
    assert look(signal, two_short(60), IN_NEED, 1.0, 6.0) == 6, "120 tokens, 3 instances: less than before"
    assert look(signal, two_short(150), IN_NEED, 7.0) == 9, "300 tokens, 7 instances"


def test_a_wish_that_grew_with_more_instances_is_taken_back_by_what_fits_the_first_ones() -> None:
    """Raised at two, again at three; 140 tokens fit three of 48, and not two."""
    signal = asked()
    assert look(signal, make_facts([short(number) for number in range(3)]), IN_NEED, 1.0, 6.0) == 10
    fits = make_facts([make_instance(i, used_tokens=tokens) for i, tokens in enumerate((48, 46, 46))])
    assert look(signal, fits, CALM, *LONG_S) == 10


@given(
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from(["short", "calm", "blind"])), max_size=60),
    st.integers(0, 12),
)
def test_a_wish_stays_within_its_bounds_and_ends_by_a_hold_of_calm_only(
    looks: list[tuple[int, str]], most: int
) -> None:
    """A look every 20 s; a hold of 60 s is the fourth in a row that fits."""
    signal = ScaleSignal(replace(PARAMS, max_instances=most))
    before, num_fitting = None, 0
    for at, (tokens, what) in enumerate(looks):
        seen = {"blind": (None, BLIND), "short": (two_short(tokens), IN_NEED), "calm": (pair(tokens), CALM)}[what]
        look(signal, *seen, 20.0 * at)
        num_fitting = num_fitting + 1 if what == "calm" and tokens <= 96 else 0
        wish = signal.wish
        assert wish is None or 2 < wish.num_instances <= most
        if before is not None and wish is None:
            assert num_fitting >= 4
        if before is not None and wish is not None:
            assert wish.num_instances >= before.num_instances
        before = wish


# --- the planner tells it --------------------------------------------------------------------------------------------


async def wanted_by(cluster: PlanCluster, expected: int | None) -> None:
    """Check what the planner says is wanted."""
    answer = await cluster.ask("plan")
    assert answer["instances_wanted"] == expected
    assert ("416 tokens of KV are lacking" in answer["instances_reason"]) == (expected is not None)


async def told(cluster: PlanCluster, name: str, times: int) -> float:
    return await cluster.until(lambda: len(cluster.names(name)) >= times)


@clustered(2, max_instances=8, scale_hold_s=5.0, cooldown_s=0)
async def test_people_hear_what_is_wanted_and_that_it_is_no_more_each_time_anew(cluster: PlanCluster) -> None:
    """Two of 10 blocks, 50 wanted at one: 40 too many, a drop gains 4, 10 are free. 26 x 16 tokens: 3 of 160."""
    await cluster.burst(after_s=1.3)
    for number in (1, 2):
        await wanted_by(cluster, None)
        await cluster.strain("w0", queued=5, demanded=40)
        await told(cluster, "instances_wanted", number)
        await wanted_by(cluster, 5)
        await asyncio.sleep(8)
        cluster.relax(0)
        began_s = asyncio.get_running_loop().time()
        assert 5.0 <= await told(cluster, "instances_suffice", number) - began_s < 7.0
        await cluster.until(lambda: not cluster.groups())
    await asyncio.sleep(0.1)
    said = [reason for _, name, reason in cluster.events if name.startswith("instances_")]
    assert len(said) == 4, "once each"
    assert "not satisfiable, gained 64 of 640" in said[0]
    assert "5 instances are wanted, there are 2" in said[2]
    assert said[1].endswith("5 instances are no longer wanted: demand fits those that there were")


@clustered(2)
async def test_nobody_is_asked_for_by_default(cluster: PlanCluster) -> None:
    await cluster.burst("w0", after_s=1.3, queued=5, demanded=40)
    await asyncio.sleep(10)
    await wanted_by(cluster, None)
    assert cluster.names("plan_done")
    assert cluster.names("instances_") == []


@clustered(2, max_instances=8, scale_hold_s=5.0, cooldown_s=0)
async def test_a_planner_that_takes_over_goes_on_with_what_was_wanted(cluster: PlanCluster) -> None:
    """Nobody is told twice, or that it is no more although it is; the new one takes it back when demand fits."""
    planner = await cluster.burst("w0", after_s=1.3, queued=5, demanded=40)
    await told(cluster, "instances_wanted", 1)
    await asyncio.sleep(8)
    planner.kill(None)
    cluster.relax(0)
    await asyncio.sleep(1)
    cluster.start_planner()
    await asyncio.sleep(2)
    await wanted_by(cluster, 5)
    wanted = some(cluster.plan.wanted)
    assert (wanted.num_instances, wanted.num_before, wanted.lacking_tokens) == (5, 2, 416)
    assert len(cluster.names("instances_")) == 1
    await told(cluster, "instances_suffice", 1)
    assert cluster.plan.wanted is None
    cluster.start_planner().kill(None)
    cluster.start_planner()
    await asyncio.sleep(3)
    await wanted_by(cluster, None)
    assert cluster.names("instances_") == ["instances_wanted", "instances_suffice"]


@pytest.mark.parametrize(("most", "expected"), [(8, 6), (4, 4), (0, None)])
def test_no_more_is_taken_over_than_there_may_be(most: int, expected: int | None) -> None:
    before = some(asked().wish)
    signal = ScaleSignal(ScaleParams(most, 0.0))
    signal.resume(before)
    assert num_wanted(signal) == (expected or 0)
