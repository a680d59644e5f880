"""How few workers serve a load, and what readers notice: packing systems on the virtual clock, steps, queues and links.

    python -m benchmarks.packing_runs [--scenario mell-chat-7b] [--systems worst-fit load-balance mell pack]
        [--duration 300] [--warm-up 120] [--seeds 1] [--gbps 25] [--rate R] [--instances N]
        [--per-host N] [--host-gbps 200] [--moves-as adaptive kv tokens] [--plot FILE]

Conversations times ten come for some time; a run ends with the last arrival. From a warm-up on: *peak* and *GPU-s* of
workers in use, over what the KV that is held would need as if it were a fluid; *by sizes*, the same of a replay of
sizes alone (`kv_sizes`) of the same requests, which decode as fast as they did; TTFT and TPOT of the requests that
came since and have begun. Of the whole run: *kept*, how many requests were whole by its end and never lost their KV
(what the paper's request serving ratio counts), of how many that came; *recomputed*, how often a request lost it, per
request; moves and overflows. Means over seeds, and P99 of all requests together.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.harness import print_table
from benchmarks.kv_sizes import PACKERS, replay
from shared.process.log import only_from
from sim.experiment.result import Samples
from sim.experiment.run import Progress, StopRun, run_workload
from sim.experiment.setup import build_cluster
from sim.scenarios.files import load_scenario
from sim.scenarios.parts import HostSpec
from sim.scenarios.scenario import Scenario
from sim.scenarios.variants import Variant
from sim.workload.workload import F64

BITS: Final = 8e-9
"""Gbps of a byte per second."""
PLOTTED_SAMPLES: Final = 50
"""From one point of a curve to the next."""
HEAD: Final = (
    "",
    "workers",
    "peak",
    "GPU-s",
    "by sizes",
    "kept",
    "moves",
    "recomputed",
    "overflows",
    "TTFT P50; P99",
    "TPOT P50; P99",
)


@dataclass(frozen=True, slots=True)
class Load:
    """What comes, and where."""

    scenario: str
    duration_s: float
    warm_up_s: float
    gbps: float | None
    """Of an instance's link; None: the scenario's."""
    rate_per_s: float | None
    instances: int | None = None
    """None: as many as the scenario has."""
    moves_as: str | None = None
    """See `PlannerSettings`."""
    per_host: int | None = None
    """Instances that share a host; None: as the scenario has them."""
    host_gbps: float = 200.0
    """From one to another there."""

    def scenario_of(self, system: str) -> Scenario:
        """Return it, with a variant of the system by the name "run"."""
        scenario = load_scenario(self.scenario)
        if self.rate_per_s is not None:
            scenario = scenario.with_overrides(rate_per_s=self.rate_per_s)
        changes: dict[str, Any] = {
            "duration_s": self.duration_s,
            "variants": {"run": Variant(system=system, planner={"moves_as": self.moves_as} if self.moves_as else {})},
        }
        if self.gbps is not None:
            changes["network_bytes_per_s"] = self.gbps / BITS
        if self.instances is not None:
            changes["instances"] = self.instances
        if self.per_host is not None:
            changes["hosts"] = HostSpec(instances=self.per_host, bytes_per_s=self.host_gbps / BITS)
        return scenario.model_copy(update=changes)


@dataclass(frozen=True, slots=True)
class Seen:
    """One run, from the warm-up to the last arrival."""

    num_requests: int
    peak: float
    """Workers in use at most, over what the KV that is held at most would need."""
    gpu_s: float
    """The same of worker-seconds."""
    mean_gpus: float
    by_sizes: float
    """GPU-s of the replay of sizes; NaN: the system has none."""
    num_kept: int
    num_moves: int
    num_preemptions: int
    num_overflows: int
    ttft_s: F64
    """[n]"""
    tpot_s: F64
    """[n]"""
    plotted: tuple[F64, F64, F64]
    """Seconds, workers in use, and those that the KV that is held would need."""


def look(system: str, seed: int, load: Load) -> Seen:
    """Return what one run shows."""
    scenario = load.scenario_of(system)
    workload = scenario.workload(seed)

    def stop_at_end(progress: Progress) -> None:
        if progress.at_s > progress.end_s:
            raise StopRun

    with only_from("error"):
        run = run_workload(build_cluster(scenario, "run", workload), workload, stop_at_end)
    assert run.samples is not None
    peak, gpu_s, mean = _over_kv(run.samples, load.warm_up_s)
    records = run.records.select(run.records.arrival_s >= load.warm_up_s)
    by_sizes = math.nan
    if system in PACKERS:
        token_s, until_s = float(np.nanmean(run.records.tpot_s)), float(workload.arrival_s[-1])
        packer = PACKERS[system](scenario.instance().kv_tokens)
        by_sizes = replay(workload, packer, token_s, until_s, warm_up_s=load.warm_up_s).figures()["GPU-s"]
    return Seen(
        len(run.records),
        peak,
        gpu_s,
        mean,
        by_sizes,
        int((run.records.is_complete & (run.records.num_preemptions == 0)).sum()),
        run.facts.migrations or 0,
        run.facts.preemptions or 0,
        run.facts.overflows or 0,
        records.ttft_s[~np.isnan(records.ttft_s)],
        records.tpot_s[~np.isnan(records.tpot_s)],
        (run.samples.at_s, run.samples.num_busy_gpus, _needed(run.samples)),
    )


def _over_kv(samples: Samples, from_s: float) -> tuple[float, float, float]:
    """Return the peak and the mean of workers in use over what KV needs, and the mean itself."""
    seen = samples.at_s >= from_s
    needed, busy = _needed(samples)[seen], samples.num_busy_gpus[seen]
    return float(busy.max() / needed.max()), float(busy.mean() / needed.mean()), float(busy.mean())


def _needed(samples: Samples) -> F64:
    return samples.used_blocks / (samples.num_blocks / samples.num_gpus)


def row_of(system: str, runs: Sequence[Seen]) -> Sequence[str]:
    """Return what is printed of a system."""
    by_sizes = float(np.mean([run.by_sizes for run in runs]))
    requests = sum(run.num_requests for run in runs)
    ttft_s, tpot_s = (np.concatenate([getattr(run, name) for run in runs]) for name in ("ttft_s", "tpot_s"))
    return (
        system,
        f"{np.mean([run.mean_gpus for run in runs]):.1f}",
        f"{np.mean([run.peak for run in runs]):.3f}",
        f"{np.mean([run.gpu_s for run in runs]):.3f}",
        "" if math.isnan(by_sizes) else f"{by_sizes:.3f}",
        f"{sum(run.num_kept for run in runs)} of {requests}",
        f"{sum(run.num_moves for run in runs) / requests:.2f}",
        f"{sum(run.num_preemptions for run in runs) / requests:.3f}",
        f"{sum(run.num_overflows for run in runs)}",
        f"{np.median(ttft_s):.3f}; {np.percentile(ttft_s, 99):.2f} s",
        f"{np.median(tpot_s) * 1e3:.0f}; {np.percentile(tpot_s, 99) * 1e3:.0f} ms",
    )


def plot(runs: Mapping[str, Seen], title: str, file: Path) -> None:
    """Draw workers in use over time, and those that the KV of the last run would need."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: Any = {"svg.hashsalt": "sluice", "svg.fonttype": "none"}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        axes = figure.subplots()
        for name, run in runs.items():
            axes.plot(run.plotted[0][::PLOTTED_SAMPLES], run.plotted[1][::PLOTTED_SAMPLES], label=name, lw=0.8)
        name, run = list(runs.items())[-1]
        at_s, _, needed = run.plotted
        told = f"what the KV needs, {name}"
        axes.plot(at_s[::PLOTTED_SAMPLES], needed[::PLOTTED_SAMPLES], label=told, color="black", lw=0.8, ls=":")
        axes.set(xlabel="seconds", ylabel="workers in use", title=title)
        axes.legend(fontsize=7)
        figure.savefig(file, metadata={"Date": None, "Creator": None})
    print(f"wrote {file}")


def main() -> None:
    """Print a row for each system."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="mell-chat-7b")
    parser.add_argument("--systems", nargs="+", default=["worst-fit", "load-balance", "mell", "pack"])
    parser.add_argument("--duration", type=float, default=300.0, help="seconds of arrivals")
    parser.add_argument("--warm-up", type=float, default=120.0, help="seconds that do not count")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--gbps", type=float, help="of an instance's link; the scenario's if nothing is said")
    parser.add_argument("--rate", type=float, help="requests per second; the scenario's if nothing is said")
    parser.add_argument("--instances", type=int, help="so many, and no more; the scenario's if nothing is said")
    parser.add_argument("--per-host", type=int, help="instances that share a host; the scenario's if nothing is said")
    parser.add_argument("--host-gbps", type=float, default=200.0, help="from one to another there (PCIe 4.0: 200)")
    parser.add_argument("--moves-as", nargs="+", choices=["adaptive", "kv", "tokens"], default=[None])
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw workers over time, of seed 0")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    load = Load(
        asked.scenario,
        asked.duration,
        asked.warm_up,
        asked.gbps,
        asked.rate,
        asked.instances,
        per_host=asked.per_host,
        host_gbps=asked.host_gbps,
    )
    ways = {
        f"{system}, moves {kind}" if kind else system: (system, replace(load, moves_as=kind))
        for system, kind in product(asked.systems, asked.moves_as)
    }
    rows: list[Sequence[str]] = []
    plotted: dict[str, Seen] = {}
    with ProcessPoolExecutor(asked.jobs) as pool:
        runs = {
            name: [pool.submit(look, system, seed, each) for seed in range(asked.seeds)]
            for name, (system, each) in ways.items()
        }
        for name, futures in runs.items():
            found = [future.result() for future in futures]
            plotted[name] = found[0]
            rows.append(row_of(name, found))
            print(*rows[-1], sep="  ", flush=True)
    print_table(asked.scenario, HEAD, rows)
    if asked.plot:
        plot(plotted, asked.scenario, asked.plot)


if __name__ == "__main__":
    main()
