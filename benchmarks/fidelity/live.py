"""The live side: `sluice up` with one worker, the client of `sluice replay` for its load, and the worker's step log."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fidelity.loads import sequential
from benchmarks.fidelity.measurement import LiveRun, Measurement, WorkerFacts
from benchmarks.live_cluster import LiveCluster
from benchmarks.peers_load import wait_idle
from cli.bench.report import lateness_p99_s
from cli.profile.driver import find_worker, read_steps
from cli.replay.records import records_of
from shared.ids import WorkerId
from shared.messages.report import WorkerReport
from shared.messages.steps import StepRecord
from sim.workload.workload import Workload

READ_PERIOD_S = 1.0
"""Between two looks at the step log, which holds 2 048 steps."""
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


class FidelityCluster(LiveCluster):
    """A cluster of one worker, whose steps are read."""

    async def start(self, settings: LiveSettings) -> WorkerReport:
        """Return the worker's report when it serves."""
        flags = ["--model", str(settings.checkpoint), "--dtype", settings.dtype, "--memory", settings.memory]
        flags += ["--threads", str(settings.threads), "--workers", "1", "--kernels", "native"]
        flags += ["--host-memory", "0"]  # as the simulated systems
        await self.serve(*flags, log=settings.log)
        report = await find_worker(self.bus, self.subjects)
        self._worker_id = WorkerId(report.worker_id)
        return report

    async def replay(self, workload: Workload) -> LiveRun:
        """Send a workload; return what its clients saw, and every step that the worker did meanwhile.

        Raises:
            RuntimeError: see `send`.
        """
        _, first_step_id = await self._read_steps(0)
        sending = asyncio.create_task(self.send(workload))
        steps = await self._collect(first_step_id, sending)
        load, foreign = await sending
        records = records_of(workload, load.outcomes)
        return LiveRun(workload, records, tuple(steps), foreign, lateness_p99_s(load.outcomes) or 0.0)

    async def _collect(self, first_step_id: int, until: asyncio.Task[Any]) -> list[StepRecord]:
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
        return await read_steps(self.bus, self.subjects, self._worker_id, first_step_id)


async def measure(settings: LiveSettings, fitted: Workload, compared: Workload) -> Measurement:
    """Return both loads and the probes of the idle server, taken one after the other on one cluster."""
    cluster = FidelityCluster()
    try:
        report = await cluster.start(settings)
        await cluster.replay(sequential(20, 200, 20, 0.2, seed=90))  # to warm caches, sockets and the allocator
        runs = []
        for workload in (sequential(NUM_PROBES, PROBE_PROMPT, 1, PROBE_GAP_S, seed=91), fitted, compared):
            await wait_idle()
            runs.append(await cluster.replay(workload))
    finally:
        await cluster.stop()
    facts = WorkerFacts(report.num_blocks, report.block_size, report.max_model_len, report.max_sequences, report.system)
    return Measurement(facts, *runs)
