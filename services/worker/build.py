"""Wires one worker from its parts; used live and by the simulator, so that both run the same code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from services.worker.config import WorkerSettings
from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import Executor, HostMemory, KvCapacity, overlaps
from services.worker.cost.estimate import CostEstimate
from services.worker.cost.fitting import CostFitting
from services.worker.engine.demand import count_queued_for_memory
from services.worker.engine.engine import Engine
from services.worker.engine.gate import StepGate
from services.worker.engine.loop import StepLoop
from services.worker.engine.readers import look_at_readers
from services.worker.engine.sketch import sketch_prefixes
from services.worker.migration.kv_link import KvNetwork
from services.worker.migration.migration import Migration
from services.worker.roles.agent import OrderAgent
from services.worker.roles.device import GroupDevice
from services.worker.roles.errands import make_errands
from services.worker.roles.role_executor import RoleExecutor
from services.worker.roles.role_keeper import RoleKeeper, StepMachine
from services.worker.scheduling.registry import make_scheduler
from services.worker.scheduling.view import Scheduler
from services.worker.sequences.config import EngineConfig
from services.worker.serving.admin import Admin
from services.worker.serving.emitter import Emitter
from services.worker.serving.endpoints import Endpoints
from services.worker.serving.intake import Intake
from services.worker.serving.leases import Leases
from services.worker.serving.reporter import Reporter, WorkerFacts
from services.worker.serving.service import WorkerService
from services.worker.serving.step_log import StepLog
from services.worker.serving.watchdog import step_limit
from shared.host import process_facts
from shared.ids import Incarnation, WorkerId
from shared.process.tasks import TaskOwner
from shared.subjects import Subjects
from shared.systems import find_system
from shared.transport.bus import Bus, ServiceInfo
from shared.version import VERSION

DESCRIPTION = "Runs the model on one device, and owns its memory"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a worker must know of the model that its executor runs."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    param_bytes: int = 0
    kv_bytes: int = 0
    reserve_bytes: int = 0
    dry_step_s: float = 0.0
    """Seconds that the largest step took while the worker was loaded; 0 if none was tried."""
    cost: CostEstimate = field(default_factory=CostEstimate)
    """Of a step of the whole model; the only one: whoever prices anything reads it there."""
    fitting: CostFitting | None = None
    """What keeps it up to date; None: it does not change."""
    kernels: str = "modelled"
    digest: str = ""
    """See `ProcessFacts.model_digest`."""
    prepare_grammar: Callable[[bytes], None] | None = None
    """See `Intake`."""


EngineMaker = Callable[[EngineConfig, Scheduler, int, HostMemory | None, CostEstimate], Engine]
"""(limits, scheduler, KV blocks, memory for what leaves them, cost of a step) -> an engine."""


def _max_failures(max_batch_rows: int) -> int:
    """Return after how many failed steps in a row the executor is to blame: several guilty rows cost fewer.

    One costs a step per halving and two in the end.
    """
    return 4 * (max_batch_rows.bit_length() + 2)


def make_reporter(settings: WorkerSettings, bus: Bus, incarnation: Incarnation) -> Reporter:
    """Return the reporter; it can run while the model still loads."""
    subjects = Subjects(settings.cluster)
    return Reporter(WorkerId(settings.instance_id), subjects, bus, settings.report_period_s, incarnation)


def build_worker(  # noqa: PLR0913  one argument per part that is joined here
    settings: WorkerSettings,
    bus: Bus,
    executor: Executor,
    model: ServedModel,
    reporter: Reporter,
    on_failure: Callable[[str, BaseException], None],
    *,
    make_engine: EngineMaker | None = None,
    device: GroupDevice | None = None,
    network: KvNetwork | None = None,
    end: Callable[[], None] | None = None,
) -> WorkerService:
    """Return a worker that is ready to `start`.

    Args:
        settings: checked settings of this worker.
        bus: connected.
        executor: loaded; the worker closes it when it stops.
        model: facts about what the executor runs.
        reporter: already running or not; its task belongs to the caller.
        on_failure: called with a task's name and error when one of the worker's own tasks dies.
        make_engine: makes another engine than the usual one; for simulated devices.
        device: of the executor, if its layers can be dropped; the worker closes it when it stops.
        network: the way to the KV of other workers, and theirs here, if there is one; the worker closes it too.
        end: has the process drain and end, if there is one.
    """
    facts = _facts(settings, executor, model, device, network)
    reporter.watch_cost(model.cost, executor.num_lanes)
    parts = _Parts(
        worker_id=WorkerId(settings.instance_id),
        subjects=Subjects(settings.cluster),
        now=asyncio.get_running_loop().time,
        emitter=Emitter(WorkerId(settings.instance_id), Subjects(settings.cluster), bus),
        reporter=reporter,
        tasks=TaskOwner(on_failure),
        end=end,
        prepare_grammar=model.prepare_grammar,
    )
    engine_executor, gate, roles = RoleExecutor(executor), StepGate(), _Roles()
    engine = _engine(settings, engine_executor, model, facts.max_model_len, make_engine)
    reporter.watch_readers(lambda: look_at_readers(engine, parts.now()))
    reporter.watch_prefixes(lambda: sketch_prefixes(engine))
    steps = StepLog(parts.worker_id, settings.step_log_size, parts.now, model.cost)
    loop = StepLoop(
        engine,
        engine_executor,
        parts.emitter.emit,
        parts.now,
        gate,
        max_failures=_max_failures(settings.max_batch_rows),
        on_step=_on_step(settings, parts, engine, model.fitting, steps),
        on_lost=roles.on_lost,
    )
    limit_s = step_limit(settings.step_limit_s, model.dry_step_s)
    machine = StepMachine(engine, loop, gate, engine_executor, limit_s)
    endpoints = _endpoints(settings, parts, machine, steps, device, network)
    roles.agent = endpoints.agent
    return WorkerService(
        info=_info(settings, facts),
        facts=facts,
        bus=bus,
        machine=machine,
        endpoints=endpoints,
        emitter=parts.emitter,
        reporter=reporter,
        tasks=parts.tasks,
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the other parts of a worker are made of."""

    worker_id: WorkerId
    subjects: Subjects
    now: Callable[[], float]
    emitter: Emitter
    reporter: Reporter
    tasks: TaskOwner
    end: Callable[[], None] | None
    """Of the process."""
    prepare_grammar: Callable[[bytes], None] | None
    """See `Intake`."""


class _Roles:
    """The step loop's way to the agent, which is made after it; without one a lost executor ends the worker."""

    def __init__(self) -> None:
        self.agent: OrderAgent | None = None

    def on_lost(self, cause: str) -> bool:
        """Return whether the lost executor was a group's, which is mended."""
        return self.agent is not None and self.agent.keeper.on_lost(cause)


def _on_step(
    settings: WorkerSettings, parts: _Parts, engine: Engine, fitting: CostFitting | None, steps: StepLog
) -> Callable[[Batch, BatchOutput], None]:
    def on_step(batch: Batch, output: BatchOutput) -> None:
        """Note a step where its duration is wanted, and tell at once when memory runs short."""
        if settings.step_log_size:
            steps.note(batch, output)
        is_whole = engine.limits.num_lanes == 1  # a group's steps say what several devices took
        if fitting is not None and is_whole and fitting.note(batch, output):
            parts.tasks.start(fitting.fit(), name="cost fitting")
        parts.reporter.look(is_short=count_queued_for_memory(engine) > 0)

    return on_step


def _endpoints(
    settings: WorkerSettings,
    parts: _Parts,
    machine: StepMachine,
    steps: StepLog,
    device: GroupDevice | None,
    network: KvNetwork | None,
) -> Endpoints:
    engine, loop, reporter = machine.engine, machine.loop, parts.reporter
    leases = Leases(
        engine,
        parts.emitter,
        parts.now,
        loop.wake,
        step_age_s=lambda: loop.step_age_s,
        incarnation=reporter.incarnation,
        lease_s=settings.lease_s,
        orphan_s=settings.orphan_s,
    )
    intake = Intake(engine, parts.emitter, leases, parts.now, loop.wake, parts.prepare_grammar)
    agent = migration = None
    if device is not None:
        keeper = RoleKeeper(
            device=device, machine=machine, intake=intake, reporter=reporter, now=parts.now, tasks=parts.tasks
        )
        agent = OrderAgent(keeper, make_errands(keeper))
    if network is not None:
        migration = Migration(
            engine,
            network,
            wake=loop.wake,
            busy=str if agent is None else agent.keeper.why_no_migration,
            is_open=lambda: intake.is_open,
            closing=intake.closing,
            now=parts.now,
            tasks=parts.tasks,
        )
        reporter.watch_migration(migration.look)
        if settings.pull_prefixes:
            intake.on_new = migration.pulls.begin
        if agent is not None:
            agent.keeper.migration = migration
    return Endpoints(
        worker_id=parts.worker_id,
        subjects=parts.subjects,
        intake=intake,
        leases=leases,
        admin=Admin(engine, reporter, leases, parts.now, parts.end),
        steps=steps,
        agent=agent,
        migration=migration,
    )


def _num_blocks(settings: WorkerSettings, capacity: KvCapacity) -> int:
    return min(capacity.num_blocks, settings.max_blocks or capacity.num_blocks)


def _facts(
    settings: WorkerSettings,
    executor: Executor,
    model: ServedModel,
    device: GroupDevice | None,
    network: KvNetwork | None,
) -> WorkerFacts:
    capacity = executor.capacity
    address = "" if device is None else device.address
    return WorkerFacts(
        model=settings.model_name(),
        model_digest=model.digest,
        device=settings.device,
        kernels=model.kernels,
        system=settings.system,
        max_model_len=min(model.max_model_len, _num_blocks(settings, capacity) * capacity.block_size),
        block_size=capacity.block_size,
        max_sequences=settings.max_sequences,
        param_bytes=model.param_bytes,
        kv_bytes=model.kv_bytes,
        reserve_bytes=model.reserve_bytes,
        memory_bytes=settings.memory,
        num_layers=0 if device is None else len(device.facts.layer_bytes),
        stage_address=address if network is None else network.address,
        elastic=None if device is None else device.facts,
    )


def _engine(
    settings: WorkerSettings,
    executor: Executor,
    model: ServedModel,
    max_model_len: int,
    make_engine: EngineMaker | None,
) -> Engine:
    capacity, system = executor.capacity, find_system(settings.system)
    config = EngineConfig(
        max_sequences=settings.max_sequences,
        max_batch_tokens=settings.max_batch_tokens,
        max_batch_rows=settings.max_batch_rows,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        block_size=capacity.block_size,
        prefix_caching=settings.prefix_caching,
        num_lanes=executor.num_lanes,
        overlaps=overlaps(executor),
        shares_blocks=system.shares_blocks,
    )
    scheduler = make_scheduler(system.scheduler)
    num_blocks = _num_blocks(settings, capacity)
    return (make_engine or Engine)(config, scheduler, num_blocks, capacity.host, model.cost)


def _info(settings: WorkerSettings, facts: WorkerFacts) -> ServiceInfo:
    return ServiceInfo(
        name="sluice-worker",
        version=VERSION,
        description=DESCRIPTION,
        metadata={
            "cluster": settings.cluster,
            "model": facts.model,
            "device": facts.device,
            "system": facts.system,
            **process_facts(),
        },
        instance_id=settings.instance_id,
    )
