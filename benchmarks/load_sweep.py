"""One quantity of a drawn load, by system: Andes's figures 15 (intensity), 16 (duration), 20 (rate), BROS's 10 to 12.

    python -m benchmarks.load_sweep SCENARIO rate_per_s 0.5 1 1.5 [--systems fcfs,andes] [--jobs N] [--svg FILE]
    python -m benchmarks.load_sweep bros-13b rate_per_s 4 6 8 --figures limits [--lengths lmsys] [--no-best-effort]

The quantity is a field of the scenario's arrivals (`sim/scenarios/arrivals.py`): `rate_per_s`, `intensity`,
`burst_ratio`. Each value is one run by each system, or one for each of `--seeds`: then the mean is told, and the least
and the most.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import fmean
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
_Told = Callable[[Summary], float | None]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a run."""

    title: str
    of: _Told
    shown: str = "{:.3f}"
    is_drawn: bool = True


def _until(which: str) -> _Told:
    return lambda summary: summary["tokens_until_s"][which]


def _best_effort_rate(summary: Summary) -> float | None:
    told = summary["best_effort"]
    return None if told is None else told["cut_off"]["requests_per_s"]


def _token_rate(summary: Summary) -> float | None:
    """Return the tokens of both classes until the cut-off, or those of all who wait where there is no best effort."""
    at_cut_off = summary["cut_off"]
    rate: float | None = summary["throughput_tokens_per_s"] if at_cut_off is None else at_cut_off["tokens_per_s"]
    return rate


FIGURES: dict[str, tuple[Figure, ...]] = {
    "qoe": (
        Figure("QoE, mean", lambda summary: summary["qoe"]["mean"]),
        Figure(f"readers ≥ {GOOD_QOE:g}", lambda summary: summary["qoe"]["share_ge_0_95"], "{:.1%}", is_drawn=False),
        Figure("QoE, P1", lambda summary: summary["qoe"]["p1"]),
        Figure("99 % of tokens by, s", _until("p99"), "{:.0f}", is_drawn=False),
        Figure("last token, s", _until("last"), "{:.0f}", is_drawn=False),
    ),
    "limits": (
        Figure("normalised latency, s", lambda summary: summary["normalised_latency_s"]["mean"]),
        Figure("TTFT in time", lambda summary: summary["slo"]["ttft_share"], "{:.1%}"),
        Figure("TPOT in time", lambda summary: summary["slo"]["tpot_share"], "{:.1%}"),
        Figure("both in time", lambda summary: summary["slo"]["both_share"], "{:.1%}", is_drawn=False),
        Figure("best effort, requests/s", _best_effort_rate, "{:.2f}"),
        Figure("tokens/s", _token_rate, "{:.0f}", is_drawn=False),
    ),
}
"""What is told: of readers, or of requests with limits and best effort beside them."""
Found = Mapping[str, Sequence[Sequence[Summary]]]
"""By system, of each value, by seed."""


def changed(scenario: Scenario, quantity: str, value: float) -> Scenario:
    """Return the scenario with this value.

    Raises:
        StartupError: its arrivals have no such quantity, or do not allow the value.
    """
    arrivals = {**scenario.arrivals.model_dump(), quantity: value}
    return validated({**scenario.model_dump(), "arrivals": arrivals}, f"scenario {scenario.name}")


def measure(
    scenario: Scenario,
    quantity: str,
    values: Sequence[float],
    systems: Sequence[str],
    seeds: Sequence[int],
    num_processes: int,
) -> Found:
    """Return what came of each value."""
    loads = [changed(scenario, quantity, value) for value in values]
    jobs = [Job(load, system, seed) for system in systems for load in loads for seed in seeds]
    done = iter(run_jobs(jobs, num_processes))
    return {system: [[next(done).summary for _ in seeds] for _ in values] for system in systems}


def report(quantity: str, values: Sequence[float], found: Found, figures: Sequence[Figure]) -> None:
    """Print a row for each value."""
    rows = [
        [system, f"{value:g}", *(_cell(figure, summaries) for figure in figures)]
        for system, of_system in found.items()
        for value, summaries in zip(values, of_system, strict=True)
    ]
    print_table(TITLES.get(quantity, quantity), ["", quantity, *(figure.title for figure in figures)], rows)


def _values(figure: Figure, summaries: Sequence[Summary]) -> list[float]:
    return [value for summary in summaries if (value := figure.of(summary)) is not None]


def _cell(figure: Figure, summaries: Sequence[Summary]) -> str:
    told = _values(figure, summaries)
    if not told:
        return "–"
    mean, *ends = (figure.shown.format(value).replace("%", " %") for value in (fmean(told), min(told), max(told)))
    return mean if len(summaries) == 1 else f"{mean} ({' to '.join(ends)})"


def draw(quantity: str, values: Sequence[float], found: Found, figures: Sequence[Figure], path: Path) -> None:
    """Draw those that are."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Picture

    settings: Any = {"svg.hashsalt": "sluice", "svg.fonttype": "none"}
    drawn = [figure for figure in figures if figure.is_drawn]
    with mpl.rc_context(settings):
        picture = Picture(figsize=(4 * len(drawn), 3.5), layout="constrained")
        for axes, figure in zip(picture.subplots(1, len(drawn)), drawn, strict=True):
            for system, summaries in found.items():
                axes.plot(
                    values, [fmean(_values(figure, each) or [nan]) for each in summaries], marker=".", label=system
                )
            axes.set(xlabel=TITLES.get(quantity, quantity), ylabel=figure.title)
            axes.set_ylim(0, 1.02 if figure.title.startswith("QoE") or "in time" in figure.title else None)
            axes.grid(visible=True, lw=0.3)
            if figure.title.startswith("QoE"):
                axes.axhline(GOOD_QOE, color="black", lw=0.6, ls="--")
        picture.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize="small")
        picture.savefig(path, metadata={"Date": None, "Creator": None})


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("scenario", help="name or file")
    parser.add_argument("quantity", help="field of its arrivals")
    parser.add_argument("values", type=float, nargs="+")
    parser.add_argument("--systems", type=lambda text: text.split(","), default=["fcfs", "andes"])
    parser.add_argument("--figures", choices=sorted(FIGURES), default="qoe")
    parser.add_argument("--lengths", help="of prompts and answers, and not the scenario's")
    parser.add_argument("--no-best-effort", action="store_true", help="requests with limits alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a run of each value by each")
    parser.add_argument("--jobs", type=int, default=count_cores(), help="runs at a time [cores]")
    parser.add_argument("--svg", type=Path, help="file for the picture")
    chosen = parser.parse_args()
    load = load_scenario(chosen.scenario).with_overrides(lengths=chosen.lengths)
    if chosen.no_best_effort:
        load = validated({**load.model_dump(), "best_effort": None}, f"scenario {load.name}")
    found = measure(load, chosen.quantity, chosen.values, chosen.systems, chosen.seeds, chosen.jobs)
    figures = FIGURES[chosen.figures]
    report(chosen.quantity, chosen.values, found, figures)
    if chosen.svg:
        draw(chosen.quantity, chosen.values, found, figures, chosen.svg)


if __name__ == "__main__":
    main()
