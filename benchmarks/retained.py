"""What a cluster keeps of requests that have ended: live allocations on the virtual clock, by the line that made them.

    python -m benchmarks.retained [--rounds 6] [--requests 1500]

One modelled worker answers rounds of short requests; after each round, everything idle, the allocations are counted.
The table shows the lines that grew most in the last round, per request. Bounded tables grow until they are full.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import tracemalloc

import numpy as np

from benchmarks.harness import ROOT, print_table
from shared.cost import load_profile
from shared.process.log import only_from
from sim.cluster import ClusterParams, SimCluster
from sim.requests import SimRequest
from sim.virtual_time import run
from sim.worker import SimWorkerParams

AT_A_TIME = 100
NUM_LINES = 8


async def take_snapshots(num_rounds: int, num_requests: int) -> list[tracemalloc.Snapshot]:
    """Return the live allocations after each round."""
    found = []
    random = np.random.default_rng(0)
    worker = SimWorkerParams("w0", load_profile("llama-3-8b-tp1-h200").cost, num_blocks=2000)
    async with SimCluster(ClusterParams((worker,))) as cluster:
        for turn in range(num_rounds):
            for first in range(0, num_requests, AT_A_TIME):
                async with asyncio.TaskGroup() as group:
                    for i in range(first, min(first + AT_A_TIME, num_requests)):
                        prompt = random.integers(256, 32_000, 20)
                        group.create_task(cluster.ask(SimRequest(f"r{turn}-{i}", prompt, 3, seed=i)))
            await asyncio.sleep(5.0)
            cluster.check_idle()
            gc.collect()
            found.append(tracemalloc.take_snapshot())
    return found


def main() -> None:
    """Run, and print what grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=1500, help="of each round")
    chosen = parser.parse_args()
    if chosen.rounds < 2:
        parser.error("growth takes two rounds at least")
    tracemalloc.start()
    with only_from("error"):
        snapshots = run(take_snapshots(chosen.rounds, chosen.requests))
    tracemalloc.stop()
    sizes = [sum(trace.size for trace in snapshot.traces) for snapshot in snapshots]
    rows = [(str((i + 1) * chosen.requests), f"{size / 1024:.0f}") for i, size in enumerate(sizes)]
    print_table("Live allocations", ("requests", "KiB"), rows)
    grown = snapshots[-1].compare_to(snapshots[-2], "lineno")[:NUM_LINES]
    lines = [
        (_place(each.traceback[0]), f"{each.size_diff / chosen.requests:+.1f}", f"{each.size / 1024:.0f}")
        for each in grown
    ]
    print_table("What grew in the last round", ("line", "bytes per request", "KiB now"), lines)


def _place(frame: tracemalloc.Frame) -> str:
    return f"{frame.filename.removeprefix(f'{ROOT}/').rpartition('site-packages/')[2]}:{frame.lineno}"


if __name__ == "__main__":
    main()
