"""Violations of an SLO by scale, against counting one by one."""

from __future__ import annotations

import numpy as np
import pytest

from sim.experiment.compare import compare
from sim.experiment.report import render
from sim.experiment.slo_scales import SCALES, SHOWN_SCALES, Latencies, missed_by_scale
from sim.experiment.summary import SystemFacts, summarise
from tests.unit.sim.test_experiment_records import record


def drawn(seed: int, scale: float = 1.0) -> Latencies:
    rng = np.random.default_rng(seed)
    ttft_s, tpot_s = rng.exponential(scale, 200), rng.exponential(0.1 * scale, 200)
    ttft_s[rng.random(200) < 0.05] = np.nan
    tpot_s[rng.random(200) < 0.2] = np.nan
    return Latencies(ttft_s, tpot_s, ttft_s)


@pytest.mark.parametrize("num_seeds", [1, 3])
def test_the_shares_are_those_of_counting(num_seeds: int) -> None:
    runs = [
        {"slow": drawn(seed, 3.0), "fast": drawn(seed + 50), "bound": drawn(seed + 90, 0.1)}
        for seed in range(num_seeds)
    ]
    found = missed_by_scale(runs, ["bound"])
    assert found["scales"] == list(SCALES)
    for name in runs[0]:
        for place, scale in enumerate(SCALES):
            ttft, tpot = [], []
            for run in runs:
                unit_s = float(np.nanmedian(run["fast"].ttft_s))
                values = run[name].ttft_s.tolist()
                ttft.append(sum(not value <= scale * unit_s for value in values) / len(values))
                unit_s = float(np.nanmedian(run["fast"].tpot_s))
                values = [value for value in run[name].tpot_s.tolist() if not np.isnan(value)]
                tpot.append(sum(value > scale * unit_s for value in values) / len(values))
            assert found["ttft_s"]["missed"][name][place] == pytest.approx(sum(ttft) / num_seeds)
            assert found["tpot_s"]["missed"][name][place] == pytest.approx(sum(tpot) / num_seeds)


def test_without_any_figure_there_is_none() -> None:
    nothing = Latencies(*(np.full(3, np.nan) for _ in range(3)))
    assert missed_by_scale([{"a": nothing, "b": nothing}]) == {"scales": list(SCALES), "ttft_s": None, "tpot_s": None}


def test_what_came_before_the_warm_up_counts_for_nothing() -> None:
    records = record([[1.0, 1.0], [0.5, 0.1, 0.1]], [0.0, 5.0])
    late = Latencies.of(records, 4.0)
    assert late.ttft_s.tolist() == [0.5]
    assert late.tpot_s == pytest.approx([0.1])


def test_the_table_shows_them_with_their_limits() -> None:
    records = record([[1.0, 1.0], [0.5, 0.1, 0.1]], [0.0, 5.0])
    summary = summarise(records, SystemFacts())
    comparison = compare({}, {0: {"a": summary, "b": summary}})
    comparison["slo_scales"] = missed_by_scale([{"a": Latencies.of(records), "b": Latencies.of(records)}])
    lines = [line for line in render(comparison).splitlines() if "best p50" in line]
    assert len(lines) == 2 * len(SHOWN_SCALES)
    assert " ".join(lines[0].split()) == "TTFT above 2 × best p50 (1.50 s) 0.0 % 0.0 %"
