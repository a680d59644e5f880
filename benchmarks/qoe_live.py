"""Forty readers of one CPU worker that has KV for a third of them: what each has on the screen when, by system.

    python -m benchmarks.qoe_live [--turns 3] [--bare-turns 1] [--vllm-python P] [--svg FILE]

Clusters of one worker with one thread, the same but for their system, take turns with the same readers: new ones in
each turn, who come within some seconds and read at the paper's mean speed. Blocks are as many as a third of the readers
need in the end (`max_blocks`). First with host memory for KV that gives way, then without; then vLLM, if the Python of
an environment that has it is named, with as many blocks and no prefix cache.

Before the first turn each has answered some requests, so that it knows what its steps cost. Timelines are computed from
the deliveries at the client (`sluice_client.qoe`), in seconds from the sending of each request. A stall is time for
which a reader has read everything and waits for more, after the first text. The model (`medium` of `peers_model.py`) is
one that cannot write at once for as many as there is memory for in a moment: with a faster one nobody waits.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.burst_load import BurstShape
from benchmarks.fidelity.loads import sequential
from benchmarks.harness import machine, print_table
from benchmarks.live_cluster import LiveCluster, send_load
from benchmarks.peers_engines import Setting
from benchmarks.peers_load import wait_idle
from benchmarks.peers_model import make_checkpoint
from benchmarks.peers_servers import VllmServer
from cli.bench.load import HttpLoad
from cli.bench.stream import BenchRecord
from cli.profile.driver import read_steps
from services.worker.scheduling.blocks_math import ceil_div
from sim.workload.workload import Workload
from sluice_client.qoe import QoeTarget, displayed_times, final_qoe

NUM_READERS = 40
TARGET = QoeTarget(ttft_s=1.0, speed_tokens_per_s=4.8)
SHAPE = BurstShape(
    calm_s=0.5,
    calm_requests=0,
    burst_s=12.0,
    burst_requests=NUM_READERS,
    num_bursts=1,
    prompt_tokens=(20, 60),
    output_tokens=(220, 320),
    reader=(TARGET.ttft_s, TARGET.speed_tokens_per_s),
)
SYSTEMS = ("andes", "fcfs-chunked")
BARE, VLLM = ", no host memory", "vLLM"
MODEL, DTYPE, BLOCK_SIZE = "medium", "bfloat16", 16
MEMORY, HOST_MEMORY = "2GiB", "1GiB"
WARM_UP = (12, 100, 40, 0.2)
"""Requests, tokens of their prompts and of their answers, seconds between arrivals."""
LAST_STEPS = 500
"""Of a turn, which has more: those that are looked at."""
SETTLE_S = 1.5
"""Until the newest view has the end of a load."""
MAX_LEN = 1024
LATE_S, LEAST_QOE, STALL_S = 5.0, 0.95, 1.0
"""What is aimed at for each reader."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one reader had; seconds since the request was sent, or since the load began where it says so."""

    sent_s: float
    """Since the load began."""
    delivered_s: list[float]
    """Of each token."""

    @classmethod
    def of(cls, outcome: BenchRecord) -> Reading:
        """Return what came of a request."""
        times = [at_s - outcome.sent_s for at_s, count in outcome.deliveries for _ in range(count)]
        return cls(outcome.sent_s, times)

    @property
    def displayed_s(self) -> list[float]:
        """Of each token."""
        return displayed_times(TARGET, self.delivered_s)

    @property
    def qoe(self) -> float:
        """In [0, 1]."""
        return final_qoe(TARGET, self.delivered_s)

    @property
    def stall_s(self) -> float:
        """The longest one."""
        gap_s = 1 / TARGET.speed_tokens_per_s
        return max(after - before - gap_s for before, after in itertools.pairwise(self.displayed_s))


@dataclass(frozen=True, slots=True)
class Turn:
    """What one system made of the readers of one seed."""

    title: str
    seed: int
    readings: list[Reading]
    preemptions: int | None
    recomputed_tokens: int | None
    """None: it does not say."""
    foreign_ratio: float
    """Share of the machine that others used."""
    loop_ratio: float | None = None
    """What the step loop takes between steps, of what the steps take: the median step. Decisions are a part of it."""

    @property
    def figures(self) -> list[float]:
        """Of the columns of `HEAD`, but for the title and the counts."""
        first_s, qoe = [reading.delivered_s[0] for reading in self.readings], [each.qoe for each in self.readings]
        stalls_s = [reading.stall_s for reading in self.readings]
        ends_s = [reading.sent_s + reading.delivered_s[-1] for reading in self.readings]
        num_tokens = sum(len(reading.delivered_s) for reading in self.readings)
        return [
            statistics.mean(first_s),
            max(first_s),
            statistics.mean(qoe),
            min(qoe),
            sum(each >= LEAST_QOE for each in qoe),
            max(stalls_s),
            sum(each > STALL_S for each in stalls_s),
            num_tokens / (max(ends_s) - min(reading.sent_s for reading in self.readings)),
        ]

    @property
    def num_missed(self) -> int:
        """Readers for whom one of the aims is missed."""
        return sum(
            reading.delivered_s[0] > LATE_S or reading.qoe < LEAST_QOE or reading.stall_s > STALL_S
            for reading in self.readings
        )


HEAD = (
    *("system", "first text, mean, s", "latest", "QoE, mean", "least", f"readers ≥ {LEAST_QOE}", "longest stall, s"),
    *(f"readers > {STALL_S:g} s", "tokens/s", "preemptions", "tokens again", "loop, %", "others, %"),
)
_FORMATS = (".2f", ".1f", ".3f", ".3f", ".0f", ".1f", ".0f", ".0f")


class ServedCluster(LiveCluster):
    """One that notes how often somebody gave way in a load."""

    async def turn(self, title: str, seed: int, workload: Workload) -> Turn:
        """Send the load of a seed."""
        before = (await self.worker_reports())[0]
        load, foreign_ratio = await self.send(workload)
        await asyncio.sleep(SETTLE_S)
        after = (await self.worker_reports())[0]
        steps, _ = await read_steps(self.bus, self.subjects, after.worker_id, 0)
        loops = [
            step.period_s / step.duration_s - 1 for step in steps[-LAST_STEPS:] if step.period_s and step.duration_s
        ]
        counts = (
            after.num_preemptions_total - before.num_preemptions_total,
            after.num_recomputed_tokens_total - before.num_recomputed_tokens_total,
        )
        return Turn(title, seed, readings_of(load), *counts, foreign_ratio, statistics.median(loops))


def readings_of(load: HttpLoad) -> list[Reading]:
    """Return what the readers of a load had, in the order in which they came."""
    return [Reading.of(outcome) for outcome in load.outcomes]


def third_of(workloads: Sequence[Workload]) -> int:
    """Return the blocks that a third of the readers take in the end, in the load that takes least."""
    ends = [workload.num_prompt + workload.num_output for workload in workloads]
    return min(sum(ceil_div(int(end), BLOCK_SIZE) for end in each) for each in ends) // 3


@asynccontextmanager
async def served(
    checkpoint: Path, num_blocks: int, systems: Sequence[str], host_memory: str
) -> AsyncIterator[dict[str, ServedCluster]]:
    """Run a cluster of each system, warm; gives them by system."""
    found: dict[str, ServedCluster] = {}
    folder = checkpoint.parent
    flags = ["--model", str(checkpoint), "--dtype", DTYPE, "--memory", MEMORY, "--host-memory", host_memory]
    flags += ["--workers", "1", "--threads", "1", "--costs-kept", str(folder / "costs")]
    flags += ["--max-model-len", str(MAX_LEN)]
    try:
        for system in systems:
            found[system] = ServedCluster()
            log = folder / f"{system}-{host_memory}.log"
            env = {"SLUICE_WORKER_MAX_BLOCKS": str(num_blocks)}
            await found[system].serve(*flags, "--system", system, log=log, env=env)
            await found[system].send(sequential(*WARM_UP, seed=90))
        yield found
    finally:
        for cluster in found.values():
            await cluster.stop()


async def measure_vllm(python: str, checkpoint: Path, num_blocks: int, workloads: Sequence[Workload]) -> list[Turn]:
    """Return its turns; none if it does not start."""
    server, turns = VllmServer(python, checkpoint.parent), list[Turn]()
    setting = Setting(checkpoint, DTYPE, 1, MAX_LEN, MEMORY, 1, 0, num_blocks)
    try:
        try:
            await server.start(setting)
        except (RuntimeError, OSError, TimeoutError) as error:
            print(f"skipped: {VLLM} does not start: {error}", file=sys.stderr, flush=True)
            return []
        await send_load(server.url, server.pid, sequential(*WARM_UP, seed=90))
        for workload in workloads:
            await wait_idle()
            load, foreign_ratio = await send_load(server.url, server.pid, workload)
            turns.append(Turn(VLLM, workload.seed, readings_of(load), None, None, foreign_ratio))
            say(turns[-1])
    finally:
        await server.stop()
    return turns


def say(turn: Turn) -> None:
    """Say how it went."""
    mean_s, latest_s, qoe, least, _, stall_s, _, rate = turn.figures
    print(
        f"{turn.title}, seed {turn.seed}: first text {mean_s:.1f} s, latest {latest_s:.1f}, QoE {qoe:.3f}, "
        f"least {least:.3f}, longest stall {stall_s:.1f} s, {rate:.0f} tokens/s, {turn.preemptions} preemptions, "
        f"others {turn.foreign_ratio:.0%}",
        file=sys.stderr,
        flush=True,
    )


async def measure(chosen: argparse.Namespace, folder: Path) -> list[Turn]:
    """Return all turns."""
    checkpoint, turns = folder / MODEL, list[Turn]()
    workloads = [SHAPE.draw(seed) for seed in range(1, max(chosen.turns, chosen.bare_turns) + 1)]
    num_blocks = third_of(workloads)
    print(f"{NUM_READERS} readers, {num_blocks} blocks of {BLOCK_SIZE} tokens", file=sys.stderr, flush=True)
    for host_memory, suffix, count in ((HOST_MEMORY, "", chosen.turns), ("0", BARE, chosen.bare_turns)):
        if not count:
            continue
        async with served(checkpoint, num_blocks, chosen.systems, host_memory) as found:
            for number, workload in enumerate(workloads[:count]):
                for system in chosen.systems if number % 2 else chosen.systems[::-1]:
                    await wait_idle()
                    turns.append(await found[system].turn(system + suffix, workload.seed, workload))
                    say(turns[-1])
    if chosen.vllm_python:
        turns += await measure_vllm(chosen.vllm_python, checkpoint, num_blocks, workloads[: chosen.turns])
    return turns


def report(turns: Sequence[Turn], taken_s: float) -> None:
    """Print medians over turns, and whether the aims are reached."""
    rows = []
    for title in dict.fromkeys(turn.title for turn in turns):
        own = [turn for turn in turns if turn.title == title]
        columns = zip(*(turn.figures for turn in own), strict=True)
        row = [format(statistics.median(each), form) for each, form in zip(columns, _FORMATS, strict=True)]
        for counts in ([turn.preemptions for turn in own], [turn.recomputed_tokens for turn in own]):
            known = [count for count in counts if count is not None]
            row.append(f"{statistics.median(known):.0f}" if known else "?")
        loops = [turn.loop_ratio for turn in own if turn.loop_ratio is not None]
        row.append(f"{100 * statistics.median(loops):.1f}" if loops else "?")
        rows.append([title, *row, f"{100 * statistics.median(turn.foreign_ratio for turn in own):.0f}"])
    print_table(f"Medians of turns ({machine()}; {taken_s:.0f} s in all)", HEAD, rows)
    for turn in turns:
        if turn.title == SYSTEMS[0]:
            print(f"{turn.title}, seed {turn.seed}: {turn.num_missed} of {NUM_READERS} readers miss an aim")


def draw(turns: Sequence[Turn], path: Path) -> None:
    """Draw the first turn of each system with host memory: tokens of every other reader, delivered and displayed."""
    import matplotlib as mpl
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    shown = {system: next(turn for turn in turns if turn.title == system) for system in SYSTEMS}
    settings: Any = {"svg.hashsalt": "sluice", "svg.fonttype": "none", "path.simplify_threshold": 1.0}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(10, 6), layout="constrained")
        axes = figure.subplots(2, len(shown), sharex=True, sharey=True)
        for column, (system, turn) in enumerate(shown.items()):
            for place, reading in list(enumerate(turn.readings))[::2]:
                colour = colormaps["viridis"](place / NUM_READERS)
                for row, times in enumerate((reading.delivered_s, reading.displayed_s)):
                    number = np.arange(1, len(times) + 1)
                    axes[row, column].plot(np.array(times) + reading.sent_s, number, color=colour, lw=0.6)
            axes[0, column].set_title(system, fontsize="medium")
            axes[1, column].set_xlabel("seconds")
        for row, name in enumerate(("delivered", "displayed")):
            axes[row, 0].set_ylabel(f"tokens {name}")
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3, help="of each system [%(default)s]")
    parser.add_argument("--bare-turns", type=int, default=1, help="of each, without host memory [%(default)s]")
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEMS))
    parser.add_argument("--vllm-python", default="", help="interpreter of an environment with vllm")
    parser.add_argument("--svg", type=Path, help="file for the picture")
    parser.add_argument("--folder", type=Path, help="checkpoint and logs go here [a temporary one]")
    chosen = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        make_checkpoint(MODEL, folder / MODEL)
        turns = asyncio.run(measure(chosen, folder))
    report(turns, time.monotonic() - began_s)
    if chosen.svg:
        draw(turns, chosen.svg)


if __name__ == "__main__":
    main()
