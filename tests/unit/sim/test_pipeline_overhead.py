"""The figures that say what a pipeline costs are those of equal load per instance and of memory for everybody."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.pipeline_overhead import Loads, main, measure, one_group
from sim.experiment.run import run_workload
from sim.scenarios.files import load_scenario
from sim.scenarios.scenario import validated
from tests.support.workloads import plain_workload

SCENARIO = load_scenario("standard-15").with_overrides(lengths="400x60")
LOADS = Loads(moderate_per_s=1.0, saturating_per_s=3.0, seconds=20.0, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2])
def test_tokens_are_counted_per_instance_in_the_second_half(num_stages: int) -> None:
    """400 and 60 tokens, three requests per second and instance, which is less than can be computed: 1 380 tokens/s."""
    load = {"arrivals": {"kind": "poisson", "rate_per_s": 3.0 * num_stages}, "duration_s": 20.0, "reader": None}
    workload = validated({**SCENARIO.model_dump(), **load, "upscale": 1.0}, "asked").workload(0)
    figures = measure(SCENARIO, "kunserve", num_stages, LOADS)
    asked = int((workload.arrival_s >= 10).sum()) * 460 / 10 / num_stages
    assert figures.tokens_per_s == pytest.approx(asked, rel=0.2)
    assert (figures.moderate_idle_ratio > 0) == (num_stages > 1)
    assert all(ratio == 1 for ratio in figures.over(figures).values())
    double = replace(figures, tpot_p99_s=2 * figures.tpot_p99_s)
    assert double.over(figures)["tpot_p99_s"] == 2


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_request_alone_takes_as_long_as_in_one_instance_and_the_ways_between_the_stages(num_stages: int) -> None:
    """All stages together compute a whole prompt as one instance does; 1 000 tokens have 10 KiB each to carry.

    The last stage's token takes a message to the leader.
    """
    scenario = validated({**SCENARIO.model_dump(), "instances": 1}, "alone")
    workload = plain_workload([0.5], 1000, 2)
    whole, group = (
        run_workload(one_group(scenario, "fcfs", count, workload), workload).records for count in (1, num_stages)
    )
    facts = scenario.instance()
    way_s = 50e-6 + 1000 * facts.activation_bytes_per_token / facts.network_bytes_per_s
    extra_s = float(group.ttft_s[0] - whole.ttft_s[0])
    assert extra_s == pytest.approx((num_stages - 1) * way_s + 50e-6, rel=1e-6)


@pytest.mark.slow
def test_memory_holds_every_request_at_once() -> None:
    scenario = validated({**SCENARIO.model_dump(), "instances": 1, "max_batch_rows": 256}, "at once")
    workload = plain_workload(np.zeros(200).tolist(), 37, 100)
    for num_stages in (1, 2):
        facts = run_workload(one_group(scenario, "fcfs-chunked", num_stages, workload), workload).facts
        assert facts.preemptions == 0
        assert facts.demand_over_capacity_peak is not None
        assert 0.5 < facts.demand_over_capacity_peak <= 1


@pytest.mark.slow
def test_the_table_and_the_file_say_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    flags = {"--systems": "fcfs", "--moderate": "1", "--saturating": "3", "--seconds": "5", "--json": str(path)}
    main(["--stages", "1", "2", *(word for pair in flags.items() for word in pair)])
    kept = json.loads(path.read_text())
    assert kept["loads"] == {"moderate_per_s": 1.0, "saturating_per_s": 3.0, "seconds": 5.0, "seed": 0}
    first, second = kept["figures"]
    assert (first["system"], first["num_stages"], second["num_stages"]) == ("fcfs", 1, 2)
    assert second["ratios"]["tpot_p50_s"] == second["tpot_p50_s"] / first["tpot_p50_s"] > 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| fcfs |")]
    assert f"| {first['tpot_p50_s'] * 1000:.1f} |" in rows[0]
    assert f"| {second['tpot_p50_s'] * 1000:.1f} ({second['ratios']['tpot_p50_s']:.2f}) |" in rows[1]
