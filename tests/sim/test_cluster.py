"""The whole cluster on the virtual clock: monitor, two workers, dispatcher; the live services' code."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import numpy as np
import pytest

from services.worker.engine.stats import take_stats
from shared.transport.bus import Message
from shared.types import FinishReason, ReaderTarget
from sim.cluster import ClusterParams, SimCluster
from sim.requests import SimAnswer, SimRequest
from sim.virtual_time import run
from tests.support.sim_clusters import ask_all, check_answers, cluster_of
from tests.support.traces import outputs_of

pytestmark = pytest.mark.virtual_time

READER = ReaderTarget(ttft_s=1.0, speed_tokens_per_s=4.8)


def two_workers(system: str = "fcfs-chunked", *, num_blocks: int = 120, **params: Any) -> ClusterParams:
    return cluster_of(2, num_blocks, system=system, max_model_len=1024, max_batch_tokens=256, **params)


def workload(seed: int, count: int) -> list[tuple[float, SimRequest, float | None]]:
    """Return (pause before it, request, seconds after which its client leaves or None)."""
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(count):
        prompt = rng.integers(300, 30_000, int(rng.integers(1, 300)))
        request = SimRequest(f"r{i}", prompt, int(rng.integers(1, 120)), seed=i, qoe=READER)
        leaves_s = float(rng.exponential(1.0)) if rng.random() < 0.2 else None
        requests.append((float(rng.exponential(0.05)), request, leaves_s))
    return requests


async def serve(params: ClusterParams, seed: int, count: int = 120) -> tuple[str, list[SimAnswer], int]:
    """Run a workload; returns a digest of every message on the bus, the whole answers, and the preemptions."""
    digest = hashlib.sha256()
    async with SimCluster(params) as cluster:

        def on_message(message: Message) -> None:
            if ".report" not in message.subject:  # reports carry the process id
                digest.update(f"{asyncio.get_running_loop().time():.9f} {message.subject} ".encode() + message.data)

        await cluster.broker.connect("spy").subscribe("sluice.>", on_message)

        async def one(request: SimRequest, leaves_s: float | None) -> SimAnswer | None:
            try:
                async with asyncio.timeout(leaves_s):
                    return await cluster.ask(request)
            except TimeoutError:
                return None

        async with asyncio.TaskGroup() as group:
            tasks = []
            for pause_s, request, leaves_s in workload(seed, count):
                await asyncio.sleep(pause_s)
                tasks.append(group.create_task(one(request, leaves_s)))
        answers = [answer for task in tasks if (answer := task.result()) is not None]
        await asyncio.sleep(1.0)
        cluster.check_idle()
        check_answers(cluster, answers)
        assert {answer.finish for answer in answers} == {FinishReason.LENGTH}
        preemptions = sum(worker.service.engine.totals.num_preemptions for worker in cluster.workers)
    return digest.hexdigest(), answers, preemptions


@pytest.mark.slow
@pytest.mark.parametrize("system", ["fcfs", "fcfs-chunked", "round-robin", "swap"])
def test_every_answer_is_whole_under_pressure_and_nothing_is_left(system: str) -> None:
    _, answers, preemptions = run(serve(two_workers(system), seed=1))
    assert preemptions > 0
    assert 80 < len(answers) < 120
    assert all(answer.qoe is not None and 0 <= answer.qoe <= 1 for answer in answers)


async def test_every_choice_is_what_its_seed_gives_wherever_it_runs() -> None:
    """Workers that take eight sequences each: siblings of one request often run at both, some as forks, some alone."""
    rng = np.random.default_rng(3)
    async with SimCluster(two_workers(num_blocks=66, max_sequences=8)) as cluster:
        asks = []
        async with asyncio.TaskGroup() as group:
            for _, request, _ in workload(3, 25):
                await asyncio.sleep(float(rng.exponential(0.1)))
                asks.append(group.create_task(cluster.ask_choices(request, int(rng.integers(1, 6)))))
        answers = [answer for ask in asks for answer in ask.result()]
        check_answers(cluster, answers)
        await asyncio.sleep(1.0)
        cluster.check_idle()
        totals = [worker.service.engine.totals for worker in cluster.workers]
    assert len(answers) > 60
    assert min(each.num_finished for each in totals) > 20
    assert sum(each.num_preemptions for each in totals) > 0


async def test_a_client_that_leaves_takes_all_its_choices_along() -> None:
    async with SimCluster(two_workers()) as cluster:
        request = SimRequest("r", np.arange(300, 400), 900)
        task = asyncio.create_task(cluster.ask_choices(request, 4))
        await asyncio.sleep(0.5)
        assert sum(take_stats(worker.service.engine).num_running for worker in cluster.workers) == 4
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.5)
        cluster.check_idle()


async def test_both_workers_serve() -> None:
    async with SimCluster(two_workers()) as cluster:
        await ask_all(cluster, [request for _, request, _ in workload(2, 20)])
        finished = [worker.service.engine.totals.num_finished for worker in cluster.workers]
    assert sum(finished) == 20
    assert min(finished) >= 8


async def test_a_worker_whose_answers_have_just_ended_gets_the_new_ones() -> None:
    """Both hold 4 answers of some 330 tokens, 84 blocks; those of w0 end, and eight new requests ask for 2 each."""
    async with SimCluster(two_workers()) as cluster:
        prompts = np.random.default_rng(4).integers(300, 30_000, (16, 16))
        first = [SimRequest(f"r{i}", prompts[i], 320 + 160 * (i % 2), seed=i) for i in range(8)]
        asks = [asyncio.ensure_future(cluster.ask(request)) for request in first]
        await asyncio.gather(*asks[::2])
        assert [take_stats(worker.service.engine).num_running for worker in cluster.workers] == [0, 4]
        late = [SimRequest(f"r{i}", prompts[i], 16, seed=i) for i in range(8, 16)]
        await asyncio.gather(*(cluster.ask(request) for request in late), *asks)
        assert [worker.service.engine.totals.num_finished for worker in cluster.workers] == [12, 4]


@pytest.mark.slow
def test_one_seed_gives_one_trace_in_any_process() -> None:
    program = "from tests.sim import test_cluster as t; print(t.run(t.serve(t.two_workers(), 5))[0])"
    (digest,) = outputs_of(program)
    assert len(digest) == 64
    assert run(serve(two_workers(), 6))[0] != digest
