"""From the summaries of several systems to one comparison: means over seeds, and how much of a gap each closed. Pure.

The gap is what lies between the baseline, the first system named, and a system whose memory never runs out: of the TTFT
`oracle`, of QoE `andes-unlimited`. With one seed every figure of a system is that run's. With several it is the mean
over the runs; `range` then holds the least and the greatest, and `per_seed` every run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from sim.experiment.slo_scales import Latencies
from sim.experiment.summary import Summary, rounded

ORACLE: Final = "oracle"
"""Name of the system that bounds the TTFT. Of QoE it is no bound: it serves first come, first served."""
UNLIMITED: Final = "andes-unlimited"
"""Name of the system that bounds QoE."""
MIN_TTFT_FACTOR: Final = 1.5
"""With less between the baseline's P99 TTFT and its bound there is no gap worth a ratio."""
MIN_QOE_GAP: Final = 0.02
"""The same of the mean QoE, and of the share of readers with at least 0.95."""
Comparison = dict[str, Any]


def compare(scenario: Mapping[str, Any], runs: Mapping[int, Mapping[str, Summary]]) -> Comparison:
    """Return the comparison, as its JSON holds it.

    Args:
        scenario: what was run, in plain values.
        runs: by seed, the summaries by system; every seed has the same systems, in the order in which they were named.
    """
    seeds = list(runs)
    names = list(runs[seeds[0]])
    by_name = {name: [runs[seed][name] for seed in seeds] for name in names}
    systems = {name: _merged(each, _mean) for name, each in by_name.items()}
    whole: Comparison = {
        "scenario": dict(scenario),
        "seeds": seeds,
        "systems": systems,
        "gap_closed": gaps_closed(systems),
    }
    if len(seeds) > 1:
        whole["range"] = {name: _merged(each, _range) for name, each in by_name.items()}
        whole["per_seed"] = {
            str(seed): {"systems": dict(systems), "gap_closed": gaps_closed(systems)} for seed, systems in runs.items()
        }
    comparison: Comparison = rounded(whole)
    return comparison


def gaps_closed(systems: Mapping[str, Summary]) -> dict[str, dict[str, float | None]]:
    """Return for each system how much of the gap it closed: 0 as the baseline, 1 as the bound; None without a gap.

    (baseline - system) / (baseline - bound), of the P99 TTFT towards `oracle`, of the mean QoE and of the share of
    readers with at least 0.95 towards `andes-unlimited`. None without that system; for the TTFT where the baseline is
    less than 1.5 times the bound, for QoE where the bound is less than 0.02 above the baseline.

    Args:
        systems: summaries by name; the first is the baseline.
    """
    baseline, oracle, unlimited = next(iter(systems.values())), systems.get(ORACLE), systems.get(UNLIMITED)

    def ttft(summary: Summary, figure: str) -> float | None:
        return closed(summary, oracle, "ttft_s", figure, _is_ttft_gap)

    def qoe(summary: Summary, figure: str) -> float | None:
        return closed(summary, unlimited, "qoe", figure, _is_qoe_gap)

    def closed(
        summary: Summary, bound: Summary | None, key: str, figure: str, is_gap: Callable[[float, float], bool]
    ) -> float | None:
        ends = None if bound is None else (baseline[key][figure], summary[key][figure], bound[key][figure])
        if ends is None or None in ends or not is_gap(ends[0], ends[2]):
            return None
        return float((ends[0] - ends[1]) / (ends[0] - ends[2])) + 0.0  # never -0.0

    return {
        name: {
            "ttft_p99": ttft(summary, "p99"),
            "qoe_mean": qoe(summary, "mean"),
            "qoe_share_ge_0_95": qoe(summary, "share_ge_0_95"),
        }
        for name, summary in systems.items()
    }


def against_alone(
    systems: Mapping[str, Summary], runs: Sequence[Mapping[str, Latencies]], alone: str
) -> dict[str, Any]:
    """Return what best effort costs those who wait: every system against one that had none, on the same cards.

    `in_time_points` is how much larger a share kept both limits, in points; `shown_later_ratio` how much later the last
    token was displayed, counted from the arrival, as a mean over the requests that ended in both; `ttft_p99_s` how much
    longer the P99 TTFT was.

    Args:
        systems: means over the seeds.
        runs: of each seed, by system.
        alone: name of the system that had no best effort.
    """

    def more(name: str, key: str, figure: str) -> float | None:
        own, base = (each[key] and each[key][figure] for each in (systems[name], systems[alone]))
        return None if own is None or base is None else float(own - base)

    def later(name: str) -> float | None:
        ratios = [run[name].shown_s / run[alone].shown_s - 1 for run in runs]
        means = [float(each[~np.isnan(each)].mean()) for each in ratios if not np.isnan(each).all()]
        return float(np.mean(means)) if len(means) == len(runs) else None

    def points(name: str) -> float | None:
        share = more(name, "slo", "both_share")
        return None if share is None else 100 * share

    figures = {
        name: {
            "in_time_points": points(name),
            "shown_later_ratio": later(name),
            "ttft_p99_s": more(name, "ttft_s", "p99"),
        }
        for name in systems
        if name != alone
    }
    return {"system": alone, "systems": figures}


def to_json(comparison: Comparison) -> str:
    """Return the text of a comparison's file: the same bytes for the same values."""
    return json.dumps(comparison, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _is_ttft_gap(baseline: float, bound: float) -> bool:
    return baseline >= MIN_TTFT_FACTOR * bound and baseline > bound


def _is_qoe_gap(baseline: float, bound: float) -> bool:
    # a mean of hundreds of figures that should be 0.02 apart may be so but for its last bits
    return round(bound - baseline, 12) >= MIN_QOE_GAP


def _merged(trees: Sequence[Any], merge: Any) -> Any:
    """Return one tree whose leaves are merged from the trees' leaves; None where one of them is None."""
    if any(tree is None for tree in trees):
        return None
    if isinstance(trees[0], Mapping):
        return {key: _merged([tree[key] for tree in trees], merge) for key in trees[0]}
    return merge(trees)


def _mean(values: Sequence[float]) -> float:
    return values[0] if len(set(values)) == 1 else float(np.mean(values))


def _range(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]
