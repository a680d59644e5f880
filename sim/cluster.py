"""A whole cluster on the virtual clock: the live services' own code over the bus in memory, below HTTP and text.

async with SimCluster(ClusterParams(workers=(…))) as cluster:
    answer = await cluster.ask(request)
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count, cycle
from types import TracebackType
from typing import Any, Self

from services.dispatcher.config import DispatcherSettings
from services.dispatcher.policy.placement import Placement
from services.dispatcher.service import DispatcherService
from services.monitor.config import MonitorSettings
from services.monitor.service import Monitor
from services.planner.config import PlannerSettings
from services.planner.service import Planner
from services.worker.engine.invariants import check_engine
from services.worker.engine.stats import take_stats
from shared.ids import RequestId, WorkerId
from shared.messages.fetch import FETCH_LIMIT_S, Fetch, Fetched, FetchReason
from shared.subjects import Subjects
from shared.systems import DEFAULT_SYSTEM, KvExchange, find_system
from shared.transport.memory_bus import LATENCY_S, MemoryBroker
from shared.wire import decode, encode
from sim.devices.channel import ModelledLink
from sim.devices.modelled_network import ModelledNetwork
from sim.requests import SimAnswer, SimRequest, new_answers, serve_choices, undisturbed_text
from sim.worker import MODEL_NAME, NO_FOLDER, SimWorker, SimWorkerParams

READY_LIMIT_S = 10.0
"""Virtual seconds in which every worker must have shown up in the dispatcher's view."""
MAX_REQUESTS = 65_536
"""That the dispatcher takes at a time; so many may wait for room."""
FLEX_MEMORY_BYTES = 2**50
"""For prompts of any workload."""
QUEUE_LIMIT_S = 3600.0
"""How long they may wait."""
_MOVERS = count()


@dataclass(frozen=True, slots=True)
class ClusterParams:
    """What runs."""

    workers: tuple[SimWorkerParams, ...]
    system: str = DEFAULT_SYSTEM
    """Of the dispatcher; each worker names its own."""
    placement: Placement | None = None
    """Which worker gets a request; None: as the system has it."""
    num_dispatchers: int = 1
    """Requests go to them in turn."""
    latency_s: float = LATENCY_S
    """Of every message, from sender to receiver."""
    link: ModelledLink | None = None
    """Between workers; None: it costs no time."""
    near_link: ModelledLink | None = None
    """Between workers of one host, for requests that move; None: as between any others."""
    exchange: bool = True
    """Whether KV changes hands when groups form and dissolve; else it is computed again."""
    kv_exchange: KvExchange | None = None
    """How it comes to a group that forms; None: as the system has it."""
    planner: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the planner besides its name and system."""


class SimCluster:
    """Monitor, planner, workers and dispatchers; each on a connection of its own."""

    def __init__(self, params: ClusterParams) -> None:
        self.params = params
        self.broker = MemoryBroker(params.latency_s)
        limits = {} if params.exchange else {"exchange_limit_s": 0.0}
        kv_exchange = params.kv_exchange or find_system(params.system).exchange
        self.network = ModelledNetwork(params.link, near_link=params.near_link, kv_exchange=kv_exchange, **limits)
        self.workers: list[SimWorker] = []
        self.failures: list[tuple[str, BaseException]] = []
        self.monitor = Monitor(MonitorSettings(instance_id="monitor"), self.broker.connect("monitor"), self._fail)
        self._planner = Planner(
            PlannerSettings(**{**params.planner, "instance_id": "planner", "system": params.system}),
            self.broker.connect("planner"),
            on_failure=self._fail,
        )
        names = ["dispatcher", *(f"dispatcher-{number}" for number in range(2, params.num_dispatchers + 1))]
        self.dispatchers = [self._make_dispatcher(name) for name in names]
        self.dispatcher = self.dispatchers[0]
        self._turns = cycle(self.dispatchers)

    def _make_dispatcher(self, name: str) -> DispatcherService:
        settings = DispatcherSettings(
            instance_id=name,
            model=NO_FOLDER,
            served_model_name=(MODEL_NAME,),
            system=self.params.system,
            max_requests=MAX_REQUESTS,
            max_queued=MAX_REQUESTS,
            max_queued_flex=MAX_REQUESTS,
            flex_memory=FLEX_MEMORY_BYTES,
            queue_limit_s=QUEUE_LIMIT_S,
        )
        return DispatcherService(settings, self.broker.connect(name), self._fail, placement=self.params.placement)

    def _fail(self, name: str, error: BaseException) -> None:
        self.failures.append((name, error))

    async def __aenter__(self) -> Self:
        await self.monitor.start()
        await self._planner.start()
        for dispatcher in self.dispatchers:
            await dispatcher.start()
        for params in self.params.workers:
            await self.start_worker(params)
        async with asyncio.timeout(READY_LIMIT_S):
            while min(each.sessions.cluster.num_ready for each in self.dispatchers) < len(self.workers):
                await asyncio.sleep(0.01)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for dispatcher in self.dispatchers:
            await dispatcher.stop()
        for worker in self.workers:
            await worker.stop()
        await self._planner.stop()
        await self.monitor.stop()

    async def start_worker(self, params: SimWorkerParams) -> SimWorker:
        """Let a worker join, in the place of one of the same id, which has stopped."""
        name = f"{params.worker_id}-{params.incarnation}" if params.incarnation else params.worker_id
        worker = SimWorker(params, self.broker.connect(name), network=self.network)
        await worker.start()
        names = [each.params.worker_id for each in self.workers]
        place = names.index(params.worker_id) if params.worker_id in names else len(names)
        self.workers[place : place + 1] = [worker]
        return worker

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
        answers = new_answers(request, count, asyncio.get_running_loop().time())
        await serve_choices(next(self._turns), answers)
        return answers

    async def fetch(self, name: str, source: str, target: str, attempt: int = 1, *, as_tokens: bool = False) -> Fetched:
        """Have a worker fetch a request that another one runs; return its answer."""
        asked = Fetch(
            request_id=RequestId(name),
            attempt=attempt,
            source=WorkerId(source),
            source_address=source,
            reason=FetchReason.BALANCE,
            as_tokens=as_tokens,
        )
        bus = self.broker.connect(f"mover-{next(_MOVERS)}")
        data = await bus.request(Subjects().fetch(WorkerId(target)), encode(asked), timeout_s=FETCH_LIMIT_S)
        return decode(data, Fetched)

    def undisturbed(self, request: SimRequest) -> list[int]:
        """Return what the request's answer is when nothing ever happens to its KV."""
        return undisturbed_text(request, self.workers[0].draw)

    def all_failures(self) -> list[tuple[str, BaseException]]:
        """Return the tasks of services that died, with what ended them."""
        return self.failures + [failure for worker in self.workers for failure in worker.failures]

    def check_idle(self) -> None:
        """Check that nothing of any request is left anywhere; raises AssertionError naming what is."""
        assert not self.all_failures(), f"tasks died: {self.all_failures()}"
        for dispatcher in self.dispatchers:
            assert not len(dispatcher.sessions.table), "a dispatcher still has sessions"
            assert not dispatcher.sessions.num_queued, "a dispatcher still has requests that wait"
        for worker in self.workers:
            engine, name = worker.service.engine, worker.params.worker_id
            check_engine(engine)
            assert not engine.table.num_sequences, f"{name} still has sequences"
            assert not take_stats(engine).num_used_blocks, f"{name} still holds blocks"
