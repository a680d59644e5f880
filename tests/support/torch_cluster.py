"""A cluster of live workers in one process: real models in pages, real sockets between stages, a bus in memory.

Everything above the workers is what the simulator has too; the clock is the real one. Every call that maps a page is
seen, and can be made to fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import Self

import pytest

from services.dispatcher.config import DispatcherSettings
from services.dispatcher.service import DispatcherService
from services.monitor.config import MonitorSettings
from services.monitor.service import Monitor
from services.planner.config import PlannerSettings
from services.planner.service import Planner
from services.worker.build import build_worker, make_reporter
from services.worker.config import KernelKind, LoadFrom, WorkerSettings
from services.worker.engine.invariants import check_engine
from services.worker.executor import opening
from services.worker.load import check_start, load_executor
from services.worker.memory import model_memory
from services.worker.memory.elastic import ElasticMemory
from services.worker.memory.layout import Kind
from services.worker.memory.posix import PosixMemory
from services.worker.roles.agent import OrderAgent
from services.worker.roles.role import Broken, Changing
from services.worker.roles.torch_device import TorchGroupDevice
from services.worker.serving.service import WorkerService
from shared.ids import Incarnation
from shared.layers import LayerRange, check_tiling
from shared.messages.event import Event
from shared.messages.plan import PLAN_KEY, Plan
from shared.messages.report import WorkerPhase
from shared.subjects import Subjects
from shared.transport.bus import BusError, KvEntry, Message
from shared.transport.memory_bus import MemoryBroker, MemoryBus
from shared.wire import decode_json
from sim.requests import SimAnswer, SimRequest, new_answers, serve_choices
from sim.worker import MODEL_NAME, NO_FOLDER
from tests.support.checkpoints import CheckpointShape, stored_checkpoint
from tests.support.elastic_cases import Faults
from tests.support.hand_planner import HandPlanner
from tests.support.live_groups import PAGE, SHAPES, stated_peak
from tests.support.mapped_pages import mapped_pages
from tests.support.peers import PASSWORD
from tests.support.runners import KERNELS, MIB
from tests.support.waiting import until

SYSTEM = "kunserve"
SUBJECTS = Subjects()
LIMIT_S = 20.0
STAGE_LIMIT_S = 5.0


@dataclass
class TorchWorker:
    """One worker, and what a test may look at."""

    service: WorkerService
    device: TorchGroupDevice
    bus: MemoryBus
    faulty: Faults

    @property
    def memory(self) -> ElasticMemory:
        """Its pages."""
        return self.device._model._memory

    @property
    def num_blocks(self) -> int:
        """KV blocks that its engine hands out."""
        return self.service.engine.capacity_blocks

    @property
    def layers(self) -> LayerRange:
        """Held now."""
        return self.device.layers


class TorchCluster:
    """Monitor, planner, dispatcher and workers.

    Args:
        num_workers: `w0`, `w1` …
        patch: through which the workers' memory is made one that can fail.
        memory_bytes: of each worker.
        shape: of the model; None: a small one of four layers.
        max_batch_rows: of each worker; six times as many tokens.
        max_model_len: of each worker; 0: what its memory holds.
    """

    def __init__(
        self,
        num_workers: int,
        patch: pytest.MonkeyPatch,
        *,
        memory_bytes: int = 8 * MIB,
        shape: CheckpointShape | None = None,
        max_batch_rows: int = 8,
        max_model_len: int = 0,
    ) -> None:
        self.broker = MemoryBroker()
        self.workers: dict[str, TorchWorker] = {}
        self.wrong: list[str] = []
        """What was not right in the middle of a change."""
        self.num_page_calls = 0
        self.events: list[Event] = []
        self.plans: list[Plan] = []
        self.failures: list[tuple[str, BaseException]] = []
        self._names = [f"w{index}" for index in range(num_workers)]
        self._folder = stored_checkpoint(shape or SHAPES["llama"])[0]
        self._memory_bytes = memory_bytes
        self._max_batch_rows = max_batch_rows
        self._max_model_len = max_model_len
        self._num_processes = 0
        self._made: list[Faults] = []
        patch.setattr(model_memory, "PosixMemory", self._make_memory)
        patch.setattr(opening, "peak_bytes", stated_peak)
        self.bus = self.broker.connect("test")
        self.driver = HandPlanner(self.broker.connect("hand"))
        self._monitor = Monitor(MonitorSettings(instance_id="monitor"), self.broker.connect("monitor"), self._fail)
        settings = PlannerSettings(instance_id="planner", system=SYSTEM, restore_ratio=0, cooldown_s=0)
        self.planner = Planner(settings, self.broker.connect("planner"), on_failure=self._fail)
        front = DispatcherSettings(
            instance_id="dispatcher", model=NO_FOLDER, served_model_name=(MODEL_NAME,), system=SYSTEM
        )
        self.dispatcher = DispatcherService(front, self.broker.connect("dispatcher"), self._fail)

    def _fail(self, name: str, error: BaseException) -> None:
        self.failures.append((name, error))

    def _make_memory(self, page_bytes: int, num_pages: int, *, huge: bool = False) -> PosixMemory:
        memory = PosixMemory(page_bytes, num_pages, huge=huge)
        self._made.append(Faults(memory))
        return memory

    async def __aenter__(self) -> Self:
        await self.bus.subscribe("sluice.*.event.>", self._on_event)
        await (await self.bus.key_value(SUBJECTS.plan_bucket())).watch(PLAN_KEY, self._on_plan)
        await self._monitor.start()
        await self.dispatcher.start()
        await self.driver.start()
        for name in self._names:
            await self.start_worker(name)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.dispatcher.stop()
        for name in list(self.workers):
            await self.kill(name)
        if self.planner.epoch:
            await self.planner.stop()
        await self._monitor.stop()

    def _on_event(self, message: Message) -> None:
        self.events.append(decode_json(message.data, Event))

    def _on_plan(self, entry: KvEntry) -> None:
        assert entry.value is not None
        self.plans.append(decode_json(entry.value, Plan))

    # Workers

    def _settings_of(self, name: str, memory_bytes: int) -> WorkerSettings:
        return WorkerSettings(
            instance_id=name,
            nats_user="worker",
            nats_password=PASSWORD,
            model=self._folder,
            served_model_name=(MODEL_NAME,),
            system=SYSTEM,
            memory=memory_bytes,
            page_bytes=PAGE,
            max_batch_tokens=self._max_batch_rows * 6,
            max_batch_rows=self._max_batch_rows,
            max_model_len=self._max_model_len,
            max_sequences=512,
            threads=1,
            deterministic=True,
            kernels=KernelKind(KERNELS),
            report_period_s=0.03,
            stage_limit_s=STAGE_LIMIT_S,
            load_from=LoadFrom.PEERS if self._names.index(name) % 2 else LoadFrom.HOST,
        )

    async def start_worker(self, name: str) -> None:
        """Start a worker, or another process of that name; return when it is used."""
        self._num_processes += 1
        incarnation = Incarnation(self._num_processes)
        settings = self._settings_of(name, self._memory_bytes)
        bus = self.broker.connect(name)
        loaded = await load_executor(settings, check_start(settings), lambda _done, _what: None, incarnation)
        assert isinstance(loaded.device, TorchGroupDevice)
        reporter = make_reporter(settings, bus, incarnation)
        reporter.pid = self._num_processes
        service = build_worker(
            settings,
            bus,
            loaded.executor,
            loaded.model,
            reporter,
            self._fail,
            device=loaded.device,
            network=loaded.network,
        )
        worker = self.workers[name] = TorchWorker(service, loaded.device, bus, self._made[-1])
        worker.faulty.on_call = lambda: self._on_page_call(worker)
        service._tasks.start(reporter.run(), name=f"{name}-reporter")
        await service.start()
        await until(lambda: self._is_told(name))

    async def kill(self, name: str) -> None:
        """End a worker without a word: others see that its connections end, and that it is silent."""
        worker = self.workers.pop(name)
        worker.bus.abort()
        with contextlib.suppress(BusError):  # it cannot say goodbye
            await worker.service.stop()
        self.driver.reports.pop(name, None)

    # Requests

    async def ask(self, request: SimRequest) -> SimAnswer:
        """Send a request and return its whole answer; cancelled, the request is cancelled too."""
        answers = new_answers(request, 1, asyncio.get_running_loop().time())
        await serve_choices(self.dispatcher, answers)
        return answers[0]

    # Looks

    def _on_page_call(self, worker: TorchWorker) -> None:
        """Hold the ledger to its law in the middle of a change; runs in the thread that makes the change."""
        self.num_page_calls += 1
        try:
            worker.memory._pool.check_invariants()
        except AssertionError as error:
            self.wrong.append(str(error))

    async def check(self) -> None:
        """Check the memory of every worker, while none of them changes, and every group that stands."""
        for name, worker in self.workers.items():
            async with worker.device._changing:
                worker.device._model.check_invariants()
                check_pages(worker.memory)
                assert tuple(worker.layers) == worker.memory.holding.layers, name
            check_engine(worker.service.engine)
        self.check_groups()
        assert not self.wrong, self.wrong[:3]
        assert not self.failures, self.failures

    def check_groups(self) -> None:
        """Check that the members of a group have every layer once, and its leader the room of the least of them."""
        groups: dict[int, list[TorchWorker]] = {}
        num_stages: dict[int, int] = {}
        for worker in self.workers.values():
            agent = worker.service.agent
            assert agent is not None
            if agent.role.num_stages > 1 and not is_changing(agent):
                groups.setdefault(agent.role.plan_id, []).append(worker)
                num_stages[agent.role.plan_id] = agent.role.num_stages
        for plan_id, members in groups.items():
            if len(members) < num_stages[plan_id]:
                continue  # one of them is gone, or has heard of the end before
            members.sort(key=lambda member: member.layers.first)
            whole = members[0].device._model.info.num_layers
            check_tiling([member.layers for member in members], whole)
            assert members[0].num_blocks == min(member.memory.num_blocks for member in members)

    async def settle(self) -> None:
        """Return when every worker's report says what it is, and the dispatcher has nothing to do."""
        await until(lambda: all(self._is_told(name) for name in self.workers))

    def _num_members(self, group: str) -> int:
        roles = [worker.service.agent.role for worker in self.workers.values() if worker.service.agent is not None]
        return sum(role.group == group and role.num_stages > 1 for role in roles)

    def _is_told(self, name: str) -> bool:
        report, worker = self.driver.reports.get(name), self.workers[name]
        agent = worker.service.agent
        assert agent is not None
        role = agent.role
        if report is None or report.phase is not WorkerPhase.READY:
            return False
        if is_changing(agent):
            return False
        if role.num_stages > 1 and self._num_members(role.group) < role.num_stages:
            return False  # somebody has left, and this worker has not heard of it yet
        said = (report.layers, report.group, report.plan_id, report.incarnation)
        return said == (
            (role.layers.first, role.layers.end),
            role.group,
            role.plan_id,
            worker.service._reporter.incarnation,
        )


def is_changing(agent: OrderAgent) -> bool:
    """Whether a plan is in hand, or a group that is over is being left."""
    return agent._in_hand is not None or isinstance(agent.keeper.state, Broken | Changing)


def check_pages(memory: ElasticMemory) -> None:
    """Check that the operating system maps the pages that the ledger says, each once, and none beyond the budget."""
    pool = memory._pool
    num_parameters, num_kv = pool.count(Kind.OUTER, Kind.PARAMETERS), pool.count(Kind.KEYS, Kind.VALUES)
    assert num_parameters + num_kv + memory._pool.num_free == pool.budget
    posix = memory._memory
    assert isinstance(posix, PosixMemory)
    mapped = mapped_pages(posix.page_bytes, inode=os.fstat(posix._file.descriptor).st_ino)
    assert len(mapped) == len(set(mapped)) == num_parameters + num_kv, "pages are mapped twice, or not at all"
    assert not mapped or max(mapped) < pool.budget, "a page beyond the budget is mapped"
