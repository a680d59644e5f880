"""Comparisons: how much of a gap is closed, several seeds, the table."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.experiment.compare import against_alone, compare, gaps_closed, to_json
from sim.experiment.plan import plan_instances
from sim.experiment.report import render
from sim.experiment.series import (
    SHARES,
    best_median,
    cdf,
    kept,
    slo_violations,
    windowed_max,
    windowed_mean,
    windowed_tokens_per_s,
)
from sim.experiment.slo_scales import Latencies
from sim.experiment.summary import Slo, Summary, SystemFacts, summarise
from tests.unit.sim.test_experiment_records import beside, record

FIXED_KEYS = [
    "requests", "completed", "refused", "ttft_s", "tpot_s", "normalised_latency_s", "preemptions_per_request", "qoe",
    "slo", "throughput_tokens_per_s", "tokens_until_s", "effective_tokens_per_s", "tds_tokens_per_s", "kv_peak_ratio",
    "demand_over_capacity_peak", "preemptions", "stall_s", "stall_at_drops_s", "stall_at_restores_s", "first_drop_s",
    "pauses", "opened_blocks", "met_blocks", "queue_peak",
    "recomputed_tokens", "given_up_tokens", "brought_back_tokens", "swapped_out_bytes",
    "bubble_ratio", "drops", "restores", "grouped_ratio", "overflows", "migrations", "moves_as_tokens", "gpus_peak",
    "gpu_seconds", "busy_gpus_peak", "busy_gpu_seconds", "paid_60_s_gpu_seconds", "paid_300_s_gpu_seconds",
    "busy_kv_ratio", "moved_bytes", "cut_off_s",
    "cut_off", "drained_s", "drained", "best_effort",
]  # fmt: skip


def figures(ttft_p99: float | None, qoe_mean: float | None, share: float | None = None) -> Summary:
    return {"ttft_s": {"p99": ttft_p99}, "qoe": {"mean": qoe_mean, "share_ge_0_95": share}}


def closed(baseline: Summary, system: Summary, bound: Summary) -> dict[str, float | None]:
    """Return what `system` closed of the gap to one system that bounds all."""
    return gaps_closed({"base": baseline, "mine": system, "oracle": bound, "andes-unlimited": bound})["mine"]


@given(st.floats(1.5, 1e3), st.floats(0, 1), st.floats(0.02, 0.9), st.floats(0, 1))
def test_the_gap_closed_is_the_share_of_the_way_to_the_bound(
    factor: float, way: float, qoe_gap: float, qoe_way: float
) -> None:
    """With the bound at 1 s and QoE q + gap: a system a share of the way there closed just that share."""
    baseline, bound = figures(factor + 1e-9, 0.1, 0.05), figures(1.0, 0.1 + qoe_gap + 1e-9, 0.05 + qoe_gap + 1e-9)
    mine = figures(factor + way * (1 - factor), 0.1 + qoe_way * qoe_gap, 0.05 + qoe_way**2 * qoe_gap)
    gap = closed(baseline, mine, bound)
    assert gap["ttft_p99"] == pytest.approx(way, abs=1e-6)
    assert gap["qoe_mean"] == pytest.approx(qoe_way, abs=1e-6)
    assert gap["qoe_share_ge_0_95"] == pytest.approx(qoe_way**2, abs=1e-6)


def test_the_oracle_bounds_the_first_token_and_andes_without_bounds_of_memory_the_experience() -> None:
    systems = {
        "base": figures(9.0, 0.5, 0.2),
        "oracle": figures(1.0, 0.7, 0.3),
        "andes-unlimited": figures(5.0, 1.0, 1.0),
    }
    first, qoe, share = "ttft_p99", "qoe_mean", "qoe_share_ge_0_95"
    gaps = gaps_closed(systems)
    assert gaps["base"] == {first: 0.0, qoe: 0.0, share: 0.0}
    assert gaps["oracle"] == {first: 1.0, qoe: pytest.approx(0.4), share: pytest.approx(0.125)}
    assert gaps["andes-unlimited"] == {first: 0.5, qoe: 1.0, share: 1.0}
    del systems["andes-unlimited"]
    assert gaps_closed(systems)["oracle"] == {first: 1.0, qoe: None, share: None}


def test_a_system_that_is_worse_than_the_baseline_closed_less_than_nothing() -> None:
    gap = closed(figures(3.0, 0.5, 0.5), figures(5.0, 0.4, 0.25), figures(1.0, 1.0, 1.0))
    assert gap == {"ttft_p99": -1.0, "qoe_mean": pytest.approx(-0.2), "qoe_share_ge_0_95": -0.5}


@pytest.mark.parametrize(
    ("baseline_s", "bound_s", "is_null"), [(1.49, 1.0, True), (1.5, 1.0, False), (1.0, 1.0, True), (0.0, 0.0, True)]
)
def test_there_is_no_ratio_of_a_ttft_gap_below_a_factor_of_one_and_a_half(
    baseline_s: float, bound_s: float, *, is_null: bool
) -> None:
    gap = closed(figures(baseline_s, 0.0), figures(1.2, 0.0), figures(bound_s, 1.0))
    assert (gap["ttft_p99"] is None) is is_null
    assert gap["qoe_mean"] == 0.0


@pytest.mark.parametrize(("baseline", "bound", "is_null"), [(0.971, 0.99, True), (0.97, 0.99, False), (1.0, 0.9, True)])
def test_there_is_no_ratio_of_a_qoe_gap_below_two_hundredths(baseline: float, bound: float, *, is_null: bool) -> None:
    gap = closed(figures(9.0, baseline, baseline), figures(1.0, 0.98, 0.98), figures(1.0, bound, bound))
    assert (gap["qoe_mean"] is None) is (gap["qoe_share_ge_0_95"] is None) is is_null
    assert gap["ttft_p99"] == 1.0


def test_without_a_bound_or_without_figures_there_is_no_gap() -> None:
    nothing = {"ttft_p99": None, "qoe_mean": None, "qoe_share_ge_0_95": None}
    assert gaps_closed({"base": figures(9.0, 0.1), "mine": figures(1.0, 0.9)}) == {"base": nothing, "mine": nothing}
    assert closed(figures(None, None), figures(1.0, 0.9), figures(1.0, 1.0)) == nothing
    assert closed(figures(9.0, 0.1), figures(None, None), figures(1.0, 1.0)) == nothing


def run_of(delay_s: float, preemptions: int) -> Summary:
    return summarise(record([[delay_s, 0.2], [delay_s, 0.2]]), SystemFacts(preemptions=preemptions, gpus_peak=8))


@pytest.mark.parametrize(("drop_times_s", "first_s"), [((7.5, 3.25, 9.0), 3.25), ((), None), (None, None)])
def test_a_summary_says_when_the_first_drop_began(
    drop_times_s: tuple[float, ...] | None, first_s: float | None
) -> None:
    found = summarise(record([[1.0, 0.2]]), SystemFacts(drop_times_s=drop_times_s))
    assert found["first_drop_s"] == first_s


def test_a_comparison_has_the_keys_that_its_readers_know() -> None:
    runs = {3: {"fcfs": run_of(4.0, 9), "oracle": run_of(1.0, 0)}}
    comparison = compare({"name": "x"}, runs)
    assert list(comparison) == ["scenario", "seeds", "systems", "gap_closed"]
    for summary in comparison["systems"].values():
        assert list(summary) == FIXED_KEYS
    assert comparison["systems"] == runs[3]
    assert json.loads(to_json(comparison)) == comparison


def test_several_seeds_give_means_with_their_range() -> None:
    runs = {1: {"fcfs": run_of(4.0, 10)}, 2: {"fcfs": run_of(6.0, 20)}}
    comparison = compare({}, runs)
    assert comparison["systems"]["fcfs"]["ttft_s"]["p50"] == 5.0
    assert comparison["systems"]["fcfs"]["preemptions"] == 15.0
    assert comparison["systems"]["fcfs"]["gpus_peak"] == 8
    assert comparison["range"]["fcfs"]["ttft_s"]["p50"] == [4.0, 6.0]
    assert comparison["range"]["fcfs"]["kv_peak_ratio"] is None
    assert [each["systems"]["fcfs"] for each in comparison["per_seed"].values()] == [runs[1]["fcfs"], runs[2]["fcfs"]]


def test_what_best_effort_costs_is_told_against_those_who_wait_alone() -> None:
    """Of two answers one is displayed after 12 and not 10 s, one after 9; the third fails."""
    whole = {"slo": {"both_share": 0.95}, "ttft_s": {"p99": 0.5}}
    mixed = {"slo": {"both_share": 0.9}, "ttft_s": {"p99": 0.75}}
    nan = np.full(3, np.nan)
    runs = [
        {
            "alone": Latencies(nan, nan, np.array([10.0, 9.0, 9.0])),
            "fcfs": Latencies(nan, nan, np.array([12.0, 9.0, np.nan])),
        }
    ]
    found = against_alone({"alone": whole, "fcfs": mixed}, runs, "alone")
    assert found == {
        "system": "alone",
        "systems": {
            "fcfs": {
                "in_time_points": pytest.approx(-5.0),
                "shown_later_ratio": pytest.approx(0.1),
                "ttft_p99_s": pytest.approx(0.25),
            }
        },
    }
    nobody = {"slo": None, "ttft_s": {"p99": None}}
    unread = {name: Latencies(nan, nan, nan) for name in ("alone", "fcfs")}
    nothing = against_alone({"alone": whole, "fcfs": nobody}, [unread], "alone")["systems"]["fcfs"]
    assert nothing == {"in_time_points": None, "shown_later_ratio": None, "ttft_p99_s": None}


def test_the_table_tells_best_effort_where_there_is_some() -> None:
    mixed = summarise(beside(), SystemFacts(), slo=Slo(1.5, 9.0), cut_off_s=5.0)
    alone = summarise(beside().real_time, SystemFacts(), slo=Slo(1.5, 9.0), cut_off_s=5.0)
    comparison = compare({}, {0: {"fcfs": mixed, "alone": alone}})
    latencies = {"fcfs": Latencies.of(beside()), "alone": Latencies.of(beside().real_time)}
    comparison["against_alone"] = against_alone(comparison["systems"], [latencies], "alone")
    rows = {line[:44].strip(): " ".join(line[44:].split()) for line in render(comparison).splitlines()}
    assert rows["best effort: tokens/s when drained"] == "0.4 -"
    assert rows["both: tokens/s at the cut-off"] == "1 0.6 ×0.60"
    assert rows["waited for then"] == "2 2"
    assert rows["drained at"] == "8.00 s 8.00 s"
    assert rows["in time, against alone"] == "+0.0 points -"
    assert rows["displayed later than alone"] == "+0.0 % -"
    assert not any("best effort" in line for line in render(compare({}, {0: {"alone": alone}})).splitlines())


def test_the_gap_of_several_seeds_is_that_of_their_means() -> None:
    """Baseline 4 and 8 s, oracle 1 s: of a mean of 6 s, a system at 1 and 6 s closed (6 - 3.5) / (6 - 1)."""
    runs = {
        1: {"fcfs": run_of(4.0, 0), "mine": run_of(1.0, 0), "oracle": run_of(1.0, 0)},
        2: {"fcfs": run_of(8.0, 0), "mine": run_of(6.0, 0), "oracle": run_of(1.0, 0)},
    }
    assert compare({}, runs)["gap_closed"]["mine"]["ttft_p99"] == pytest.approx(0.5)


def test_the_table_shows_factors_beside_the_figures() -> None:
    text = render(compare({}, {1: {"fcfs": run_of(4.0, 9), "oracle": run_of(1.0, 0)}}))
    rows = {line[:24].strip(): line.split() for line in text.splitlines()}
    assert rows["TTFT p99"][-5:] == ["4.00", "s", "1.00", "s", "×0.25"]
    assert rows["gap closed: TTFT p99"][-4:] == ["0.0", "%", "100.0", "%"]
    assert "gap closed: QoE" not in text
    assert "migrations" not in text
    assert "in time: TTFT" not in text


def test_a_single_system_has_no_factors() -> None:
    text = render(compare({}, {1: {"vllm": run_of(4.0, 9)}}))
    assert "×" not in text
    assert "gap" not in text


@given(st.integers(1, 200), st.integers(1, 130))
def test_planning_finds_the_least_number_that_suffices(needed: int, limit: int) -> None:
    tried: list[int] = []

    def probe(count: int) -> float:
        tried.append(count)
        return 1.0 if count >= needed else count / (needed + 1)

    plan = plan_instances(probe, 0.999, limit)
    assert len(tried) == len(set(tried)) <= 2 * limit.bit_length() + 1
    assert max(tried) <= limit
    if needed > limit:
        assert plan.num_instances is None
        assert limit in plan.shares
        return
    assert plan.num_instances == needed
    assert plan.share == 1.0
    assert plan.share_below == (None if needed == 1 else (needed - 1) / (needed + 1))


def test_curves_over_time_count_every_request_and_token_once() -> None:
    records = record([[1.0, 0.5], [2.0, 1.0], []], [0.0, 9.0, 9.5])
    middles, means = windowed_mean(records.arrival_s, records.ttft_s, 5.0)
    assert middles.tolist() == [2.5, 7.5]
    assert means.tolist() == [1.0, 2.0]
    middles, rates = windowed_tokens_per_s(records, 5.0)
    assert (rates * 5).tolist() == [2, 0, 2]


def test_a_curve_of_peaks_keeps_every_peak_and_leaves_gaps_open() -> None:
    middles, peaks = windowed_max(np.array([0.0, 1.0, 4.9, 10.0]), np.array([1.0, 7.0, 2.0, 3.0]), 5.0)
    assert middles.tolist() == [2.5, 7.5, 12.5]
    assert peaks == pytest.approx([7.0, np.nan, 3.0], nan_ok=True)
    assert windowed_max(np.zeros(0), np.zeros(0), 5.0)[1].size == 0


def test_a_distribution_has_its_worst_thousandth_and_ignores_what_is_missing() -> None:
    """Of 0 … 1000 a share s lies up to 1000 s."""
    values, shares = cdf(np.append(np.arange(1001.0)[::-1], np.nan))
    assert values == pytest.approx(1000 * shares)
    assert (shares[0], shares[-1]) == pytest.approx((0.001, 1.0))
    assert (np.diff(SHARES) > 0).all()
    assert cdf(np.array([np.nan]))[0].size == 0


def test_a_request_without_an_answer_misses_every_slo() -> None:
    values = np.array([1.0, 2.0, np.nan, 4.0])
    assert slo_violations(values, np.array([0.5, 2.0, 100.0])).tolist() == [1.0, 0.5, 0.25]
    assert best_median({"a": values, "b": np.array([np.nan]), "c": np.array([1.5])}) == 1.5
    assert best_median({"b": np.array([np.nan])}) is None
    bounded = {"a": values, "bound": np.array([0.5])}
    assert best_median(bounded, ["bound"]) == 2.0
    assert best_median({"bound": np.array([0.5])}, ["bound"]) == 0.5


def test_json_refuses_what_is_no_number() -> None:
    broken: dict[str, Any] = {"a": float("nan")}
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(broken)


def test_what_is_idle_is_kept_for_a_time() -> None:
    at_s, needed = np.array([0.0, 1.0, 2.0, 5.0, 6.0, 20.0]), np.array([3.0, 1.0, 2.0, 0.0, 4.0, 0.0])
    assert kept(at_s, needed, 0.0).tolist() == needed.tolist()
    assert kept(at_s, needed, 2.0).tolist() == [3, 3, 3, 0, 4, 0]
    assert kept(at_s, needed, 100.0).tolist() == [3, 3, 3, 3, 4, 4]
