"""QoE over one quantity of a drawn load, by system: Andes's figures 15 (intensity), 16 (duration) and 20 (rate).

    python -m benchmarks.qoe_sweep SCENARIO rate_per_s 0.5 1 1.5 [--systems fcfs,andes] [--jobs N] [--svg FILE]

The quantity is a field of the scenario's arrivals (`sim/scenarios/arrivals.py`): `rate_per_s`, `intensity`,
`burst_ratio`. Each value is one run by each system.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import print_table
from cli.simulate.jobs import Job, run_jobs
from shared.host import count_cores
from sim.experiment.summary import GOOD_QOE, Summary
from sim.scenarios.files import load_scenario
from sim.scenarios.scenario import Scenario, validated

TITLES = {
    "rate_per_s": "requests per second",
    "intensity": "rate of the burst / mean rate",
    "burst_ratio": "share of the cycle that the burst lasts",
}
DRAWN = {"mean": "QoE, mean", "p1": "QoE, P1"}
Found = Mapping[str, Sequence[Summary]]
"""By system, of each value."""


def changed(scenario: Scenario, quantity: str, value: float) -> Scenario:
    """Return the scenario with this value.

    Raises:
        StartupError: its arrivals have no such quantity, or do not allow the value.
    """
    arrivals = {**scenario.arrivals.model_dump(), quantity: value}
    return validated({**scenario.model_dump(), "arrivals": arrivals}, f"scenario {scenario.name}")


def measure(
    scenario: Scenario, quantity: str, values: Sequence[float], systems: Sequence[str], num_processes: int
) -> Found:
    """Return what came of each value."""
    loads = [changed(scenario, quantity, value) for value in values]
    jobs = [Job(load, system, 0) for system in systems for load in loads]
    done = [each.summary for each in run_jobs(jobs, num_processes)]
    return {system: done[i * len(values) : (i + 1) * len(values)] for i, system in enumerate(systems)}


def report(quantity: str, values: Sequence[float], found: Found) -> None:
    """Print a row for each run."""
    header = ["", quantity, "QoE, mean", f"readers ≥ {GOOD_QOE:g}", "QoE, P1", "99 % of tokens by, s", "last token, s"]
    rows = [
        [
            system,
            f"{value:g}",
            f"{summary['qoe']['mean']:.3f}",
            f"{100 * summary['qoe']['share_ge_0_95']:.1f} %",
            f"{summary['qoe']['p1']:.3f}",
            *(f"{summary['tokens_until_s'][each]:.0f}" for each in ("p99", "last")),
        ]
        for system, summaries in found.items()
        for value, summary in zip(values, summaries, strict=True)
    ]
    print_table(TITLES.get(quantity, quantity), header, rows)


def draw(quantity: str, values: Sequence[float], found: Found, path: Path) -> None:
    """Draw the mean, and what the last hundredth has at most."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: Any = {"svg.hashsalt": "sluice", "svg.fonttype": "none"}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(8, 3.5), layout="constrained")
        for axes, (key, title) in zip(figure.subplots(1, len(DRAWN), sharey=True), DRAWN.items(), strict=True):
            for system, summaries in found.items():
                axes.plot(values, [each["qoe"][key] for each in summaries], marker=".", label=system)
            axes.set(xlabel=TITLES.get(quantity, quantity), ylabel=title, ylim=(0, 1.02))
            axes.grid(visible=True, lw=0.3)
            axes.legend(fontsize="small")
        figure.axes[0].axhline(GOOD_QOE, color="black", lw=0.6, ls="--")
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("scenario", help="name or file")
    parser.add_argument("quantity", help="field of its arrivals")
    parser.add_argument("values", type=float, nargs="+")
    parser.add_argument("--systems", type=lambda text: text.split(","), default=["fcfs", "andes"])
    parser.add_argument("--jobs", type=int, default=count_cores(), help="runs at a time [cores]")
    parser.add_argument("--svg", type=Path, help="file for the picture")
    chosen = parser.parse_args()
    load = load_scenario(chosen.scenario)
    found = measure(load, chosen.quantity, chosen.values, chosen.systems, chosen.jobs)
    report(chosen.quantity, chosen.values, found)
    if chosen.svg:
        draw(chosen.quantity, chosen.values, found, chosen.svg)


if __name__ == "__main__":
    main()
