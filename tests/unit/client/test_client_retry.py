"""When the SDK tries again: never more than its budget, never before the server's time, never against its word."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_client.cursor import Cursor, Servers, check_key
from sluice_client.retry import Attempts, Resumes, RetryBudget, RetryPolicy, Setback, may_retry, parse_retry_after

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[3] / "client" / "vectors" / "sdk.json").read_text())
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


@pytest.mark.parametrize("case", VECTORS["may_retry"], ids=str)
def test_the_servers_own_word_counts_most(case: dict[str, Any]) -> None:
    assert may_retry(case["status"], case["headers"]) is case["expected"]


@pytest.mark.parametrize("case", VECTORS["retry_after"], ids=lambda case: str(case["headers"]))
def test_retry_after_is_read_in_every_form(case: dict[str, Any]) -> None:
    assert parse_retry_after(case["headers"], now_unix_s=30.0) == case["expected_s"]


class Half(random.Random):
    """Draws the middle of everything."""

    def random(self) -> float:
        return 0.5


@pytest.mark.parametrize("case", VECTORS["attempts"], ids=lambda case: case["name"])
def test_attempts(case: dict[str, Any]) -> None:
    policy = RetryPolicy(**case.get("policy", {}))
    attempts = Attempts(policy, RetryBudget(policy, 0.0), Half(), 0.0, is_resume=case.get("is_resume", False))
    for step in case["steps"]:
        setback = Setback(
            step.get("may_retry", True), step.get("retry_after_s"), is_unreachable=step.get("is_unreachable", False)
        )
        has_other_server = step.get("has_other_server", False)
        delay_s = attempts.next_delay_s(setback, step.get("now_s", 0.0), has_other_server=has_other_server)
        assert delay_s == step["delay_s"], step


@pytest.mark.parametrize("case", VECTORS["resumes"], ids=lambda case: case["name"])
def test_resumes(case: dict[str, Any]) -> None:
    policy = RetryPolicy(**case.get("policy", {}))
    resumes = Resumes(policy, RetryBudget(policy, 0.0), Half())
    for step in case["steps"]:
        assert resumes.next_delay_s(0.0, has_progressed=step["has_progressed"]) == step["delay_s"], step


def test_an_answer_that_has_begun_waits_for_its_server_for_a_while_at_no_cost_to_others() -> None:
    policy = RetryPolicy(resume_limit_s=30.0)
    budget = RetryBudget(policy, 0.0)
    attempts = Attempts(policy, budget, random.Random(1), 0.0, is_resume=True)
    assert all(attempts.next_delay_s(AWAY, now_s) is not None for now_s in range(30))
    assert attempts.next_delay_s(AWAY, 30.1) is None
    assert sum(budget.take(30.1) for _ in range(20)) == policy.budget_burst


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
