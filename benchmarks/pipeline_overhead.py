"""What a pipeline costs where memory is no matter: a group of two or four against one whole instance, at equal load.

    python -m benchmarks.pipeline_overhead [--scenario standard-15] [--systems kunserve fcfs-chunked] [--stages 1 2 4]
        [--moderate 5] [--saturating 12] [--seconds 200] [--seed 0] [--json FILE]

One instance gets a Poisson load, a group of n instances n times as much; model, lengths and limits of a step are the
scenario's, the scheduler is the system's, and KV memory holds all requests at their full length. What differs from the
whole instance is the pipeline alone, and that more requests share it.

- Saturated: requests come faster than they can be computed; tokens of prompts and outputs, which cost nearly the same,
  per second and instance in the second half.
- Moderate: TTFT and TPOT of the requests after the first quarter.
- Idle: share of the stages' time that passed idle while the group had work, over the whole run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.harness import print_table
from shared.layers import even_split
from shared.process.log import only_from
from sim.experiment.records import Records
from sim.experiment.result import RunResult
from sim.experiment.run import run_workload
from sim.experiment.setup import BLOCK_SIZE, ExperimentCluster, build_cluster
from sim.experiment.summary import summarise
from sim.scenarios.files import load_scenario
from sim.scenarios.scenario import Scenario, validated
from sim.worker import Pipeline
from sim.workload.workload import Workload

WHOLE = "fcfs-chunked"
"""A system whose instances hold the whole model: the worker that it gets is changed into a group."""
WARM_UP_RATIO, MEASURED_RATIO = 0.25, 0.5
"""Shares of the arrivals' time that are left out: before percentiles, and before throughput is counted."""


@dataclass(frozen=True, slots=True)
class Loads:
    """What is asked of one instance; a group of n gets n times as much."""

    moderate_per_s: float
    """Requests per second."""
    saturating_per_s: float
    seconds: float
    """In which requests arrive."""
    seed: int


@dataclass(frozen=True, slots=True)
class Figures:
    """One system in so many stages."""

    system: str
    num_stages: int
    tokens_per_s: float
    """Tokens of prompts and outputs per second and instance, saturated."""
    saturated_idle_ratio: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    moderate_idle_ratio: float

    def over(self, whole: Figures) -> dict[str, float]:
        """Return the ratios to the whole instance."""
        names = ("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")
        return {name: getattr(self, name) / getattr(whole, name) for name in names}


def measure(scenario: Scenario, system: str, num_stages: int, loads: Loads) -> Figures:
    """Return the figures of one system in so many stages.

    Raises:
        StartupError: the scenario names what does not exist.
    """
    saturated = _run(scenario, system, num_stages, loads.saturating_per_s, loads)
    moderate = _run(scenario, system, num_stages, loads.moderate_per_s, loads)
    summary = summarise(moderate.records, moderate.facts, warm_up_s=WARM_UP_RATIO * loads.seconds)
    begin_s = MEASURED_RATIO * loads.seconds
    num_tokens = _num_tokens(saturated.records, begin_s, loads.seconds)
    return Figures(
        system=system,
        num_stages=num_stages,
        tokens_per_s=num_tokens / (loads.seconds - begin_s) / num_stages,
        saturated_idle_ratio=saturated.facts.bubble_ratio or 0.0,
        ttft_p50_s=summary["ttft_s"]["p50"],
        ttft_p99_s=summary["ttft_s"]["p99"],
        tpot_p50_s=summary["tpot_s"]["p50"],
        tpot_p99_s=summary["tpot_s"]["p99"],
        moderate_idle_ratio=moderate.facts.bubble_ratio or 0.0,
    )


def one_group(scenario: Scenario, system: str, num_stages: int, workload: Workload) -> ExperimentCluster:
    """Return a cluster of one instance, or of one group, whose memory is ample for the workload."""
    built, instance = build_cluster(scenario, WHOLE, workload), scenario.instance()
    link = built.params.link
    assert link is not None, "instances are joined by the network"
    tokens = (workload.num_prompt + workload.num_output).astype(int)
    worker = replace(
        built.params.workers[0],
        system=system,
        # A block beside its tokens for each, since schedulers keep one free for each that runs.
        num_blocks=int((-(-tokens // BLOCK_SIZE) + 1).sum()),
        max_sequences=len(workload),
        pipeline=Pipeline(instance.num_layers, even_split(instance.num_layers, num_stages), link)
        if num_stages > 1
        else None,
    )
    params = replace(built.params, workers=(worker,), system=system)
    return ExperimentCluster(params, built.gpus_per_worker * num_stages)


def _num_tokens(records: Records, begin_s: float, end_s: float) -> int:
    """Return the output tokens that came in this time, and the prompts whose first token did."""
    first_s, token_s = records.arrival_s + records.ttft_s, records.token_s
    prompts = records.num_prompt[(first_s >= begin_s) & (first_s < end_s)]
    return int(prompts.sum()) + int(((token_s >= begin_s) & (token_s < end_s)).sum())


def _run(scenario: Scenario, system: str, num_stages: int, rate_per_s: float, loads: Loads) -> RunResult:
    load = {
        "arrivals": {"kind": "poisson", "rate_per_s": rate_per_s * num_stages},
        "upscale": 1.0,
        "instances": 1,
        "duration_s": loads.seconds,
        "warm_up_s": 0.0,
        "reader": None,
    }
    chosen = validated({**scenario.model_dump(), **load}, f"scenario {scenario.name}")
    workload = chosen.workload(loads.seed)
    with only_from("error"):
        result = run_workload(one_group(chosen, system, num_stages, workload), workload)
    assert result.records.is_complete.all(), "every request is answered"
    assert not result.facts.preemptions, "memory is ample"
    return result


def _row(figures: Figures, whole: Figures) -> tuple[str, ...]:
    ratios = figures.over(whole)

    def shown(name: str, digits: int, scale: float = 1.0) -> str:
        value = f"{getattr(figures, name) * scale:.{digits}f}"
        return value if figures is whole else f"{value} ({ratios[name]:.2f})"

    return (
        figures.system,
        str(figures.num_stages),
        shown("tokens_per_s", 0),
        f"{figures.saturated_idle_ratio:.1%}",
        *(shown(name, 3) for name in ("ttft_p50_s", "ttft_p99_s")),
        *(shown(name, 1, 1000) for name in ("tpot_p50_s", "tpot_p99_s")),
        f"{figures.moderate_idle_ratio:.1%}",
    )


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="standard-15", help="whose model, GPU, lengths and limits are taken")
    parser.add_argument("--systems", nargs="+", default=["kunserve", "fcfs-chunked"], help="whose schedulers are taken")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4], help="the first one is the base of ratios")
    parser.add_argument("--moderate", type=float, default=5.0, help="requests per second and instance")
    parser.add_argument("--saturating", type=float, default=12.0, help="the same, more than can be computed")
    parser.add_argument("--seconds", type=float, default=200.0, help="simulated, in which requests arrive")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    chosen = _arguments(arguments)
    loads = Loads(chosen.moderate, chosen.saturating, chosen.seconds, chosen.seed)
    scenario, rows, document = load_scenario(chosen.scenario), [], []
    for system in chosen.systems:
        found = [measure(scenario, system, num_stages, loads) for num_stages in chosen.stages]
        rows += [_row(figures, found[0]) for figures in found]
        document += [{**asdict(figures), "ratios": figures.over(found[0])} for figures in found]
    rates = f"{loads.moderate_per_s:g} and {loads.saturating_per_s:g} requests/s and instance"
    print_table(
        f"{chosen.scenario}, {rates}, {loads.seconds:g} s, seed {loads.seed}",
        (
            "scheduler of",
            "stages",
            "tokens/s and instance, saturated",
            "idle",
            "TTFT p50, s, moderate",
            "TTFT p99, s",
            "TPOT p50, ms",
            "TPOT p99, ms",
            "idle",
        ),
        rows,
    )
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"loads": asdict(loads), "figures": document}, indent=1) + "\n")


if __name__ == "__main__":
    main()
