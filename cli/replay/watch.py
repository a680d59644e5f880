"""Looks at a server while a load runs: what it tells of its memory, for the figures that no client can measure.

Any server is asked for `/metrics`; one that tells a cluster view (`/v1/cluster`, Sluice's own) gives blocks as well, of
all workers at one instant. Both are looked at once a second: what lies between two looks is not seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
import numpy as np

from cli.http import MAX_VIEW_BYTES, read_body
from cli.replay.metrics import MetricsSample, read_sample
from shared.messages.report import ClusterView, Liveness, WorkerPhase, WorkerReport
from shared.wire import WireError, decode_json
from sim.experiment.result import Samples
from sim.experiment.summary import SystemFacts

PERIOD_S = 1.0
LOOK_LIMIT = aiohttp.ClientTimeout(total=5)


class ServerWatch:
    """Watches one load.

    Args:
        session: with the headers.
        base_url: of the server.
        clock: seconds since the load began.
    """

    def __init__(self, session: aiohttp.ClientSession, base_url: str, clock: Callable[[], float]) -> None:
        self._session = session
        self._base_url = base_url
        self._clock = clock
        self._has_metrics = self._has_view = True
        self._rows: list[tuple[float, ...]] = []
        """Of the views; columns as in `Samples`."""
        self._kv_peak: float | None = None
        """By the metrics."""
        self._queue_peak: int | None = None
        """The same."""
        self._preemptions: tuple[float, float] | None = None
        """At the first look, and at the last one."""

    async def run(self) -> None:
        """Look until cancelled, or until the server turns out to tell nothing."""
        while self._has_metrics or self._has_view:
            await self.look()
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Take in what the server says now."""
        if self._has_view:
            self._has_view = await self._ask("/v1/cluster", self._take_cluster)
        if self._has_metrics:
            self._has_metrics = await self._ask("/metrics", self._take_metrics)

    def take_view(self, view: ClusterView, at_s: float) -> None:
        """Note the blocks and devices of all workers that serve."""
        reports = [
            worker.report
            for worker in view.workers
            if worker.liveness is Liveness.ALIVE and worker.report.phase is WorkerPhase.READY
        ]
        used = sum(report.num_used_blocks for report in reports)
        demanded = sum(report.num_demanded_blocks for report in reports)
        self._rows.append(
            (
                at_s,
                used,
                used + demanded,
                sum(report.num_blocks for report in reports),
                sum(report.num_running for report in reports),
                sum(report.num_waiting + report.num_preempted for report in reports),
                sum(map(_is_on_gpu, reports)),
                sum(_is_on_gpu(report) for report in reports if _is_busy(report)),
            )
        )

    def take_sample(self, sample: MetricsSample) -> None:
        """Note the metrics."""
        if sample.kv_used_ratio is not None:
            self._kv_peak = max(self._kv_peak or 0.0, sample.kv_used_ratio)
        if sample.num_waiting is not None:
            self._queue_peak = max(self._queue_peak or 0, round(sample.num_waiting))
        if sample.num_preemptions is not None:
            first = sample.num_preemptions if self._preemptions is None else self._preemptions[0]
            self._preemptions = (first, sample.num_preemptions)

    def samples(self) -> Samples | None:
        """Return what the views said so far; None if there was none."""
        return Samples(*np.array(self._rows, dtype=np.float64).T) if self._rows else None

    def facts(self) -> SystemFacts:
        """Return what was seen; None for what the server does not tell. A view is the better word on memory."""
        preemptions = None
        if self._preemptions is not None and self._preemptions[1] >= self._preemptions[0]:  # else it began anew
            preemptions = round(self._preemptions[1] - self._preemptions[0])
        samples, queue_peak = self.samples(), self._queue_peak
        if samples is None or not samples.num_blocks.any():
            return SystemFacts(kv_peak_ratio=self._kv_peak, preemptions=preemptions, queue_peak=queue_peak)
        num_blocks = np.maximum(samples.num_blocks, 1)
        return SystemFacts(
            kv_peak_ratio=float((samples.used_blocks / num_blocks).max()),
            demand_over_capacity_peak=float((samples.demanded_blocks / num_blocks).max()),
            preemptions=preemptions,
            queue_peak=queue_peak,
            gpus_peak=int(samples.num_gpus.max()),
            gpu_seconds=float((samples.num_gpus[:-1] * np.diff(samples.at_s)).sum()),
            busy_gpus_peak=int(samples.num_busy_gpus.max()),
            busy_gpu_seconds=float((samples.num_busy_gpus[:-1] * np.diff(samples.at_s)).sum()),
        )

    def _take_cluster(self, body: bytes) -> bool:
        try:
            view = decode_json(body, ClusterView, MAX_VIEW_BYTES)
        except WireError:
            return b'"workers"' in body  # a cluster whose monitor has not spoken yet
        self.take_view(view, self._clock())
        return True

    def _take_metrics(self, body: bytes) -> bool:
        self.take_sample(read_sample(body.decode(errors="replace")))
        return True

    async def _ask(self, path: str, take: Callable[[bytes], bool]) -> bool:
        """Return whether to ask this again: not if the server does not know the path, or says something else."""
        try:
            async with self._session.get(f"{self._base_url}{path}", timeout=LOOK_LIMIT) as response:
                if response.status != 200:
                    return response.status >= 500
                return take(await read_body(response, MAX_VIEW_BYTES))
        except (aiohttp.ClientError, TimeoutError, OSError):
            return True  # it may be late under load


def _is_busy(report: WorkerReport) -> bool:
    return report.num_running + report.num_waiting + report.num_preempted > 0


def _is_on_gpu(report: WorkerReport) -> bool:
    return report.device.startswith("cuda")
