"""How few workers serve a load, and what readers notice: packing systems on the virtual clock, steps, queues and links.

    python -m benchmarks.packing_runs [--scenario mell-chat-7b] [--systems worst-fit load-balance mell pack]
        [--duration 300] [--warm-up 120] [--seeds 1] [--gbps 25] [--rate R]

Conversations times ten come for some time, and after a warm-up everything is counted until the last arrival: *peak* and
*GPU-s* of workers in use, over what the KV that is held would need as if it were a fluid; *recomputed*, how often a
request lost its KV, per request. Means over seeds, and P99 of all requests that came after the warm-up.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from benchmarks.harness import print_table
from shared.process.log import only_from
from sim.experiment.result import Samples
from sim.experiment.run import Progress, StopRun, run_system
from sim.scenarios.files import load_scenario
from sim.workload.workload import F64

BITS: Final = 8e-9
"""Gbps of a byte per second."""


@dataclass(frozen=True, slots=True)
class Load:
    """What comes, and where."""

    scenario: str
    duration_s: float
    warm_up_s: float
    gbps: float | None
    """Of an instance's link; None: the scenario's."""
    rate_per_s: float | None


@dataclass(frozen=True, slots=True)
class Seen:
    """One run, from the warm-up to the last arrival."""

    num_requests: int
    peak: float
    """Workers in use at most, over what the KV that is held at most would need."""
    gpu_s: float
    """The same of worker-seconds."""
    mean_gpus: float
    num_moves: int
    num_preemptions: int
    num_overflows: int
    ttft_s: F64
    """[n]"""
    tpot_s: F64
    """[n]"""


def look(system: str, seed: int, load: Load) -> Seen:
    """Return what one run shows."""
    changes = {
        "duration_s": load.duration_s,
        **({} if load.gbps is None else {"network_bytes_per_s": load.gbps / BITS}),
    }
    scenario = load_scenario(load.scenario)
    if load.rate_per_s is not None:
        scenario = scenario.with_overrides(rate_per_s=load.rate_per_s)
    scenario = scenario.model_copy(update=changes)

    def stop_at_end(progress: Progress) -> None:
        if progress.at_s > progress.end_s:
            raise StopRun

    with only_from("error"):
        run = run_system(scenario, system, seed, on_progress=stop_at_end)
    assert run.samples is not None
    peak, gpu_s, mean = _over_kv(run.samples, load.warm_up_s)
    records = run.records.select(run.records.arrival_s >= load.warm_up_s)
    return Seen(
        len(run.records),
        peak,
        gpu_s,
        mean,
        run.facts.migrations or 0,
        run.facts.preemptions or 0,
        run.facts.overflows or 0,
        records.ttft_s[~np.isnan(records.ttft_s)],
        records.tpot_s[~np.isnan(records.tpot_s)],
    )


def _over_kv(samples: Samples, from_s: float) -> tuple[float, float, float]:
    """Return the peak and the mean of workers in use over what KV needs, and the mean itself."""
    seen = samples.at_s >= from_s
    needed = samples.used_blocks[seen] / (samples.num_blocks[seen] / samples.num_gpus[seen])
    busy = samples.num_busy_gpus[seen]
    return float(busy.max() / needed.max()), float(busy.mean() / needed.mean()), float(busy.mean())


def row_of(system: str, runs: Sequence[Seen]) -> Sequence[str]:
    """Return what is printed of a system."""
    requests = sum(run.num_requests for run in runs)
    ttft_s, tpot_s = (np.concatenate([getattr(run, name) for run in runs]) for name in ("ttft_s", "tpot_s"))
    return (
        system,
        f"{np.mean([run.mean_gpus for run in runs]):.1f}",
        f"{np.mean([run.peak for run in runs]):.3f}",
        f"{np.mean([run.gpu_s for run in runs]):.3f}",
        f"{sum(run.num_moves for run in runs) / requests:.2f}",
        f"{sum(run.num_preemptions for run in runs) / requests:.3f}",
        f"{sum(run.num_overflows for run in runs)}",
        f"{np.median(ttft_s):.3f}; {np.percentile(ttft_s, 99):.2f} s",
        f"{np.median(tpot_s) * 1e3:.0f}; {np.percentile(tpot_s, 99) * 1e3:.0f} ms",
    )


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
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    load = Load(asked.scenario, asked.duration, asked.warm_up, asked.gbps, asked.rate)
    pairs = [(system, seed) for system in asked.systems for seed in range(asked.seeds)]
    rows: list[Sequence[str]] = []
    with ProcessPoolExecutor(asked.jobs) as pool:
        runs = pool.map(partial(look, load=load), *zip(*pairs, strict=True))
        for system in asked.systems:
            found = [next(runs) for _ in range(asked.seeds)]
            rows.append(row_of(system, found))
            print(*rows[-1], sep="  ", flush=True)
    head = ("", "workers", "peak", "GPU-s", "moves", "recomputed", "overflows", "TTFT P50; P99", "TPOT P50; P99")
    print_table(asked.scenario, head, rows)


if __name__ == "__main__":
    main()
