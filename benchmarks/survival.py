"""What a reader sees when a worker dies, stands still or is told to go, and when the broker restarts.

    python -m benchmarks.survival [--rounds 5] [--streams 8]

Real processes on this machine: nats-server, monitor, planner, two workers with the demo model, a dispatcher. Each round
starts the streams, lets every one get some tokens, does the fault, and takes each reader's pause then. The pause of
a stream that the fault did not touch is shown apart, and how many requests went on at another worker. Every text is
compared with that of a run without faults.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.harness import machine, print_table
from tests.support.fault_cluster import NATS, Cluster, Shape, running
from tests.support.fault_streams import CHAT, Ask, Reader, answers, ask, reading, seen, undisturbed

NUM_BEFORE = 15
"""Events that every reader has seen when the fault comes."""
OUTAGE_S = 1.0
EFFECT_S = 0.3
"""A pause that begins later has another cause."""
TOUCHED_S = 0.25
"""A stream whose longest pause is shorter was not touched by the fault."""


def restart_broker(cluster: Cluster) -> None:
    cluster.kill(NATS)
    time.sleep(OUTAGE_S)
    cluster.start_broker()


def freeze_broker(cluster: Cluster) -> None:
    cluster.freeze(NATS)
    time.sleep(OUTAGE_S)
    cluster.thaw(NATS)


FAULTS: dict[str, Callable[[Cluster], None]] = {
    "worker killed": lambda cluster: cluster.kill("worker-0"),
    "worker stopped (SIGSTOP)": lambda cluster: cluster.freeze("worker-0"),
    "worker told to go (SIGTERM)": lambda cluster: cluster.terminate("worker-0"),
    f"broker away for {OUTAGE_S:g} s (killed)": restart_broker,
    f"broker away for {OUTAGE_S:g} s (SIGSTOP)": freeze_broker,
}


@dataclass
class Result:
    """Longest pauses, in seconds, over all rounds."""

    touched_s: list[float] = field(default_factory=list)
    others_s: list[float] = field(default_factory=list)
    num_moved: int = 0
    """Requests that went on at another worker."""
    num_wrong: int = 0
    """Answers that differ from those of a run without faults."""

    def take(self, readers: Sequence[Reader], fault_s: float) -> None:
        """Sort the pauses of one round: of each reader the longest that began with the fault.

        Later ones are the model's own: after the end of a story it goes on with tokens that are no text.
        """
        for reader in readers:
            gap_s = max(
                (b - a for a, b in pairwise(reader.told.times_s) if b > fault_s and a < fault_s + EFFECT_S), default=0.0
            )
            (self.touched_s if gap_s >= TOUCHED_S else self.others_s).append(gap_s)

    def row(self, name: str) -> list[str]:
        """Return the cells of the table."""
        pauses = [cell for values in (self.touched_s, self.others_s) for cell in _spread(values)]
        return [name, str(self.num_moved), str(len(self.touched_s)), *pauses, str(self.num_wrong)]


def _spread(values: Sequence[float]) -> tuple[str, str]:
    return (f"{statistics.median(values):.2f}", f"{max(values):.2f}") if values else ("-", "-")


async def prefill_s(cluster: Cluster, load: Sequence[Ask]) -> float:
    """Return the median time to the first token of these requests, alone on the cluster."""
    times: list[float] = []
    for asked in load:
        started_s = time.monotonic()
        async with reading(cluster, [asked]) as (reader,):
            await seen([reader], 1)
            times.append(reader.told.times_s[0] - started_s)
    return statistics.median(times)


async def num_moved(cluster: Cluster) -> int:
    """Return how many requests have gone on at another worker since the dispatcher started."""
    async with cluster.bus() as bus:
        return int((await cluster.dump(bus, "dispatcher-0"))["num_recovered"])


async def measure(cluster: Cluster, load: Sequence[Ask], num_rounds: int) -> None:
    expected = await undisturbed(cluster, load)
    print(f"time to the first token of an undisturbed request: {1000 * await prefill_s(cluster, load):.0f} ms")
    rows = []
    for name, fault in FAULTS.items():
        result = Result()
        before = await num_moved(cluster)
        for _ in range(num_rounds):
            async with reading(cluster, load) as readers:
                await seen(readers, NUM_BEFORE)
                fault_s = time.monotonic()
                await asyncio.to_thread(fault, cluster)
                found = await answers(readers)
            result.take(readers, fault_s)
            result.num_wrong += sum(found[asked.name] != expected[asked.name] for asked in load)
            await cluster.restore()
        result.num_moved = await num_moved(cluster) - before
        rows.append(result.row(name))
    figures = ("streams that paused", "median, s", "max, s", "others: median, s", "max, s", "wrong texts")
    print_table("Pauses", ("fault", "moved", *figures), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=8)
    options = parser.parse_args()
    load = [ask(f"animal {n}", CHAT, seed=n, temperature=0.8, max_tokens=900) for n in range(options.streams)]
    print(machine())
    with tempfile.TemporaryDirectory() as folder, running(Cluster(Path(folder), Shape())) as cluster:
        asyncio.run(measure(cluster, load, options.rounds))


if __name__ == "__main__":
    main()
