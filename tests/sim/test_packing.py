"""Packing in simulated clusters: placement and packer do not undo each other, over shared prefixes or by size class."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

from sim.cluster import SimCluster
from sim.requests import SimAnswer, SimRequest
from tests.support.sim_clusters import ask_all, check_answers, cluster_of, hear_events, reasons

pytestmark = [pytest.mark.virtual_time, pytest.mark.slow]

NUM_BLOCKS = 1500


def over_one_prefix(count: int, seed: int, num_output: int) -> list[SimRequest]:
    """Prompts of 4 800 tokens that are alike and 40 that are not: 300 blocks, and three more of each."""
    random = np.random.default_rng(seed)
    prefix = random.integers(300, 900, 4800)
    prompts = [np.concatenate([prefix, random.integers(300, 900, 40)]) for _ in range(count)]
    return [SimRequest(f"p{seed}-{number}", prompt, num_output, seed) for number, prompt in enumerate(prompts)]


@pytest.mark.parametrize(("num_output", "most"), [(2000, 1), (3000, 2)])
@pytest.mark.parametrize("seed", range(2))
async def test_eight_requests_over_one_long_prefix_move_once_and_if_they_outgrow_their_worker_some_back(
    seed: int, num_output: int, most: int
) -> None:
    """Each grows by 125 or by 188 blocks: together they fit one worker, or outgrow it after half a minute.

    Each prompt takes too long to wait for others, so they are placed on all three workers; then two of these are
    emptied, because their prefix counts once.
    """
    workers = cluster_of(3, NUM_BLOCKS, system="pack", kv_bytes_per_token=131_072, max_model_len=16_384)
    async with SimCluster(workers) as cluster:
        events = await hear_events(cluster.broker.connect("listener"))
        await ask_all(cluster, over_one_prefix(8, seed, num_output))
        told = reasons(events, "request_moved")
        moves = Counter(reason.split()[2] for reason in told)
        assert 4 <= moves.total() <= 5 * most, told
        assert max(moves.values()) == most, told
        assert len(reasons(events, "worker_closing")) == 2
        assert [worker.service.engine.totals.num_preemptions for worker in cluster.workers] == [0, 0, 0]
        assert cluster.monitor.counters["overflows"] == 0


@pytest.mark.parametrize("system", ["mell", "mell-printed"])
async def test_by_size_class_requests_go_where_they_belong_and_leave_when_their_large_neighbour_has_ended(
    system: str,
) -> None:
    """Of 1 500 blocks: an L of 870, an M of 500, an L of 850 and a T of 220, which lie on two workers.

    Then the first L ends, so the M is to go beside the other one, and the T makes place for it.
    """
    random = np.random.default_rng(3)
    workers = cluster_of(4, NUM_BLOCKS, system=system, kv_bytes_per_token=131_072, max_model_len=16_384)
    lengths = (("l0", 13_900, 600), ("m", 8_000, 1300), ("l1", 13_600, 1000), ("t", 3_500, 1200))
    async with SimCluster(workers) as cluster:
        events = await hear_events(cluster.broker.connect("listener"))
        asking: list[asyncio.Task[SimAnswer]] = []
        for name, num_prompt, num_output in lengths:
            request = SimRequest(name, random.integers(300, 900, num_prompt), num_output, 1)
            asking.append(asyncio.create_task(cluster.ask(request)))
            await asyncio.sleep(2.2)
        await asking[0]
        assert not reasons(events, "request_moved"), "everybody came where dispatchers were told"
        assert [worker.service.engine.totals.num_steps > 0 for worker in cluster.workers] == [True] * 2 + [False] * 2
        check_answers(cluster, await asyncio.gather(*asking))
        moved = reasons(events, "request_moved")
        assert moved[0].endswith("t goes from w1 to w2: by its size class it belongs on w2")
        assert not cluster.workers[3].service.engine.totals.num_steps
        assert cluster.monitor.counters["overflows"] == 0
