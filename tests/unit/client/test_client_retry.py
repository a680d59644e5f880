"""When the SDK tries again: never more than its budget, never before the server's time, never against its word."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_client.cursor import Cursor, Servers, check_key
from sluice_client.retry import Attempts, Resumes, RetryBudget, RetryPolicy, Setback, may_retry, parse_retry_after

BUSY = Setback(may_retry=True)
AWAY = Setback(may_retry=True, is_unreachable=True)


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(st.floats(0, 2), st.integers(1, 40)), min_size=1, max_size=60),
    ratio=st.sampled_from([0.0, 0.1, 0.5]),
    burst=st.sampled_from([0.0, 3.0, 10.0]),
)
def test_retries_are_never_more_than_a_share_of_the_requests(
    steps: list[tuple[float, int]], ratio: float, burst: float
) -> None:
    """A server that refuses everything: each request is tried again as often as its client may."""
    policy = RetryPolicy(budget_ratio=ratio, budget_burst=burst, budget_per_s=0.1)
    budget, rng = RetryBudget(policy, 0.0), random.Random(1)
    now_s, num_requests, num_retries = 0.0, 0, 0
    for pause_s, count in steps:
        now_s += pause_s
        for _ in range(count):
            attempts = Attempts(policy, budget, rng, now_s)
            num_requests += 1
            num_own = 0
            while attempts.next_delay_s(BUSY, now_s) is not None:
                num_own += 1
            assert num_own <= policy.max_retries
            num_retries += num_own
    assert num_retries <= burst + ratio * num_requests + 0.1 * now_s + 1e-6


def test_a_quiet_client_has_all_of_its_retries() -> None:
    policy = RetryPolicy()
    attempts = Attempts(policy, RetryBudget(policy, 0.0), random.Random(1), 0.0)
    assert [attempts.next_delay_s(BUSY, 0.0) is None for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("policy", [RetryPolicy(first_backoff_s=1.0, max_backoff_s=4.0), RetryPolicy()])
def test_the_wait_is_drawn_from_all_of_the_backoff_and_never_ends_before_the_servers_time(policy: RetryPolicy) -> None:
    rng = random.Random(1)
    for attempt in (*range(10), 10_000):
        waits = [policy.delay_s(attempt, None, rng) or 0.0 for _ in range(200)]
        longest_s = min(policy.first_backoff_s * 2 ** min(attempt, 9), policy.max_backoff_s)
        assert 0 <= min(waits) < 0.1 * longest_s
        assert 0.9 * longest_s < max(waits) <= longest_s
    waits = [policy.delay_s(0, 5.0, rng) or 0.0 for _ in range(200)]
    assert 5.0 <= min(waits) < 5.0 + 0.1 * policy.first_backoff_s
    assert 5.0 + 0.9 * policy.first_backoff_s < max(waits) <= 5.0 + policy.first_backoff_s
    assert policy.delay_s(0, policy.max_retry_after_s + 1, rng) is None
    assert policy.delay_s(0, None, random.Random(3)) == policy.delay_s(0, None, random.Random(3))


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (429, {}, True),
        (503, {}, True),
        (500, {}, False),
        (409, {}, False),
        (400, {}, False),
        (429, {"x-should-retry": "true"}, True),
        (503, {"x-should-retry": "false"}, False),
        (500, {"x-should-retry": "true"}, True),
        (503, {"x-should-retry": "perhaps"}, True),
    ],
)
def test_the_servers_own_word_counts_most(status: int, headers: dict[str, str], expected: bool) -> None:
    assert may_retry(status, headers) is expected


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after-ms": "250", "retry-after": "3"}, 0.25),
        ({"retry-after": "Thu, 01 Jan 1970 00:01:40 GMT"}, 70.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:10 GMT"}, 0.0),
    ],
)
def test_retry_after_is_read_in_every_form(headers: dict[str, str], expected: float | None) -> None:
    assert parse_retry_after(headers, now_unix_s=30.0) == expected


def test_another_server_is_asked_at_once() -> None:
    policy = RetryPolicy()
    attempts = Attempts(policy, RetryBudget(policy, 0.0), random.Random(1), 0.0)
    assert attempts.next_delay_s(BUSY, 0.0, has_other_server=True) == 0.0
    delay_s = attempts.next_delay_s(BUSY, 0.0)
    assert delay_s is not None
    assert 0.0 < delay_s <= policy.first_backoff_s


def test_an_answer_that_has_begun_waits_for_its_server_for_a_while_at_no_cost_to_others() -> None:
    policy = RetryPolicy(resume_limit_s=30.0)
    budget = RetryBudget(policy, 0.0)
    attempts = Attempts(policy, budget, random.Random(1), 0.0, is_resume=True)
    assert all(attempts.next_delay_s(AWAY, now_s) is not None for now_s in range(30))
    assert attempts.next_delay_s(AWAY, 30.1) is None
    assert sum(budget.take(30.1) for _ in range(20)) == policy.budget_burst


def test_connections_that_bring_something_are_free_and_empty_ones_count_as_retries() -> None:
    policy = RetryPolicy(max_resumes=5)
    resumes = Resumes(policy, RetryBudget(policy, 0.0), random.Random(1))
    assert [resumes.next_delay_s(0.0, has_progressed=True) is None for _ in range(6)] == [False] * 5 + [True]
    resumes = Resumes(policy, RetryBudget(policy, 0.0), random.Random(1))
    assert [resumes.next_delay_s(0.0, has_progressed=False) is None for _ in range(3)] == [False, False, True]
    poor = Resumes(policy, RetryBudget(RetryPolicy(budget_burst=0.0), 0.0), random.Random(1))
    assert poor.next_delay_s(0.0, has_progressed=True) is not None
    assert poor.next_delay_s(0.0, has_progressed=False) is None
    off = RetryPolicy(max_resumes=0)
    assert Resumes(off, RetryBudget(off, 0.0), random.Random(1)).next_delay_s(0.0, has_progressed=True) is None


def test_servers_take_turns_and_one_loss_moves_on_once() -> None:
    servers = Servers(["http://a", "http://b/", "https://c/api"])
    assert servers.urls == ["http://a/v1", "http://b/v1", "https://c/api"]
    first = servers.current
    servers.leave(first)
    servers.leave(first)  # another request found out as well
    assert servers.current == servers.urls[1]
    servers.leave(servers.current)
    servers.leave(servers.current)
    assert servers.current == first
    for wrong in ([], "h:80", ["http://a", "ftp://b"]):
        with pytest.raises(ValueError, match="base_url"):
            Servers(wrong)


def test_a_request_says_who_it_is_and_how_far_it_has_come() -> None:
    cursor = Cursor(check_key("mine"))
    assert cursor.headers() == {"Idempotency-Key": "mine", "x-request-id": cursor.request_id}
    cursor.last_event_id = "3-0011aabb"
    assert cursor.headers()["Last-Event-ID"] == "3-0011aabb"
    assert check_key(None) != check_key(None)
    for wrong in ("", "ü", "x" * 256, "a\nb"):
        with pytest.raises(ValueError, match="idempotency_key"):
            check_key(wrong)
