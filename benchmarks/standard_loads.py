"""Where the standard scenarios come from: the load of KunServe's section 5, raised until memory hurts.

    python -m benchmarks.standard_loads --traces DIR [--factors 60 70 80 90 100 110] [--lengths NAME] [--json FILE]

Each factor is one run of `kunserve-v2` by `fcfs` and one by `oracle`. Between the grid's points the factors are halved
in until the ratio of their P99 TTFT passes 2, 5 and 15: the names of the standard scenarios are its values there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import machine, print_table
from cli.simulate.jobs import Job, run_jobs
from sim.scenarios.files import load_scenario

BASELINE, ORACLE = "fcfs", "oracle"
TARGETS = (2.0, 5.0, 15.0)


@dataclass(frozen=True, slots=True)
class Point:
    """One load and what it does."""

    upscale: float
    requests_per_s: float
    baseline_ttft_p99_s: float
    oracle_ttft_p99_s: float
    mean_demand: float
    """KV that requests hold or wait for where memory is unlimited, over what there is: mean over the arrivals' time."""
    mean_held: float
    """The same without what an instance's real memory has no room for."""
    peak_demand: float

    @property
    def ratio(self) -> float:
        """P99 TTFT of the baseline, over the oracle's."""
        return self.baseline_ttft_p99_s / self.oracle_ttft_p99_s


class Sweep:
    """Runs loads, each once."""

    def __init__(self, scenario_name: str, traces: Path, seed: int, lengths: str | None = None) -> None:
        self._scenario = load_scenario(scenario_name).with_overrides(lengths=lengths)
        self._traces = traces
        self._seed = seed
        self.points: dict[float, Point] = {}

    def point(self, upscale: float) -> Point:
        """Return what a load does."""
        if upscale not in self.points:
            self.points[upscale] = self._measure(upscale)
        return self.points[upscale]

    def _measure(self, upscale: float) -> Point:
        scenario = self._scenario.with_overrides(upscale=upscale)
        jobs = [Job(scenario, system, self._seed, self._traces, keep_result=True) for system in (BASELINE, ORACLE)]
        baseline, oracle = run_jobs(jobs, 2)
        assert oracle.result is not None, "asked for"
        samples, duration_s = oracle.result.samples, scenario.duration_s
        assert samples is not None, "a simulated run has samples"
        assert duration_s is not None, "the scenario says how long requests come"
        during = samples.at_s <= duration_s
        held = samples.used_blocks[during] / samples.num_blocks[during]
        demand = samples.demanded_blocks[during] / samples.num_blocks[during]
        point = Point(
            upscale=upscale,
            requests_per_s=len(oracle.result.records) / duration_s,
            baseline_ttft_p99_s=baseline.summary["ttft_s"]["p99"],
            oracle_ttft_p99_s=oracle.summary["ttft_s"]["p99"],
            mean_held=float(held.mean()),
            mean_demand=float(demand.mean()),
            peak_demand=float(demand.max()),
        )
        walls = f"{baseline.wall_s:.0f} and {oracle.wall_s:.0f} s"
        print(
            f"upscale {upscale:g}: ratio {point.ratio:.2f}, mean demand {point.mean_demand:.1%} ({walls})", flush=True
        )
        return point


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where the ratio passes a target."""

    factor: float
    """The smallest one whose ratio is known to be at least the target, above one where it is less."""
    is_bounded: bool
    """Whether there is one where it is less, at most a step below; else the lowest factor tried is above already."""


def find_crossing(ratio: Callable[[float], float], factors: list[float], target: float, step: float) -> Crossing | None:
    """Return where the ratio first passes the target on its way up the factors, to a step.

    Args:
        ratio: of a factor; between two neighbouring factors it is taken to pass the target once.
        factors: ascending.
        target: of the ratio.
        step: how close the crossing is found; what is tried between the factors is a multiple of it.

    Returns:
        None if no factor's ratio is at least the target.
    """
    place = next((i for i, factor in enumerate(factors) if ratio(factor) >= target), None)
    if place is None:
        return None
    if place == 0:
        return Crossing(factors[0], is_bounded=False)
    below, above = factors[place - 1], factors[place]
    while above - below > step:
        middle = round((above + below) / 2 / step) * step
        if ratio(middle) >= target:
            above = middle
        else:
            below = middle
    return Crossing(above, is_bounded=True)


def main() -> None:
    """Sweep, print the table and the points."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder with burstgpt_640s.csv")
    parser.add_argument("--scenario", default="kunserve-v2")
    parser.add_argument("--factors", type=float, nargs="+", default=[60.0, 70.0, 80.0, 90.0, 100.0, 110.0])
    parser.add_argument("--lengths", help="other lengths than the scenario's, as in its files")
    parser.add_argument("--step", type=float, default=1.0, help="how close the points are found")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    sweep = Sweep(chosen.scenario, chosen.traces, chosen.seed, chosen.lengths)
    factors = sorted(chosen.factors)
    for factor in factors:
        sweep.point(factor)
    found = {
        target: find_crossing(lambda factor: sweep.point(factor).ratio, factors, target, chosen.step)
        for target in TARGETS
    }
    print_table(
        f"{chosen.scenario}, seed {chosen.seed} ({machine()})",
        (
            "upscale",
            "requests/s",
            f"{BASELINE} P99 TTFT, s",
            f"{ORACLE}, s",
            "ratio",
            "mean KV held",
            "mean demand",
            "peak",
        ),
        [
            (
                f"{point.upscale:g}",
                f"{point.requests_per_s:.1f}",
                f"{point.baseline_ttft_p99_s:.3f}",
                f"{point.oracle_ttft_p99_s:.3f}",
                f"{point.ratio:.2f}",
                f"{point.mean_held:.1%}",
                f"{point.mean_demand:.1%}",
                f"{point.peak_demand:.0%}",
            )
            for point in sorted(sweep.points.values(), key=lambda point: point.upscale)
        ],
    )
    for target, crossing in found.items():
        if crossing is None:
            print(f"ratio {target:g}: not reached")
            continue
        passed = "passed at" if crossing.is_bounded else "passed at the lowest factor,"
        print(f"ratio {target:g}: {passed} upscale {crossing.factor:g} ({sweep.point(crossing.factor).ratio:.2f})")
    if chosen.json is not None:
        document = {
            "points": [asdict(point) for point in sweep.points.values()],
            "found": {f"{target:g}": crossing and asdict(crossing) for target, crossing in found.items()},
        }
        chosen.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
