"""How long a drop and a restore take on live workers under load, and what a reader sees of them.

    python -m benchmarks.live_drops [--rounds 50] [--streams 8] [--workers 2]

Real processes on this machine: nats-server, monitor, planner, workers with the demo model in memory so small that the
parameters are a quarter of it, a dispatcher. Streams run all the time; each round drops by hand and restores. The time
is the planner's own: from the publication of the plan to the last worker's word that it is carried out. Beside it, what
changes of role took on the workers, and the pauses that readers saw around them. Every text is compared with that of a
run without changes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.harness import machine, percentiles, print_table
from shared.transport.bus import BusError
from shared.transport.nats_bus import NatsBus
from tests.support.fault_cluster import Cluster, Shape, running
from tests.support.fault_streams import CHAT, Ask, Reader, answers, ask, reading, undisturbed

ENV = {
    "SLUICE_WORKER_PAGE_BYTES": "16384",
    "SLUICE_WORKER_MAX_BATCH_TOKENS": "128",
    "SLUICE_WORKER_MAX_BATCH_ROWS": "32",
    "SLUICE_PLANNER_COOLDOWN_S": "0.1",
    "SLUICE_PLANNER_RESTORE_RATIO": "0",
}
SYSTEM = ("--system", "kunserve")
FLAGS = {"worker": (*SYSTEM, "--memory", "32MiB"), "planner": SYSTEM, "dispatcher": SYSTEM}
PAUSE_S = 0.3
ANSWER_S = 30.0
_TOOK = re.compile(r"carried out by \d+ of \d+ workers in ([0-9.]+) s")


def asks(num_streams: int) -> list[Ask]:
    """Return long answers, sampled by seed, so that a wrong token shows."""
    return [ask(f"fox {i}", CHAT, max_tokens=300, temperature=0.8, seed=i) for i in range(num_streams)]


async def change(cluster: Cluster, bus: NatsBus, verb: str) -> float | None:
    """Drop or restore; return the planner's time from publication to the last word, seconds, None if it was refused."""
    subject = cluster.subjects.admin("planner", "planner", verb)
    answer = json.loads(await bus.request(subject, b"", timeout_s=ANSWER_S))
    found = _TOOK.search(answer["reason"])
    return float(found[1]) if answer["done"] and found else None


class Streams:
    """Readers one generation after the other, so that somebody always reads."""

    def __init__(self, cluster: Cluster, num_streams: int) -> None:
        self._cluster = cluster
        self._asks = asks(num_streams)
        self.expected: dict[str, object] = {}
        self.generations: list[list[Reader]] = []
        self.num_wrong = 0

    async def prepare(self) -> None:
        """Learn what is said without changes."""
        self.expected = dict(await undisturbed(self._cluster, self._asks))

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            async with reading(self._cluster, self._asks) as readers:
                found = await answers(readers)
            self.num_wrong += sum(found[name] != self.expected[name] for name in self.expected)
            self.generations.append(readers)

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Return every reader's longest pause that overlaps this time of the monotonic clock."""
        longest = []
        for readers in self.generations:
            for reader in readers:
                gaps = [b - a for a, b in pairwise(reader.told.times_s) if a < end_s and b > begin_s]
                longest += [max(gaps)] if gaps else []
        return longest


async def measure(cluster: Cluster, num_rounds: int, num_streams: int) -> None:
    """Change roles again and again, and print what it took."""
    streams = Streams(cluster, num_streams)
    await streams.prepare()
    taken: dict[str, list[float]] = {"drop": [], "restore": []}
    spans: dict[str, list[tuple[float, float]]] = {"drop": [], "restore": []}
    num_refused = 0
    running_streams = asyncio.create_task(streams.run())
    async with cluster.bus() as bus:
        for number in range(num_rounds):
            for verb in ("drop", "restore"):
                await asyncio.sleep(PAUSE_S)
                begun_s = time.monotonic()
                try:
                    took_s = await change(cluster, bus, verb)
                except BusError:
                    took_s = None
                if took_s is None:
                    num_refused += 1
                    continue
                taken[verb].append(took_s)
                spans[verb].append((begun_s, time.monotonic()))
            print(f"\rround {number + 1} of {num_rounds}", end="", flush=True)
    print()
    while not streams.generations or streams.generations[-1][0].told.times_s[0] < spans["restore"][-1][1]:
        await asyncio.sleep(0.2)
    running_streams.cancel()
    report(streams, taken, spans, num_refused)


def report(
    streams: Streams,
    taken: dict[str, list[float]],
    spans: dict[str, list[tuple[float, float]]],
    num_refused: int,
) -> None:
    """Print the tables."""
    rows: list[Sequence[str]] = []
    for verb, times_s in taken.items():
        pauses_s = [gap_s for begin_s, end_s in spans[verb] for gap_s in streams.gaps_s(begin_s, end_s)]
        rows.append((verb, str(len(times_s)), percentiles(times_s, scale=1e3), percentiles(pauses_s, scale=1e3)))
    title = "From the plan's publication to the last word, and readers' pauses meanwhile, ms (p50 / p99)"
    print_table(title, ("change", "count", "planner", "pause"), rows)
    texts = sum(len(readers) for readers in streams.generations)
    print(f"{texts} answers, {streams.num_wrong} differ from those without changes; {num_refused} changes were refused")
    print(machine())


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    shape = Shape(num_workers=arguments.workers, env=ENV, flags=FLAGS)
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Cluster(Path(folder), shape)) as cluster,
    ):
        asyncio.run(measure(cluster, arguments.rounds, arguments.streams))


if __name__ == "__main__":
    main()
