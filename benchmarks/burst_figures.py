"""The figures of `benchmarks.live_burst`: runs by system and seed, kept in a file, and the tables of them.

A machine that others use now and then is measured bit by bit: of each run the one that was disturbed least stays.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.burst_load import BurstShape, Watched
from benchmarks.harness import machine, print_table

MAX_FOREIGN_RATIO = 0.05
"""A run during which others used more of the machine is done again."""


@dataclass(frozen=True, slots=True)
class Run:
    """One system under the load of one seed."""

    system: str
    seed: int
    summary: dict[str, Any]
    """As `sluice replay` has it."""
    watched: Watched
    foreign_ratio: float
    """Of the machine that others used meanwhile."""
    lateness_p99_s: float

    @property
    def is_quiet(self) -> bool:
        """Whether others left the machine alone."""
        return self.foreign_ratio <= MAX_FOREIGN_RATIO

    @property
    def ttft_p99_s(self) -> float:
        """Of this run."""
        found: float = self.summary["ttft_s"]["p99"]
        return found


class Figures:
    """The runs so far.

    Args:
        shape: of the load; runs of another one do not count.
        path: where they are kept, and looked for first; None: nowhere.
    """

    def __init__(self, shape: BurstShape, path: Path | None) -> None:
        self.shape = shape
        self._load = json.loads(json.dumps(asdict(shape)))
        self._path = path
        self._runs: dict[tuple[str, int], Run] = {}
        if path is not None and path.is_file():
            kept = json.loads(path.read_text(encoding="utf-8"))
            runs = [_read(fields) for fields in kept["runs"]] if kept["load"] == self._load else []
            self._runs = {(run.system, run.seed): run for run in runs}

    def missing(self, system: str, seeds: Sequence[int]) -> list[int]:
        """Return the seeds of which there is no quiet run of this system."""
        return [seed for seed in seeds if not ((run := self._runs.get((system, seed))) and run.is_quiet)]

    def note(self, run: Run) -> None:
        """Keep a run, unless there is one that was disturbed less."""
        known = self._runs.get((run.system, run.seed))
        if known is None or run.foreign_ratio < known.foreign_ratio:
            self._runs[run.system, run.seed] = run
        if self._path is not None:
            kept = {"load": self._load, "runs": [asdict(each) for each in self._runs.values()]}
            self._path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")

    def of(self, system: str, seeds: Sequence[int]) -> list[Run]:
        """Return what there is of a system, seed by seed."""
        return [self._runs[system, seed] for seed in seeds if (system, seed) in self._runs]


def _read(fields: dict[str, Any]) -> Run:
    return Run(**{**fields, "watched": Watched(**fields["watched"])})


HEAD = (
    "system",
    "seed",
    "done",
    "TTFT p50 / p99",
    "TPOT p50 / p99",
    "gap p99 / max",
    "QoE mean / p10",
    "KV use",
    "throttled",
    "drops",
    "restores",
    "in a group",
    "others",
)
"""*Gap*: an answer's longest pause. *Others*: the share of the machine that others used."""


def row(run: Run) -> tuple[str, ...]:
    """Return the cells of one run."""
    summary, watched = run.summary, run.watched
    tpot, stall, qoe = summary["tpot_s"], summary["stall_s"], summary["qoe"]
    return (
        run.system,
        str(run.seed),
        f"{summary['completed']} of {summary['requests']}",
        f"{summary['ttft_s']['p50']:.2f} / {summary['ttft_s']['p99']:.2f} s",
        f"{1e3 * tpot['p50']:.1f} / {1e3 * tpot['p99']:.1f} ms",
        f"{stall['p99']:.2f} / {stall['max']:.2f} s",
        f"{qoe['mean']:.3f} / {qoe['p10']:.3f}",
        f"{watched.mean_use_ratio:.0%}, peak {watched.demand_peak_ratio:.0%}",
        f"{watched.num_windows} × {watched.throttled_s / max(watched.num_windows, 1):.1f} s",
        str(watched.drops),
        str(watched.restores),
        f"{watched.grouped_ratio:.0%}",
        f"{run.foreign_ratio:.0%}",
    )


def report(runs: Sequence[Run]) -> None:
    """Print every run, and how much sooner `kunserve` begins to answer."""
    print_table("Every run", HEAD, [row(run) for run in runs])
    p99_s = {(run.system, run.seed): run.ttft_p99_s for run in runs}
    ours = "kunserve"
    seeds = list(dict.fromkeys(run.seed for run in runs if run.system == ours))
    rows: list[Sequence[str]] = []
    for name in dict.fromkeys(run.system for run in runs if run.system != ours):
        ratios = {seed: p99_s[name, seed] / p99_s[ours, seed] for seed in seeds if (name, seed) in p99_s}
        if ratios:
            cells = [f"{ratios[seed]:.2f}" if seed in ratios else "-" for seed in seeds]
            rows.append((name, *cells, f"{statistics.median(ratios.values()):.2f}", f"{min(ratios.values()):.2f}"))
    title = "P99 TTFT over that of `kunserve`, by seed"
    print_table(title, ("system", *map(str, seeds), "median", "least"), rows)
    print(f"\n{machine()}; load average {os.getloadavg()[1]:.1f} over the last five minutes, own processes included")
