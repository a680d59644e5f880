"""Andes keeps its promises: nobody starves, and who asks for more speed takes nothing from the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.worker.scheduling.registry import SCHEDULERS, make_scheduler
from shared.api_keys import Tier
from shared.types import FinishReason, ReaderTarget
from sim.cluster import SimCluster
from sim.experiment.result import RunResult
from sim.experiment.run import run_workload
from sim.experiment.setup import build_cluster
from sim.requests import SimRequest
from sim.scenarios.files import load_scenario
from sim.scenarios.scenario import Scenario, validated
from sim.workload.workload import Workload
from tests.support.engine_builders import new_sequence, per_token
from tests.support.engine_chaos import draw_reader
from tests.support.engine_harness import EngineHarness, make_harness
from tests.support.napping import Napping
from tests.support.seeds import first_of
from tests.support.sim_clusters import ask_all, cluster_of, hear_events

GREEDY, ORDINARY = 10_000.0, 4.8
"""Tokens per second."""
MOST_STEPS = 2000


def run(scenario: Scenario, system: str, workload: Workload) -> RunResult:
    return run_workload(build_cluster(scenario, system, workload), workload)


@pytest.mark.slow
def test_a_thousand_greedy_readers_take_nothing_from_the_others() -> None:
    """Of 2 000, where memory is short: not one of all tokens comes at another time."""
    scenario = validated(
        {
            "name": "greed",
            "model": "llama-3-8b",
            "gpu": "a100",
            "instances": 1,
            "lengths": "burstgpt-conversation",
            "max_request_tokens": 4096,
            "duration_s": 111.0,
            "max_batch_rows": 1024,
            "arrivals": {"kind": "poisson", "rate_per_s": 18.0},
            "reader": {"kind": "andes"},
        },
        "scenario greed",
    )
    drawn = scenario.workload(1, None)
    is_greedy = np.zeros(len(drawn), dtype=np.bool_)
    is_greedy[np.random.default_rng(1).permutation(len(drawn))[:1000]] = True

    def others(speed: float) -> RunResult:
        return run(scenario, "andes", replace(drawn, qoe_speed=np.where(is_greedy, speed, drawn.qoe_speed)))

    before, after = others(ORDINARY), others(GREEDY)
    assert before.facts.preemptions
    assert (before.records.token_s == after.records.token_s).all()
    assert after.records.qoe[is_greedy].mean() < before.records.qoe[is_greedy].mean()


@pytest.mark.long
def test_the_worst_readers_are_no_worse_off_than_first_come_first_served() -> None:
    scenario = load_scenario("burst-demo").model_copy(update={"instances": 1, "upscale": 0.575, "duration_s": 120.0})
    workload = scenario.workload(1, None)
    worst = {
        system: float(np.percentile(result.records.qoe[result.records.is_complete], 1))
        for system in ("fcfs", "andes")
        for result in [run(scenario, system, workload)]
    }
    assert worst["andes"] >= worst["fcfs"] - 0.005


def crowd(seed: int, settings: dict[str, Any], num_host_blocks: int) -> EngineHarness:
    """One request that needs most of the memory and that nobody reads, and readers who keep coming, until it has ended.

    A prompt of 60 tokens takes 3 s.
    """
    random = np.random.default_rng(seed)
    harness = make_harness(
        make_scheduler("andes", **settings), num_blocks=24, num_host_blocks=num_host_blocks, cost=per_token(0.05)
    )
    harness.add(new_sequence(0, num_prompt=60, max_tokens=30, tier=Tier.FLEX))
    for _ in range(MOST_STEPS):
        while len(harness.live()) < 12:
            qoe, tier = draw_reader(random)
            harness.add(
                new_sequence(
                    len(harness.stories),
                    num_prompt=int(random.integers(1, 30)),
                    max_tokens=int(random.integers(2, 30)),
                    arrival_s=harness.now_s,
                    qoe=qoe or ReaderTarget(),
                    tier=tier,
                )
            )
        harness.step()
        if harness.stories[1000].finish is not FinishReason.NONE:
            break
    return harness


@pytest.mark.slow
@pytest.mark.parametrize("num_host_blocks", [0, 40])
@pytest.mark.parametrize("horizon_s", [0.05, 30.0])
@pytest.mark.parametrize("seed", first_of(range(3), in_ci=1))
def test_nobody_starves_while_others_keep_coming(seed: int, horizon_s: float, num_host_blocks: int) -> None:
    """Nor do those who came meanwhile, once nobody comes any more."""
    harness = crowd(seed, {"horizon_s": horizon_s, "aging_s": 10.0}, num_host_blocks)
    assert harness.stories[1000].finish is FinishReason.LENGTH
    harness.finish()
    assert {story.finish for story in harness.stories.values()} == {FinishReason.LENGTH}


@pytest.mark.virtual_time
async def test_a_worker_that_pauses_everybody_for_a_minute_keeps_them_and_stays_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    napping = Napping()
    monkeypatch.setitem(SCHEDULERS, "napping", lambda: napping)
    async with SimCluster(cluster_of(2, 100, scheduler="napping")) as cluster:
        events = await hear_events(cluster.broker.connect("watch"))
        await ask_all(cluster, [SimRequest(f"r{i}", np.arange(300, 320), 8) for i in range(4)])
        judged = {event.name for event in events} & {"worker_suspect", "worker_dead", "worker_gone"}
        totals = [worker.service.engine.totals for worker in cluster.workers]
    assert napping.num_naps >= 2
    assert not judged
    assert sum(each.num_prompt_tokens for each in totals) == 80, "nobody was sent to another worker"
