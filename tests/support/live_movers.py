"""Has requests change their worker at random moments, in a cluster of real processes."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.ids import RequestId, WorkerId
from shared.messages.fetch import Fetch, Fetched, FetchOutcome, FetchReason
from shared.transport.bus import BusError
from shared.transport.nats_bus import NatsBus
from shared.wire import WireError, decode, encode
from tests.support.fault_cluster import Cluster

LIMIT_S = 12.0
"""Longest wait for what came of a move."""
PAUSE_S = 0.02


class Movers:
    """Some of them, each of which moves one request after the other until it is stopped."""

    def __init__(self, cluster: Cluster, bus: NatsBus, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        """By what came of them; `silent`: nobody answered."""
        self.num_under_way = 0
        self._cluster = cluster
        self._bus = bus
        self._random = random.Random(seed)

    @property
    def num_moved(self) -> int:
        return self.counts[FetchOutcome.MOVED]

    async def move_forever(self) -> None:
        while True:
            with contextlib.suppress(BusError, WireError, ValueError, KeyError):
                await self._move_one()
            await asyncio.sleep(PAUSE_S)

    async def _move_one(self) -> None:
        _, view = await self._cluster.get("/v1/cluster")
        addresses = {w["report"]["worker_id"]: w["report"]["stage_address"] for w in (view or {}).get("workers", [])}
        source, target = self._random.sample(sorted(addresses), 2)
        sequences = (await self._cluster.dump(self._bus, source))["sequences"]
        if not sequences:
            return
        one = self._random.choice(sequences)
        asked = Fetch(
            request_id=RequestId(one["request_id"]),
            attempt=one["attempt"],
            source=WorkerId(source),
            source_address=addresses[source],
            reason=FetchReason.BALANCE,
            as_tokens=self._random.random() < 0.2,
        )
        self.num_under_way += 1
        try:
            subject = self._cluster.subjects.fetch(WorkerId(target))
            fetched = decode(await self._bus.request(subject, encode(asked), timeout_s=LIMIT_S), Fetched)
        except BusError:
            self.counts["silent"] += 1
            raise
        finally:
            self.num_under_way -= 1
        self.counts[fetched.outcome] += 1


@asynccontextmanager
async def moving(cluster: Cluster, seed: int, count: int = 3) -> AsyncIterator[Movers]:
    """Let so many movers be at work meanwhile."""
    async with cluster.bus() as bus:
        movers = Movers(cluster, bus, seed)
        tasks = [asyncio.create_task(movers.move_forever()) for _ in range(count)]
        try:
            yield movers
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
