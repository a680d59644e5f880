"""KunServe under a policy that serves readers first: memory is short once readers without text lack it, not before."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from shared.api_keys import Tier
from shared.types import ReaderTarget
from sim.cluster import SimCluster
from sim.requests import SimRequest
from tests.support.group_room import group_params
from tests.support.sim_clusters import ask_all, hear_events, reasons

pytestmark = pytest.mark.virtual_time

SLOW, FAST = 4.8, 20.0
"""Tokens per second of readers."""


async def serve(system: str, count: int, **reader: float) -> tuple[int, int, int]:
    """Return the preemptions, the throttled workers and the plans that `count` requests of up to 18 blocks make.

    There are two workers of 84 blocks, which have 210 together once they have dropped half of the layers each. Each
    request has the text that it has undisturbed. Without a reader's target they are best effort.
    """
    async with SimCluster(group_params(system=system, num_pages=1000)) as cluster:
        events, rng = await hear_events(cluster.broker.connect("watch")), np.random.default_rng(0)
        await asyncio.sleep(1.0)
        target = ReaderTarget(**reader) if reader else None
        tier = Tier.DEFAULT if reader else Tier.FLEX
        prompts = [rng.integers(300, 30_000, 32) for _ in range(count)]
        await ask_all(
            cluster,
            [SimRequest(f"r{i}", prompt, 250, qoe=target, tier=tier) for i, prompt in enumerate(prompts)],
        )
        preemptions = sum(worker.service.engine.totals.num_preemptions for worker in cluster.workers)
        throttled = len(reasons(events, "worker_throttled"))
        return preemptions, throttled, len(reasons(events, "plan_done"))


async def test_nothing_is_dropped_for_rows_whose_readers_have_text() -> None:
    """16 requests need 288 of 168 blocks; who gives way has text, since each decodes faster than its reader reads."""
    preemptions, throttled, plans = await serve("kunserve-sluice", 16, speed_tokens_per_s=SLOW)
    assert preemptions > 0, "memory was short"
    assert (throttled, plans) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("system", "count", "speed"), [("kunserve", 16, SLOW), ("kunserve-sluice", 60, FAST)])
async def test_readers_who_wait_for_memory_make_it_drop(system: str, count: int, speed: float) -> None:
    """KunServe's own scheduler takes who comes first; and of 60 fast readers some wait for their first token."""
    _, throttled, plans = await serve(system, count, speed_tokens_per_s=speed)
    assert throttled > 0
    assert plans > 0


@pytest.mark.slow
async def test_what_nobody_reads_makes_nobody_drop() -> None:
    preemptions, throttled, plans = await serve("kunserve-sluice", 24)
    assert preemptions > 0, "memory was short"
    assert (throttled, plans) == (0, 0)
