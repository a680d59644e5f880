"""Restoring by benefit: what a group costs as it stands, what it costs to restore it, and when it is due."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.policy.patience import PatienceParams, RestoreBy
from services.planner.policy.plans.capacity import CapacityRule
from services.planner.policy.plans.drop import plan_drop
from services.planner.policy.plans.drop_facts import ClusterFacts, DropParams, KvFate, expected_tokens
from services.planner.policy.plans.drop_plan import DropPlan
from services.planner.policy.restoring.fits_alone import fits_alone, largest_request_tokens
from services.planner.policy.restoring.loaded_layers_watch import Due, LoadedLayersWatch
from services.planner.policy.restoring.restore_benefit import MAX_FACTOR, BenefitWatch, rent_per_s, restore_price
from shared.ids import WorkerId
from shared.layers import LayerRange
from tests.support.drop_builders import make_facts, make_group, make_instance
from tests.support.kinds import of_kind
from tests.support.plan_cluster import clustered, settings
from tests.support.plan_workers import PlanCluster

PARAMS = PatienceParams(
    restore_by=RestoreBy.BENEFIT,
    restore_max_ratio=0.8,
    restore_horizon_s=10.0,
    restore_hold_s=2.0,
    restore_again_s=60.0,
)
DROP = DropParams(kv=KvFate.BY_LINK)
WHOLE = LayerRange(0, 8)
GROUP = "w00000"
BOTH = (WorkerId("w00000"), WorkerId("w00001"))


def group_of(used: int = 40, running: int = 4, link: float = 320.0, **fields: Any) -> ClusterFacts:
    """Two stages of 4 layers: 2 x 3 blocks of 16 tokens apart, 7 as a group, 6 beside the whole model.

    A group of two does 1850 where two instances do 2000: a loss of 7.5 %.
    """
    common: dict[str, Any] = {"link_bytes_per_s": link, "host_copy": WHOLE}
    first, second = (replace(each, resident=each.layers) for each in make_group(0, (4, 8), **common))
    return make_facts([replace(first, used_tokens=used, num_running=running, **fields), second])


def due_at_s(facts: ClusterFacts, limit_s: float = 4000.0, watch: BenefitWatch | None = None) -> float:
    """Return after how long a group whose load stays as it is falls due; `inf` if it does not until the limit."""
    watch = watch or BenefitWatch(PARAMS, DROP)
    now_s = 0.0
    while not watch.apply(facts, now_s):
        now_s += 0.5
        if now_s > limit_s:
            return float("inf")
    return now_s


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_a_group_costs_its_requests_what_it_does_less_than_its_instances_apart() -> None:
    """0.075 x (4 running + 1 queued); of four stages 1 - 3250 / 4000 = 0.1875; who is alone loses nothing."""
    facts = group_of(num_queued=1)
    assert rent_per_s(facts, facts.instances) == pytest.approx(0.375)
    four = make_facts(make_group(0, (2, 4, 6, 8)))
    leader = replace(four.instances[0], num_running=16)
    assert rent_per_s(four, [leader, *four.instances[1:]]) == pytest.approx(3.0)
    assert rent_per_s(four, [replace(make_instance(9), num_running=16)]) == 0.0
    better = replace(facts, throughput=(1000.0, 2100.0))
    assert rent_per_s(better, facts.instances) == 0.0, "nobody is paid for it"
    unknown = replace(facts, throughput=(1000.0,))
    assert rent_per_s(unknown, facts.instances) == pytest.approx(0.5 * 5), "beyond the profile it does no more"


def test_the_price_is_that_of_the_load_the_parting_and_the_same_drop_again() -> None:
    """The numbers by hand.

    Each member lacks 4 layers of 128 bytes, 512 / 320 = 1.6 s, and 1 of 7 blocks is missing meanwhile. T: 20 tokens of
    each leave with 4 layers of 8 bytes a token, 640 / 320 = 2 s.
    """
    facts = group_of()
    price = restore_price(facts, facts.instances, DROP, beside=True)
    assert price.load_s == pytest.approx(4 * 0.005 + 4 * 1.6 / 7)
    assert price.part_s == pytest.approx(4 * 0.005 + 4 * 2)
    assert price.drop_s == pytest.approx(4 * 0.005 + 2 * 5 / 2)
    assert price.total_s == pytest.approx(price.load_s + price.part_s + price.drop_s)
    stall = restore_price(facts, facts.instances, DROP, beside=False)
    assert stall.load_s == pytest.approx(4 * 1.6), "all of them wait for the load"
    first, second = facts.instances
    unable = [first, replace(second, host_copy=None)]
    assert restore_price(facts, unable, DROP, beside=True).load_s == pytest.approx(4 * 0.005 + 4 * 1.6)


def test_without_requests_or_links_there_is_nothing_to_pay_for() -> None:
    idle, unlinked = group_of(used=0, running=0), group_of(link=0.0)
    assert restore_price(idle, idle.instances, DROP, beside=True).total_s == 0.0
    price = restore_price(unlinked, unlinked.instances, DROP, beside=True)
    assert price.total_s == pytest.approx(3 * 4 * 0.005), "what is unknown costs nothing"


def test_kv_that_is_computed_again_costs_its_tokens() -> None:
    """40 tokens of 0.1 s in a group that is 1.85 times as fast: 2.162 s."""
    facts = group_of(link=0.0, token_s=0.1)
    again_s = 40 * 0.1 / 1.85
    assert restore_price(facts, facts.instances, DROP, beside=True).part_s == pytest.approx(4 * 0.005 + 4 * again_s)


@given(st.integers(0, 24), st.integers(1, 20), st.floats(1, 1e6))
def test_the_drop_again_is_priced_as_the_drop_itself(used: int, running: int, link: float) -> None:
    """Two instances that share the requests evenly, and drop: remap and exchange of that plan."""
    apart = [
        make_instance(i, used_tokens=used, num_running=running, link_bytes_per_s=link, host_copy=WHOLE)
        for i in range(2)
    ]
    plan = of_kind(DropPlan, plan_drop(make_facts(apart), DROP, 1))
    facts = group_of(used=2 * used, running=2 * running, link=link)
    price = restore_price(facts, facts.instances, DROP, beside=True)
    assert price.drop_s == pytest.approx(plan.price.remap_s + plan.price.exchange_s)


# --- what fits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"used": 76}, True),
        ({"used": 77}, False),
        ({"used": 40, "demanded_tokens": 36}, True),
        ({"used": 40, "demanded_tokens": 37}, False),
        ({"used": 40, "tokens_per_s": 3.6}, True),
        ({"used": 40, "tokens_per_s": 3.7}, False),
    ],
)
def test_what_is_wanted_with_the_growth_to_come_stays_below_the_share(fields: dict[str, Any], fits: bool) -> None:
    """0.8 x 96 = 76.8 tokens, 10 s ahead."""
    facts = group_of(**fields)
    assert fits_alone(PARAMS, CapacityRule(facts.model), facts.instances) is fits


@pytest.mark.parametrize(
    ("running", "longest", "largest", "fits"),
    [(1, None, 70, False), (1, 48, 48, False), (1, 32, 32, True), (4, None, 22, True), (4, 20, 20, True)],
)
def test_each_request_surely_finds_a_member_that_takes_all_of_it(
    running: int, longest: int | None, largest: int, fits: bool
) -> None:
    """70 tokens are 5 blocks; with r blocks the largest, 2 x max(0, 3 - r + 1) + r - 1 surely fit.

    r = 2: 5, r = 3: 4, r = 5: 4. Of 4 requests the largest leaves a block of 16 to each of the others: 70 - 48 = 22.
    """
    facts = group_of(used=70, running=running, max_request_tokens=longest)
    rule = CapacityRule(facts.model)
    assert largest_request_tokens(rule, facts.instances) == largest
    assert fits_alone(PARAMS, rule, facts.instances) is fits


def test_by_hand_only_is_by_hand_only_by_either_rule() -> None:
    facts = group_of(used=0, running=0)
    for rule in RestoreBy:
        params = replace(PARAMS, restore_by=rule, restore_ratio=0.0)
        assert not fits_alone(params, CapacityRule(facts.model), facts.instances)


# --- when it is due --------------------------------------------------------------------------------------------------


def test_a_group_is_due_when_what_it_has_cost_exceeds_the_price() -> None:
    """13.974 s at 0.3 a second: after 46.58 s, so at the look of 47.0 s."""
    watch = BenefitWatch(PARAMS, DROP)
    assert due_at_s(group_of(), watch=watch) == 47.0
    assert watch.why(GROUP) == (
        "by benefit: it has cost 14.10 s of stalls, to restore and drop again 13.97 s; for 47.0 s what it wants fits "
        "without drop, now 40 of 96 tokens with the growth of 10 s"
    )
    assert watch.apply(group_of(throttled=True), 47.5) == ()
    assert watch.why(GROUP) == ""


def test_a_cheap_restore_waits_for_the_hold_all_the_same() -> None:
    assert due_at_s(group_of(used=1, link=1e9)) == PARAMS.restore_hold_s


def test_a_group_that_has_nothing_to_do_is_due_after_the_hold() -> None:
    """It pays no rent, and restoring it costs nobody anything: neither exceeds the other."""
    watch = BenefitWatch(PARAMS, DROP)
    assert due_at_s(group_of(used=0, running=0), watch=watch) == 2.0
    assert watch.why(GROUP).startswith("by benefit: it had nothing to do for 2.0 s; for 2.0 s what it wants fits")
    assert due_at_s(group_of(used=16, running=0, demanded_tokens=16, num_queued=1, link=0.0)) == 2.0, "nobody runs"


def test_a_lull_is_no_calm() -> None:
    """Busy until the second look before the hold is over: the price is 0 for a moment, and it has not fit for long."""
    watch = BenefitWatch(PARAMS, DROP)
    busy, idle = group_of(), group_of(used=0, running=0)
    assert [watch.apply(busy if at < 2 else idle, 0.5 * at) for at in range(4)] == [()] * 4
    free = replace(busy, throughput=(1000.0, 2000.0))
    watch = BenefitWatch(PARAMS, DROP)
    found = [watch.apply(free if at == 2 else replace(idle, throughput=(1000.0, 2000.0)), 0.5 * at) for at in range(8)]
    assert [bool(each) for each in found] == [False] * 6 + [True] * 2, "no rent; 2 s after the one request"


@pytest.mark.parametrize("breaks", ["throttled", "full", "other members", "alone", "unseen", "forgotten"])
def test_the_account_begins_anew_when_it_breaks(breaks: str) -> None:
    watch = BenefitWatch(PARAMS, DROP)
    for at in range(93):
        assert watch.apply(group_of(), 0.5 * at) == (), "46 s: half a look is missing"
    third = replace(make_instance(2), group_id=GROUP, layers=LayerRange(4, 8), link_bytes_per_s=320.0)
    broken = {
        "throttled": group_of(throttled=True),
        "full": group_of(used=77),
        "other members": make_facts([group_of().instances[0], third]),
        "alone": make_facts([make_instance(0)]),
        "unseen": make_facts([]),
        "forgotten": group_of(),
    }[breaks]
    watch.apply(broken, 46.5)
    if breaks == "forgotten":
        watch.forget([GROUP, "nobody"])
    began = 47.0
    assert [watch.apply(group_of(), began + 0.5 * at) for at in range(94)] == [()] * 94
    assert watch.apply(group_of(), began + 47.0) == (GROUP,)


@pytest.mark.slow
def test_a_group_that_is_dropped_again_soon_is_dearer_and_after_a_longer_time_it_is_not() -> None:
    watch = BenefitWatch(PARAMS, DROP)
    for factor in (2, 4):
        watch.note_restore(BOTH, 100.0)
        watch.note_drop(BOTH[:1], 160.0)
        assert due_at_s(group_of(), watch=watch) == pytest.approx(factor * 13.974 / 0.3, abs=0.5)
        assert f"{factor * 13.974:.2f} s ({factor} times, after drops that followed)" in watch.why(GROUP)
        watch.forget()
    for _ in range(20):
        watch.note_restore(BOTH, 100.0)
        watch.note_drop(BOTH, 101.0)
    assert due_at_s(group_of(), watch=watch) == pytest.approx(MAX_FACTOR * 13.974 / 0.3, abs=0.5)
    watch.forget()
    watch.note_restore(BOTH, 100.0)
    watch.note_drop(BOTH, 160.1)
    assert due_at_s(group_of(), watch=watch) == 47.0


def test_of_workers_that_are_gone_for_good_nothing_is_kept() -> None:
    """Two are there, so what is known of two others may be kept, and of a third is too much."""

    def dearer_after(num_others: int) -> bool:
        watch = BenefitWatch(PARAMS, DROP)
        others = [WorkerId(f"x{number}") for number in range(num_others)]
        watch.note_restore([*others, *BOTH], 0.0)
        watch.note_drop(others, 1.0)
        watch.apply(group_of(), 2.0)
        heirs = [
            replace(each, instance_id=name, group_id=others[0])
            for each, name in zip(group_of().instances, others, strict=False)
        ]
        watch.apply(make_facts(heirs), 3.0)
        return not watch.apply(make_facts(heirs), 60.0)

    assert dearer_after(2)
    assert not dearer_after(3)


def test_what_is_loaded_is_restored_at_once_while_it_fits_with_the_growth_to_come() -> None:
    def loaded(**fields: Any) -> ClusterFacts:
        facts = group_of(**fields)
        whole = tuple(replace(each, resident=WHOLE) for each in facts.instances)
        return replace(facts, instances=whole)

    watch = LoadedLayersWatch(replace(PARAMS, ahead_wait_s=0.0))
    assert watch.apply(loaded(used=76), (), 0.0) == Due(restore=(GROUP,))
    assert watch.apply(loaded(used=77), (), 0.5) == Due()
    assert watch.apply(loaded(used=40, tokens_per_s=3.7), (), 1.0) == Due()
    (why,) = watch.apply(loaded(used=87), (), 1.5).unload
    assert why == (GROUP, "w00000: its requests want 87 tokens of KV, over 90% of the room there is")
    assert watch.apply(group_of(used=70), (GROUP,), 2.0) == Due(load=(GROUP,))


LOADS = st.lists(st.tuples(st.integers(0, 112), st.integers(0, 9), st.floats(0, 4), st.booleans()), max_size=60)


@given(LOADS, st.floats(1, 1e6))
def test_a_group_is_never_due_before_it_has_fit_for_the_hold(
    loads: list[tuple[int, int, float, bool]], link: float
) -> None:
    """Used tokens, running requests, tokens per second and whether it is throttled, each for half a second."""
    watch, rule = BenefitWatch(PARAMS, DROP), CapacityRule(group_of().model)
    fit_looks = 0
    for at, (used, running, rate, throttled) in enumerate(loads):
        facts = group_of(used, running, link, tokens_per_s=rate, throttled=throttled)
        fits = not throttled and expected_tokens(facts.instances, 10.0) < 0.8 * 96
        fits = fits and fits_alone(PARAMS, rule, facts.instances)
        fit_looks = fit_looks + 1 if fits else 0
        due = watch.apply(facts, 0.5 * at)
        assert not due or fit_looks >= 5, "4 looks after the first"


@pytest.mark.slow
@given(st.integers(0, 60), st.integers(1, 12), st.integers(0, 12), st.floats(300, 1e5))
def test_with_more_requests_a_group_is_due_no_later_and_with_a_dearer_price_no_earlier(
    used: int, running: int, queued: int, link: float
) -> None:
    at_s = due_at_s(group_of(used, running, link, num_queued=queued))
    assert due_at_s(group_of(used, running, link, num_queued=queued + 1)) <= at_s
    fast = max(link, 1e4)  # over a slow link one that runs besides costs more than it brings
    fast_at_s = due_at_s(group_of(used, running, fast, num_queued=queued))
    assert due_at_s(group_of(used, running + 1, fast, num_queued=queued)) <= fast_at_s + 0.5, "a look, for the largest"
    assert due_at_s(group_of(used, running, link / 2, num_queued=queued)) >= at_s
    watch = BenefitWatch(PARAMS, DROP)
    watch.note_restore(BOTH, 0.0)
    watch.note_drop(BOTH, 1.0)
    assert due_at_s(group_of(used, running, link, num_queued=queued), watch=watch) >= at_s


# --- the planner -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "rule", "is_restored"), [(7, "benefit", True), (7, "ratio", False), (4, "ratio", True)]
)
@clustered(2, loads_beside=True)
async def test_a_group_that_fits_and_costs_is_restored_by_benefit_and_the_plan_says_why(
    cluster: PlanCluster, used: int, rule: str, is_restored: bool
) -> None:
    """Alone 10 blocks each: 7 of w0 and 7 of w1 are 70 % of the room, which the ratio of 50 % never lets go.

    More than 0.85 of the 13 with which each has memory for all of its share: it has the 17 that it wants meanwhile.
    """
    cluster.settings = settings(restore_by=rule, restore_hold_s=4.0)
    await cluster.burst("w0", after_s=1.3, until_groups=1)
    cluster.relax(used)
    await asyncio.sleep(40)
    assert (cluster.groups() == []) is is_restored
    assert cluster.levers == (["drop", "load", "restore"] if is_restored else ["drop"])
    if is_restored and rule == "benefit":
        reason = cluster.committed[1].reason
        assert "beside serving; room for 272 tokens meanwhile, 384 before; by benefit: it has cost" in reason
        assert "now 224 of 320 tokens with the growth of 3 s" in reason
    elif is_restored:
        said = "; by ratio: it wants 128 tokens, and for 4.0 s less than 50% of 320 without drop"
        assert said in cluster.committed[1].reason


@clustered(2, loads_beside=True, restore_by="benefit", restore_hold_s=4.0, cooldown_s=0)
async def test_a_burst_soon_after_a_restore_makes_the_next_one_dearer(cluster: PlanCluster) -> None:
    await cluster.burst(after_s=1.3)
    for _ in range(2):
        await cluster.strain("w0")
        await cluster.until(lambda: len(cluster.groups()) == 1)
        cluster.relax(7)
        await cluster.until(lambda: not cluster.groups())
    await asyncio.sleep(0.1)
    first, second = [plan.reason for plan in cluster.committed if plan.lever == "load"]
    assert "after drops that followed" not in first
    assert "(2 times, after drops that followed)" in second
