"""One experiment: a scenario's workload on one system, on the virtual clock, from the first arrival to the last end.

    workload ─ feeder ─ a task per request ─► SimCluster: dispatcher, monitor, planner, workers; the services' own code
                                    tokens ◄─┘      └── sampler, by period

The same scenario, system and seed give the same result, in any process.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.dispatcher.session.request import FailureCode, NewRequest, RequestFailedError
from shared.api_keys import Tier
from shared.ids import RequestId
from shared.messages.fetch import FETCH_LIMIT_S
from shared.messages.request import MAX_PROMPT_TOKENS, pack_token_ids
from shared.types import ReaderTarget, SamplingParams
from sim.cluster import SimCluster
from sim.experiment.records import Recorder
from sim.experiment.result import RunResult
from sim.experiment.sampling import ClusterSampler
from sim.experiment.setup import ExperimentCluster, build_cluster
from sim.requests import DAY_S, thinking_of
from sim.scenarios.scenario import Scenario
from sim.virtual_time import run as run_virtually
from sim.worker import SimWorker
from sim.workload.workload import BestEffort, Workload

SETTLE_S = 1.0
"""Virtual seconds after the last end, in which everything that belongs to requests must be gone."""
RETRY_S = 1.0
"""Virtual seconds from a batch of best effort that was refused, or failed, to the next."""


class StopRun(Exception):  # noqa: N818 - nothing is wrong
    """Raised by `on_progress`: the run ends, and its result is what has become of its requests by then."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is."""

    at_s: float
    """Virtual seconds since the beginning of the workload."""
    end_s: float
    """The last arrival."""
    num_done: int
    num_requests: int


def run_system(
    scenario: Scenario,
    system: str,
    seed: int,
    traces: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> RunResult:
    """Return what became of a scenario's requests on one system.

    Args:
        scenario: cluster and workload.
        system: its name (`shared.systems`), or that of one of the scenario's variants.
        seed: of everything that is drawn.
        traces: folder of the traces that scenarios name.
        on_progress: called now and then; it may end the run (`StopRun`).

    Raises:
        StartupError: the scenario names what does not exist.
    """
    workload = scenario.workload(seed, traces)
    if not scenario.variant(system).best_effort:
        workload = workload.without_best_effort()
    return run_workload(build_cluster(scenario, system, workload), workload, on_progress)


def run_workload(
    cluster: ExperimentCluster, workload: Workload, on_progress: Callable[[Progress], None] = lambda _: None
) -> RunResult:
    """Return what became of a workload's requests on a cluster."""
    return run_virtually(_run(cluster, workload, on_progress))


async def _run(built: ExperimentCluster, workload: Workload, on_progress: Callable[[Progress], None]) -> RunResult:
    recorder = Recorder(workload)
    end_s = float(workload.arrival_s[-1]) if len(workload) else 0.0

    def report(at_s: float) -> None:
        on_progress(Progress(at_s, end_s, recorder.num_done, len(workload)))

    async with SimCluster(built.params) as cluster:
        sampler = ClusterSampler(cluster, built.gpus_per_worker)
        sampling = asyncio.create_task(sampler.run(report), name="sampler")
        feeding = asyncio.create_task(feed(cluster, workload, recorder), name="feeder")
        try:
            await asyncio.wait([sampling, feeding], return_when=asyncio.FIRST_COMPLETED)
            if sampling.done():  # it ends by an error only
                sampling.result()
            feeding.result()
            sampler.look()
        except StopRun:
            pass
        finally:
            sampling.cancel()
            feeding.cancel()
            await asyncio.gather(sampling, feeding, return_exceptions=True)
        facts = sampler.facts()
        await _settle(cluster)
        cluster.check_idle()
        num_steps = sum(worker.service.engine.totals.num_steps for worker in cluster.workers)
    return RunResult(recorder.records(), facts, sampler.samples(), num_steps)


async def _settle(cluster: SimCluster) -> None:
    """Return when what belongs to requests is gone, or should be.

    A worker learns late that what it fetches has ended, and after a step that somebody has.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + FETCH_LIMIT_S
    await asyncio.sleep(SETTLE_S)
    while loop.time() < until_s and any(map(_is_busy, cluster.workers)):
        await asyncio.sleep(SETTLE_S)


def _is_busy(worker: SimWorker) -> bool:
    service = worker.service
    is_fetching = service.migration is not None and service.migration.fetching.num_under_way > 0
    return is_fetching or service.engine.table.num_sequences > 0


async def feed(cluster: SimCluster, workload: Workload, recorder: Recorder) -> None:
    """Send every request when it is due, as an open loop, and best effort beside them; return when all have ended."""
    await _Feeder(cluster, workload, recorder).run()


class _Feeder:
    """Sends one workload, from its making on.

    Args:
        cluster: entered.
        workload: what is sent.
        recorder: of the workload.
    """

    def __init__(self, cluster: SimCluster, workload: Workload, recorder: Recorder) -> None:
        self._sessions = cluster.dispatcher.sessions
        self._worker = cluster.params.workers[0]
        self._workload = workload
        self._recorder = recorder
        self._loop = asyncio.get_running_loop()
        self._begin_s = self._loop.time()
        self._num_beside = 0
        self._is_over = False
        """All requests of the workload have ended."""

    async def run(self) -> None:
        """Return when everything has ended; no batch of best effort begins after the workload's last end."""
        async with asyncio.TaskGroup() as beside:
            if self._workload.best_effort is not None:
                for _ in range(self._workload.best_effort.num_batches):
                    beside.create_task(self._batches(self._workload.best_effort))
            await self._arrivals()
            self._is_over = True

    async def _arrivals(self) -> None:
        async with asyncio.TaskGroup() as group:
            for index, arrival_s in enumerate(self._workload.arrival_s.tolist()):
                if (pause_s := self._begin_s + arrival_s - self._loop.time()) > 0:
                    await asyncio.sleep(pause_s)
                group.create_task(self._serve(index, self._request(index, self._begin_s + arrival_s)))

    async def _batches(self, source: BestEffort) -> None:
        """Send batch after batch, each when the one before is done."""
        while not self._is_over:
            async with asyncio.TaskGroup() as batch:
                served = [batch.create_task(self._serve(*self._beside(source))) for _ in range(source.batch)]
            if not all(task.result() for task in served):
                await asyncio.sleep(RETRY_S)

    async def _serve(self, index: int, request: NewRequest) -> bool:
        """Let one request run to its end, as the dispatcher's HTTP does; that refuses what no worker can hold itself.

        Nobody takes the tokens one by one: the session knows when each came. Those that came before it was admitted are
        read then. Instants are noted from the beginning of the workload on.

        Returns:
            Whether its answer is complete.
        """
        sessions, recorder = self._sessions, self._recorder
        if request.num_tokens > sessions.cluster.max_request_tokens(MAX_PROMPT_TOKENS):
            recorder.end(index, FailureCode.TOO_LONG.value)
            return False
        try:
            session = await sessions.admit(request)
        except RequestFailedError as error:
            recorder.end(index, error.code.value)
            return False
        admitted_s = self._loop.time()
        try:
            await session.ended.wait()
            failure = sessions.outcome(session)
        finally:
            sessions.release(session)
            recorder.tokens_at(index, np.maximum(session.token_s, admitted_s) - self._begin_s)
        recorder.end(index, "" if failure is None else failure.value, session.history.num_preemptions)
        return failure is None

    def _request(self, index: int, arrival_s: float) -> NewRequest:
        workload = self._workload
        speed = float(workload.qoe_speed[index])
        has_reader, ttft_s = not math.isnan(speed), float(workload.qoe_ttft_s[index])
        tier = Tier(int(workload.tier[index]))
        return NewRequest(
            request_id=RequestId(f"r{index}"),
            prompt=pack_token_ids(workload.prompt(index, self._worker.first_token_id, self._worker.vocab_size)),
            sampling=SamplingParams(
                max_tokens=int(workload.num_output[index]),
                seed=index,
                ignore_eos=True,
                thinking=thinking_of(int(workload.num_thinking[index])),
            ),
            arrival_s=arrival_s,
            limit_s=DAY_S,
            tier=tier,
            qoe=ReaderTarget(ttft_s=ttft_s, speed_tokens_per_s=speed) if has_reader else None,
            slo=None if tier.is_best_effort else workload.slo,
        )

    def _beside(self, source: BestEffort) -> tuple[int, NewRequest]:
        """Return the next request of best effort, and its index among the records."""
        number, self._num_beside = self._num_beside, self._num_beside + 1
        prompt, num_output = source.request(number, self._worker.first_token_id, self._worker.vocab_size)
        now_s = self._loop.time()
        request = NewRequest(
            request_id=RequestId(f"b{number}"),
            prompt=pack_token_ids(prompt),
            sampling=SamplingParams(max_tokens=num_output, seed=number, ignore_eos=True),
            arrival_s=now_s,
            limit_s=DAY_S,
            tier=Tier.FLEX,
        )
        return self._recorder.add(now_s - self._begin_s, prompt.size, num_output), request
