"""What each tenant takes of this dispatcher: the only writer of its rates and counts.

    enter ──► charge (once the prompts are tokenised) ──► close (gives back what was not used)
      └─ hand_over: to a newer connection for the same answer, which goes on as if it were the same request

Whoever was given a permit must close it. Several dispatchers count apart from each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from services.dispatcher.access.grants import Tenant
from services.dispatcher.policy.rates import Bucket, Short, give_back, refilled, reset_s, take

CONCURRENT_WAIT_S: Final = 1.0
"""When a place will be free nobody knows; one that asks again after this does no harm."""
MAX_TENANTS: Final = 10_000
"""Tenants whose rates are remembered; beyond it those that run nothing are forgotten."""


class UsageLimit(StrEnum):
    """What a tenant may not exceed."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENT = "concurrent"


@dataclass(frozen=True, slots=True)
class OverLimit:
    """The tenant has taken what it may."""

    limit: UsageLimit
    allowed: int
    """By the limit: per minute, or at a time."""
    asked: int
    wait_s: float | None
    """Seconds after which it may fit; None: never, it asks for more than the whole limit."""


@dataclass(frozen=True, slots=True)
class RateView:
    """One rate, as clients see it."""

    limit: UsageLimit
    allowed: int
    remaining: int
    reset_s: float
    """Seconds until all of it is there again."""


@dataclass(slots=True)
class _Usage:
    """One tenant."""

    requests: Bucket
    tokens: Bucket
    num_open: int = 0


class Permit:
    """One request's part of its tenant's limits. Made by `Tenants.enter`."""

    def __init__(self, tenant: Tenant, usage: _Usage, num_choices: int) -> None:
        self._tenant = tenant
        self._usage = usage
        self._num_choices = num_choices
        self._num_charged: int | None = None
        self._num_used = 0  # at least
        self._is_open = True

    def charge(self, num_tokens: int, now_s: float) -> OverLimit | None:
        """Take what the request may cost at most, in tokens, once; return why that is too much, if it is.

        Nothing is taken for a request that has just been replaced, and goes on up to its next wait.
        """
        allowed = self._tenant.limits.tokens_per_min
        if allowed is None or self._num_charged is not None or not self._is_open:
            return None
        outcome = take(self._usage.tokens, allowed, num_tokens, now_s)
        if isinstance(outcome, Short):
            return OverLimit(UsageLimit.TOKENS, allowed, num_tokens, outcome.wait_s)
        self._usage.tokens = outcome
        self._num_charged = num_tokens
        return None

    def hand_over(self, num_used: int) -> Permit:
        """Return a permit with all that this one has taken, and nothing more; this one is closed.

        Args:
            num_used: tokens that were used so far; the new one is closed with no fewer.
        """
        assert self._is_open, "a closed permit has nothing to hand over"
        self._is_open = False
        heir = Permit(self._tenant, self._usage, self._num_choices)
        heir._num_charged = self._num_charged
        heir._num_used = max(num_used, self._num_used)
        return heir

    def close(self, num_used: int, now_s: float) -> None:
        """Give back the places and the tokens that were charged and not used: once, and nothing after a hand-over."""
        if not self._is_open:
            return
        self._is_open = False
        self._usage.num_open -= self._num_choices
        allowed = self._tenant.limits.tokens_per_min
        num_left = (self._num_charged or 0) - max(num_used, self._num_used)
        if allowed is not None and num_left > 0:
            self._usage.tokens = give_back(self._usage.tokens, allowed, num_left, now_s)


class Tenants:
    """Every tenant's usage, by name."""

    def __init__(self) -> None:
        self._usage: dict[str, _Usage] = {}

    def enter(self, tenant: Tenant, num_choices: int, now_s: float) -> Permit | OverLimit:
        """Let a request in that needs so many places, or say which limit it meets.

        It counts against the requests per minute also if it is refused later: by then it has been tokenised.
        """
        usage, limits = self._of(tenant, now_s), tenant.limits
        places = limits.max_concurrent
        if places is not None and usage.num_open + num_choices > places:
            wait_s = CONCURRENT_WAIT_S if num_choices <= places else None
            return OverLimit(UsageLimit.CONCURRENT, places, num_choices, wait_s)
        if limits.requests_per_min is not None:
            outcome = take(usage.requests, limits.requests_per_min, num_choices, now_s)
            if isinstance(outcome, Short):
                return OverLimit(UsageLimit.REQUESTS, limits.requests_per_min, num_choices, outcome.wait_s)
            usage.requests = outcome
        usage.num_open += num_choices
        return Permit(tenant, usage, num_choices)

    def rates(self, tenant: Tenant, now_s: float) -> list[RateView]:
        """Return what is left of the tenant's rates; nothing of those that it does not have."""
        limits, usage = tenant.limits, self._of(tenant, now_s)
        found: list[RateView] = []
        for limit, allowed, bucket in (
            (UsageLimit.REQUESTS, limits.requests_per_min, usage.requests),
            (UsageLimit.TOKENS, limits.tokens_per_min, usage.tokens),
        ):
            if allowed is not None:
                left = int(refilled(bucket, allowed, now_s).level)
                found.append(RateView(limit, allowed, left, reset_s(bucket, allowed, now_s)))
        return found

    def _of(self, tenant: Tenant, now_s: float) -> _Usage:
        usage = self._usage.get(tenant.name)
        if usage is None:
            if len(self._usage) >= MAX_TENANTS:
                self._usage = {name: known for name, known in self._usage.items() if known.num_open}
            full = Bucket(math.inf, now_s)  # whatever the limit is, now or after the file has changed
            usage = self._usage[tenant.name] = _Usage(full, full)
        return usage
