"""Limits of tenants: the arithmetic of rates, and the books of who holds what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.dispatcher.access.grants import Tenant, TenantLimits
from services.dispatcher.limits.tenants import CONCURRENT_WAIT_S, OverLimit, Permit, RateView, Tenants, UsageLimit
from services.dispatcher.policy.rates import Bucket, Short, give_back, refilled, reset_s, take


@given(
    per_minute=st.integers(1, 10**6),
    steps=st.lists(st.tuples(st.floats(0, 100), st.integers(1, 2000)), min_size=1, max_size=40),
)
def test_a_rate_is_never_exceeded_and_who_waits_as_told_is_let_in(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    """Over any span of t seconds at most r + r t / 60 are taken; the wait that is told is enough, and is needed."""
    bucket, now_s = Bucket(per_minute, 0.0), 0.0
    taken: list[tuple[float, int]] = []
    for pause_s, amount in steps:
        now_s += pause_s
        outcome = take(bucket, per_minute, amount, now_s)
        if isinstance(outcome, Short):
            if outcome.wait_s is None:
                assert amount > per_minute
                continue
            assert isinstance(take(bucket, per_minute, amount, now_s + outcome.wait_s * 0.99 - 1e-3), Short)
            now_s += outcome.wait_s
            outcome = take(bucket, per_minute, amount, now_s)
            assert isinstance(outcome, Bucket)
        bucket = outcome
        taken.append((now_s, amount))
    for index, (start_s, _) in enumerate(taken):
        total = 0
        for at_s, amount in taken[index:]:
            total += amount
            assert total <= per_minute * (1 + (at_s - start_s) / 60) * (1 + 1e-9) + 1e-3


@given(st.integers(1, 10**6), st.floats(0, 1), st.floats(0, 1000), st.integers(0, 10**7))
def test_a_bucket_holds_a_minutes_worth_at_most_and_is_full_after_the_reset(
    per_minute: int, share: float, pause_s: float, returned: int
) -> None:
    bucket = Bucket(per_minute * share, 5.0)
    assert 0 <= refilled(bucket, per_minute, 5.0 + pause_s).level <= per_minute
    assert give_back(bucket, per_minute, returned, 5.0 + pause_s).level <= per_minute
    wait_s = reset_s(bucket, per_minute, 5.0)
    assert 0 <= wait_s <= 60 + 1e-9
    assert refilled(bucket, per_minute, 5.0 + wait_s).level == pytest.approx(per_minute)


def enter(tenants: Tenants, tenant: Tenant, num_choices: int = 1, now_s: float = 0.0) -> Permit:
    outcome = tenants.enter(tenant, num_choices, now_s)
    assert isinstance(outcome, Permit), outcome
    return outcome


def test_a_tenant_without_limits_is_let_in_always_and_still_counted() -> None:
    tenants, tenant = Tenants(), Tenant("a")
    permits = [enter(tenants, tenant, 100) for _ in range(100)]
    assert tenants._usage["a"].num_open == 10_000
    assert permits[0].charge(10**9, 0.0) is None
    assert tenants.rates(tenant, 0.0) == []
    for permit in permits:
        permit.close(0, 0.0)
        permit.close(0, 0.0)
    assert tenants._usage["a"].num_open == 0


def test_each_choice_counts_as_a_request() -> None:
    """Ten per minute: 8 leave 2, so 3 more wait for one: 6 s."""
    tenants, tenant = Tenants(), Tenant("a", limits=TenantLimits(requests_per_min=10))
    enter(tenants, tenant, 8).close(0, 0.0)
    assert tenants.enter(tenant, 3, 0.0) == OverLimit(UsageLimit.REQUESTS, 10, 3, 6.0)
    assert tenants.enter(tenant, 11, 0.0) == OverLimit(UsageLimit.REQUESTS, 10, 11, None)
    enter(tenants, tenant, 3, 6.0)
    enter(tenants, Tenant("b", limits=tenant.limits), 10)


def test_places_are_free_again_at_the_end_of_a_request() -> None:
    tenants, tenant = Tenants(), Tenant("a", limits=TenantLimits(max_concurrent=3))
    first = enter(tenants, tenant, 2)
    assert tenants.enter(tenant, 2, 0.0) == OverLimit(UsageLimit.CONCURRENT, 3, 2, CONCURRENT_WAIT_S)
    assert tenants.enter(tenant, 4, 0.0) == OverLimit(UsageLimit.CONCURRENT, 3, 4, None)
    first.close(0, 0.0)
    enter(tenants, tenant, 3)


def test_what_was_charged_and_not_used_comes_back() -> None:
    """100 tokens per minute: 80 are charged and 30 used, so 70 are left."""
    tenants, tenant = Tenants(), Tenant("a", limits=TenantLimits(tokens_per_min=100))
    permit = enter(tenants, tenant)
    assert permit.charge(80, 0.0) is None
    assert tenants.rates(tenant, 0.0) == [RateView(UsageLimit.TOKENS, 100, 20, 48.0)]
    second = enter(tenants, tenant)
    assert second.charge(50, 0.0) == OverLimit(UsageLimit.TOKENS, 100, 50, 18.0)
    second.close(0, 0.0)
    permit.close(30, 0.0)
    assert tenants.rates(tenant, 0.0) == [RateView(UsageLimit.TOKENS, 100, 70, 18.0)]


def test_a_refused_request_takes_no_tokens_and_no_place() -> None:
    limits = TenantLimits(requests_per_min=10, tokens_per_min=100, max_concurrent=5)
    tenants, tenant = Tenants(), Tenant("a", limits=limits)
    permit = enter(tenants, tenant)
    assert permit.charge(101, 0.0) == OverLimit(UsageLimit.TOKENS, 100, 101, None)
    permit.close(0, 0.0)
    assert tenants._usage["a"].num_open == 0
    assert [(rate.limit, rate.remaining) for rate in tenants.rates(tenant, 0.0)] == [
        (UsageLimit.REQUESTS, 9),
        (UsageLimit.TOKENS, 100),
    ]


def test_a_tenant_that_gets_its_first_limit_has_all_of_it() -> None:
    tenants = Tenants()
    enter(tenants, Tenant("a"))
    limited = Tenant("a", limits=TenantLimits(requests_per_min=5, tokens_per_min=7))
    assert [rate.remaining for rate in tenants.rates(limited, 0.1)] == [5, 7]
    enter(tenants, limited, 5, 0.1)


def test_a_limit_that_is_changed_holds_for_the_next_request() -> None:
    tenants = Tenants()
    enter(tenants, Tenant("a"))
    lowered = Tenant("a", limits=TenantLimits(requests_per_min=2, max_concurrent=2))
    assert isinstance(tenants.enter(lowered, 2, 60.0), OverLimit)
    enter(tenants, lowered, 1, 60.0)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 4), st.integers(0, 50), st.integers(0, 50)), max_size=40)
)
def test_the_books_balance(requests: list[tuple[str, int, int, int]]) -> None:
    """At one instant: what is left of a tenant's tokens is its limit less what its requests used, or still hold."""
    tenants = Tenants()
    limits = TenantLimits(tokens_per_min=200, max_concurrent=6)
    used: dict[str, int] = {"a": 0, "b": 0}
    held: dict[str, int] = {"a": 0, "b": 0}
    places: dict[str, int] = {"a": 0, "b": 0}
    for index, (name, num_choices, most, actual) in enumerate(requests):
        outcome = tenants.enter(Tenant(name, limits=limits), num_choices, 0.0)
        assert isinstance(outcome, Permit) == (places[name] + num_choices <= 6)
        if isinstance(outcome, OverLimit):
            continue
        charged = outcome.charge(most, 0.0)
        assert (charged is None) == (used[name] + held[name] + most <= 200)
        if charged is not None or index % 3:
            outcome.close(min(actual, most), 0.0)
            used[name] += min(actual, most) if charged is None else 0
        else:
            held[name] += most
            places[name] += num_choices
    for name in "ab":
        (rate,) = tenants.rates(Tenant(name, limits=limits), 0.0)
        assert rate.remaining == 200 - used[name] - held[name]
        assert tenants._usage[name].num_open == places[name]


@given(
    st.lists(st.tuples(st.sampled_from(["replace", "end", "end late", "charge", "charge late"]), st.integers(0, 50)))
)
def test_a_permit_that_is_handed_on_is_closed_once_by_whoever_has_it_last(events: list[tuple[str, int]]) -> None:
    """One request at a time. What a connection does that was replaced already, `late`, changes nothing."""
    limits = TenantLimits(requests_per_min=1, tokens_per_min=100, max_concurrent=1)
    tenants, tenant = Tenants(), Tenant("a", limits=limits)
    permit, replaced = enter(tenants, tenant), list[Permit]()
    is_charged, num_used = False, 0
    for what, number in events:
        assert tenants._usage["a"].num_open == 1
        if what == "replace":
            num_used = max(num_used, number)
            replaced.append(permit)
            permit = permit.hand_over(number)
        elif what == "charge":
            assert permit.charge(60, 0.0) is None
            is_charged = True
        elif what == "charge late" and replaced:
            assert replaced[-1].charge(60, 0.0) is None
        elif what == "end late" and replaced:
            replaced[-1].close(number, 0.0)
        elif what == "end":
            num_used = max(num_used, number)
            break
    for each in (permit, permit, *replaced):
        each.close(num_used, 0.0)
    assert tenants._usage["a"].num_open == 0
    left = {rate.limit: rate.remaining for rate in tenants.rates(tenant, 0.0)}
    assert left == {UsageLimit.REQUESTS: 0, UsageLimit.TOKENS: 100 - (num_used if is_charged else 0)}
