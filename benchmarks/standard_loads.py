"""Where the standard scenarios come from: the load of KunServe's section 5, raised until memory hurts.

    python -m benchmarks.standard_loads --traces DIR --factors 64 65 67 75 [--window 1084:1724] [--trace FILE]
        [--lengths NAME] [--seeds 0 1 2] [--baselines fcfs fcfs-chunked] [--targets 2 5 15] [--json FILE]

Each factor is one run per seed by every baseline and by `oracle`. Between the factors given more are tried, until it is
known where a baseline's P99 TTFT first is 2, 5 and 15 times the oracle's: of `fcfs` these are the standard scenarios.
`fcfs-chunked` schedules as the oracle does, so its ratio is what memory alone costs. Window and file are the scenario's
unless others are given; `benchmarks/load_replay.py` says which are worth it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import machine, print_table
from cli.simulate.jobs import Job, RunDone, run_jobs
from sim.scenarios.files import load_scenario
from sim.scenarios.scenario import Scenario

BASELINES, ORACLE = ("fcfs", "fcfs-chunked"), "oracle"
TARGETS = (2.0, 5.0, 15.0)


@dataclass(frozen=True, slots=True)
class Run:
    """One load, drawn by one seed, and what it does."""

    seed: int
    requests_per_s: float
    ttft_p99_s: dict[str, float]
    """By system, the oracle among them."""
    mean_demand: float
    """KV that requests hold or wait for where memory is unlimited, over what there is: mean over the arrivals' time."""
    mean_held: float
    """The same without what an instance's real memory has no room for."""
    peak_demand: float

    def ratio(self, baseline: str) -> float:
        """P99 TTFT of the baseline, over the oracle's."""
        return self.ttft_p99_s[baseline] / self.ttft_p99_s[ORACLE]


@dataclass(frozen=True, slots=True)
class Point:
    """One load."""

    upscale: float
    runs: tuple[Run, ...]
    """One per seed."""

    def ratio(self, baseline: str) -> float:
        """P99 TTFT of the baseline, over the oracle's: median of the seeds."""
        return statistics.median(run.ratio(baseline) for run in self.runs)


class Sweep:
    """Runs loads, each once.

    Args:
        scenario: whose load is multiplied.
        traces: folder of its trace.
        seeds: each load is drawn by all of them.
        baselines: compared with the oracle.
        num_processes: runs at a time.
    """

    def __init__(
        self,
        scenario: Scenario,
        traces: Path,
        seeds: Sequence[int] = (0,),
        baselines: Sequence[str] = BASELINES,
        num_processes: int = 2,
    ) -> None:
        self._scenario = scenario
        self._traces = traces
        self._seeds = seeds
        self._systems = (*baselines, ORACLE)
        self._num_processes = num_processes
        self.points: dict[float, Point] = {}

    def point(self, upscale: float) -> Point:
        """Return what a load does."""
        if upscale not in self.points:
            self.points[upscale] = self._measure(upscale)
        return self.points[upscale]

    def _measure(self, upscale: float) -> Point:
        scenario = self._scenario.with_overrides(upscale=upscale)
        jobs = [
            Job(scenario, system, seed, self._traces, keep_result=system == ORACLE)
            for seed in self._seeds
            for system in self._systems
        ]
        done, size = run_jobs(jobs, self._num_processes), len(self._systems)
        runs = [self._run(scenario, seed, done[i * size : (i + 1) * size]) for i, seed in enumerate(self._seeds)]
        point = Point(upscale, tuple(runs))
        ratios = ", ".join(f"{name} {point.ratio(name):.2f}" for name in self._systems[:-1])
        print(f"upscale {upscale:g}: {ratios} ({sum(each.wall_s for each in done):.0f} s)", flush=True)
        return point

    def _run(self, scenario: Scenario, seed: int, done: Sequence[RunDone]) -> Run:
        result, duration_s = done[-1].result, scenario.duration_s
        assert result is not None, "the oracle's is asked for, and comes last"
        assert result.samples is not None, "a simulated run has samples"
        assert duration_s is not None, "the scenario says how long requests come"
        during = result.samples.at_s <= duration_s
        held = result.samples.used_blocks[during] / result.samples.num_blocks[during]
        demand = result.samples.demanded_blocks[during] / result.samples.num_blocks[during]
        return Run(
            seed=seed,
            requests_per_s=len(result.records) / duration_s,
            ttft_p99_s={
                system: each.summary["ttft_s"]["p99"] for system, each in zip(self._systems, done, strict=True)
            },
            mean_demand=float(demand.mean()),
            mean_held=float(held.mean()),
            peak_demand=float(demand.max()),
        )


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


def parse_window(text: str) -> tuple[float, float]:
    """Return start and end, in seconds, of `START:END`."""
    start, _, end = text.partition(":")
    try:
        window_s = float(start), float(end)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no window: START:END in seconds") from None
    if not 0 <= window_s[0] < window_s[1]:
        raise argparse.ArgumentTypeError(f"'{text}' is no window: it must end after it starts, at 0 or later")
    return window_s


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the scenario's trace")
    parser.add_argument("--scenario", default="standard-15")
    parser.add_argument("--factors", type=float, nargs="+", default=[60.0, 65.0, 70.0, 75.0, 80.0, 85.0])
    parser.add_argument("--trace", type=Path, help="another file than the scenario's")
    parser.add_argument("--window", type=parse_window, metavar="START:END", help="seconds of the file that are taken")
    parser.add_argument("--lengths", help="other lengths than the scenario's, as in its files")
    parser.add_argument("--step", type=float, default=1.0, help="how close the points are found")
    parser.add_argument("--targets", type=float, nargs="+", default=list(TARGETS))
    parser.add_argument("--baselines", nargs="+", default=list(BASELINES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="the ratio is the median of theirs")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _print_points(points: Sequence[Point], baselines: Sequence[str], title: str) -> None:
    """Print a line per load and seed."""
    names = [name for baseline in baselines for name in (f"{baseline} P99 TTFT, s", "ratio")]
    print_table(
        title,
        ("upscale", "seed", "requests/s", *names, f"{ORACLE}, s", "mean KV held", "mean demand", "peak"),
        [
            (
                f"{point.upscale:g}",
                str(run.seed),
                f"{run.requests_per_s:.1f}",
                *(text for name in baselines for text in (f"{run.ttft_p99_s[name]:.2f}", f"{run.ratio(name):.2f}")),
                f"{run.ttft_p99_s[ORACLE]:.3f}",
                f"{run.mean_held:.1%}",
                f"{run.mean_demand:.1%}",
                f"{run.peak_demand:.0%}",
            )
            for point in points
            for run in point.runs
        ],
    )


def _crossing(sweep: Sweep, baseline: str, factors: list[float], target: float, step: float) -> Crossing | None:
    return find_crossing(lambda factor: sweep.point(factor).ratio(baseline), factors, target, step)


def main() -> None:
    """Sweep, print the table and the points."""
    chosen = _arguments()
    scenario = load_scenario(chosen.scenario).with_overrides(
        trace=chosen.trace, window_s=chosen.window, lengths=chosen.lengths
    )
    sweep = Sweep(scenario, chosen.traces, chosen.seeds, chosen.baselines, chosen.processes)
    factors = sorted(chosen.factors)
    for factor in factors:
        sweep.point(factor)
    found = {
        baseline: {target: _crossing(sweep, baseline, factors, target, chosen.step) for target in chosen.targets}
        for baseline in chosen.baselines
    }
    points = sorted(sweep.points.values(), key=lambda point: point.upscale)
    _print_points(points, chosen.baselines, f"{chosen.scenario} ({machine()})")
    for baseline, crossings in found.items():
        for target, crossing in crossings.items():
            if crossing is None:
                print(f"{baseline}, ratio {target:g}: not reached")
                continue
            passed = "passed at" if crossing.is_bounded else "passed at the lowest factor,"
            ratio = sweep.point(crossing.factor).ratio(baseline)
            print(f"{baseline}, ratio {target:g}: {passed} upscale {crossing.factor:g} ({ratio:.2f})")
    if chosen.json is not None:
        document = {
            "points": [asdict(point) for point in points],
            "found": {
                baseline: {f"{target:g}": crossing and asdict(crossing) for target, crossing in crossings.items()}
                for baseline, crossings in found.items()
            },
        }
        chosen.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
