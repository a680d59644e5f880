"""Readers of one CPU worker and a batch of best effort beside them: what the readers see, and what the batch gets done.

    python -m benchmarks.best_effort_live [--system andes,fcfs-chunked] [--best-effort 8] [--readers 20] [--turns 3]

One worker with one thread per system, as in `qoe_live.py` and with the same model and readers, has KV for a third of
what readers and batch take in the end, and host memory. A turn has three phases with the same readers: readers alone;
readers and a closed loop of so many requests with `service_tier` flex; this loop alone, for as long as before. Clusters
of several systems take turns. The loop goes on until the last reader has read all, which takes about as long with every
system, however early it writes the text. Tokens of the batch are those that arrived, over the time of the loop.

What is aimed at: nothing on a reader's screen stalls for more than a second, and the batch gets half of what it gets
alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.harness import machine, print_table
from benchmarks.live_cluster import ANSWER_LIMIT_S
from benchmarks.peers_load import Share, foreign_share, wait_idle
from benchmarks.peers_model import FIRST_ID, NUM_TOKENS, make_checkpoint
from benchmarks.qoe_live import (
    BLOCK_SIZE,
    HOST_MEMORY,
    MODEL,
    SHAPE,
    STALL_S,
    Reading,
    ServedCluster,
    readings_of,
    served,
    third_of,
)
from cli.bench.best_effort import ClosedLoop, tier_fields
from cli.bench.load import HttpLoad, http_send
from cli.bench.report import summarise_best_effort
from cli.bench.running import load_session
from cli.bench.server import BenchServer
from cli.replay.sender import replay_load, token_prompts
from services.worker.scheduling.blocks_math import ceil_div
from sim.workload.workload import Workload

PROMPT, OUTPUT = (40, 120), (80, 160)
"""Least and most tokens of a request of the batch."""
ALONE, BOTH, BATCH = "readers alone", "both", "batch alone"
LEAST_SHARE = 0.5
"""Of what the batch gets alone: what is aimed at."""


@dataclass(frozen=True, slots=True)
class Phase:
    """What came of one phase."""

    system: str
    title: str
    readings: list[Reading]
    tokens_per_s: float
    """Of the batch."""
    num_done: int
    """Requests of the batch."""
    duration_s: float
    """Of the batch."""
    preemptions: int
    foreign_ratio: float
    """Share of the machine that others used."""

    @property
    def stall_s(self) -> float:
        """The longest one on any screen."""
        return max([0.0, *(reading.stall_s for reading in self.readings)])


def documents(server: BenchServer, seed: int) -> Callable[[int], bytes]:
    """Return what makes the request of the batch of a number."""

    def body_of(number: int) -> bytes:
        rng = np.random.default_rng((seed, number))
        num_prompt, num_output = (int(rng.integers(*bounds, endpoint=True)) for bounds in (PROMPT, OUTPUT))
        fields = server.body(rng.integers(FIRST_ID, NUM_TOKENS, num_prompt).tolist(), num_output)
        fields |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0, "ignore_eos": True}
        return json.dumps(fields | tier_fields(server)).encode()

    return body_of


async def until_read(load: HttpLoad) -> None:
    """Send a load, and return when its readers have read all."""
    await load.run()
    ends_s = [reading.sent_s + reading.displayed_s[-1] for reading in readings_of(load)]
    await asyncio.sleep(max(ends_s) - load.clock())


async def run_phase(
    cluster: ServedCluster, names: tuple[str, str], workload: Workload | None, num_in_flight: int, alone_s: float = 0.0
) -> Phase:
    """Run readers, a batch, or both.

    Args:
        cluster: idle.
        names: of the system and of the phase.
        workload: of the readers; None: only the batch, for `alone_s`.
        num_in_flight: requests of the batch; 0: none.
        alone_s: how long the batch goes on without readers.

    Raises:
        RuntimeError: an answer failed: then the figures are worth nothing.
    """
    preempted = (await cluster.worker_reports())[0].num_preemptions_total
    before = Share.take(cluster.pid)
    async with load_session(ANSWER_LIMIT_S, "") as session:
        server = await BenchServer.find(session, cluster.url, "", "completions")
        send = http_send(session, server, documents(server, seed=7), time.perf_counter)
        batch = ClosedLoop(send, num_in_flight, time.perf_counter)
        load = None if workload is None else replay_load(session, server, workload, token_prompts(workload))
        beside = asyncio.create_task(batch.run(), name="batch")
        try:
            await (asyncio.sleep(alone_s) if load is None else until_read(load))
        finally:
            beside.cancel()
            with suppress(asyncio.CancelledError):
                await beside
    outcomes = [*batch.outcomes, *(load.outcomes if load is not None else ())]
    if failed := [outcome.failure for outcome in outcomes if outcome.failure]:
        raise RuntimeError(f"{len(failed)} answers failed, the first with {failed[0]}")
    done = summarise_best_effort(batch.outcomes, batch.duration_s)
    after = (await cluster.worker_reports())[0].num_preemptions_total
    phase = Phase(
        *names,
        [] if load is None else readings_of(load),
        done["output_tokens_per_s"] or 0.0,
        done["num_complete"],
        batch.duration_s,
        after - preempted,
        foreign_share(before, Share.take(cluster.pid)),
    )
    print(*_row([phase], 0.0), sep="  ", file=sys.stderr, flush=True)
    return phase


async def measure(chosen: argparse.Namespace, folder: Path) -> list[Phase]:
    """Return the phases of all turns."""
    shape = replace(SHAPE, burst_requests=chosen.readers)
    workloads = [shape.draw(seed) for seed in range(1, chosen.turns + 1)]
    of_batch = chosen.best_effort * ceil_div(PROMPT[1] + OUTPUT[1], BLOCK_SIZE) // 3
    phases, num_blocks = list[Phase](), third_of(workloads) + of_batch
    print(f"{num_blocks} blocks of {BLOCK_SIZE} tokens", file=sys.stderr, flush=True)
    async with served(folder / MODEL, num_blocks, chosen.system, HOST_MEMORY) as found:
        for workload in workloads:
            for system, cluster in found.items():
                both_s = 0.0
                for title in (ALONE, BOTH, BATCH):
                    await wait_idle()
                    readers = None if title == BATCH else workload
                    num_in_flight = 0 if title == ALONE else chosen.best_effort
                    phases.append(await run_phase(cluster, (system, title), readers, num_in_flight, both_s))
                    both_s = phases[-1].duration_s
    return phases


HEAD = (
    *("system", "phase", "latest text, s", "QoE, mean", "least", "longest stall, s", f"readers > {STALL_S:g} s"),
    *("batch, requests", "tokens/s", "of alone", "preemptions", "others, %"),
)


def _row(phases: Sequence[Phase], alone: float) -> list[str]:
    """Return the cells of one system's phase: medians of its turns, of readers the worst of all turns."""
    readings = [reading for phase in phases for reading in phase.readings]
    qoe = [reading.qoe for reading in readings]
    rate = statistics.median(phase.tokens_per_s for phase in phases)
    cells = [phases[0].system, phases[0].title]
    if readings:
        latest_s = max(reading.delivered_s[0] for reading in readings)
        stalls = f"{sum(reading.stall_s > STALL_S for reading in readings)} of {len(readings)}"
        worst_s = max(phase.stall_s for phase in phases)
        cells += [f"{latest_s:.1f}", f"{statistics.mean(qoe):.3f}", f"{min(qoe):.3f}", f"{worst_s:.1f}", stalls]
    else:
        cells += ["-"] * 5
    num_done = statistics.median(phase.num_done for phase in phases)
    cells += [f"{num_done:.0f}", f"{rate:.0f}", f"{rate / alone:.0%}" if alone else "-"]
    counts = (statistics.median(phase.preemptions for phase in phases), 100 * max(p.foreign_ratio for p in phases))
    return [*cells, *(f"{count:.0f}" for count in counts)]


def report(phases: Sequence[Phase], taken_s: float) -> None:
    """Print what readers and batch had, and whether the aims are reached."""
    rows, words = [], []
    for system in dict.fromkeys(phase.system for phase in phases):
        own = {
            title: [phase for phase in phases if (phase.system, phase.title) == (system, title)]
            for title in (ALONE, BOTH, BATCH)
        }
        alone = statistics.median(phase.tokens_per_s for phase in own[BATCH])
        rows += [_row(found, alone if title == BOTH else 0.0) for title, found in own.items()]
        worst_s = max(phase.stall_s for phase in own[BOTH])
        share = statistics.median(phase.tokens_per_s for phase in own[BOTH]) / alone if alone else 0.0
        is_reached = worst_s <= STALL_S and share >= LEAST_SHARE
        words.append(
            f"{system}: longest stall {worst_s:.2f} s (at most {STALL_S:g}), batch {share:.0%} of alone "
            f"(at least {LEAST_SHARE:.0%}): {'reached' if is_reached else 'missed'}"
        )
    print_table(f"Readers: worst of all turns; batch: medians ({machine()}; {taken_s:.0f} s in all)", HEAD, rows)
    print("\n".join(words))


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--system", type=lambda text: text.split(","), default=["andes"], help="names [andes]")
    parser.add_argument("--best-effort", type=int, default=8, help="requests of the batch under way [%(default)s]")
    parser.add_argument("--readers", type=int, default=20, help="[%(default)s]")
    parser.add_argument("--turns", type=int, default=3, help="of each system [%(default)s]")
    parser.add_argument("--folder", type=Path, help="checkpoint and logs go here [a temporary one]")
    chosen = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        make_checkpoint(MODEL, folder / MODEL)
        phases = asyncio.run(measure(chosen, folder))
    report(phases, time.monotonic() - began_s)


if __name__ == "__main__":
    main()
