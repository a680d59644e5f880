"""Looks at a simulated cluster by period: memory held and wanted, requests, GPUs. Counts plans from the bus."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from services.worker.engine.stats import count_blocks, take_stats
from shared.messages.plan import PLAN_KEY, Plan, PlanPhase
from shared.messages.report import Liveness, WorkerPhase
from shared.subjects import Subjects
from shared.transport.bus import KvEntry
from shared.wire import decode_json
from sim.cluster import SimCluster
from sim.experiment.result import Samples
from sim.experiment.series import kept
from sim.experiment.summary import SystemFacts

PERIOD_S = 0.1
"""Virtual seconds between two looks: a few steps of a large model, over which memory changes by a percent or so."""


class ClusterSampler:
    """Watches one run.

    Args:
        cluster: entered.
        gpus_per_worker: of an instance, or of a pipeline of them.
    """

    def __init__(self, cluster: SimCluster, gpus_per_worker: int) -> None:
        self._cluster = cluster
        self._gpus_per_worker = gpus_per_worker
        self._loop = asyncio.get_running_loop()
        self._begin_s = self._loop.time()
        self._rows: list[tuple[float, ...]] = []
        self._grouped: list[float] = []
        """Share of the instances that are in groups, by sample."""
        self._plans: dict[str, list[float]] = defaultdict(list)
        """When they were carried out, by lever."""

    async def run(self, on_sample: Callable[[float], None]) -> None:
        """Look by period until cancelled; `on_sample` is called with the seconds that have passed.

        Raises:
            BaseException: what ended a task of the cluster, all of which should outlive the run.
        """
        subjects = Subjects(self._cluster.workers[0].params.cluster)
        plans = await self._cluster.broker.connect("experiment").key_value(subjects.plan_bucket())
        await plans.watch(PLAN_KEY, self._on_plan)
        while True:
            self.look()
            on_sample(self._rows[-1][0])
            for _, error in self._cluster.all_failures():
                raise error
            await asyncio.sleep(PERIOD_S)

    def look(self) -> None:
        """Take one sample."""
        engines = [worker.service.engine for worker in self._cluster.workers]
        sessions = self._cluster.dispatcher.sessions
        used, wanted = (sum(counts) for counts in zip(*map(count_blocks, engines), strict=True))
        running = [len(engine.table.running) for engine in engines]
        parked = [len(engine.table.waiting) + len(engine.table.preempted) for engine in engines]
        num_busy = sum(any(counts) for counts in zip(running, parked, strict=True))
        self._grouped.append(self._grouped_ratio())
        self._rows.append(
            (
                self._loop.time() - self._begin_s,
                used,
                used + wanted + (self._queued_blocks() if sessions.num_queued else 0),
                sum(engine.capacity_blocks for engine in engines),
                sum(running),
                sum(parked) + sessions.num_queued,
                self._num_serving() * self._gpus_per_worker,
                num_busy * self._gpus_per_worker,
            )
        )

    def _grouped_ratio(self) -> float:
        """Return the share of the workers that are in a group, as leaders or members, by what they last reported."""
        statuses = self._cluster.dispatcher.sessions.cluster.statuses
        return sum(bool(each.report.group) for each in statuses) / len(self._cluster.workers)

    def _num_serving(self) -> int:
        """Return how many workers compute, as leaders, members or alone."""
        statuses = self._cluster.dispatcher.sessions.cluster.statuses
        return sum(s.report.phase is WorkerPhase.READY and s.liveness is not Liveness.DEAD for s in statuses)

    def samples(self) -> Samples:
        """Return what was seen so far."""
        return Samples(*np.array(self._rows, dtype=np.float64).reshape(-1, 8).T)

    def facts(self) -> SystemFacts:
        """Return the run's figures."""
        samples, stats = self.samples(), [take_stats(worker.service.engine) for worker in self._cluster.workers]
        migrations = [w.service.migration for w in self._cluster.workers if w.service.migration is not None]
        elapsed_s = np.diff(samples.at_s)
        return SystemFacts(
            kv_peak_ratio=float((samples.used_blocks / samples.num_blocks).max()),
            demand_over_capacity_peak=float((samples.demanded_blocks / samples.num_blocks).max()),
            preemptions=sum(each.totals.num_preemptions for each in stats),
            pauses=sum(each.totals.num_pauses for each in stats),
            opened_blocks=sum(each.totals.num_opened_blocks for each in stats),
            met_blocks=sum(each.totals.num_met_blocks for each in stats),
            queue_peak=int(samples.num_waiting.max()),
            recomputed_tokens=sum(each.totals.num_recomputed_tokens for each in stats),
            given_up_tokens=sum(each.totals.num_given_up_tokens for each in stats),
            brought_back_tokens=sum(each.totals.num_brought_back_tokens for each in stats),
            swapped_out_bytes=sum(each.totals.swapped_out_bytes for each in stats),
            bubble_ratio=self._bubble_ratio(),
            drops=len(self._plans["drop"]),
            restores=len(self._plans["restore"]),
            drop_times_s=tuple(self._plans["drop"]),
            restore_times_s=tuple(self._plans["restore"]),
            grouped_ratio=float(np.dot(self._grouped[:-1], elapsed_s) / max(elapsed_s.sum(), PERIOD_S)),
            overflows=self._cluster.monitor.counters["overflows"],
            migrations=sum(each.departures.num_left for each in migrations),
            moves_as_tokens=sum(each.fetching.num_as_tokens for each in migrations),
            gpus_peak=int(samples.num_gpus.max()),
            gpu_seconds=float((samples.num_gpus[:-1] * elapsed_s).sum()),
            busy_gpus_peak=int(samples.num_busy_gpus.max()),
            busy_gpu_seconds=float((samples.num_busy_gpus[:-1] * elapsed_s).sum()),
            paid_60_s_gpu_seconds=_paid_gpu_seconds(samples, 60.0),
            paid_300_s_gpu_seconds=_paid_gpu_seconds(samples, 300.0),
            busy_kv_ratio=_busy_kv_ratio(samples),
            moved_bytes=sum(
                worker.service.migration.fetching.num_bytes
                for worker in self._cluster.workers
                if worker.service.migration is not None
            ),
        )

    def _bubble_ratio(self) -> float:
        """Return the idle time of pipelines' stages over all their time while their groups had work; 0 without any."""
        stats = [pipeline.stats for worker in self._cluster.workers for pipeline in worker.pipelines]
        whole_s = sum(len(each.busy_s) * each.span_s for each in stats)
        return 1 - sum(sum(each.busy_s) for each in stats) / whole_s if whole_s else 0.0

    def _queued_blocks(self) -> int:
        """Return the blocks that requests need which no worker has."""
        size = self._cluster.workers[0].params.block_size
        queued = (s.request.num_prompt_tokens for s in self._cluster.dispatcher.sessions.table if s.worker_id is None)
        return sum(-(-num_tokens // size) for num_tokens in queued)

    def _on_plan(self, entry: KvEntry) -> None:
        if entry.value is not None:
            plan = decode_json(entry.value, Plan)
            if plan.phase is PlanPhase.COMMITTING:
                self._plans[plan.lever].append(self._loop.time() - self._begin_s)


def _paid_gpu_seconds(samples: Samples, hold_s: float) -> float:
    paid = kept(samples.at_s, samples.num_busy_gpus, hold_s)
    return float((paid[:-1] * np.diff(samples.at_s)).sum())


def _busy_kv_ratio(samples: Samples) -> float | None:
    """Instances are alike."""
    elapsed_s = np.diff(samples.at_s)
    blocks = samples.num_blocks * samples.num_busy_gpus / np.maximum(samples.num_gpus, 1)
    whole = float((blocks[:-1] * elapsed_s).sum())
    return float((samples.used_blocks[:-1] * elapsed_s).sum()) / whole if whole else None
