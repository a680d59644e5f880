"""Copies between device and host on the virtual clock: the modelled link, the step loop, whole simulated workers."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pytest

from services.dispatcher.session.request import RequestFailedError
from services.worker.contract.executor import CopyFailedError, HostCopy, HostMemory
from services.worker.engine.stats import take_stats
from services.worker.modelled.executor import ModelledExecutor
from services.worker.modelled.shadow_kv import ShadowKv, TokenDraw
from services.worker.sequences.config import NewSequence
from shared.cost import CostModel
from sim.cluster import ClusterParams, SimCluster
from sim.requests import SimRequest
from sim.virtual_time import run
from tests.support.engine_builders import new_sequence
from tests.support.engine_live import LiveEngine, live_engine
from tests.support.sim_clusters import cluster_of
from tests.support.traces import outputs_of

pytestmark = pytest.mark.virtual_time

DRAW = TokenDraw.of_vocabulary(1000, (), 3)
COST = CostModel(g0_s=0.1, b0_s=0, g1_s=0, b1_s=0, d_s=0, a_s=0)


def copy(copy_id: int, count: int, *, to_host: bool) -> HostCopy:
    ids = np.arange(count, dtype=np.int32)
    return HostCopy(copy_id, ids, ids, to_host=to_host)


# The link


@pytest.fixture
def executor() -> ModelledExecutor:
    return ModelledExecutor(COST, ShadowKv(8, 4, DRAW, num_host_blocks=8), host=HostMemory(8, 1024, 0.01))


async def test_each_direction_carries_one_block_after_the_other_by_itself(executor: ModelledExecutor) -> None:
    """Blocks of 10 ms. Out: 3, then 2 blocks; back at the same time: 4. So they end at 30, 50 and 40 ms.

    A second later the link is idle, and 2 blocks take 20 ms.
    """
    ended: list[tuple[int, float]] = []

    async def note(begun: HostCopy, copying: asyncio.Future[None]) -> None:
        await copying
        ended.append((begun.copy_id, round(asyncio.get_running_loop().time(), 9)))

    copies = [copy(0, 3, to_host=True), copy(1, 2, to_host=True), copy(2, 4, to_host=False)]
    await asyncio.gather(*(note(begun, executor.copy(begun)) for begun in copies))
    await asyncio.sleep(1.0)
    last = copy(3, 2, to_host=True)
    await note(last, executor.copy(last))
    await executor.close()
    assert ended == [(0, 0.03), (2, 0.04), (1, 0.05), (3, 1.07)]


# The step loop


small_engine = partial(live_engine, num_blocks=9, num_host_blocks=20, prefix_caching=False)
"""Two sequences of 7 blocks each at their ends, 9 blocks: the second is away for a while."""


def add_two(live: LiveEngine) -> list[NewSequence]:
    return [live.add(new_sequence(name, num_prompt=12, max_tokens=16)) for name in range(2)]


async def serve_two(live: LiveEngine) -> None:
    new = add_two(live)
    await live.until_idle()
    for each in new:
        assert len(live.texts[each.stream]) == 16


async def test_the_loop_waits_for_a_copy_when_nothing_else_can_run() -> None:
    """A link of 1 s a block, and still better than to compute anew: the second sequence comes back 4 s or more later.

    Nothing wakes the loop meanwhile but the copy itself.
    """
    async with small_engine(block_copy_s=0.04) as live:
        await serve_two(live)
        assert live.engine.totals.num_swap_ins == 1
        assert asyncio.get_running_loop().time() < 10


async def test_steps_go_on_beside_a_copy() -> None:
    """The copy of 4 or 5 blocks takes 0.5 s, five steps; the first sequence says a token in each of them."""
    async with small_engine(block_copy_s=0.12) as live:
        first, swapping = add_two(live)[0], live.engine.swapping
        assert swapping is not None
        during = []
        while live.engine.table.num_sequences:
            await asyncio.sleep(0.01)
            if bool(swapping._moves) and not swapping.num_arriving:
                during.append(asyncio.get_running_loop().time())
        assert sum(during[0] <= at_s <= during[-1] for at_s in live.heard_s[first.stream]) >= 3


async def test_a_copy_that_fails_is_no_failure_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(begun: HostCopy) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        error = CopyFailedError(begun.copy_id, "the link is down")
        asyncio.get_running_loop().call_later(0.05, future.set_exception, error)
        return future

    async with small_engine() as live:
        monkeypatch.setattr(live.executor, "copy", fail)
        await serve_two(live)
        totals = take_stats(live.engine).totals
        assert totals.num_failed_copies >= 1
        assert totals.num_recomputed_tokens > 0


async def test_the_gate_opens_only_when_no_copy_is_under_way() -> None:
    async with small_engine(block_copy_s=0.12) as live:
        add_two(live)
        num_waited, swapping = 0, live.engine.swapping
        assert swapping is not None
        while live.engine.table.num_sequences:
            num_waited += bool(swapping._moves)
            async with live.gate.exclusive():
                assert not bool(swapping._moves)
                assert not live.engine.flights
            live.loop.wake()
            await asyncio.sleep(0.02)
        assert num_waited >= 1


# Whole simulated workers


def one_worker(system: str, **changes: object) -> ClusterParams:
    """KV for 60 blocks of 16, Llama 3 8B: 131 072 bytes a token."""
    usual: dict[str, Any] = {"max_model_len": 900, "max_batch_tokens": 256, "kv_bytes_per_token": 131_072}
    return cluster_of(1, 60, system=system, **usual | changes)


async def serve(params: ClusterParams, count: int = 24, num_output: int = 80) -> tuple[SimCluster, list[float]]:
    """Ask for more than the memory holds at once; check every text; return the cluster and when each answer ended."""
    random = np.random.default_rng(7)
    async with SimCluster(params) as cluster:
        requests = [
            SimRequest(f"r{i}", random.integers(300, 30_000, int(random.integers(20, 200))), num_output, seed=i)
            for i in range(count)
        ]
        ended_s: list[float] = []

        async def ask(request: SimRequest) -> None:
            answer = await cluster.ask(request)
            assert answer.tokens == cluster.undisturbed(request)
            ended_s.append(asyncio.get_running_loop().time())

        await asyncio.gather(*(ask(request) for request in requests))
        await asyncio.sleep(1.0)
        cluster.check_idle()
        return cluster, ended_s


def test_a_worker_that_swaps_computes_nothing_twice_and_fills_no_memory_for_ever() -> None:
    cluster, _ = run(serve(one_worker("swap")))
    engine = cluster.workers[0].service.engine
    stats = take_stats(engine)
    assert stats.totals.num_swap_outs == stats.totals.num_swap_ins > 0
    assert stats.totals.num_recomputed_tokens == 0
    assert stats.totals.swapped_out_bytes % (16 * 131_072) == 0
    assert stats.num_used_host_blocks == 0
    assert cluster.workers[0].service.executor.capacity.host is not None


@pytest.mark.parametrize(
    "changes",
    [{"host_link_bytes_per_s": 1e6}, {"host_memory_bytes": 16 * 131_072}],
    ids=["a link of 1 MB/s", "a host of one block"],
)
def test_a_worker_that_had_better_not_swap_does_not(changes: dict[str, object]) -> None:
    cluster, _ = run(serve(one_worker("swap", **changes)))
    stats = take_stats(cluster.workers[0].service.engine)
    assert stats.totals.num_swap_outs == 0
    assert stats.totals.num_recomputed_tokens > 0


@pytest.mark.slow
def test_the_oracle_preempts_nobody_and_reports_the_real_memory() -> None:
    """For longer than a worker whose reports are refused would count as alive."""
    cluster, oracle_s = run(serve(one_worker("oracle"), count=10, num_output=450))
    stats = take_stats(cluster.workers[0].service.engine)
    assert min(oracle_s) > 4
    assert stats.totals.num_preemptions == 0
    assert stats.num_blocks == 60 < stats.totals.peak_used_blocks
    assert stats.totals.peak_demanded_blocks >= stats.totals.peak_used_blocks
    assert stats.totals.stalled_s == 0
    _, bounded_s = run(serve(one_worker("fcfs-chunked"), count=10, num_output=450))
    assert max(oracle_s) < max(bounded_s)


@pytest.mark.slow
async def test_the_oracle_refuses_what_the_real_memory_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 blocks of 16 are 960 tokens."""
    monkeypatch.setattr("sim.cluster.QUEUE_LIMIT_S", 5.0)
    for system in ("oracle", "fcfs-chunked"):
        async with SimCluster(one_worker(system, max_model_len=4096)) as cluster:
            with pytest.raises(RequestFailedError, match="queue_full"):
                await cluster.ask(SimRequest("r", np.arange(300, 1300), 10))


@pytest.mark.slow
@pytest.mark.parametrize("system", ["swap", "round-robin", "oracle"])
def test_one_seed_gives_one_run_in_any_process(system: str) -> None:
    program = (
        "from tests.sim import test_host_copies as t; "
        f"cluster, ended_s = t.run(t.serve(t.one_worker('{system}'))); "
        "print(ended_s, t.take_stats(cluster.workers[0].service.engine))"
    )
    assert len(outputs_of(program)) == 1
