"""The system `fcfs-pp`: instances joined to pipelines for good, in whole experiments."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from shared.errors import StartupError
from sim.catalog.instance import find_instance
from sim.cluster import SimCluster
from sim.experiment.plan import plan_instances
from sim.experiment.run import run_system
from sim.experiment.setup import build_cluster
from sim.requests import SimRequest
from sim.scenarios.files import load_scenario
from sim.scenarios.scenario import Scenario
from tests.support.group_room import group_params
from tests.support.sim_clusters import ask_all


def small() -> Scenario:
    return load_scenario("burst-demo").with_overrides(duration_s=20.0, warm_up_s=0.0, kv_tokens=40_000)


def test_two_halves_hold_the_memory_of_two_instances_and_one_copy_more() -> None:
    """Qwen2.5-14B on A800: 206 K tokens alone, in halves 2 * 206 K + 29.5 GB / 192 KiB = 562 K for both together."""
    instance = find_instance("qwen2.5-14b", "a800")
    alone, halves = instance.kv_tokens, instance.stage_kv_tokens(24)
    assert halves == pytest.approx(2 * alone + instance.parameter_bytes / instance.kv_bytes_per_token, rel=1e-3)
    assert instance.stage_kv_tokens(48) == pytest.approx(alone, abs=1)
    assert instance.stage_kv_tokens(25) < halves


@pytest.mark.slow
def test_pipelines_serve_every_request_with_idle_stages_told() -> None:
    result = run_system(small(), "fcfs-pp", seed=0)
    assert not [failure for failure in result.records.failure if failure]
    assert (result.records.num_tokens == result.records.num_output).all()
    bubble_ratio = result.facts.bubble_ratio
    assert bubble_ratio is not None
    assert 0.0 < bubble_ratio < 0.6
    assert result.facts.gpus_peak == 2
    assert run_system(small(), "fcfs", seed=0).facts.bubble_ratio == 0.0


@pytest.mark.virtual_time
async def test_the_text_is_that_of_an_undisturbed_sequence() -> None:
    scenario = small()
    built = build_cluster(scenario, "fcfs-pp", scenario.workload(0))

    rng = np.random.default_rng(0)
    async with SimCluster(built.params) as cluster:
        for i in range(3):
            await ask_all(cluster, [SimRequest(f"r{i}", rng.integers(300, 900, 50 + 40 * i), 20, seed=i)])
        cluster.check_idle()


@pytest.mark.slow
@pytest.mark.virtual_time
async def test_instances_that_join_by_a_plan_are_pairs_for_good_and_say_what_they_say_alone() -> None:
    """As live: whole instances drop half of their layers at the start; `build_cluster` makes the stages at once."""
    rng = np.random.default_rng(1)
    requests = [
        SimRequest(f"r{i}", rng.integers(300, 30_000, int(rng.integers(1, 200))), 40, seed=i) for i in range(40)
    ]
    async with SimCluster(group_params(num_workers=4, system="fcfs-pp")) as cluster:
        await asyncio.sleep(2.0)
        led = [worker for worker in cluster.workers if worker.pipelines]
        assert [len(worker.pipelines) for worker in led] == [1, 1], "two of four lead"
        await ask_all(cluster, requests)
        await asyncio.sleep(60.0)
        assert [len(worker.pipelines) for worker in led] == [1, 1], "and never stop to"
        cluster.check_idle()


def test_instances_that_do_not_come_out_even_are_refused() -> None:
    scenario = small().with_overrides(instances=3)
    with pytest.raises(StartupError, match="joins 2 instances to a pipeline: 3 do not come out even"):
        build_cluster(scenario, "fcfs-pp", scenario.workload(0))


@pytest.mark.parametrize(
    ("least", "most", "expected"), [(1, 16, 2), (5, 16, 6), (6, 16, 6), (11, 16, 12), (17, 16, None)]
)
def test_plans_count_in_steps_of_a_pipeline(least: int, most: int, expected: int | None) -> None:
    tried: list[int] = []

    def probe(count: int) -> float:
        tried.append(count)
        return float(count >= least)

    plan = plan_instances(probe, 1.0, most, step=2)
    assert plan.num_instances == expected
    assert not [count for count in tried if count % 2]
    if expected is not None and expected > 2:
        assert plan.share_below == 0.0
