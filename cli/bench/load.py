"""Sends a planned load on time, and keeps what came of each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from cli.bench.server import BenchServer
from cli.bench.stream import BenchRecord, stream_answer
from cli.bench.workload import Planned

Send = Callable[[int, BenchRecord], Awaitable[None]]
"""Sends the request of this index and fills its outcome."""


class BenchLoad:
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
        self._under_way: dict[int, BenchRecord] = {}
        self._num_failed = 0
        self._num_tokens = 0
        self.outcomes: list[BenchRecord] = []
        """Of every request that was sent, in order."""

    def clock(self) -> float:
        """Return the seconds since the load began."""
        return time.perf_counter() - self._began_s

    def describe(self) -> str:
        """Return one line about how far it is; costs no more with every answer that is done."""
        num_done = len(self.outcomes) - len(self._under_way)
        num_tokens = self._num_tokens + sum(outcome.num_output for outcome in self._under_way.values())
        elapsed_s = self.clock()
        return (
            f"{elapsed_s:5.0f} s  {num_done}/{len(self._planned)} done, {len(self._under_way)} under way, "
            f"{self._num_failed} failed, {num_tokens / max(elapsed_s, 1e-3):.0f} tokens/s"
        )

    async def run(self) -> None:
        """Return when every request has ended; if cancelled, those under way are given up."""
        self._began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(self._planned):
                delay_s = request.arrival_s - self.clock()
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                await self._room.acquire()
                outcome = BenchRecord(index, due_s=request.arrival_s, sent_s=self.clock())
                self.outcomes.append(outcome)
                self._under_way[index] = outcome
                group.create_task(self._one(index, outcome), name=f"request-{index}")

    async def _one(self, index: int, outcome: BenchRecord) -> None:
        try:
            await self._send(index, outcome)
        finally:
            del self._under_way[index]
            self._num_tokens += outcome.num_output
            self._num_failed += bool(outcome.failure)
            self._room.release()


class HttpLoad(BenchLoad):
    """A load of requests that are made ready before the first one is sent.

    Args:
        planned: when each is due.
        bodies: of the requests.
        session: with the time limit and the headers.
        server: whom to ask.
        max_in_flight: requests under way; None: no limit.
    """

    def __init__(
        self,
        planned: Sequence[Planned],
        bodies: Sequence[bytes],
        session: aiohttp.ClientSession,
        server: BenchServer,
        max_in_flight: int | None = None,
    ) -> None:
        super().__init__(planned, http_send(session, server, bodies.__getitem__, self.clock), max_in_flight)


def http_send(
    session: aiohttp.ClientSession, server: BenchServer, body_of: Callable[[int], bytes], clock: Callable[[], float]
) -> Send:
    """Return what sends requests to a server.

    Args:
        session: with the time limit and the headers.
        server: whom to ask.
        body_of: returns the body of the request of an index.
        clock: seconds since the load began.
    """

    async def send(index: int, outcome: BenchRecord) -> None:
        await stream_answer(session, server.endpoint_url, body_of(index), clock, outcome)

    return send
