"""Workers that keep the promises of `shared.messages.plan`, with a real planner and a real monitor.

They have no model: layers, groups and loads are numbers. What they heard and said is written down, and `check` holds it
to the laws of the protocol.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter

from services.monitor.config import MonitorSettings
from services.planner.config import PlannerSettings
from services.planner.policy.plans.capacity import CapacityRule
from services.planner.policy.plans.drop_facts import ModelFacts
from shared.ids import Incarnation, WorkerId
from shared.layers import LayerRange, check_tiling
from shared.messages.event import Event
from shared.messages.plan import (
    PLAN_KEY,
    CommitPlan,
    FormGroup,
    LoadBeside,
    Plan,
    PlanAnswer,
    PlanMessage,
    PlanPhase,
    PlanState,
    PreparePlan,
    RestoreInstance,
    Step,
    UnloadBeside,
)
from shared.messages.report import WorkerPhase, WorkerReport
from shared.subjects import Subjects
from shared.transport.bus import BusError, Endpoint, KvEntry, Message, ServiceInfo
from shared.transport.memory_bus import Delivery, MemoryBroker, MemoryBus
from shared.wire import decode_json, decode_union_json, encode_json
from sim.faults.nodes import MonitorNode, PlannerNode
from tests.support.drop_builders import make_elastic, make_model

SUBJECTS = Subjects()
MODEL = make_model(8, layer_bytes=(8 * 64,) * 8)
"""64 pages of parameters. With 224 in all a whole instance has 10 blocks of 16 tokens, half of one 24."""
NUM_PAGES = 224
GROUP_LIMIT_S = 1.0
"""In which the members of a group must have met."""
Faults = Callable[[Delivery], tuple[float, ...]]
"""What becomes of a message: when each of its copies arrives."""
_QUESTION: TypeAdapter[PlanMessage] = TypeAdapter(Annotated[PlanMessage, Field(discriminator="kind")])


@dataclass
class Load:
    """What one worker's requests have and want, in blocks."""

    used: int = 0
    demanded: int = 0
    queued: int = 0


@dataclass
class Heard:
    """One question, and what became of it."""

    at_s: float
    worker_id: WorkerId
    kind: str
    plan_id: int
    epoch: int
    state: PlanState | None = None


@dataclass
class _Prepared:
    plan_id: int
    step: Step
    until_s: float


@dataclass
class PlanWorker:
    """One worker. The fields after `load` are its faults."""

    cluster: PlanCluster
    worker_id: WorkerId
    bus: MemoryBus
    incarnation: Incarnation
    load: Load = field(default_factory=Load)
    refuses: str = ""
    """Why it refuses what it is asked to prepare."""
    is_deaf: bool = False
    """It answers nothing about plans."""
    stop_s: float = 0.002
    """Until it has stopped between two steps."""
    lacks_blocks: int = 0
    """Fewer than anybody would expect."""
    is_leaving: bool = False
    """It is told to stop."""
    change_s: float = 0.005
    """Until its memory has changed."""
    load_s: float = 3.0
    """Until parameters are loaded beside serving."""
    stalls_at: float = 1.0
    """Share of them at which it comes to a halt."""
    breaks: bool = False
    """It fails at what it has to change beside serving, and leaves its group."""
    loads_beside: bool = False
    """It can load parameters while it serves."""
    model: ModelFacts = MODEL
    is_elastic: bool = True
    is_alive: bool = True
    layers: LayerRange = MODEL.all_layers
    group: tuple[WorkerId, ...] = ()
    resident: LayerRange | None = None
    """Layers whose parameters it has, or loads; None: those that it computes with."""
    began_s: float = 0.0
    """When it began to load them."""
    limit: int | None = None
    """Leader: blocks that it uses at most, for what its members have beside."""
    ahead: int | None = None
    """Blocks of all layers, where KV can move ahead."""
    plan_id: int = 0
    newest_epoch: int = 0
    prepared: _Prepared | None = None
    concluded: dict[int, PlanState] = field(default_factory=dict)
    _number: int = 0
    _changing: dict[int, asyncio.Future[PlanState]] = field(default_factory=dict)

    async def start(self) -> None:
        """Answer the planner, and report by period."""
        info = ServiceInfo("sluice-worker", "1.0.0", "a worker without a model", {}, self.worker_id)
        await self.bus.serve(info, [Endpoint("plan", SUBJECTS.plan(self.worker_id), self._answer)])

    async def live(self) -> None:
        """Report by period, and give up what was prepared for too long."""
        while self.is_alive:
            await self.report()
            await asyncio.sleep(0.5)

    def die(self) -> None:
        """Be gone; whoever is in a group with it becomes whole."""
        self.is_alive = False
        self.bus.abort()
        self.cluster.broken(self.worker_id)

    def become_whole(self) -> None:
        """The group is no more."""
        self.group, self.layers = (), MODEL.all_layers
        self.resident = self.limit = self.ahead = None

    @property
    def num_blocks(self) -> int:
        """KV blocks that there is memory for beside the layers that it holds."""
        return self._num_blocks(self.resident) if self.ahead is None else self.ahead

    def _num_blocks(self, resident: LayerRange | None) -> int:
        return max(CapacityRule(self.model).blocks(self.layers, NUM_PAGES, resident=resident) - self.lacks_blocks, 0)

    @property
    def usable_blocks(self) -> int:
        """KV blocks that the leader of its group uses: what it knows of, not what there is."""
        members = [self.cluster.workers[name] for name in self.group] or [self]
        blocks = min(member._num_blocks(None) for member in members)
        return blocks if self.limit is None else min(blocks, self.limit)

    @property
    def loaded_ratio(self) -> float:
        """Share of the resident parameters that is loaded."""
        if self.resident is None:
            return 1.0
        own = len(self.layers) / len(self.resident)
        share = min((_now_s() - self.began_s) / self.load_s, self.stalls_at)
        return min(own + (1 - own) * share, 1.0)

    async def report(self) -> None:
        """Say how things are."""
        if not self.is_alive:
            return
        self._number += 1
        report = self._make_report()
        with suppress(BusError):
            await self.bus.publish(SUBJECTS.report(self.worker_id), encode_json(report))

    def _make_report(self) -> WorkerReport:
        leads = not self.group or self.group[0] == self.worker_id
        members = [self.cluster.workers[name] for name in self.group] or [self]
        loads = [member.load for member in members] if leads else []
        num_blocks = self.usable_blocks if leads else 0
        if leads and any(num_blocks > member.num_blocks for member in members):
            self.cluster.violations.append(f"{self.worker_id} uses blocks that others lack, after plan {self.plan_id}")
        resident = self.resident or self.layers
        used, demanded = sum(load.used for load in loads), sum(load.demanded for load in loads)
        queued = sum(load.queued for load in loads)
        return WorkerReport(
            worker_id=self.worker_id,
            sequence_number=self._number,
            phase=WorkerPhase.READY,
            incarnation=self.incarnation,
            is_leaving=self.is_leaving,
            host=f"host-{self.worker_id}",
            model="m",
            block_size=self.model.block_size,
            num_blocks=num_blocks,
            num_used_blocks=min(used, num_blocks),
            num_demanded_blocks=demanded + max(used - num_blocks, 0),
            num_head_blocks=min(1, queued),
            num_queued_for_memory=queued if used + demanded > num_blocks else 0,
            num_running=used,
            num_layers=self.model.num_layers,
            layers=(self.layers.first, self.layers.end),
            resident=(resident.first, resident.end) if self.loads_beside else (0, 0),
            loaded_ratio=self.loaded_ratio,
            group=self.group[0] if self.group else "",
            stage=self.group.index(self.worker_id) if self.group else 0,
            num_stages=max(len(self.group), 1),
            plan_id=self.plan_id,
            stage_address=f"{self.worker_id}:1",
            elastic=make_elastic(self.model, num_pages=NUM_PAGES) if self.is_elastic else None,
            token_s=0.0001,
        )

    async def _answer(self, message: Message) -> bytes:
        question = decode_union_json(message.data, _QUESTION)
        heard = Heard(_now_s(), self.worker_id, question.kind, question.plan_id, question.epoch)
        self.cluster.heard.append(heard)
        if self.is_deaf:
            await asyncio.sleep(3600)
        if question.epoch < self.newest_epoch:
            heard.state, reason = PlanState.REFUSED, "the epoch is old"
        else:
            self.newest_epoch = question.epoch
            heard.state, reason = await self._obey(question)
        answer = PlanAnswer(
            worker_id=self.worker_id,
            plan_id=question.plan_id,
            state=heard.state,
            reason=reason,
            newest_epoch=self.newest_epoch,
            num_blocks=self.num_blocks if heard.state is PlanState.DONE else 0,
        )
        return encode_json(answer)

    async def _obey(self, question: PlanMessage) -> tuple[PlanState, str]:
        self._give_up()
        if question.plan_id in self.concluded:
            return self.concluded[question.plan_id], "as before"
        if question.plan_id in self._changing:
            return await asyncio.shield(self._changing[question.plan_id]), ""
        if isinstance(question, PreparePlan):
            return await self._prepare(question)
        prepared = self.prepared
        if prepared is not None and prepared.plan_id == question.plan_id:
            if isinstance(question, CommitPlan):
                self.prepared = None
                return await self._commit(prepared), ""
            self._drop_prepared()
        self.concluded[question.plan_id] = PlanState.ABORTED
        return PlanState.ABORTED, ""

    async def _prepare(self, question: PreparePlan) -> tuple[PlanState, str]:
        why_not = self.refuses or self._why_not(question.step) or ("it is changing" if self._changing else "")
        if why_not:
            self.concluded[question.plan_id] = PlanState.REFUSED
            return PlanState.REFUSED, why_not
        self._drop_prepared()
        self.prepared = _Prepared(question.plan_id, question.step, _now_s() + question.limit_s)
        if isinstance(question.step, LoadBeside) and self.group[0] == self.worker_id:
            self.limit = question.step.num_blocks
        await asyncio.sleep(self.stop_s)
        if question.plan_id in self.concluded:
            return self.concluded[question.plan_id], "aborted meanwhile"
        return PlanState.PREPARED, ""

    def _why_not(self, step: Step) -> str:
        own = next(worker for worker in step.workers if worker.worker_id == self.worker_id)
        if own.incarnation != self.incarnation:
            return "it is another process"
        if own.held != (self.layers.first, self.layers.end):
            return f"it holds {self.layers}"
        return self._why_not_resident(step) if isinstance(step, LoadBeside | UnloadBeside) else ""

    def _why_not_resident(self, step: LoadBeside | UnloadBeside) -> str:
        if tuple(worker.worker_id for worker in step.stages) != self.group:
            return f"its group is {self.group}"
        if not self.loads_beside:
            return "it cannot load beside serving"
        leads = self.group[0] == self.worker_id
        used = sum(self.cluster.workers[name].load.used for name in self.group)
        loads = isinstance(step, LoadBeside)
        return "its requests hold more" if leads and loads and used > step.num_blocks else ""

    def _give_up(self) -> None:
        if self.prepared is not None and _now_s() >= self.prepared.until_s:
            self.concluded[self.prepared.plan_id] = PlanState.ABORTED
            self._drop_prepared()

    def _drop_prepared(self) -> None:
        """Go on as before: a leader that had made room for a load, and is not to load, uses all blocks again."""
        prepared, self.prepared = self.prepared, None
        if prepared is not None and isinstance(prepared.step, LoadBeside) and self.resident is None:
            self.limit = None
        if any(self.cluster.workers[name].group != self.group for name in self.group):
            self.become_whole()  # others of its group went on without it

    async def _commit(self, prepared: _Prepared) -> PlanState:
        change: asyncio.Future[PlanState] = asyncio.get_running_loop().create_future()
        self._changing[prepared.plan_id] = change
        step = prepared.step
        if isinstance(step, LoadBeside | UnloadBeside):
            await asyncio.sleep(self.change_s)
            state = self._reside(step, prepared.plan_id)
        else:
            self.cluster.broken(self.worker_id, but=step)
            await asyncio.sleep(self.change_s)
            state = await self._meet(step, prepared)
        if state is not PlanState.DONE:
            self.become_whole()
        self.concluded[prepared.plan_id] = state
        change.set_result(state)
        del self._changing[prepared.plan_id]
        await self.report()
        return state

    def _reside(self, step: LoadBeside | UnloadBeside, plan_id: int) -> PlanState:
        """Make room for parameters beside, and begin to load them, or give it back."""
        members = [self.cluster.workers[worker.worker_id] for worker in step.stages]
        if self.breaks or any(member.group != self.group or not member.is_alive for member in members):
            self.cluster.broken(self.worker_id)
            return PlanState.FAILED
        loads = isinstance(step, LoadBeside)
        self.resident = MODEL.all_layers if loads else None
        self.limit = step.num_blocks if loads and self.group[0] == self.worker_id else None
        num_ahead = CapacityRule(self.model).blocks_ahead(self.layers, NUM_PAGES, step.num_blocks)
        self.ahead = step.num_blocks if loads and num_ahead > 0 else None
        self.began_s, self.plan_id = _now_s(), plan_id
        return PlanState.DONE

    async def _meet(self, step: FormGroup | RestoreInstance, prepared: _Prepared) -> PlanState:
        layers, names = MODEL.all_layers, tuple(worker.worker_id for worker in step.workers)
        if isinstance(step, FormGroup):
            layers = LayerRange(*step.stages[names.index(self.worker_id)].layers)
            if not await self.cluster.meet(self, prepared.plan_id, names):
                return PlanState.FAILED
        self.layers = layers
        self.resident = self.limit = self.ahead = None
        self.group = names if len(names) > 1 else ()
        self.plan_id = prepared.plan_id
        return PlanState.DONE


class PlanCluster:
    """Workers, a monitor, and planners that come and go.

    Args:
        num_workers: `w0`, `w1` …, one on each host.
        settings: of the planners.
        deliver: faults of the broker; None: none.
        loads_beside: whether its workers can load parameters while they serve.
    """

    def __init__(
        self,
        num_workers: int,
        settings: PlannerSettings,
        deliver: Faults | None = None,
        *,
        loads_beside: bool = False,
    ) -> None:
        self._loads_beside = loads_beside
        self.broker = MemoryBroker(latency_s=0.001, deliver=deliver)
        self.bus = self.broker.connect("test")
        self.settings = settings
        self.workers: dict[WorkerId, PlanWorker] = {}
        self.heard: list[Heard] = []
        self.violations: list[str] = []
        self.is_lossless = True
        """Whether whoever lives must have heard what became of each plan."""
        self.plans: list[Plan] = []
        self._new_plan = asyncio.Event()
        self.events: list[tuple[float, str, str]] = []
        self.monitor = MonitorNode(MonitorSettings(instance_id="monitor"), self.broker, np.random.default_rng(0))
        self.planners: dict[str, PlannerNode] = {}
        self._meetings: dict[tuple[int, tuple[WorkerId, ...]], set[WorkerId]] = {}
        self._over: dict[tuple[int, tuple[WorkerId, ...]], None] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._num_processes = 0
        for number in range(num_workers):
            self._make(WorkerId(f"w{number}"), Load())

    def _make(self, worker_id: WorkerId, load: Load) -> PlanWorker:
        self._num_processes += 1
        bus, incarnation = self.broker.connect(worker_id), Incarnation(self._num_processes)
        worker = PlanWorker(self, worker_id, bus, incarnation, load, loads_beside=self._loads_beside)
        self.workers[worker_id] = worker
        return worker

    async def start(self) -> None:
        """Start workers and monitor; the planner is started by `start_planner`."""
        await self.bus.subscribe("sluice.*.event.>", self._on_event)
        await (await self.bus.key_value(SUBJECTS.plan_bucket())).watch(PLAN_KEY, self._on_plan)
        self.monitor.launch()
        for worker in list(self.workers.values()):
            await self._start(worker)

    async def _start(self, worker: PlanWorker) -> None:
        await worker.start()
        self._tasks.append(asyncio.create_task(worker.live()))

    async def restart(self, worker_id: WorkerId) -> None:
        """Put a new process in the place of a dead worker."""
        await self._start(self._make(worker_id, self.workers[worker_id].load))

    def start_planner(self, name: str = "p") -> PlannerNode:
        """Start a planner, or start it again."""
        if name not in self.planners:
            settings = self.settings.model_copy(update={"instance_id": name})
            self.planners[name] = PlannerNode(settings, self.broker, np.random.default_rng(0))
        self.planners[name].launch()
        return self.planners[name]

    async def burst(
        self, *names: str, after_s: float = 1.0, queued: int = 3, demanded: int = 2, until_groups: int = 0
    ) -> PlannerNode:
        """Start a planner, and after a while let these workers run short; return when there are so many groups."""
        node = self.start_planner()
        await asyncio.sleep(after_s)
        for name in names:
            await self.strain(name, queued, demanded)
        if until_groups:
            await self.until(lambda: len(self.groups()) == until_groups)
        return node

    async def ask(self, verb: str, fields: Any = None, timeout_s: float = 30) -> Any:
        """Ask the planner by hand; return what it answers."""
        data = b"" if fields is None else json.dumps(fields).encode()
        return json.loads(await self.bus.request(SUBJECTS.admin("planner", "p", verb), data, timeout_s=timeout_s))

    async def until(self, is_so: Callable[[], bool], limit_s: float = 120.0) -> float:
        """Return soon after something is so, with the time that it is then."""
        async with asyncio.timeout(limit_s):
            while not is_so():
                await asyncio.sleep(0.02)
        return _now_s()

    async def close(self) -> None:
        """End everything."""
        for planner in self.planners.values():
            planner.kill(None)
        self.monitor.kill(None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self.workers.values():
            await worker.bus.close()
        await self.bus.close()

    async def strain(self, name: str, queued: int = 3, demanded: int = 2) -> None:
        """Let a worker be full, with requests that wait for memory, and say so at once."""
        worker = self.workers[WorkerId(name)]
        worker.load = Load(10, demanded, queued)
        await worker.report()

    def relax(self, used: int = 2, *names: str) -> None:
        """Let these workers, or all, have this much to do, and nobody wait."""
        for name, worker in self.workers.items():
            if not names or name in names:
                worker.load = Load(used)

    def broken(self, worker_id: WorkerId, but: Step | None = None) -> None:
        """End the groups of this worker: each member becomes whole, but those that change their role with it."""
        changing = [] if but is None else [worker.worker_id for worker in but.workers]
        names = self.workers[worker_id].group
        for name in names:
            if name not in changing and not self.workers[name]._changing:
                self.workers[name].become_whole()

    async def meet(self, worker: PlanWorker, plan_id: int, names: tuple[WorkerId, ...]) -> bool:
        """Return whether all members of a group came in time."""
        meeting = (plan_id, names)
        present = self._meetings.setdefault(meeting, set())
        present.add(worker.worker_id)
        until_s = _now_s() + GROUP_LIMIT_S
        while len(present) < len(names):
            if _now_s() >= until_s:
                self._over[meeting] = None
                return False
            await asyncio.sleep(0.001)
        if meeting in self._over:
            return False
        return all(self.workers[name].is_alive for name in names)

    def names(self, prefix: str = "plan_") -> list[str]:
        """Names of the planner's events."""
        return [name for _, name, _ in self.events if name.startswith(prefix)]

    def reasons(self, name: str, word: str = "") -> list[str]:
        """Reasons of the events of this name that have the word in them."""
        return [reason for _, event, reason in self.events if event == name and word in reason]

    def times(self, name: str) -> list[float]:
        """When the events of this name were told."""
        return [at_s for at_s, event, _ in self.events if event == name]

    @property
    def committed(self) -> list[Plan]:
        """Plans that workers were told to carry out."""
        return [plan for plan in self.plans if plan.phase is PlanPhase.COMMITTING]

    @property
    def levers(self) -> list[str]:
        """Their levers, in order."""
        return [plan.lever for plan in self.committed]

    def groups(self) -> list[tuple[str, ...]]:
        """The groups of living workers, by their leaders."""
        return [w.group for w in self.workers.values() if w.is_alive and w.group and w.group[0] == w.worker_id]

    @property
    def plan(self) -> Plan:
        """What the plan key holds."""
        return self.plans[-1]

    async def next_plan(self) -> None:
        """Return when the plan key holds something new."""
        self._new_plan.clear()
        await self._new_plan.wait()

    def _on_event(self, message: Message) -> None:
        event = decode_json(message.data, Event)
        self.events.append((_now_s(), event.name, event.reason))

    def _on_plan(self, entry: KvEntry) -> None:
        assert entry.value is not None
        self.plans.append(decode_json(entry.value, Plan))
        self._new_plan.set()

    def check(self) -> None:
        """Hold what was heard to the laws; raises AssertionError."""
        assert not self.violations
        self._check_epochs()
        for plan_id in dict.fromkeys(heard.plan_id for heard in self.heard):
            self._check_plan(plan_id)
        self._check_groups()

    def _check_epochs(self) -> None:
        epochs = [plan.epoch for plan in self.plans]
        assert all(later > earlier for earlier, later in pairwise(epochs)), epochs
        for plan in self.plans:
            for step in plan.steps:
                if isinstance(step, FormGroup):
                    check_tiling([LayerRange(*stage.layers) for stage in step.stages], MODEL.num_layers)
                    for stage in step.stages:
                        assert LayerRange(*stage.held).covers(LayerRange(*stage.layers)), "it would have to load"

    def _check_plan(self, plan_id: int) -> None:
        heard = [each for each in self.heard if each.plan_id == plan_id]
        named = {worker.worker_id for p in self.plans if p.plan_id == plan_id for worker in p.workers}
        assert {each.worker_id for each in heard} <= named, "somebody else was asked"
        commits = [each for each in heard if each.kind == "commit_plan"]
        aborts = [each for each in heard if each.kind == "abort_plan"]
        steps = next(p.steps for p in self.plans if p.plan_id == plan_id)
        in_turn = {worker.worker_id for step in steps if len(step.waves) > 1 for worker in step.workers}
        both = commits and [each for each in aborts if each.worker_id not in in_turn]
        assert not both, f"plan {plan_id} was both committed and aborted"
        if commits:
            first = {each.worker_id: each for each in reversed(heard) if each.kind == "prepare_plan"}
            refused = [name for name, each in first.items() if each.state is not PlanState.PREPARED]
            assert not refused, f"plan {plan_id} was committed although {refused} refused"
            assert first.keys() == named, f"plan {plan_id} was committed although not all were prepared"
        if self.is_lossless:
            told = {each.worker_id for each in (*commits, *aborts)}
            silent = {name for name in named - told if self.workers[name].is_alive}
            assert not silent, f"{sorted(silent)} never heard what became of plan {plan_id}"

    def _check_groups(self) -> None:
        assert not self.plans or self.plan.phase is PlanPhase.DONE, "something was begun and not ended"
        for worker in self.workers.values():
            if not worker.is_alive:
                continue
            worker._give_up()
            assert worker.prepared is None, f"{worker.worker_id} waits for ever"
            if not worker.group:
                assert worker.layers == MODEL.all_layers, f"{worker.worker_id} is alone and not whole"
                continue
            members = [self.workers[name] for name in worker.group]
            assert all(member.group == worker.group for member in members), "members disagree"
            assert [member.layers.first for member in members] == [0, *(m.layers.end for m in members[:-1])]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
