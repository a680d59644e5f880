"""The limits of tenants as clients see them: headers on every answer, and the 429 that says what to do."""

from __future__ import annotations

from services.dispatcher.access.grants import Tenant
from services.dispatcher.endpoints.call import CheckedCall
from services.dispatcher.http.errors import RATE_LIMITED, ApiError
from services.dispatcher.http.front import Front
from services.dispatcher.limits.tenants import OverLimit, Permit, UsageLimit


def enter(front: Front, call: CheckedCall) -> Permit:
    """Return the permit of a request that was checked; it must be closed.

    Raises:
        ApiError: 429, one of the tenant's limits is reached.
    """
    outcome = front.tenants.enter(call.grant.tenant, call.num_choices, front.now())
    if isinstance(outcome, OverLimit):
        raise _refusal(front, call, outcome)
    return outcome


def charge(front: Front, call: CheckedCall, permit: Permit, num_tokens: int) -> None:
    """Take what the request may cost at most.

    Args:
        front: for the clock and the counts.
        call: who asks.
        permit: of the request.
        num_tokens: of its prompts, and of its answers if each becomes as long as it may.

    Raises:
        ApiError: 429, the tenant's tokens do not suffice.
    """
    outcome = permit.charge(num_tokens, front.now())
    if outcome is not None:
        raise _refusal(front, call, outcome)


def rate_headers(front: Front, tenant: Tenant) -> dict[str, str]:
    """Return `x-ratelimit-…`; nothing for a tenant without rates."""
    headers: dict[str, str] = {}
    for rate in front.tenants.rates(tenant, front.now()):
        headers[f"x-ratelimit-limit-{rate.limit}"] = str(rate.allowed)
        headers[f"x-ratelimit-remaining-{rate.limit}"] = str(rate.remaining)
        headers[f"x-ratelimit-reset-{rate.limit}"] = f"{rate.reset_s:.3f}s"
    return headers


_WHAT = {
    UsageLimit.REQUESTS: "requests per minute (each choice counts)",
    UsageLimit.TOKENS: "tokens per minute (prompts and 'max_tokens' of each choice)",
    UsageLimit.CONCURRENT: "requests at a time (each choice counts)",
}


def _refusal(front: Front, call: CheckedCall, over: OverLimit) -> ApiError:
    """Return the 429; one that asks for more than the whole limit is not to be tried again."""
    front.metrics.limited(call.grant.tenant.name, over.limit.value)
    front.metrics.refused(RATE_LIMITED, call.params.service_tier)
    message = f"Your limit is {over.allowed} {_WHAT[over.limit]}; this request needs {over.asked}."
    message += " Ask for less at a time." if over.wait_s is None else " Try again later."
    headers = {"x-should-retry": "false"} if over.wait_s is None else {}
    headers |= rate_headers(front, call.grant.tenant)
    return ApiError(429, RATE_LIMITED, message, headers=headers, retry_after_s=over.wait_s)
