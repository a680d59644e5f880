"""How fast the simulator runs a scenario, and where its time goes.

    python -m benchmarks.simulation [--scenario kunserve-v2 --traces DIR] [--system fcfs] [--duration S] \
        [--profile] [--spans]

Processor seconds of one process, so that others on the machine matter less. A step is one of the engine's, a token one
that a reader got. `--profile` runs it once more under the profiler, which lengthens calls and so shows shares only.
`--spans` runs it once more and counts the steps that nothing but decoding happens in: those that a simulator could let
go by together.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.harness import machine, print_table
from services.worker.contract.batch import Batch, BatchOutput
from services.worker.engine.engine import Engine
from services.worker.sequences.events import StepEvents
from shared.process.log import only_from
from sim.experiment.result import RunResult
from sim.experiment.run import run_workload
from sim.experiment.setup import build_cluster
from sim.scenarios.files import load_scenario
from sim.scenarios.scenario import Scenario

ROOT = str(Path(__file__).parents[1]) + "/"
PARTS = (
    ("engine: sequences, blocks", ("services/worker/engine/", "services/worker/blocks/", "services/worker/sequences/")),
    ("scheduling policy", ("services/worker/scheduling/",)),
    ("modelled device and KV", ("services/worker/modelled/", "sim/devices/", "shared/cost")),
    ("worker around the engine", ("services/worker/",)),
    ("messages: packing, checks", ("shared/token_batch", "shared/wire", "shared/messages/", "shared/checksum")),
    ("dispatcher: sessions, readers' QoE", ("services/dispatcher/", "client/")),
    ("monitor and planner", ("services/monitor/", "services/planner/")),
    ("bus in memory", ("shared/transport/", "shared/subjects")),
    ("virtual clock", ("sim/virtual_time",)),
    ("experiment: feeding, recording", ("sim/",)),
)


def run(scenario: Scenario, system: str, seed: int, traces: Path | None) -> tuple[float, RunResult]:
    """Return the processor seconds of one run, and what it left."""
    workload = scenario.workload(seed, traces)
    cluster = build_cluster(scenario, system, workload)
    began_s = time.process_time()
    result = run_workload(cluster, workload)
    return time.process_time() - began_s, result


def shares(profile: cProfile.Profile) -> list[tuple[str, float]]:
    """Return each part's share of the time; what is called from outside the project counts for its caller."""
    stats: dict[Any, Any] = vars(pstats.Stats(profile))["stats"]
    seconds: Counter[str] = Counter()
    for (file, _, _), (_, _, own_s, _, callers) in stats.items():
        if file.startswith(ROOT) or not callers:
            seconds[_part_of(file)] += own_s
        else:
            for (caller, _, _), (_, _, from_there_s, _) in callers.items():
                seconds[_part_of(caller)] += from_there_s
    total_s = sum(seconds.values())
    return [(part, part_s / total_s) for part, part_s in seconds.most_common()]


def _part_of(file: str) -> str:
    if not file.startswith(ROOT) or "/.venv/" in file:
        return "asyncio, numpy and others by themselves"
    name = file.removeprefix(ROOT)
    return next((part for part, prefixes in PARTS if name.startswith(prefixes)), "other")


@dataclass
class Spans:
    """Steps of all engines, by what they have in common with the step before of the same engine."""

    num_steps: int = 0
    num_same_rows: int = 0
    """Decodes of the same sequences: none came, ended or is computing its prompt."""
    num_same_blocks: int = 0
    """Of these, the steps in which no sequence needed a new block either."""
    _rows: dict[int, bytes] = field(default_factory=dict)

    def note(self, engine: Engine, batch: Batch) -> None:
        """Count a step that was taken in."""
        rows = batch.rows.tobytes() if (batch.num_tokens == 1).all() else b""
        same = bool(rows) and self._rows.get(id(engine)) == rows
        self._rows[id(engine)] = rows
        self.num_steps += 1
        self.num_same_rows += same
        self.num_same_blocks += same and not batch.table_delta.row.size


def count_spans(scenario: Scenario, system: str, seed: int, traces: Path | None) -> Spans:
    """Run once and count."""
    spans, absorb = Spans(), Engine.absorb

    def counting(engine: Engine, batch: Batch, output: BatchOutput, now_s: float) -> StepEvents:
        spans.note(engine, batch)
        return absorb(engine, batch, output, now_s)

    with patch.object(Engine, "absorb", counting):
        run(scenario, system, seed, traces)
    return spans


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="kunserve-v2")
    parser.add_argument("--traces", type=Path, help="folder of the traces that the scenario names")
    parser.add_argument("--system", default="fcfs")
    parser.add_argument("--duration", type=float, help="seconds of arrivals [the scenario's]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--spans", action="store_true")
    chosen = parser.parse_args()
    scenario = load_scenario(chosen.scenario)
    if chosen.duration is not None:
        scenario = scenario.with_overrides(duration_s=chosen.duration)
    with only_from("error"):
        measure(scenario, chosen)


def measure(scenario: Scenario, chosen: argparse.Namespace) -> None:
    """Run once for the speed and, if asked, once more for the shares."""
    cpu_s, result = run(scenario, chosen.system, chosen.seed, chosen.traces)
    num_steps, num_tokens = result.num_steps or 0, int(result.records.num_tokens.sum())
    print_table(
        f"{chosen.scenario}, {chosen.system}, {scenario.duration_s} s of arrivals ({machine()})",
        ("requests", "steps", "tokens", "processor s", "us per step", "us per token"),
        [
            (
                str(len(result.records)),
                str(num_steps),
                str(num_tokens),
                f"{cpu_s:.1f}",
                f"{cpu_s / num_steps * 1e6:.0f}",
                f"{cpu_s / num_tokens * 1e6:.1f}",
            )
        ],
    )
    if chosen.profile:
        profile = cProfile.Profile()
        profile.enable()
        run(scenario, chosen.system, chosen.seed, chosen.traces)
        profile.disable()
        rows = [(part, f"{share:.1%}") for part, share in shares(profile)]
        print_table("Where the time goes", ("part", "share"), rows)
    if chosen.spans:
        spans = count_spans(scenario, chosen.system, chosen.seed, chosen.traces)
        counts = (spans.num_same_rows, spans.num_same_blocks)
        print_table(
            "Steps in which nothing but decoding happens",
            ("steps", "same sequences as before", "and no new block", "steps per change", "or block"),
            [
                (
                    str(spans.num_steps),
                    *(f"{count / spans.num_steps:.1%}" for count in counts),
                    *(f"{spans.num_steps / (spans.num_steps - count):.2f}" for count in counts),
                )
            ],
        )


if __name__ == "__main__":
    main()
