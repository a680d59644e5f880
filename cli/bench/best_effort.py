"""Best effort beside a load: always so many requests under way, the next one when one is done."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, Final

from cli.bench.load import Send
from cli.bench.server import BenchServer
from cli.bench.stream import BenchRecord
from shared.api_keys import Tier

FAILED_PAUSE_S: Final = 1.0
"""After a request that failed: a server that refuses best effort is not asked again at once."""


class ClosedLoop:
    """A closed loop of requests beside a load, for as long as that lasts.

    Args:
        send: as a load's; must not raise but when cancelled. Numbers go on from 0.
        num_in_flight: requests under way.
        clock: the load's.
    """

    def __init__(self, send: Send, num_in_flight: int, clock: Callable[[], float]) -> None:
        self._send = send
        self._num_in_flight = num_in_flight
        self._clock = clock
        self._num_done = 0
        self.duration_s = 0.0
        """From the first request to the end of the loop; 0 while it runs."""
        self.outcomes: list[BenchRecord] = []
        """Of every request that was sent, in order; those that were under way at the end have no end."""

    def describe(self) -> str:
        """Return in a few words how far it is."""
        return f"best effort: {self._num_done} done, {self._num_in_flight} under way"

    async def run(self) -> None:
        """Ask until cancelled; what is under way then is given up."""
        began_s, numbers = self._clock(), itertools.count()
        try:
            async with asyncio.TaskGroup() as group:
                for place in range(self._num_in_flight):
                    group.create_task(self._keep_asking(numbers), name=f"best-effort-{place}")
        finally:
            self.duration_s = self._clock() - began_s

    async def _keep_asking(self, numbers: itertools.count[int]) -> None:
        while True:
            now_s = self._clock()
            outcome = BenchRecord(next(numbers), due_s=now_s, sent_s=now_s)
            self.outcomes.append(outcome)
            await self._send(outcome.index, outcome)
            self._num_done += not outcome.failure
            if outcome.failure:
                await asyncio.sleep(FAILED_PAUSE_S)


def tier_fields(server: BenchServer) -> dict[str, Any]:
    """Return what makes a request one of best effort; nothing for a server that knows no such thing."""
    return {"service_tier": Tier.FLEX.label} if server.is_own else {}
