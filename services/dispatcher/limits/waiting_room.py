"""Requests for which no worker has room: a bounded queue, first come first served, with a time limit for each."""

from __future__ import annotations

import asyncio
from collections import deque


class Ticket:
    """A place in the queue."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event = asyncio.Event()


class WaitingRoom:
    """Only the first in the queue tries to be placed; when it leaves, the next one tries at once."""

    def __init__(self) -> None:
        self._tickets: deque[Ticket] = deque()

    def __len__(self) -> int:
        return len(self._tickets)

    def enter(self, *, first: bool = False) -> Ticket:
        """Join the end of the queue, or its front. The caller keeps the limit (`len`), and must `leave`."""
        ticket = Ticket()
        if first:
            self._tickets.appendleft(ticket)
        else:
            self._tickets.append(ticket)
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
        was_first = self._tickets[0] is ticket
        self._tickets.remove(ticket)
        if was_first:
            self.signal()

    def signal(self) -> None:
        """There may be room: the first in the queue tries."""
        if self._tickets:
            self._tickets[0].event.set()
