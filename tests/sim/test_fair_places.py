"""One who asks for far more than a worker can do, and others: places at workers, turns, what is told of the queue."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from services.dispatcher.session.request import FailureCode, RequestFailedError
from services.worker.engine.stats import MIN_WAITING, take_stats
from shared.api_keys import Tier
from sim.cluster import SimCluster
from sim.requests import SimAnswer, SimRequest
from tests.support.sim_clusters import check_answers, cluster_of

pytestmark = pytest.mark.virtual_time

PROMPT = np.arange(300, 332)


def flood(tenant: str, count: int, tokens: int, max_queued: int | None = None) -> Iterator[SimRequest]:
    for i in range(count):
        prompt = PROMPT + i
        yield SimRequest(f"{tenant}-{i}", prompt, tokens, seed=i, tenant=tenant, max_tenant_queued=max_queued)


async def ask(cluster: SimCluster, request: SimRequest, order: list[str], num_choices: int = 1) -> list[SimAnswer]:
    """Return the answers, none if it is refused; note the request when its answers have ended."""
    try:
        answers = await cluster.ask_choices(request, num_choices)
    except RequestFailedError:
        return []
    order.append(request.request_id)
    return answers


async def test_one_tenants_flood_leaves_places_for_other_tenants_and_tiers_and_meets_its_own_limit() -> None:
    """500 requests of four choices, two of which may wait; the worker runs eight at a time."""
    async with SimCluster(cluster_of(1, 2000, max_batch_rows=8, max_sequences=1024)) as cluster:
        order: list[str] = []
        engine = cluster.workers[0].service.engine
        most_waiting = 0
        async with asyncio.TaskGroup() as group:
            greedy = [
                group.create_task(ask(cluster, request, order, 4))
                for request in flood("greedy", 500, 100, max_queued=2)
            ]
            await asyncio.sleep(0.5)
            for name, tier in (("modest", Tier.DEFAULT), ("urgent", Tier.PRIORITY)):
                request = SimRequest(name, PROMPT, 5, tenant=name, tier=tier)
                group.create_task(ask(cluster, request, order))
            for _ in range(100):
                await asyncio.sleep(0.05)
                most_waiting = max(most_waiting, take_stats(engine).num_waiting)
        answers = [answer for task in greedy for answer in task.result()]
        whole = [answer for answer in answers if answer.failure is None]
        check_answers(cluster, whole)
        assert {answer.failure for answer in answers} <= {None, FailureCode.QUEUE_FULL}
        assert most_waiting <= 8
        assert 8 <= len(whole) <= 8 + 8 + 2 * 4, "what ran, what waited there, and what waited here"
        assert max(map(order.index, ("modest", "urgent"))) < len(order) / 2 + 2
        await asyncio.sleep(1.0)
        cluster.check_idle()


@pytest.mark.parametrize("weights", [(1, 1), (1, 4)])
async def test_tenants_of_a_tier_get_equal_service_however_many_requests_each_has(weights: tuple[int, int]) -> None:
    """Both always have some waiting; the second has more, and longer ones. While both wait, tokens come evenly."""
    async with SimCluster(cluster_of(1, 2000, max_batch_rows=4)) as cluster:
        order: list[str] = []
        num_tokens: Counter[str] = Counter()
        async with asyncio.TaskGroup() as group:
            for tenant, weight in zip("ab", weights, strict=True):
                for request in flood(tenant, 60 * weight, 20 * weight):
                    group.create_task(ask(cluster, request, order))
            waiting = cluster.dispatcher.sessions
            await asyncio.sleep(0.1)
            while len(order) < 60:
                await asyncio.sleep(0.1)
            for name in order:
                num_tokens[name[0]] += len(PROMPT) + 2 * 20 * weights["ab".index(name[0])]
            assert waiting.num_queued > 0
        assert abs(num_tokens["a"] - num_tokens["b"]) <= 2 * MIN_WAITING * (len(PROMPT) + 2 * 20 * max(weights))


async def test_what_waits_in_the_dispatcher_is_told_by_tier_and_forgotten_when_it_has_gone() -> None:
    async with SimCluster(cluster_of(1, 2000, max_batch_rows=4)) as cluster:
        order: list[str] = []
        async with asyncio.TaskGroup() as group:
            for request in flood("a", 40, 50):
                group.create_task(ask(cluster, request, order))
            await asyncio.sleep(1.1)
            sessions = cluster.dispatcher.sessions
            view = sessions.cluster.view
            assert view is not None
            (told,) = view.waiting
            assert told.tier == "default"
            assert told.num_tokens == told.num_requests * len(PROMPT)
            assert sessions.num_queued <= told.num_requests <= 40 - 4
        await asyncio.sleep(1.5)
        view = sessions.cluster.view
        assert view is not None
        assert not view.waiting


async def test_a_scheduler_that_reorders_sees_all_who_wait() -> None:
    """Round-robin lets everybody in, up to what its engine has rows for; first come, first served one batch."""
    found = {}
    for system in ("round-robin", "fcfs"):
        async with SimCluster(cluster_of(1, 2000, system=system, max_batch_rows=4, max_sequences=64)) as cluster:
            engine = cluster.workers[0].service.engine
            async with asyncio.TaskGroup() as group:
                for request in flood("a", 40, 5):
                    group.create_task(ask(cluster, request, []))
                await asyncio.sleep(0.02)
                found[system] = engine.table.num_sequences
    assert found["round-robin"] > 4 + 4 >= found["fcfs"]
