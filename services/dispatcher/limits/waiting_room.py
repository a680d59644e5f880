"""Requests for which no worker has a place: a bounded queue, fair between tenants, with a time limit for each.

Urgent tiers go first, and within a tier the tenant that has been served least; of one tenant's, who came first.

    begun elsewhere ─► priority ─► default ─► flex          a full queue sends away, of the least urgent tier there is,
                          └─ tenants by service, least first   the last one of the tenant that has most waiting

Best effort has a room of its own, so it takes nobody's place in the other one, and nobody takes its own.

A tenant that comes to wait counts as having been served as much as the least served one that waits: time in which it
asked for nothing gives it no claim. Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024),
algorithm 2, virtual token counters, of which these are the weights. Deviation: counted when tokens were made, not when
a prompt is chosen, since who is chosen is not known to fit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from shared.api_keys import Tier

PROMPT_WEIGHT: Final = 1.0
OUTPUT_WEIGHT: Final = 2.0
"""Of a token that was computed; a token of output costs more than one of a prompt."""
MAX_TENANTS: Final = 10_000
"""Tenants whose service is remembered; beyond it those that wait for nothing are forgotten."""
TOKEN_BYTES: Final = 4
"""Of a prompt that waits."""
_BEGUN: Final = -max(Tier) - 1
"""Rank of requests that have begun, before that of the most urgent tier."""


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who waits."""

    tier: Tier = Tier.DEFAULT
    tenant: str = ""
    num_tokens: int = 0
    """Most tokens of its prompt and output together."""
    num_known: int = 0
    """Tokens of its prompt and its output so far."""
    has_begun: bool = False
    """At a worker that it has lost: it goes before every request that has not."""
    has_output: bool = False
    """It has tokens already: a worker takes it also when as many wait there as may, unless it is best effort."""


class Ticket:
    """A place in the queue."""

    __slots__ = ("claimant", "event", "rank", "was_sent_away")

    def __init__(self, claimant: Claimant) -> None:
        self.event = asyncio.Event()
        self.claimant = claimant
        self.rank = _BEGUN if claimant.has_begun else -claimant.tier
        """Smaller ones go first."""
        self.was_sent_away = False

    @property
    def line(self) -> str:
        """Where it stands within its rank: with others of its tenant; what has begun is nobody's."""
        return "" if self.claimant.has_begun else self.claimant.tenant


class WaitingRoom:
    """Only the first for which there is a place tries to be placed; when it leaves, the next one tries at once.

    Args:
        has_place: returns whether one could be placed at once, as far as is known here.
    """

    def __init__(self, has_place: Callable[[Claimant], bool] = lambda _: True) -> None:
        self._has_place = has_place
        self._lines: dict[int, dict[str, dict[Ticket, None]]] = {}
        """By rank and `Ticket.line`, none empty; tickets in order of arrival."""
        self._num_of: Counter[str] = Counter()
        self._tiers: dict[Tier, tuple[int, int]] = {}
        """How many wait, and how many known tokens they have, by tier; of those that have any."""
        self._served: dict[str, float] = {}
        """Weighted tokens, by tenant."""

    def __len__(self) -> int:
        return sum(number for number, _ in self._tiers.values())

    @property
    def num_known(self) -> int:
        """Known tokens of all that wait."""
        return sum(tokens for _, tokens in self._tiers.values())

    def num_of(self, tenant: str) -> int:
        """Return how many requests of a tenant wait."""
        return self._num_of[tenant]

    def num_before(self, tier: Tier, tenant: str = "") -> int:
        """Return how many requests a new one would wait behind, if tenants of a tier took turns."""
        num_more_urgent = sum(len(line) for rank in self._lines if rank < -tier for line in self._lines[rank].values())
        of_tier = self._lines.get(-tier, {})
        num_own = len(of_tier.get(tenant, ()))
        others = sum(min(len(line), num_own + 1) for name, line in of_tier.items() if name != tenant)
        return num_more_urgent + num_own + others

    def tiers(self) -> dict[Tier, tuple[int, int]]:
        """Return how many wait, and how many known tokens they have, by tier."""
        return dict(self._tiers)

    def serve(self, tenant: str, num_prompt: int, num_output: int) -> None:
        """Count tokens that were computed for a tenant."""
        amount = PROMPT_WEIGHT * num_prompt + OUTPUT_WEIGHT * num_output
        if tenant not in self._served and len(self._served) >= MAX_TENANTS:
            self._served = {name: served for name, served in self._served.items() if self._num_of[name]}
        self._served[tenant] = self._served.get(tenant, 0.0) + amount

    def shrink(self, most: int) -> None:
        """Send the last ones away until so many are left: whoever has more claim took their place.

        What has begun stays.
        """
        while len(self) > most and max(self._lines) != _BEGUN:
            lines = self._lines[max(self._lines)]
            line = max(lines.values(), key=len)  # of equally long ones the first that was there
            last = next(reversed(line))
            last.was_sent_away = True
            self.leave(last)
            last.event.set()

    def enter(self, claimant: Claimant) -> Ticket:
        """Join the queue behind everything of its tenant and tier. The caller keeps the limits, and must `leave`."""
        ticket, tenant = Ticket(claimant), claimant.tenant
        if not self._num_of[tenant]:
            least = min((self._served.get(name, 0.0) for name in self._num_of if self._num_of[name]), default=0.0)
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
        self._lines.setdefault(ticket.rank, {}).setdefault(ticket.line, {})[ticket] = None
        self._num_of[tenant] += 1
        self._count(claimant, 1)
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
        lines, tenant = self._lines.get(ticket.rank, {}), ticket.claimant.tenant
        if ticket not in lines.get(ticket.line, ()):
            return
        del lines[ticket.line][ticket]
        if not lines[ticket.line]:
            del lines[ticket.line]
        if not lines:
            del self._lines[ticket.rank]
        self._num_of[tenant] -= 1
        if not self._num_of[tenant]:
            del self._num_of[tenant]
        self._count(ticket.claimant, -1)
        self.signal()  # also if it was not the first: a more urgent one may have come while it tried

    def signal(self) -> None:
        """There may be a place: the first for which there is tries."""
        first = self.first()
        if first is not None:
            first.event.set()

    def first(self) -> Ticket | None:
        """Return the first for which there is a place; None: there is none."""
        return next((ticket for ticket in self._heads() if self._has_place(ticket.claimant)), None)

    def _count(self, claimant: Claimant, change: int) -> None:
        number, tokens = self._tiers.get(claimant.tier, (0, 0))
        self._tiers[claimant.tier] = number + change, tokens + change * claimant.num_known
        if not self._tiers[claimant.tier][0]:
            del self._tiers[claimant.tier]

    def _heads(self) -> Iterator[Ticket]:
        """Return the first of each line, who has most claim first."""
        for rank in sorted(self._lines):
            lines = self._lines[rank]
            for name in sorted(lines, key=lambda name: self._served.get(name, 0.0)):
                yield next(iter(lines[name]))


@dataclass(frozen=True, slots=True)
class RoomLimits:
    """See `DispatcherSettings`."""

    max_queued: int = 256
    max_queued_flex: int = 256
    flex_memory: int = 2**30


class WaitingRooms:
    """A room for real-time work, and one for best effort, each with its limits.

    Args:
        has_place: see `WaitingRoom`.
        limits: of both.
    """

    def __init__(self, has_place: Callable[[Claimant], bool], limits: RoomLimits) -> None:
        self.real_time, self.best_effort = WaitingRoom(has_place), WaitingRoom(has_place)
        self._limits = limits

    def __len__(self) -> int:
        return len(self.real_time) + len(self.best_effort)

    def of(self, tier: Tier) -> WaitingRoom:
        """Return the room of a tier."""
        return self.best_effort if tier.is_best_effort else self.real_time

    def max_of(self, tier: Tier) -> int:
        """Return how many requests may wait in the room of a tier."""
        return self._limits.max_queued_flex if tier.is_best_effort else self._limits.max_queued

    def has_memory(self, tier: Tier) -> bool:
        """Return whether the prompts of best effort that waits leave room for another one; of others few wait."""
        return not tier.is_best_effort or TOKEN_BYTES * self.best_effort.num_known < self._limits.flex_memory

    def is_full(self, tier: Tier, tenant: str, max_of_tenant: int | None) -> bool:
        """Return whether one more of a tenant may not wait."""
        room = self.of(tier)
        is_over_own = max_of_tenant is not None and room.num_of(tenant) >= max_of_tenant
        return is_over_own or room.num_before(tier, tenant) >= self.max_of(tier) or not self.has_memory(tier)

    def tiers(self) -> dict[Tier, tuple[int, int]]:
        """See `WaitingRoom`."""
        return self.real_time.tiers() | self.best_effort.tiers()

    def signal(self) -> None:
        """There may be a place for somebody in either room."""
        self.real_time.signal()
        self.best_effort.signal()
