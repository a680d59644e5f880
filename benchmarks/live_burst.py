"""Bursts that throttle two live workers, on one system after the other: what dropping parameters saves readers.

    python -m benchmarks.live_burst [--seeds 1,2,3,4,5] [--systems fcfs,fcfs-chunked,fcfs-pp,kunserve] [--json FILE]
                                    [--memory 100MiB] [--stretch 1]

For each system `sluice up` starts a broker, monitor, planner, two workers of one thread and a dispatcher; then all of
them get the same requests, seed by seed, from the client of `sluice replay`. The model (25.7 M parameters, bfloat16)
takes about half of each worker's memory. The row `fcfs, unthrottled` is the same on workers with much more of it.

A machine with less arithmetic for its memory reaches the one limit before the other: then no memory helps. There a
smaller memory and a stretched load make memory the first one again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.burst_figures import Figures, Run, report
from benchmarks.burst_load import BurstShape, BurstWatch, Watched
from benchmarks.fidelity.loads import sequential
from benchmarks.live_cluster import LiveCluster
from benchmarks.peers_load import wait_idle
from benchmarks.peers_model import make_checkpoint
from cli.bench.load import HttpLoad
from cli.bench.report import lateness_p99_s
from cli.replay.records import records_of
from shared.cluster_views import ViewFeed
from shared.messages.report import ClusterView, WorkerReport
from shared.systems import find_live_system
from shared.wire import WireError
from sim.experiment.summary import SystemFacts, summarise
from sim.workload.workload import Workload

SYSTEMS = ("fcfs", "fcfs-chunked", "fcfs-pp", "kunserve")
UNTHROTTLED = "fcfs, unthrottled"
MEMORY, MUCH_MEMORY = "100MiB", "1GiB"
"""Of each worker; parameters take 49 MiB."""
SETTINGS = {
    "SLUICE_WORKER_PAGE_BYTES": "32768",
    "SLUICE_WORKER_MAX_BATCH_TOKENS": "256",
    "SLUICE_WORKER_MAX_BATCH_ROWS": "48",
    "SLUICE_PLANNER_RESTORE_HOLD_S": "0.5",
    "SLUICE_PLANNER_COOLDOWN_S": "0.5",
    "SLUICE_PLANNER_AHEAD_WAIT_S": "0.5",
}
"""Small pages for a small model, and the patience of a load whose calm lasts seconds and not minutes."""
REST_LIMIT_S = 20.0
REST_LOOK_S = 0.1


class BurstCluster(LiveCluster):
    """A cluster of two workers, and its newest view."""

    def __init__(self) -> None:
        super().__init__()
        self._feed: ViewFeed | None = None
        self._view: ClusterView | None = None
        self._watch: BurstWatch | None = None

    async def start(self, system: str, memory: str, checkpoint: Path, log: Path, settings: Mapping[str, str]) -> None:
        """Return when it serves, joined to pipelines if the system has them."""
        flags = ["--model", str(checkpoint), "--dtype", "bfloat16", "--memory", memory, "--workers", "2"]
        flags += ["--threads", "1", "--system", system, "--log-dir", str(log.with_suffix(""))]
        flags += [] if find_live_system(system).swaps else ["--host-memory", "0"]  # as the papers' systems
        await self.serve(*flags, log=log, env=settings)
        self._feed = ViewFeed(self.bus, self.subjects, self._on_view, _on_malformed)
        await self._feed.start()
        await self.rest(find_live_system(system).num_stages)

    async def stop(self) -> None:
        """End it, and everything that it started."""
        if self._feed is not None:
            await self._feed.close()
        await super().stop()

    @property
    def reports(self) -> list[WorkerReport]:
        """Of its workers, as the newest view has them."""
        return [] if self._view is None else [status.report for status in self._view.workers]

    def _on_view(self, view: ClusterView, *, is_fresh: bool) -> None:
        if not is_fresh:
            return
        self._view = view
        if self._watch is not None:
            self._watch.take(view, time.perf_counter())

    async def rest(self, num_stages: int) -> None:
        """Return when nothing runs and every worker is in a group of this size.

        Raises:
            RuntimeError: they are not in time.
        """
        until_s = time.monotonic() + REST_LIMIT_S
        while self._view is None or not _is_at_rest(self._view, num_stages):
            if time.monotonic() > until_s:
                raise RuntimeError(f"the workers are not at rest after {REST_LIMIT_S:g} s: {self._view}")
            await asyncio.sleep(REST_LOOK_S)

    async def watch(self, workload: Workload) -> tuple[HttpLoad, Watched, float]:
        """Send a load; return it when it has ended, what views said, and the share of the machine that others used.

        Raises:
            RuntimeError: see `send`.
        """
        watch = self._watch = BurstWatch()
        load, foreign = await self.send(workload)
        self._watch = None
        return load, watch.figures(), foreign


def _on_malformed(where: str, error: WireError) -> None:
    raise RuntimeError(f"{where} is no view: {error}")


def _is_at_rest(view: ClusterView, num_stages: int) -> bool:
    reports = [status.report for status in view.workers]
    busy = any(report.num_running or report.num_waiting or report.num_preempted for report in reports)
    return not busy and all(report.num_stages == num_stages for report in reports)


@asynccontextmanager
async def burst_cluster(
    system: str, memory: str, checkpoint: Path, log: Path, settings: Mapping[str, str] = SETTINGS
) -> AsyncIterator[BurstCluster]:
    """Give a cluster that serves and is warm; end it afterwards."""
    cluster = BurstCluster()
    try:
        await cluster.start(system, memory, checkpoint, log, settings)
        await cluster.send(sequential(12, 200, 20, 0.1, seed=90))
        yield cluster
    finally:
        await cluster.stop()


async def measure(
    title: str, seeds: Sequence[int], figures: Figures, folder: Path, *, max_tries: int, memory: str
) -> None:
    """Send the loads of these seeds to one system, again where others used the machine meanwhile."""
    system, memory = ("fcfs", MUCH_MEMORY) if title == UNTHROTTLED else (title, memory)
    num_stages = find_live_system(system).num_stages
    log = folder / f"{title.replace(', ', '-')}.log"
    async with burst_cluster(system, memory, folder / "small", log) as cluster:
        for seed in seeds:
            for _ in range(max_tries):
                await cluster.rest(num_stages)
                await wait_idle()
                run = await _run(cluster, title, figures.shape.draw(seed))
                said = f"P99 TTFT {run.ttft_p99_s:.2f} s, others {run.foreign_ratio:.0%}"
                print(f"{title}, seed {seed}: {said}", file=sys.stderr, flush=True)
                figures.note(run)
                if run.is_quiet:
                    break


async def _run(cluster: BurstCluster, title: str, workload: Workload) -> Run:
    load, watched, foreign = await cluster.watch(workload)
    summary = summarise(records_of(workload, load.outcomes), SystemFacts())
    return Run(title, workload.seed, summary, watched, foreign, lateness_p99_s(load.outcomes) or 0.0)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3, 4, 5])
    parser.add_argument("--systems", type=lambda text: text.split(","), default=[*SYSTEMS, "unthrottled"])
    parser.add_argument("--stretch", type=float, default=1.0, help="times between arrivals, in multiples of their own")
    parser.add_argument("--memory", default=MEMORY, help="of each worker; parameters take 49 MiB [%(default)s]")
    parser.add_argument("--tries", type=int, default=4, help="of a run while others use the machine [4]")
    parser.add_argument(
        "--json", type=Path, help="keeps figures; quiet runs that it has are not done again: one file for each memory"
    )
    parser.add_argument("--folder", type=Path, help="checkpoint and logs go here [a temporary one]")
    chosen = parser.parse_args()
    figures = Figures(BurstShape(stretch=chosen.stretch), chosen.json)
    titles = [UNTHROTTLED if name == "unthrottled" else name for name in chosen.systems]
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        make_checkpoint("small", folder / "small")
        for title in titles:
            if seeds := figures.missing(title, chosen.seeds):
                asyncio.run(measure(title, seeds, figures, folder, max_tries=chosen.tries, memory=chosen.memory))
    report([run for title in titles for run in figures.of(title, chosen.seeds)])


if __name__ == "__main__":
    main()
