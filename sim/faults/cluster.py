"""A cluster whose processes fail by plan: the nodes, the faults, and the clients who must not notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial

import numpy as np

from services.dispatcher.config import DispatcherSettings
from services.dispatcher.session.request import FailureCode, RequestFailedError
from services.monitor.config import MonitorSettings
from services.planner.config import PlannerSettings
from services.worker.engine.stats import take_stats
from shared.ids import WorkerId
from shared.systems import DEFAULT_SYSTEM
from shared.transport.memory_bus import Delivery, MemoryBroker
from sim.devices.channel import ModelledLink
from sim.devices.modelled_network import ModelledNetwork
from sim.faults.conductor import Conductor
from sim.faults.kinds import BROKER, CHANGE_KINDS, MAX_DELAY_S, MESSAGE_KINDS, Fault, FaultKind
from sim.faults.movers import Movers
from sim.faults.nodes import Cut, DispatcherNode, LostConnectionError, MonitorNode, Node, PlannerNode, WorkerNode
from sim.faults.scenario import MONITOR, Ask, FaultScenario
from sim.faults.trace import SPY, FaultTrace
from sim.requests import SimAnswer, new_answers, serve_choices
from sim.worker import MODEL_NAME, NO_FOLDER

EXCHANGE_LIMIT_S = 3.0
MEET_LIMIT_S = 1.5
"""How long stages wait for each other when a group forms."""
MAX_TRIES = 8
"""Times that a client asks before it gives up."""
RETRY_S = 1.5
"""Pause before it asks again."""
_AS_IT_IS = (0.0,)
_PLANNER_TASK = "planner"
"""Ends for good when another planner takes over."""


class CallOutcome(Enum):
    """How one call of a client ended."""

    OPEN = auto()  # it has not
    ANSWERED = auto()  # each choice has its answer, or says why not
    REFUSED = auto()  # not admitted
    CUT = auto()  # the dispatcher died or was not there
    LEFT = auto()  # the client disconnected


@dataclass(slots=True)
class ClientCall:
    """One call of a client to one dispatcher."""

    ask: Ask
    dispatcher: str
    begun_s: float
    answers: list[SimAnswer]
    """One per choice; whatever had come when it ended."""
    outcome: CallOutcome = CallOutcome.OPEN
    code: FailureCode | None = None
    """Why it was refused."""
    ended_s: float = 0.0


@dataclass(slots=True)
class Peaks:
    """Largest sizes that were seen."""

    num_tasks: dict[str, int] = field(default_factory=dict)
    """Of each process."""
    num_on_the_way: int = 0


class FaultCluster:
    """Made within the run's event loop.

    Args:
        scenario: what runs and what fails.
        trace: hears of everything.
    """

    def __init__(self, scenario: FaultScenario, trace: FaultTrace) -> None:
        self.scenario = scenario
        self.trace = trace
        self.broker = MemoryBroker(deliver=self._deliver)
        self.calls: list[ClientCall] = []
        self.peaks = Peaks()
        self.felt: dict[Fault, frozenset[str]] = {}
        """Of each fault that has begun: the processes that it is felt by."""
        self._loop = asyncio.get_running_loop()
        self._random = np.random.default_rng([scenario.seed, 1])
        self._message_faults: list[Fault] = []
        link = ModelledLink(bytes_per_s=scenario.link_bytes_per_s)
        self.network = ModelledNetwork(link, MEET_LIMIT_S, EXCHANGE_LIMIT_S, scenario.kv_exchange)
        self.conductor = Conductor(self.broker, trace.say)
        self.workers = [WorkerNode(params, self.broker, self._random, self.network) for params in scenario.workers]
        self.dispatchers = [
            DispatcherNode(_dispatcher_settings(scenario, name), self.broker, self._random)
            for name in scenario.dispatchers
        ]
        self.others: list[Node] = [
            MonitorNode(MonitorSettings(instance_id=MONITOR), self.broker, self._random),
            *(PlannerNode(_planner_settings(scenario, name), self.broker, self._random) for name in scenario.planners),
        ]
        self._by_name: dict[str, Node] = {node.name: node for node in self.nodes}
        self.movers = Movers(self.broker, {worker.name: worker for worker in self.workers}, trace.say)

    @property
    def nodes(self) -> list[Node]:
        """Every process of the cluster."""
        return [*self.others, *self.dispatchers, *self.workers]

    @property
    def is_whole(self) -> bool:
        """Whether every process serves, and every dispatcher knows it."""
        return all(node.is_running for node in self.nodes) and all(
            node.service is not None and node.service.sessions.cluster.num_ready == len(self.workers)
            for node in self.dispatchers
        )

    def launch(self) -> None:
        """Start every process."""
        for node in self.nodes:
            node.launch()

    def bury(self) -> None:
        """End every process: the run is over."""
        for node in self.nodes:
            node.bury()

    # Clients

    async def follow(self, ask: Ask) -> None:
        """Be the client: ask, ask again elsewhere after a refusal or a lost connection, and perhaps leave."""
        try:
            async with asyncio.timeout(ask.leaves_s):
                for index in range(MAX_TRIES):
                    node = self.dispatchers[(ask.first_dispatcher + index) % len(self.dispatchers)]
                    if await self._call(ask, index, node):
                        return
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            self.trace.say(f"client   {ask.request.request_id} leaves")

    async def _call(self, ask: Ask, index: int, node: DispatcherNode) -> bool:
        """Ask once; return whether the client is content, or would not ask again."""
        request = ask.request
        if not request.is_resumable:
            request = replace(request, request_id=f"{request.request_id}-try{index}")
        now_s = self._loop.time()
        call = ClientCall(ask, node.name, now_s, new_answers(request, ask.num_choices, now_s))
        self.calls.append(call)
        try:
            await node.call(partial(serve_choices, answers=call.answers))
            call.outcome = CallOutcome.ANSWERED
        except RequestFailedError as error:
            call.outcome, call.code = CallOutcome.REFUSED, error.code
        except LostConnectionError:
            call.outcome = CallOutcome.CUT
        except asyncio.CancelledError:
            call.outcome = CallOutcome.LEFT
            raise
        finally:
            call.ended_s = self._loop.time()
            self.trace.say(f"client   {describe_call(call)}")
        return call.outcome is CallOutcome.ANSWERED

    # Faults

    def apply(self, fault: Fault) -> None:
        """Let a fault begin; it ends by itself."""
        self.trace.say(f"FAULT    {fault}")
        self.conductor.note(fault)
        self.movers.note(fault)
        self.felt[fault] = self._felt_by(fault.target)
        if fault.kind in MESSAGE_KINDS:
            self._message_faults.append(fault)
            self._later(fault, partial(self._message_faults.remove, fault))
        elif fault.target == BROKER:
            self._apply_to_broker(fault)
        elif fault.kind in CHANGE_KINDS:
            self.conductor.begin(fault)
        elif fault.kind is FaultKind.LINK_CUT:
            self._cut_link(fault)
        else:
            self._apply_to_node(fault, self._by_name[fault.target])

    def _felt_by(self, name: str) -> frozenset[str]:
        """Return the process of this name, and the members of its group, which is lost with it."""
        group = next((worker.group for worker in self.workers if worker.name == name), "")
        return frozenset({name, *(worker.name for worker in self.workers if group and worker.group == group)})

    def _later(self, fault: Fault, action: Callable[[], None]) -> None:
        def mend() -> None:
            self.trace.say(f"mended   {fault}")
            action()

        self._loop.call_later(fault.duration_s, mend)

    def _apply_to_broker(self, fault: Fault) -> None:
        if fault.kind is FaultKind.BROKER_HANG:
            self.broker.hang()
            self._later(fault, self.broker.go_on)
        else:
            self.broker.available = False
            self._later(fault, self._return_broker)

    def _cut_link(self, fault: Fault) -> None:
        """Cut the way to the next worker."""
        names = [worker.name for worker in self.workers]
        pair = (WorkerId(fault.target), WorkerId(names[(names.index(fault.target) + 1) % len(names)]))
        self.network.cut(*pair)
        self._later(fault, partial(self.network.heal, *pair))

    def _return_broker(self) -> None:
        self.broker.available = True
        for node in self.nodes:
            if node.bus is not None:
                node.bus.link.drop()

    def _apply_to_node(self, fault: Fault, node: Node) -> None:
        match fault.kind:
            case FaultKind.CRASH:
                node.kill(fault.duration_s)
            case FaultKind.HANG:
                self._later(fault, partial(node.thaw, node.freeze()))
            case FaultKind.HANG_AND_CRASH:
                process = node.freeze()
                self._later(fault, lambda: node.kill(0.5) if node.process is process else None)
            case FaultKind.RESTART:
                node.terminate(fault.duration_s)
            case FaultKind.PARTITION | FaultKind.DEAF | FaultKind.MUTE:
                cut = Cut(out=fault.kind is not FaultKind.DEAF, into=fault.kind is not FaultKind.MUTE)
                node.cut(cut)
                self._later(fault, partial(node.heal, cut))
            case _:
                assert isinstance(node, WorkerNode), "devices are workers'"
                self._apply_to_device(fault, node)

    def _apply_to_device(self, fault: Fault, node: WorkerNode) -> None:
        if fault.kind is FaultKind.FAILING_STEP:
            node.failing_ratio = fault.ratio
            self._later(fault, partial(setattr, node, "failing_ratio", 0.0))
        elif node.worker is not None and node.worker.device is not None:
            node.worker.device.stuck_until_s = self._loop.time() + fault.duration_s

    def _deliver(self, delivery: Delivery) -> Sequence[float]:
        if delivery.receiver == SPY:
            return _AS_IT_IS
        copies: tuple[float, ...] = _AS_IT_IS
        for fault in self._message_faults:
            if fault.target not in (delivery.sender, delivery.receiver) or self._random.random() >= fault.ratio:
                continue
            if fault.kind is FaultKind.LOSS:
                return ()
            late_s = float(np.exp(self._random.uniform(np.log(0.005), np.log(MAX_DELAY_S))))
            copies = (late_s,) if fault.kind is FaultKind.DELAY else (*copies, late_s)
        return copies

    # Looks

    def note_peaks(self) -> None:
        """Take note of sizes that must stay bounded."""
        self.peaks.num_on_the_way = max(self.peaks.num_on_the_way, self.broker.router.num_on_the_way)
        for node in self.nodes:
            if node.process is not None:
                known = self.peaks.num_tasks.get(node.name, 0)
                self.peaks.num_tasks[node.name] = max(known, len(node.process.task_names))

    def footprint(self) -> dict[str, tuple[list[str], int]]:
        """Return the tasks and the number of subscriptions of each process: the same whenever nothing is to do."""
        return {
            node.name: (
                [name for name in node.process.task_names if name != _PLANNER_TASK],
                self.broker.router.num_subscriptions(node.name),
            )
            for node in self.nodes
            if node.process is not None
        }

    def leftovers(self) -> list[str]:
        """Return what of any request is left anywhere, in words."""
        found = []
        for node in self.dispatchers:
            assert node.service is not None, "it serves"
            sessions = node.service.sessions
            found += [f"{node.name}: {len(sessions.table)} sessions"] if len(sessions.table) else []
            found += [f"{node.name}: {sessions.num_queued} requests that wait"] if sessions.num_queued else []
            found += [f"{node.name}: {sessions.num_drops} sequences to give up"] if sessions.num_drops else []
        for worker in self.workers:
            assert worker.worker is not None, "it serves"
            engine, leases = worker.worker.service.engine, worker.worker.service.leases
            found += (
                [f"{worker.name}: sequences {sorted(engine.registry.row_of)}"] if engine.table.num_sequences else []
            )
            num_used = take_stats(engine).num_used_blocks
            found += [f"{worker.name}: {num_used} blocks"] if num_used else []
            found += [f"{worker.name}: {len(leases)} leases"] if len(leases) else []
            migration, num_reserved = worker.worker.service.migration, engine.sharing.coming.num_reservations
            num_open = 0 if migration is None else len(migration.departures)
            found += [f"{worker.name}: {num_open} connections to who fetches"] if num_open else []
            found += [f"{worker.name}: {num_reserved} reservations"] if num_reserved else []
        if self.broker.router.askers:
            found.append(f"{len(self.broker.router.askers)} questions that wait for an answer")
        return found


def describe_call(call: ClientCall) -> str:
    """Return how a call stands, in words."""
    parts = [f"{call.answers[0].request.request_id} at {call.dispatcher}: {call.outcome.name.lower()}"]
    parts += [call.code.value] if call.code is not None else []
    for answer in call.answers:
        end = answer.failure.value if answer.failure is not None else answer.finish.name.lower()
        parts.append(f"[{len(answer.tokens)} of {answer.request.num_output} tokens, {end}]")
    return " ".join(parts)


def _planner_settings(scenario: FaultScenario, name: str) -> PlannerSettings:
    """Where groups form, that is by hand."""
    params = scenario.workers[0]
    return PlannerSettings(instance_id=name, system=DEFAULT_SYSTEM if params.elastic else params.system)


def _dispatcher_settings(scenario: FaultScenario, name: str) -> DispatcherSettings:
    return DispatcherSettings(
        instance_id=name,
        model=NO_FOLDER,
        served_model_name=(MODEL_NAME,),
        system=scenario.workers[0].system,
        max_requests=64,
        max_queued=32,
        queue_limit_s=30.0,
    )
