"""One who asks for far more than a worker can do, and others: places at workers, turns, what is told of the queue."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from services.dispatcher.session.request import FailureCode, RequestFailedError
from services.worker.engine.engine import Engine
from services.worker.engine.stats import take_stats
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


@pytest.mark.parametrize(("system", "batches"), [("fcfs-chunked", 1), ("sluice", 4)])
async def test_one_tenants_flood_leaves_places_for_other_tenants_and_tiers_and_meets_its_own_limit(
    system: str, batches: int
) -> None:
    """500 requests of four choices, two of which may wait; the worker runs eight at a time."""
    async with SimCluster(cluster_of(1, 2000, system=system, max_batch_rows=8, max_sequences=1024)) as cluster:
        order: list[str] = []
        engine = cluster.workers[0].service.engine
        async with asyncio.TaskGroup() as group:
            greedy = [
                group.create_task(ask(cluster, request, order, 4))
                for request in flood("greedy", 500, 100, max_queued=2)
            ]
            assert await _most_waiting(engine, 0.5) <= 4 * batches, "half of the places, siblings too"
            for name, tier in (("modest", Tier.DEFAULT), ("urgent", Tier.PRIORITY)):
                request = SimRequest(name, PROMPT, 5, tenant=name, tier=tier)
                group.create_task(ask(cluster, request, order))
            assert await _most_waiting(engine, 5.0) <= 8 * batches
        answers = [answer for task in greedy for answer in task.result()]
        whole = [answer for answer in answers if answer.failure is None]
        check_answers(cluster, whole)
        assert {answer.failure for answer in answers} <= {None, FailureCode.QUEUE_FULL}
        assert 8 <= len(whole) <= 8 + 8 * batches + 2 * 4, "what ran, what waited there, and what waited here"
        assert max(map(order.index, ("modest", "urgent"))) < len(order) / 2 + 2
        await asyncio.sleep(1.0)
        cluster.check_idle()


async def test_floods_of_others_leave_rows_for_whoever_comes() -> None:
    """With the limits that workers have: those who wait take no row that whoever comes needs."""
    async with SimCluster(cluster_of(1, 4000, system="sluice", max_batch_rows=256, max_sequences=1024)) as cluster:
        engine, order = cluster.workers[0].service.engine, list[str]()
        async with asyncio.TaskGroup() as group:
            floods = []
            for tenant in ("a", "b", "d"):
                for request in flood(tenant, 1000, 200):
                    floods.append(group.create_task(ask(cluster, request, order)))
                await asyncio.sleep(0.3)
            stats = take_stats(engine)
            assert stats.num_running == 256
            assert stats.num_waiting >= 256, "each had half of the places that the ones before it left"
            assert engine.table.num_sequences < 1024
            began_s = asyncio.get_running_loop().time()
            answers = await cluster.ask_choices(SimRequest("c", PROMPT, 5, tenant="c"), 1)
            assert asyncio.get_running_loop().time() - began_s < 2.0
            assert len(answers[0].tokens) == 5
            for each in floods:
                each.cancel()


async def _most_waiting(engine: Engine, seconds: float) -> int:
    """Return how many waited at a worker at most."""
    most = 0
    for _ in range(round(seconds / 0.01)):
        await asyncio.sleep(0.01)
        most = max(most, take_stats(engine).num_waiting)
    return most


@pytest.mark.parametrize(
    ("system", "longer", "ratio"), [("fcfs-chunked", 1, 1.0), ("fcfs-chunked", 4, 192 / 72), ("sluice", 1, 1.0)]
)
async def test_tenants_of_a_tier_get_equal_service_however_many_requests_each_has(
    system: str, longer: int, ratio: float
) -> None:
    """Two tenants, the second with more requests, and longer ones: while both wait, tokens and not requests are equal.

    A request of the first costs 32 tokens of prompt and twice 20 of output; one of the second twice 80 if four times as
    long. So of the former more end, by that ratio. (By gain short answers come before long ones at a worker.)
    """
    async with SimCluster(cluster_of(1, 2000, system=system, max_batch_rows=4)) as cluster:
        order: list[str] = []
        async with asyncio.TaskGroup() as group:
            for tenant, factor in (("a", 1), ("b", longer)):
                for request in flood(tenant, 60 * factor, 20 * factor):
                    group.create_task(ask(cluster, request, order))
            while len(order) < 60:
                await asyncio.sleep(0.1)
            assert cluster.dispatcher.sessions.num_queued > 0
            ended = Counter(name[0] for name in order)
        assert 0.75 * ratio <= ended["a"] / ended["b"] <= 1.33 * ratio, ended


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


async def test_a_scheduler_that_reorders_sees_more_of_those_who_wait() -> None:
    """Round-robin is given four batches; first come, first served one."""
    found = {}
    for system in ("round-robin", "fcfs"):
        async with SimCluster(cluster_of(1, 2000, system=system, max_batch_rows=4, max_sequences=64)) as cluster:
            engine = cluster.workers[0].service.engine
            async with asyncio.TaskGroup() as group:
                for request in flood("a", 40, 5):
                    group.create_task(ask(cluster, request, []))
                await asyncio.sleep(0.02)
                found[system] = engine.table.num_sequences
    assert found == {"round-robin": 4 + 4 * 4 // 2, "fcfs": 4 + 4 // 2}
