"""One worker's life: serve, drain, stop. Owns the tasks; the handlers live in the modules that it joins."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from services.worker.engine.stats import take_stats
from services.worker.roles.role_keeper import StepMachine
from services.worker.serving.emitter import Emitter
from services.worker.serving.endpoints import Endpoints
from services.worker.serving.reporter import Reporter, WorkerFacts
from services.worker.serving.watchdog import watch_steps
from shared.messages.report import WorkerPhase
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner
from shared.transport.bus import Bus, ServiceInfo, Subscription

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
        machine: StepMachine,
        endpoints: Endpoints,
        emitter: Emitter,
        reporter: Reporter,
        tasks: TaskOwner,
    ) -> None:
        self.engine = machine.engine
        self.agent = endpoints.agent
        self.migration = endpoints.migration
        self.executor = machine.executor
        self.intake = endpoints.intake
        self.leases = endpoints.leases
        self.emitter = emitter
        self._info = info
        self._facts = facts
        self._bus = bus
        self._machine = machine
        self._endpoints = endpoints
        self._reporter = reporter
        self._tasks = tasks
        self._served: Subscription | None = None
        self._stepping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take requests from now on."""
        loop = self._machine.loop
        self._stepping = self._tasks.start(loop.run(), name="step-loop")
        self._tasks.start(self.emitter.run(), name="emitter")
        self._tasks.start(self.leases.run(), name="leases")
        watchdog = watch_steps(lambda: loop.step_age_s, self._machine.step_limit_s)
        self._tasks.start(watchdog, name="watchdog")
        self._served = await self._bus.serve(self._info, self._endpoints.all())
        if self._endpoints.migration is not None:
            self._endpoints.migration.start()
        self.intake.open()
        self._reporter.serve(self._facts, lambda: take_stats(self.engine, loop.pace))

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests, and return when the running ones have ended or the time is over.

        A stage of a group goes on at first, for half of the time at most: planners restore its group.
        """
        began_s = asyncio.get_running_loop().time()
        num_left = 0 if self.migration is None else self.migration.departures.num_left
        if self.agent is not None and self.agent.keeper.is_needed:
            self._reporter.will_leave()
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s / 2):
                    while self.agent.keeper.is_needed:
                        await asyncio.sleep(IDLE_POLL_S)
        limit_s -= asyncio.get_running_loop().time() - began_s
        self.intake.close()
        self._reporter.enter(WorkerPhase.DRAINING)
        try:
            async with asyncio.timeout(limit_s):
                while self.engine.table.num_sequences or not self.emitter.idle:
                    await asyncio.sleep(IDLE_POLL_S)
        except TimeoutError:
            _log.warning("drain_limit_reached", num_left=len(self.engine.registry.row_of), limit_s=limit_s)
        num_left = 0 if self.migration is None else self.migration.departures.num_left - num_left
        took_s, num_here = asyncio.get_running_loop().time() - began_s, len(self.engine.registry.row_of)
        told = f"in {took_s:.3g} s; {num_left} sequences left with their KV, {num_here} are still here"
        await self._reporter.announce("drained", told)

    async def stop(self) -> None:
        """Leave the bus and release the executor. Sequences that still run are lost: the dispatcher sees the phase."""
        self.intake.close()
        if self._served is not None:
            await self._served.close()
        if self._endpoints.migration is not None:
            await self._endpoints.migration.close()
        self._machine.loop.close()
        ended = True
        if self._stepping is not None:
            _, running = await asyncio.wait([self._stepping], timeout=self._machine.step_limit_s)
            ended = not running
        await self._reporter.leave()
        await self._tasks.close()
        if ended:
            await self.executor.close()
            if self.agent is not None:
                await self.agent.keeper.device.close()
        else:  # its thread is stuck in a step, and dies with the process
            _log.error("executor_abandoned", after_s=self._machine.step_limit_s)
        await self._bus.flush()
