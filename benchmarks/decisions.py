"""How long scheduling policies take to decide, where memory is short and requests wait.

    python -m benchmarks.decisions [--schedulers chunked andes lqsf] [--calls 300]
    python -m benchmarks.decisions --scenario andes-burstgpt --upscale 1.45 --traces DIR

Thread time. Contexts, how long requests have waited and how much text readers have still are drawn at random; all who
run share a system prompt, so that what each holds alone has to be told apart. *Ranking* is what Andes calls the solver:
what everybody gains, and who is served. With a scenario it is simulated, and decisions are set against the steps that
they were made for: what a device computes is modelled, and takes the time that it takes there; deciding is real.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.harness import machine, print_table
from services.worker.blocks.manager import BlockManager
from services.worker.contract.arrays import I32, AnyRows
from services.worker.contract.batch import Batch, BatchOutput
from services.worker.engine.engine import Engine
from services.worker.scheduling.andes_settings import AndesSettings
from services.worker.scheduling.ranking import rank
from services.worker.scheduling.registry import make_scheduler
from services.worker.scheduling.view import NOTHING_CACHED, CachedPrefix, Scheduler, SchedulerView
from services.worker.sequences.events import StepEvents
from shared.cost import load_profile
from shared.process.log import only_from
from shared.systems import SYSTEMS
from sim.experiment.run import run_workload
from sim.experiment.setup import build_cluster
from sim.scenarios.files import load_scenario
from tests.support.engine_views import decoding, make_view, parked

PROFILE = "qwen2.5-14b-tp1-a800"
NOW_S = 100.0
READER = (1.0, 4.8)
"""First token after a second, then tokens per second."""
BLOCK_SIZE = 16
SYSTEM_PROMPT_BLOCKS = 6
SIZES = ((64, 16), (256, 64), (512, 512), (900, 124))
"""Rows that run, and that wait."""


class HeldBlocks:
    """Block tables of rows that begin with the same blocks; nobody who waits finds anything."""

    def __init__(self, num_blocks: list[int]) -> None:
        self._manager = BlockManager(2 * sum(num_blocks), BLOCK_SIZE, np.zeros(len(num_blocks), dtype=np.int32), 200)
        for row, count in enumerate(num_blocks):
            if row:
                self._manager.share(row, self._manager.block_table[0, :SYSTEM_PROMPT_BLOCKS], None, owner="")
            self._manager.extend(np.array([row]), np.array([count * BLOCK_SIZE], dtype=np.int32))

    def freeable(self, rows: AnyRows) -> I32:
        """See `BlockFacts`."""
        return self._manager.freeable(rows)

    def cached(self, row: int) -> CachedPrefix:
        """See `BlockFacts`."""
        del row
        return NOTHING_CACHED


def moment(random: np.random.Generator, num_running: int, num_waiting: int) -> SchedulerView:
    """Return a view with little memory free."""
    count = num_running + num_waiting
    context = random.integers(100, 2000, count).tolist()
    view = make_view(
        running=[decoding(tokens, block_size=BLOCK_SIZE) for tokens in context[:num_running]],
        waiting=[parked(tokens) for tokens in context[num_running:]],
        free_blocks=50,
        block_size=BLOCK_SIZE,
        max_batch_tokens=2048,
        max_batch_rows=1024,
        now_s=NOW_S,
        cost=load_profile(PROFILE).cost,
    )
    waited_s, num, (ttft_s, speed) = random.uniform(0, 90, count), view.columns.num_output, READER
    shown_s = np.maximum(waited_s + random.uniform(-5, 30, count), ttft_s + (num - 1) / speed)
    columns = replace(
        view.columns,
        arrival_s=NOW_S - waited_s,
        qoe_ttft_s=np.full(count, ttft_s),
        qoe_speed=np.full(count, speed),
        qoe_gap_s=np.full(count, 1 / speed),
        qoe_last_s=np.where(num == 0, ttft_s - 1 / speed, shown_s),
        qoe_delay_sum_s=np.zeros(count),
    )
    blocks = HeldBlocks(columns.held_blocks[:num_running].tolist())
    return replace(view, columns=columns, blocks=blocks)


@dataclass(slots=True)
class Spent:
    """Of one simulated run."""

    num_decisions: int = 0
    deciding_s: float = 0.0
    num_steps: int = 0
    computing_s: float = 0.0


@contextmanager
def watched(policy: type[Scheduler]) -> Iterator[Spent]:
    """Count what all engines and this class of policies spend meanwhile."""
    spent, schedule, absorb = Spent(), policy.schedule, Engine.absorb

    def timed(self: Any, view: SchedulerView) -> Any:
        began_ns = time.thread_time_ns()
        output = schedule(self, view)
        spent.deciding_s += (time.thread_time_ns() - began_ns) / 1e9
        spent.num_decisions += 1
        return output

    def counted(engine: Engine, batch: Batch, output: BatchOutput, now_s: float) -> StepEvents:
        spent.num_steps += 1
        spent.computing_s += output.duration_s
        return absorb(engine, batch, output, now_s)

    with patch.object(policy, "schedule", timed), patch.object(Engine, "absorb", counted):
        yield spent


def taken_us(call: Callable[[], object], num_calls: int) -> str:
    """Return the thread time of a call: P50 / P99 of so many."""
    taken = []
    for _ in range(num_calls):
        began_ns = time.thread_time_ns()
        call()
        taken.append((time.thread_time_ns() - began_ns) / 1e3)
    return " / ".join(f"{value:.0f}" for value in np.percentile(taken, [50, 99]))


def print_times(schedulers: list[str], num_calls: int) -> None:
    """Print how long decisions take."""
    lines = list[list[str]]()
    for num_running, num_waiting in SIZES:
        view = moment(np.random.default_rng(0), num_running, num_waiting)
        times = [taken_us(partial(make_scheduler(name).schedule, view), num_calls) for name in schedulers]
        ranking = taken_us(partial(rank, view, AndesSettings()), num_calls)
        lines.append([f"{num_running} + {num_waiting}", ranking, *times])
    print_table(f"{machine()}; us of thread time, P50 / P99", ["run + wait", "ranking", *schedulers], lines)


def print_share(name: str, upscale: float, traces: Path | None, schedulers: list[str]) -> None:
    """Print what part of a simulated load's time decisions are."""
    scenario = load_scenario(name).with_overrides(upscale=upscale)
    workload, lines = scenario.workload(0, traces), list[list[str]]()
    for scheduler in schedulers:
        system = next(system.name for system in SYSTEMS.values() if system.scheduler == scheduler)
        with only_from("error"), watched(type(make_scheduler(scheduler))) as spent:
            run_workload(build_cluster(scenario, system, workload), workload)
        lines.append(
            [
                scheduler,
                f"{spent.num_steps:,}",
                f"{spent.num_decisions:,}",
                f"{1e6 * spent.deciding_s / spent.num_decisions:.0f}",
                f"{1e6 * spent.deciding_s / spent.num_steps:.0f}",
                f"{1e3 * spent.computing_s / spent.num_steps:.1f}",
                f"{spent.deciding_s / spent.computing_s:.2%}",
            ]
        )
    header = ["scheduler", "steps", "decisions", "us of each", "us per step", "ms of a step", "share"]
    print_table(f"{machine()}; {name} x {upscale:g}", header, lines)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedulers", nargs="+", default=["chunked", "andes", "lqsf"])
    parser.add_argument("--calls", type=int, default=300, help="of each line [%(default)s]")
    parser.add_argument("--scenario", help="simulate this one instead")
    parser.add_argument("--upscale", type=float, default=1.0, help="of its rate [%(default)s]")
    parser.add_argument("--traces", type=Path, help="folder of traces that it names")
    chosen = parser.parse_args()
    if chosen.scenario is None:
        print_times(chosen.schedulers, chosen.calls)
    else:
        print_share(chosen.scenario, chosen.upscale, chosen.traces, chosen.schedulers)


if __name__ == "__main__":
    main()
