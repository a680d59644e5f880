"""Requests for which no worker has room: a bounded queue, more urgent tiers first, with a time limit for each.

Within a tier the order is that of arrival.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import Counter

from shared.api_keys import Tier


class Ticket:
    """A place in the queue."""

    __slots__ = ("event", "tenant", "tier")

    def __init__(self, tier: Tier, tenant: str) -> None:
        self.event = asyncio.Event()
        self.tier = tier
        self.tenant = tenant


class WaitingRoom:
    """Only the first in the queue tries to be placed; when it leaves, the next one tries at once."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []
        self._num_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tickets)

    def num_of(self, tenant: str) -> int:
        """Return how many requests of a tenant wait."""
        return self._num_of[tenant]

    def enter(self, tier: Tier = Tier.DEFAULT, tenant: str = "") -> Ticket:
        """Join the queue behind everything as urgent. The caller keeps the limits, and must `leave`."""
        ticket = Ticket(tier, tenant)
        insort(self._tickets, ticket, key=lambda waiting: -waiting.tier)
        self._num_of[tenant] += 1
        return ticket

    async def turn(self, ticket: Ticket, until_s: float) -> bool:
        """Return True when it is this one's turn to try (again), False when the time (of the event loop) is over."""
        try:
            async with asyncio.timeout_at(until_s):
                await ticket.event.wait()
        except TimeoutError:
            return False
        ticket.event.clear()
        return True

    def leave(self, ticket: Ticket) -> None:
        """Give up the place; idempotent."""
        if ticket not in self._tickets:
            return
        self._tickets.remove(ticket)
        self._num_of[ticket.tenant] -= 1
        if not self._num_of[ticket.tenant]:
            del self._num_of[ticket.tenant]
        self.signal()  # also if it was not the first: a more urgent one may have come while it tried

    def signal(self) -> None:
        """There may be room: the first in the queue tries."""
        if self._tickets:
            self._tickets[0].event.set()
