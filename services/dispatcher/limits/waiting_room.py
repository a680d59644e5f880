"""Requests for which no worker has room: a bounded queue, more urgent ones first, with a time limit for each.

Within a tier the order is that of arrival. Where the queue is full, who is more urgent takes the place of the last one.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right, insort
from collections import Counter
from typing import Final

from shared.api_keys import Tier

_BEGUN: Final = -max(Tier) - 1
"""Rank of requests that have begun, before that of the most urgent tier."""


class Ticket:
    """A place in the queue."""

    __slots__ = ("event", "rank", "tenant", "was_sent_away")

    def __init__(self, rank: int, tenant: str) -> None:
        self.event = asyncio.Event()
        self.rank = rank
        """Smaller ones go first."""
        self.tenant = tenant
        self.was_sent_away = False


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

    def num_before(self, tier: Tier) -> int:
        """Return how many requests a new one would wait behind."""
        return bisect_right(self._tickets, -tier, key=lambda waiting: waiting.rank)

    def shrink(self, most: int) -> None:
        """Send the last ones away until so many are left: who is more urgent took their place. What has begun stays."""
        while len(self._tickets) > most and self._tickets[-1].rank != _BEGUN:
            last = self._tickets[-1]
            last.was_sent_away = True
            self.leave(last)
            last.event.set()

    def enter(self, tier: Tier = Tier.DEFAULT, tenant: str = "", *, first: bool = False) -> Ticket:
        """Join the queue behind everything as urgent. The caller keeps the limits, and must `leave`.

        Args:
            tier: of the request.
            tenant: whose it is.
            first: it has begun already, so it goes before every request that has not.
        """
        ticket = Ticket(_BEGUN if first else -tier, tenant)
        insort(self._tickets, ticket, key=lambda waiting: waiting.rank)
        self._num_of[tenant] += 1
        return ticket

    async def turn(self, ticket: Ticket, until_s: float) -> bool:
        """Return True when it is this one's turn to try (again).

        False: the time (of the event loop) is over, or it was sent away.
        """
        try:
            async with asyncio.timeout_at(until_s):
                await ticket.event.wait()
        except TimeoutError:
            return False
        ticket.event.clear()
        return not ticket.was_sent_away

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
