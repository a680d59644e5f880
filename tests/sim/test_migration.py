"""Running requests go from worker to worker with their KV, in simulated clusters: texts, what is computed again, faults."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from services.worker.migration.fetching import ROOM_BLOCKS
from shared.messages.fetch import FetchOutcome
from sim.cluster import ClusterParams, SimCluster
from sim.devices.channel import ModelledLink
from sim.requests import SimRequest
from tests.support.sim_clusters import check_answers, cluster_of

BLOCK = 16


def requests_of(count: int, seed: int = 0, *, num_prompt: int = 400, num_output: int = 200) -> list[SimRequest]:
    random = np.random.default_rng(seed)
    return [
        SimRequest(
            f"r{i}",
            random.integers(300, 31_000, size=int(random.integers(num_prompt // 2, num_prompt))).astype(np.int32),
            num_output=int(random.integers(num_output // 2, num_output)),
            seed=i,
        )
        for i in range(count)
    ]


def linked(params: ClusterParams, gbits: float = 25) -> ClusterParams:
    return replace(params, link=ModelledLink(latency_s=0.0001, bytes_per_s=gbits * 1e9 / 8))


async def num_recomputed(cluster: SimCluster) -> int:
    return sum(worker.service.engine.totals.num_generated_tokens for worker in cluster.workers)


@pytest.mark.virtual_time
@pytest.mark.parametrize("system", ["fcfs-chunked", "sluice", "kunserve"])
async def test_a_worker_that_drains_gives_its_requests_away_with_their_kv(system: str) -> None:
    async with SimCluster(linked(cluster_of(3, 1200, system="fcfs-chunked"))) as cluster:
        asked = [asyncio.ensure_future(cluster.ask(request)) for request in requests_of(24)]
        await asyncio.sleep(1.0)
        source = cluster.workers[0].service
        num_here = source.engine.table.num_sequences
        assert num_here
        before = sum(worker.service.engine.totals.num_prompt_tokens for worker in cluster.workers)
        await source.drain(5.0)
        print(num_here, source.engine.table.num_sequences, asyncio.get_running_loop().time())
        check_answers(cluster, await asyncio.gather(*asked))
        for worker in cluster.workers:
            migration = worker.service.migration
            totals = worker.service.engine.totals
            print(
                worker.params.worker_id,
                migration.departures.num_left,
                migration.fetching.outcomes,
                migration.fetching.num_blocks,
                totals.num_prompt_tokens,
                totals.num_prefix_cache_hits,
            )
        print(before)
