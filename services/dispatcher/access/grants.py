"""Who asks, and what they may do: the outcome of looking at a key. Frozen values, no HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from shared.api_keys import Scope, Tier


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may take of one dispatcher; None: as much as the dispatcher gives anybody."""

    requests_per_min: int | None = None
    """Requests (each choice counts) that may come within a minute; so many at once, then evenly."""
    tokens_per_min: int | None = None
    """Tokens of prompts and answers; `max_tokens` are charged at the start, and what was not used comes back."""
    max_concurrent: int | None = None
    """Choices that run or wait at a time."""
    max_queued: int | None = None
    """Of these, the ones that wait because no worker has room."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose keys these are."""

    name: str
    """For logs and metrics; "" is everybody, where no key is asked for."""
    max_tier: Tier = Tier.DEFAULT
    """The most urgent tier that its requests get; what asks for more gets this one."""
    limits: TenantLimits = TenantLimits()


@dataclass(frozen=True, slots=True)
class Grant:
    """What the sender of one HTTP request may do."""

    tenant: Tenant
    scopes: frozenset[Scope]
    identity: str
    """What keeps its cached prompts and requests apart from others': the tenant; without keys, what `Authorization`
    held."""


EVERYBODY = Tenant("")
ALL_SCOPES = frozenset(Scope)


def grant_of_tenant(tenant: Tenant, scopes: frozenset[Scope]) -> Grant:
    """Return the grant of a key."""
    return Grant(tenant, scopes, f"tenant:{tenant.name}")


def grant_without_keys(authorization: str) -> Grant:
    """Return the grant of everybody, where no key is asked for; the header only keeps cached prompts apart."""
    return Grant(EVERYBODY, ALL_SCOPES, authorization)
