"""The live side: `sluice up` with one worker, the client of `sluice replay` for its load, and the worker's step log."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fidelity.loads import sequential
from benchmarks.fidelity.measurement import LiveRun, Measurement, WorkerFacts
from benchmarks.peers_engines import START_LIMIT_S, EngineProcess
from benchmarks.peers_load import Share, foreign_share, wait_idle
from cli.bench.report import lateness_p99_s
from cli.bench.running import load_session
from cli.bench.server import Server
from cli.profile.driver import find_worker, read_steps
from cli.replay.records import is_silent, records_of
from cli.replay.sender import replay_load, token_prompts
from shared.ids import WorkerId
from shared.messages.report import WorkerReport
from shared.messages.steps import StepRecord
from shared.subjects import Subjects
from shared.transport.bus import Bus
from shared.transport.nats_bus import NatsBus
from sim.workload.workload import Workload

READ_PERIOD_S = 1.0
"""Between two looks at the step log, which holds 2 048 steps."""
ANSWER_LIMIT_S = 300.0
NUM_PROBES = 60
PROBE_GAP_S = 0.1
PROBE_PROMPT = 16


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """How the cluster is started."""

    checkpoint: Path
    dtype: str
    threads: int
    memory: str
    log: Path


class LiveCluster(EngineProcess):
    """A running `sluice up`, and this process's connection to its broker."""

    def __init__(self, url: str = "") -> None:
        super().__init__()
        self.url = url
        self.subjects = Subjects("default")
        self._bus: Bus | None = None
        self.report: WorkerReport | None = None

    async def start(self, settings: LiveSettings) -> None:
        """Return when it serves."""
        flags = ["--model", str(settings.checkpoint), "--dtype", settings.dtype, "--memory", settings.memory]
        flags += ["--threads", str(settings.threads), "--workers", "1", "--port", "0", "--kernels", "native"]
        await self.spawn(sys.executable, "-m", "cli.main", "up", "--json", *flags, log=settings.log)
        line = await self.read_line(START_LIMIT_S)
        self.url = line["url"]
        self._bus = await NatsBus.connect(line["nats_url"], name="fidelity")
        self.report = await find_worker(self._bus, self.subjects)

    async def stop(self) -> None:
        """End it, and everything that it started."""
        if self._bus is not None:
            await self._bus.close()
        await super().stop()

    async def replay(self, workload: Workload) -> LiveRun:
        """Send a workload; return what its clients saw, and every step that the worker did meanwhile.

        Raises:
            RuntimeError: an answer failed: then the figures are worth nothing.
        """
        async with load_session(ANSWER_LIMIT_S, "") as session:
            server = await Server.find(session, self.url, "", "completions")
            load = replay_load(session, server, workload, token_prompts(workload))
            _, first_step_id = await self._read_steps(0)
            before, began_s = Share.take(self.pid), time.perf_counter()
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(load.run())
                reading = group.create_task(self._collect(first_step_id, sending))
            elapsed_s = time.perf_counter() - began_s
            foreign = foreign_share(before, Share.take(self.pid), elapsed_s, os.cpu_count() or 1)
        failed = [outcome for outcome in load.outcomes if outcome.failure and not is_silent(outcome)]
        if failed:
            raise RuntimeError(f"{len(failed)} answers failed, the first with {failed[0].failure}: {failed[0].detail}")
        records = records_of(workload, load.outcomes)
        return LiveRun(workload, records, tuple(reading.result()), foreign, lateness_p99_s(load.outcomes) or 0.0)

    async def _collect(self, first_step_id: int, until: asyncio.Task[None]) -> list[StepRecord]:
        """Return the steps from an id on, read by period until the load has ended."""
        steps: list[StepRecord] = []
        is_last = False
        while not is_last:
            await asyncio.wait([until], timeout=READ_PERIOD_S)
            is_last = until.done()
            new, first_step_id = await self._read_steps(first_step_id)
            steps += new
        return steps

    async def _read_steps(self, first_step_id: int) -> tuple[list[StepRecord], int]:
        assert self._bus is not None, "started"
        assert self.report is not None, "started"
        return await read_steps(self._bus, self.subjects, WorkerId(self.report.worker_id), first_step_id)


@asynccontextmanager
async def live_cluster(settings: LiveSettings) -> AsyncIterator[LiveCluster]:
    """Give a cluster that serves; end it afterwards."""
    cluster = LiveCluster()
    try:
        await cluster.start(settings)
        yield cluster
    finally:
        await cluster.stop()


async def measure(settings: LiveSettings, fitted: Workload, compared: Workload) -> Measurement:
    """Return both loads and the probes of the idle server, taken one after the other on one cluster."""
    async with live_cluster(settings) as cluster:
        report = cluster.report
        assert report is not None, "started"
        await cluster.replay(sequential(20, 200, 20, 0.2, seed=90))  # to warm caches, sockets and the allocator
        runs = []
        for workload in (sequential(NUM_PROBES, PROBE_PROMPT, 1, PROBE_GAP_S, seed=91), fitted, compared):
            await wait_idle()
            runs.append(await cluster.replay(workload))
    facts = WorkerFacts(report.num_blocks, report.block_size, report.max_model_len, report.max_sequences, report.system)
    return Measurement(facts, *runs)
