"""The simulated `fcfs` beside a queueing replay of vLLM's published rules, which shares no code with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import fcfs_reference as reference
from shared.cost import load_profile
from sim.cluster import ClusterParams
from sim.experiment.run import run_workload
from sim.experiment.setup import ExperimentCluster
from sim.experiment.summary import Summary, summarise
from sim.worker import SimWorkerParams
from tests.support.workloads import plain_workload

TABLE = json.loads((Path(__file__).parents[1] / "data" / "fcfs_reference.json").read_text())
ALLOWED_RATIO = 0.10
FIGURES = {
    "ttft_mean_s": ("ttft_s", "mean"),
    "ttft_p50_s": ("ttft_s", "p50"),
    "ttft_p99_s": ("ttft_s", "p99"),
    "tpot_mean_s": ("tpot_s", "mean"),
    "tpot_p99_s": ("tpot_s", "p99"),
    "throughput_tokens_per_s": ("throughput_tokens_per_s",),
}


def simulated(name: str) -> Summary:
    worker = SimWorkerParams(
        "w0",
        load_profile("qwen2.5-14b-tp1-a800").cost,
        reference.NUM_BLOCKS,
        block_size=reference.BLOCK_SIZE,
        system="fcfs",
        prefix_caching=False,
        max_batch_rows=reference.MAX_SEQUENCES,
        max_batch_tokens=reference.MAX_TOKENS,
    )
    load = reference.draw_load(reference.LOADS[name])
    workload = plain_workload(load.arrival_s, load.num_prompt, load.num_output, has_reader=False)
    result = run_workload(ExperimentCluster(ClusterParams((worker,), system="fcfs")), workload)
    return summarise(result.records, result.facts)


@pytest.mark.parametrize("name", reference.LOADS)
def test_the_table_is_what_the_replay_says(name: str) -> None:
    figures = reference.figures(reference.draw_load(reference.LOADS[name]))
    assert TABLE["loads"][name] == pytest.approx(figures, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", reference.LOADS)
def test_fcfs_in_the_simulator_is_within_a_tenth_of_the_replay(name: str) -> None:
    summary, expected = simulated(name), TABLE["loads"][name]
    assert summary["completed"] == expected["requests"]
    for figure, path in FIGURES.items():
        value: float = summary[path[0]] if len(path) == 1 else summary[path[0]][path[1]]
        assert value == pytest.approx(expected[figure], rel=ALLOWED_RATIO), figure


def test_the_overload_of_the_table_is_one() -> None:
    """Memory runs out, requests wait for it, and some are preempted: the rules that matter are all used."""
    light, overload = TABLE["loads"]["light"], TABLE["loads"]["overload"]
    assert overload["preemptions"] > 10
    assert overload["ttft_p99_s"] > 10 * light["ttft_p99_s"]
