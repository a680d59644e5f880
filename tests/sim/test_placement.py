"""Placement in simulated clusters: every system is placed by the same rule, from the same facts."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from shared.messages.report import WorkerReport
from shared.systems import SYSTEMS
from sim.cluster import SimCluster
from sim.experiment.run import run_system
from sim.experiment.setup import build_cluster
from sim.requests import SimRequest
from sim.scenarios.scenario import validated
from sim.worker import SimWorker
from tests.support.sim_clusters import ask_all
from tests.support.workloads import plain_workload

AMPLE: dict[str, Any] = {
    "name": "ample",
    "model": "qwen2.5-14b",
    "gpu": "a800",
    "instances": 4,
    "lengths": "burstgpt-conversation",
    "duration_s": 20.0,
    "arrivals": {"kind": "poisson", "rate_per_s": 20.0},
}
"""Memory for more than three times what there is."""


def report_of(worker: SimWorker) -> WorkerReport:
    return worker.reporter.make_report(asyncio.get_running_loop().time())


@pytest.mark.virtual_time
@pytest.mark.parametrize("system", sorted(SYSTEMS))
async def test_every_worker_says_what_a_token_costs(system: str) -> None:
    """A static pipeline computes two steps at a time, so that a token of it takes half as long."""
    scenario = validated(AMPLE, "ample")
    workload = plain_workload([0.0], 100, 2)

    async with SimCluster(build_cluster(scenario, system, workload).params) as cluster:
        reports = [report_of(worker) for worker in cluster.workers]
    num_stages = SYSTEMS[system].num_stages
    for report in reports:
        token_bytes = report.kv_bytes / (report.num_blocks * report.block_size)
        assert token_bytes == pytest.approx(scenario.instance().kv_bytes_per_token, rel=1e-3)
        for num_sequences, error in ((0, 1e-9), (8, 0.02), (256, 1e-9)):
            cost_s = scenario.instance().cost.step_s(num_sequences, 1000, 0)
            assert report.decode_cost.of(num_sequences, 1000) == pytest.approx(cost_s, rel=error)
    assert [report.token_s for report in reports] == [scenario.instance().cost.b1_s / num_stages] * (4 // num_stages)


@pytest.mark.slow
def test_requests_change_their_instance_in_experiments_of_systems_that_say_so() -> None:
    """Four small instances, of which now and then one is fuller than another, or short."""
    few = {"model": "llama-2-13b", "gpu": "a100-40", "arrivals": {"kind": "poisson", "rate_per_s": 6.0}}
    scenario = validated({**AMPLE, **few}, "few")
    facts = {name: run_system(scenario, name, 0).facts for name in ("fcfs-chunked", "migrate", "load-balance")}
    moved = [found.migrations or 0 for found in facts.values()]
    assert 0 == moved[0] < moved[1] < moved[2]


@pytest.mark.slow
def test_packing_needs_about_as_few_instances_as_the_fits_and_nobody_gives_way() -> None:
    """Ten small instances, of which a few are enough, and answers that triple what their prompts hold."""
    few = {"model": "llama-2-13b", "gpu": "a100-40", "instances": 10, "lengths": "1000x2000"}
    scenario = validated({**AMPLE, **few, "arrivals": {"kind": "poisson", "rate_per_s": 0.8}}, "few")
    facts = {name: run_system(scenario, name, 0).facts for name in ("fcfs-chunked", "worst-fit", "best-fit", "pack")}
    busy_s = {name: found.busy_gpu_seconds or 0.0 for name, found in facts.items()}
    gave_way = {name: found.preemptions or 0 for name, found in facts.items()}
    assert facts["fcfs-chunked"].busy_gpus_peak == 10
    assert busy_s["pack"] < 1.05 * min(busy_s["worst-fit"], busy_s["best-fit"]) < 0.8 * busy_s["fcfs-chunked"], busy_s
    assert gave_way["pack"] == 0 < min(gave_way["worst-fit"], gave_way["best-fit"]), gave_way
    assert not facts["pack"].overflows
    assert facts["best-fit"].overflows
    assert facts["pack"].migrations


@pytest.mark.slow
def test_systems_that_schedule_alike_are_as_fast_where_memory_suffices() -> None:
    """Equal schedulers, equal requests: only where they were placed could make a difference."""
    scenario = validated({**AMPLE, "duration_s": 8.0}, "ample")
    results = {name: run_system(scenario, name, 0) for name in ("fcfs-chunked", "swap", "kunserve", "oracle")}
    plain = results["fcfs-chunked"]
    assert plain.facts.demand_over_capacity_peak is not None
    assert plain.facts.demand_over_capacity_peak < 0.9
    for name, result in results.items():
        assert np.array_equal(result.records.ttft_s, plain.records.ttft_s), name
        assert np.array_equal(result.records.token_s, plain.records.token_s), name


@pytest.mark.virtual_time
async def test_what_is_left_of_prompts_is_reported_and_memory_that_is_overrun_is_no_part_of_it() -> None:
    """Two prompts of 600 tokens, 38 blocks, in memory of 1 000. The first step takes 32 of them: 6 and 38 are left.

    After two seconds both decode: nothing is left to compute, however much they hold.
    """
    scenario = validated({**AMPLE, "instances": 1, "kv_tokens": 1_000, "max_batch_tokens": 512}, "overrun")
    built = build_cluster(scenario, "oracle", plain_workload([0.0], 600, 100))

    async with SimCluster(built.params) as cluster:
        requests = [SimRequest(f"r{i}", np.arange(300, 900) + i, 100) for i in range(2)]
        asked = asyncio.ensure_future(ask_all(cluster, requests))
        await asyncio.sleep(0.01)
        first = report_of(cluster.workers[0])
        await asyncio.sleep(1.99)
        then = report_of(cluster.workers[0])
        await asked
    assert (first.num_running, first.num_waiting, first.num_uncomputed_blocks) == (1, 1, 44)
    assert then.num_running == 2
    assert then.num_used_blocks + then.num_demanded_blocks > then.num_blocks
    assert then.num_uncomputed_blocks == 0
