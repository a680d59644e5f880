"""A whole cluster on the virtual clock: the live services' own code over the bus in memory, below HTTP and text.

async with SimCluster(ClusterParams(workers=(…))) as cluster:
    answer = await cluster.ask(request)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from services.dispatcher.config import DispatcherSettings
from services.dispatcher.service import DispatcherService
from services.dispatcher.session.session import FailureCode, NewRequest, RequestFailedError, Session
from services.monitor.config import MonitorSettings
from services.monitor.service import Monitor
from services.worker.executor.shadow_kv import expected_outputs
from shared.ids import RequestId
from shared.memory_bus import MemoryBroker
from shared.messages.request import pack_token_ids
from shared.types import FinishReason, QoeTarget, RequestClass, SamplingParams
from sim.worker import MODEL_NAME, NO_FOLDER, SimWorker, SimWorkerParams

READY_LIMIT_S = 10.0
"""Virtual seconds in which every worker must have shown up in the dispatcher's view."""


@dataclass(frozen=True, slots=True)
class ClusterParams:
    """What runs."""

    workers: tuple[SimWorkerParams, ...]
    system: str = "fcfs-chunked"
    """Of the dispatcher; each worker names its own."""
    max_requests: int = 65_536
    """Requests that the dispatcher takes at a time."""
    max_queued: int = 65_536
    """Requests that may wait for room."""
    queue_limit_s: float = 3600.0
    """Seconds that they may wait."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a workload."""

    request_id: str
    prompt: NDArray[np.integer]
    """[num_prompt] token ids."""
    num_output: int
    """Tokens of the answer; a simulated answer always ends by its length."""
    seed: int = 0
    qoe: QoeTarget | None = None
    request_class: RequestClass = RequestClass.REAL_TIME


@dataclass(slots=True)
class SimAnswer:
    """What came back, and when (seconds after the request's arrival)."""

    request: SimRequest
    arrival_s: float
    tokens: list[int] = field(default_factory=list)
    delivered_s: list[float] = field(default_factory=list)
    """One per token."""
    finish: FinishReason = FinishReason.NONE
    failure: FailureCode | None = None
    qoe: float | None = None
    """The dispatcher's own estimate, final; None when no reader follows."""

    def on_tokens(self, token_ids: Sequence[int], finish: FinishReason, now_s: float) -> bool:
        """Take the next tokens (the dispatcher's `Reader`)."""
        self.tokens += token_ids
        self.delivered_s += [now_s - self.arrival_s] * len(token_ids)
        self.finish = finish
        return True


class SimCluster:
    """Monitor, workers and one dispatcher; each on a connection of its own."""

    def __init__(self, params: ClusterParams) -> None:
        self.params = params
        self.broker = MemoryBroker()
        self.workers: list[SimWorker] = []
        self.failures: list[tuple[str, BaseException]] = []
        self._monitor = Monitor(MonitorSettings(instance_id="monitor"), self.broker.connect("monitor"), self._fail)
        settings = DispatcherSettings(
            instance_id="dispatcher",
            model=NO_FOLDER,
            served_model_name=(MODEL_NAME,),
            system=params.system,
            max_requests=params.max_requests,
            max_queued=params.max_queued,
            queue_limit_s=params.queue_limit_s,
        )
        self.dispatcher = DispatcherService(settings, self.broker.connect("dispatcher"), self._fail)

    def _fail(self, name: str, error: BaseException) -> None:
        self.failures.append((name, error))

    async def __aenter__(self) -> Self:
        await self._monitor.start()
        await self.dispatcher.start()
        for params in self.params.workers:
            worker = SimWorker(params, self.broker.connect(params.worker_id))
            await worker.start()
            self.workers.append(worker)
        async with asyncio.timeout(READY_LIMIT_S):
            while self.dispatcher.sessions.cluster.num_ready < len(self.workers):
                await asyncio.sleep(0.01)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.dispatcher.stop()
        for worker in self.workers:
            await worker.stop()
        await self._monitor.stop()

    async def ask(self, request: SimRequest) -> SimAnswer:
        """Send a request and return its whole answer.

        If the caller is cancelled, the request is cancelled at its worker, as when a client disconnects.

        Raises:
            RequestFailedError: it was not admitted.
        """
        (answer,) = await self.ask_choices(request, 1)
        return answer

    async def ask_choices(self, request: SimRequest, count: int) -> list[SimAnswer]:
        """Send a request for several choices, whose seeds count up, and return their answers.

        A choice after the first that no worker takes fails alone: its answer says why.

        Raises:
            RequestFailedError: the first was not admitted; none is left.
        """
        now_s = asyncio.get_running_loop().time()
        answers = [SimAnswer(replace(request, seed=request.seed + index), now_s) for index in range(count)]
        sessions = self.dispatcher.sessions.open([_new_request(answer, i) for i, answer in enumerate(answers)])
        try:
            await self.dispatcher.sessions.place(sessions[0])
            async with asyncio.TaskGroup() as group:
                for answer, session in zip(answers, sessions, strict=True):
                    parent = None if session is sessions[0] else sessions[0]
                    group.create_task(self._follow(answer, session, parent))
        finally:
            for session in sessions:
                self.dispatcher.sessions.release(session)
        return answers

    async def _follow(self, answer: SimAnswer, session: Session, parent: Session | None) -> None:
        try:
            if parent is not None:
                await self.dispatcher.sessions.place(session, parent)
            session.attach(answer, asyncio.get_running_loop().time())
            await session.ended.wait()
        except RequestFailedError as error:
            answer.failure = error.code
        else:
            _settle(answer, session)
        self.dispatcher.sessions.release(session)

    def undisturbed(self, request: SimRequest) -> list[int]:
        """Return what the request's answer is when nothing ever happens to its KV."""
        prompt, nothing = request.prompt.astype(np.int32), np.zeros(0, dtype=np.int32)
        draw = self.workers[0].draw
        tokens: list[int] = expected_outputs(prompt, nothing, request.num_output, request.seed, draw).tolist()
        return tokens

    def check_idle(self) -> None:
        """Check that nothing of any request is left anywhere; raises AssertionError naming what is."""
        assert not self.failures, f"tasks died: {self.failures}"
        assert not len(self.dispatcher.sessions.table), "the dispatcher still has sessions"
        assert not self.dispatcher.sessions.num_queued, "the dispatcher still has requests that wait"
        for worker in self.workers:
            engine, name = worker.service.engine, worker.params.worker_id
            assert not worker.failures, f"tasks of {name} died: {worker.failures}"
            engine.check_invariants()
            assert not engine.has_work, f"{name} still has sequences"
            assert not engine.stats.num_used_blocks, f"{name} still holds blocks"


def _settle(answer: SimAnswer, session: Session) -> None:
    answer.failure = session.failure
    answer.qoe = None if session.qoe is None else session.qoe.final()


def _new_request(answer: SimAnswer, index: int) -> NewRequest:
    request = answer.request
    return NewRequest(
        request_id=RequestId(f"{request.request_id}-{index}" if index else request.request_id),
        prompt=pack_token_ids(request.prompt),
        sampling=SamplingParams(max_tokens=request.num_output, seed=request.seed, ignore_eos=True),
        arrival_s=answer.arrival_s,
        limit_s=24 * 3600.0,
        request_class=request.request_class,
        qoe=request.qoe,
    )
