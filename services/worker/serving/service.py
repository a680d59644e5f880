"""One worker's life: serve, drain, stop. Owns the tasks; the handlers live in the modules that it joins."""

from __future__ import annotations

import asyncio
from functools import partial

from services.worker.contract.executor import Executor
from services.worker.engine.engine import Engine
from services.worker.engine.loop import StepLoop
from services.worker.engine.stats import take_stats
from services.worker.roles.agent import PlanAgent
from services.worker.roles.device import GroupDevice
from services.worker.serving.admin import Admin
from services.worker.serving.emitter import Emitter
from services.worker.serving.intake import Intake
from services.worker.serving.leases import Leases
from services.worker.serving.reporter import Reporter, WorkerFacts
from services.worker.serving.step_log import StepLog
from services.worker.serving.watchdog import watch_steps
from shared.messages.report import WorkerPhase
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner
from shared.subjects import Subjects
from shared.transport.bus import Bus, Endpoint, ServiceInfo, Subscription

_log = get_logger()

IDLE_POLL_S = 0.05
"""How often a draining worker looks whether its last sequence has ended."""


class WorkerService:
    """A loaded worker on the bus. Built by `services.worker.build`, live and in simulation."""

    def __init__(  # noqa: PLR0913  one argument per part that is joined here
        self,
        *,
        info: ServiceInfo,
        facts: WorkerFacts,
        bus: Bus,
        subjects: Subjects,
        engine: Engine,
        loop: StepLoop,
        executor: Executor,
        intake: Intake,
        leases: Leases,
        emitter: Emitter,
        reporter: Reporter,
        steps: StepLog,
        step_limit_s: float,
        tasks: TaskOwner,
        agent: PlanAgent | None = None,
        device: GroupDevice | None = None,
    ) -> None:
        self.engine = engine
        self.agent = agent
        self._device = device
        self.executor = executor
        self._info = info
        self._facts = facts
        self._bus = bus
        self._subjects = subjects
        self._loop = loop
        self._intake = intake
        self.leases = leases
        self.emitter = emitter
        self._reporter = reporter
        self._admin = Admin(engine, reporter, leases)
        self._steps = steps
        self._step_limit_s = step_limit_s
        self._tasks = tasks
        self._endpoints: Subscription | None = None
        self._stepping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take requests from now on."""
        worker_id = self.emitter.worker_id
        self._stepping = self._tasks.start(self._loop.run(), name="step-loop")
        self._tasks.start(self.emitter.run(), name="emitter")
        self._tasks.start(self.leases.run(), name="leases")
        watchdog = watch_steps(lambda: self._loop.step_age_s, self._step_limit_s)
        self._tasks.start(watchdog, name="watchdog")
        self._endpoints = await self._bus.serve(
            self._info,
            [
                Endpoint("submit", self._subjects.submit(worker_id), self._intake.submit),
                Endpoint("cancel", self._subjects.cancel(worker_id), self._intake.cancel),
                Endpoint("replay", self._subjects.replay(worker_id), self._intake.replay),
                Endpoint("renew", self._subjects.renew(worker_id), self.leases.renew),
                Endpoint("dump", self._subjects.dump(worker_id), self._admin.dump, metadata={"format": "json"}),
                *self._plan_endpoints(),
                Endpoint("steps", self._subjects.steps(worker_id), self._steps.read, metadata={"format": "json"}),
            ],
        )
        self._intake.open()
        self._reporter.serve(self._facts, partial(take_stats, self.engine))

    def _plan_endpoints(self) -> list[Endpoint]:
        if self.agent is None:
            return []
        subject = self._subjects.plan(self.emitter.worker_id)
        return [Endpoint("plan", subject, self.agent.answer, metadata={"format": "json"})]

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests, and return when the running ones have ended or the time is over."""
        self._intake.close()
        self._reporter.enter(WorkerPhase.DRAINING)
        try:
            async with asyncio.timeout(limit_s):
                while self.engine.table.num_live or not self.emitter.idle:
                    await asyncio.sleep(IDLE_POLL_S)
        except TimeoutError:
            _log.warning("drain_limit_reached", num_left=len(self.engine.residents.row_of), limit_s=limit_s)

    async def stop(self) -> None:
        """Leave the bus and release the executor. Sequences that still run are lost: the dispatcher sees the phase."""
        self._intake.close()
        if self._endpoints is not None:
            await self._endpoints.close()
        self._loop.close()
        ended = True
        if self._stepping is not None:
            _, running = await asyncio.wait([self._stepping], timeout=self._step_limit_s)
            ended = not running
        await self._reporter.leave()
        await self._tasks.close()
        if ended:
            await self.executor.close()
            if self._device is not None:
                await self._device.close()
        else:  # its thread is stuck in a step, and dies with the process
            _log.error("executor_abandoned", after_s=self._step_limit_s)
        await self._bus.flush()
