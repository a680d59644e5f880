"""Where a load begins to hurt is found between the factors that were tried, and never claimed below them."""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from benchmarks.standard_loads import Crossing, Sweep, find_crossing, parse_window
from sim.experiment.run import run_system
from sim.experiment.summary import summarise
from sim.scenarios.scenario import validated


@pytest.mark.parametrize("seed", range(20))
def test_the_crossing_is_the_first_multiple_of_the_step_that_reaches_the_target(seed: int) -> None:
    """The oracle tries every multiple of the step."""
    rng = np.random.default_rng(seed)
    steepness, middle = rng.uniform(0.05, 2.0), rng.uniform(65, 105)
    step = float(rng.choice([0.5, 1.0, 2.0]))
    tried: list[float] = []

    def ratio(factor: float) -> float:
        tried.append(factor)
        return 10 / (1 + math.exp(-steepness * (factor - middle)))

    factors = [60.0, 70.0, 80.0, 90.0, 100.0, 110.0]
    target = float(rng.uniform(1, 9))
    found = find_crossing(ratio, factors, target, step)
    every = np.arange(60, 110 + step, step)
    reached = [factor for factor in every.tolist() if ratio(factor) >= target and factor <= 110]
    if not reached:
        assert found is None
    else:
        assert found == Crossing(reached[0], is_bounded=reached[0] > 60)


def test_a_lowest_factor_above_the_target_is_no_crossing_found() -> None:
    assert find_crossing(lambda factor: factor, [80.0, 90.0], 5.0, 1.0) == Crossing(80.0, is_bounded=False)


def test_a_ratio_that_falls_again_is_found_on_its_way_up() -> None:
    """As when arithmetic is short too, so that the oracle waits as well: 3 only between 7 and 13."""
    found = find_crossing(lambda factor: 6 - abs(10 - factor), [2.0, 5.0, 10.0, 18.0], 3.0, 1.0)
    assert found == Crossing(7.0, is_bounded=True)
    assert find_crossing(lambda factor: 6 - abs(10 - factor), [2.0, 5.0, 18.0], 3.0, 1.0) is None


SHORT_OF_MEMORY = {
    "name": "short-of-memory",
    "model": "qwen2.5-14b",
    "gpu": "a800",
    "instances": 1,
    "lengths": "400x60",
    "duration_s": 6.0,
    "kv_tokens": 2_000,
    "arrivals": {"kind": "poisson", "rate_per_s": 2.0},
}


@pytest.mark.slow
def test_a_point_is_the_median_of_its_seeds_and_is_run_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Four sequences fit, and as many come every second, for two seconds each; single runs say the same."""
    scenario = validated(SHORT_OF_MEMORY, "short")
    seeds = (0, 1, 2)
    sweep = Sweep(scenario, Path(), seeds, num_processes=1)
    point = sweep.point(2.0)
    assert sweep.point(2.0) is point
    assert capsys.readouterr().out.count("upscale 2:") == 1
    for baseline in ("fcfs", "fcfs-chunked"):
        assert point.ratio(baseline) == statistics.median(run.ratio(baseline) for run in point.runs)
        assert point.ratio(baseline) > 2
    assert [run.seed for run in point.runs] == list(seeds)
    loaded = scenario.with_overrides(upscale=2.0)
    for run in point.runs:
        for system in ("fcfs", "fcfs-chunked", "oracle"):
            result = run_system(loaded, system, run.seed)
            assert run.ttft_p99_s[system] == summarise(result.records, result.facts)["ttft_s"]["p99"]
        assert run.requests_per_s == len(loaded.workload(run.seed)) / 6.0
        assert 0 < run.mean_held < 1 < run.peak_demand
        assert run.mean_held < run.mean_demand


@pytest.mark.parametrize(("text", "window_s"), [("0:640", (0, 640)), ("1084:1724", (1084, 1724)), ("1.5:2", (1.5, 2))])
def test_a_window_is_start_and_end(text: str, window_s: tuple[float, float]) -> None:
    assert parse_window(text) == window_s


@pytest.mark.parametrize("text", ["", "640", "640:", ":640", "640:0", "5:5", "-1:5", "a:b", "nan:5", "0:nan", "0:1:2"])
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no window"):
        parse_window(text)
