"""Whether and when a request that failed is sent again. Pure; time and the generator are given.

Source: the conventions of OpenAI's SDKs (Retry-After, x-should-retry), full jitter ("Exponential Backoff And Jitter",
AWS Architecture Blog, 2015), and a budget: retries are a share of requests, so that a server in trouble does not get
several times its load.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

RETRIED_STATUSES = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds on retries."""

    max_retries: int = 2
    """Attempts after the first one; 0 turns retries off."""
    first_backoff_s: float = 0.5
    """Longest wait before the first retry; doubles with each. The wait is drawn from 0 to this (full jitter)."""
    max_backoff_s: float = 8.0
    """Longest wait of our own choice."""
    max_retry_after_s: float = 60.0
    """A server that asks for a longer wait gets no retry: the error goes to the caller, with the time."""
    budget_ratio: float = 0.1
    """Retries that each request of the client allows, for itself or for others."""
    budget_burst: float = 10.0
    """Retries that the client may make before it has sent many requests; also the most that can be saved up."""
    budget_per_s: float = 0.1
    """Retries that each second allows besides."""
    max_resumes: int = 20
    """Lost connections after which an answer that has begun is not resumed again; 0 turns resuming off."""
    resume_limit_s: float = 30.0
    """Longest time in which a server that cannot be reached is tried again for an answer that has begun."""

    def backoff_s(self, attempt: int, rng: random.Random) -> float:
        """Seconds to wait after failed attempt number `attempt` (from 0), if the server names no time."""
        return rng.uniform(0.0, min(self.first_backoff_s * 2.0 ** min(attempt, 60), self.max_backoff_s))

    def delay_s(self, attempt: int, retry_after_s: float | None, rng: random.Random) -> float | None:
        """Seconds to wait after failed attempt number `attempt` (from 0); None: the server asks for too long a wait.

        With Retry-After the wait is never shorter than that.
        """
        if retry_after_s is not None and retry_after_s > self.max_retry_after_s:
            return None
        return (retry_after_s or 0.0) + self.backoff_s(attempt, rng)


class RetryBudget:
    """The retries that a client has left, over all of its requests.

    In any time T with R requests there are at most `burst + ratio * R + per_s * T` retries.

    Args:
        policy: its bounds.
        now_s: any clock's, as in every method.
    """

    def __init__(self, policy: RetryPolicy, now_s: float) -> None:
        self._policy = policy
        self._left = policy.budget_burst
        self._filled_s = now_s

    def note_request(self, now_s: float) -> None:
        """Count a first attempt."""
        self._fill(now_s, self._policy.budget_ratio)

    def take(self, now_s: float) -> bool:
        """Use one retry; False if none is left."""
        self._fill(now_s, 0.0)
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def _fill(self, now_s: float, more: float) -> None:
        more += max(0.0, now_s - self._filled_s) * self._policy.budget_per_s
        self._left = min(self._policy.budget_burst, self._left + more)
        self._filled_s = max(now_s, self._filled_s)


@dataclass(frozen=True, slots=True)
class Setback:
    """What one failed attempt says about another one."""

    may_retry: bool
    retry_after_s: float | None = None
    is_unreachable: bool = False
    """No server took the request: trying again costs none anything."""


class Attempts:
    """The attempts of one request.

    Args:
        policy: bounds.
        budget: of the client.
        rng: for the jitter.
        now_s: when the first attempt begins.
        is_resume: an answer that has begun: worth waiting for a server that comes back.
    """

    def __init__(
        self, policy: RetryPolicy, budget: RetryBudget, rng: random.Random, now_s: float, *, is_resume: bool = False
    ) -> None:
        self._policy = policy
        self._budget = budget
        self._rng = rng
        self._started_s = now_s
        self._is_resume = is_resume
        self._num_retries = 0
        self._num_waits = 0
        if not is_resume:
            budget.note_request(now_s)

    def next_delay_s(self, setback: Setback, now_s: float, *, has_other_server: bool = False) -> float | None:
        """Seconds to wait before the next attempt; None: give up.

        Args:
            setback: of the attempt before.
            now_s: the present time.
            has_other_server: another server has not been tried yet, and this one's trouble is its own.
        """
        policy = self._policy
        if not setback.may_retry:
            return None
        waits_for_server = self._is_resume and setback.is_unreachable
        if waits_for_server:
            if now_s - self._started_s > policy.resume_limit_s:
                return None
        else:
            if self._num_retries >= policy.max_retries or not self._budget.take(now_s):
                return None
            self._num_retries += 1
        if has_other_server:
            return 0.0
        self._num_waits += 1
        return policy.delay_s(self._num_waits - 1, setback.retry_after_s, self._rng)


class Resumes:
    """The connections that one answer has lost after it had begun.

    Going on costs the server little as long as each connection brings something; one that brings nothing counts as a
    retry.

    Args:
        policy: bounds.
        budget: of the client.
        rng: for the jitter.
    """

    def __init__(self, policy: RetryPolicy, budget: RetryBudget, rng: random.Random) -> None:
        self._policy = policy
        self._budget = budget
        self._rng = rng
        self._num_lost = 0
        self._num_idle = 0

    def next_delay_s(self, now_s: float, *, has_progressed: bool) -> float | None:
        """Seconds to wait before the answer is asked for again; None: give up."""
        self._num_lost += 1
        self._num_idle = 0 if has_progressed else self._num_idle + 1
        if self._num_lost > self._policy.max_resumes:
            return None
        if self._num_idle and (self._num_idle > self._policy.max_retries or not self._budget.take(now_s)):
            return None
        return self._policy.backoff_s(self._num_idle, self._rng)


def may_retry(status: int, headers: Mapping[str, str]) -> bool:
    """Whether a response with this status invites another try; the server's own word counts most."""
    own_word = headers.get("x-should-retry", "").lower()
    if own_word in ("true", "false"):
        return own_word == "true"
    return status in RETRIED_STATUSES


def parse_retry_after(headers: Mapping[str, str], now_unix_s: float) -> float | None:
    """Seconds to wait by Retry-After (seconds or a date) or retry-after-ms; None if absent or not understood.

    Args:
        headers: of the response; looked up in lower case.
        now_unix_s: wall time, for dates.
    """
    milliseconds = _parse_number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    seconds = _parse_number(value)
    if seconds is not None or value is None:
        return seconds
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now_unix_s)
    except (ValueError, OverflowError):
        return None


def _parse_number(value: str | None) -> float | None:
    try:
        number = float(value) if value is not None else -1.0
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None
