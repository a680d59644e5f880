"""Sends a planned load on time, and keeps what came of each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from cli.bench.stream import Outcome
from cli.bench.workload import Planned

Send = Callable[[int, Outcome], Awaitable[None]]
"""Sends the request of this index and fills its outcome."""


class Load:
    """One run of a load.

    Args:
        planned: in order of arrival.
        send: must not raise but when cancelled.
        max_in_flight: requests under way at most; a request that is held back counts from when it is sent. None: no
            limit.
    """

    def __init__(self, planned: Sequence[Planned], send: Send, max_in_flight: int | None = None) -> None:
        self._planned = planned
        self._send = send
        self._room = asyncio.Semaphore(max_in_flight or len(planned) or 1)
        self._began_s = time.perf_counter()
        self.outcomes: list[Outcome] = []
        """Of every request that was sent, in order."""

    def clock(self) -> float:
        """Return the seconds since the load began."""
        return time.perf_counter() - self._began_s

    async def run(self) -> None:
        """Return when every request has ended; if cancelled, those under way are given up."""
        self._began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(self._planned):
                delay_s = request.arrival_s - self.clock()
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                await self._room.acquire()
                outcome = Outcome(index, due_s=request.arrival_s, sent_s=self.clock())
                self.outcomes.append(outcome)
                group.create_task(self._one(index, outcome), name=f"request-{index}")

    async def _one(self, index: int, outcome: Outcome) -> None:
        try:
            await self._send(index, outcome)
        finally:
            self._room.release()
