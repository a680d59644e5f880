"""The processes of a simulated cluster: each can be killed, stand still, be told to leave, and come back.

A node is what a supervisor of processes knows: a name, and the process that goes by it now. Whatever ends, in order or
not, is started again; the new process has another incarnation and another connection to the broker.
"""

from __future__ import annotations

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from services.dispatcher.config import DispatcherSettings
from services.dispatcher.service import DispatcherService
from services.monitor.config import MonitorSettings
from services.monitor.service import Monitor
from services.planner.config import PlannerSettings
from services.planner.service import Planner
from services.worker.contract.batch import Batch
from shared.errors import StartupError
from shared.ids import Incarnation, WorkerId
from shared.transport.bus import BusError
from shared.transport.memory_bus import MemoryBroker, MemoryBus
from sim.devices.modelled_network import ModelledNetwork
from sim.faults.process import ProcessState, SimProcess
from sim.virtual_time import VirtualTimeLoop
from sim.worker import SimWorker, SimWorkerParams

RESTART_S = 1.0
"""Pause of the supervisor before it starts a process again that ended by itself."""
POISON_SEED = 666
"""Requests with this sampling seed kill every worker that computes their prompt."""


class LostConnectionError(Exception):
    """The process at the other end is gone, or was never there."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One reason why nothing passes between a node and the broker."""

    out: bool
    into: bool


class Node(ABC):
    """One name in the cluster, and its process.

    Args:
        name: of the process and of its connection.
        broker: of the cluster.
        random: whatever the process would draw by chance at its start comes from here.
    """

    def __init__(self, name: str, broker: MemoryBroker, random: np.random.Generator) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop), "nodes live on the virtual clock"
        self.name = name
        self.num_starts = 0
        self.is_serving = False
        """The process that goes by the name now has started its service."""
        self.failures: list[tuple[str, BaseException]] = []
        """Tasks of its services that died."""
        self.broker = broker
        self.random = random
        self.loop = loop
        self.process: SimProcess | None = None
        self.bus: MemoryBus | None = None
        self._outside = contextvars.copy_context()
        self._cuts: list[Cut] = []
        self._restart: asyncio.TimerHandle | None = None
        self._is_leaving = False

    @abstractmethod
    async def serve(self, bus: MemoryBus) -> None:
        """Start the service (in the process)."""

    @abstractmethod
    async def leave(self, limit_s: float) -> None:
        """Drain for at most this long and stop the service (in the process)."""

    def launch(self) -> None:
        """Start a process, unless one lives."""
        self._restart = None
        if self.process is not None:
            return
        self.num_starts += 1
        self.process = SimProcess(f"{self.name}#{self.num_starts}", self.loop)
        self.bus = self.broker.connect(self.name)
        self._apply_cuts()
        self.process.start(self._main(self.process, self.bus), name=f"{self.name}-main")

    async def _main(self, process: SimProcess, bus: MemoryBus) -> None:
        try:
            await self.serve(bus)
            self.is_serving = True
        except (BusError, StartupError):  # the real process says why and ends
            self._from_outside(partial(self._end, process, RESTART_S))

    def kill(self, restart_s: float | None) -> None:
        """End the process at once; another one comes after this time, or never."""
        if self.process is not None:
            self._end(self.process, restart_s)

    def kill_from_inside(self) -> None:
        """The process dies of what it is doing now."""
        assert self.process is not None, "somebody does it"
        self._from_outside(partial(self._end, self.process, RESTART_S))

    def terminate(self, limit_s: float) -> None:
        """Tell the process to end in order; another one comes at once when it has."""
        if self.process is not None and self.is_serving and not self._is_leaving:
            self._is_leaving = True
            self.process.start(self._leave(self.process, limit_s), name=f"{self.name}-leave")

    async def _leave(self, process: SimProcess, limit_s: float) -> None:
        assert self.bus is not None, "a process has a connection"
        try:
            await self.leave(limit_s)
            await self.bus.close()
        except BusError:  # the broker is away: it leaves without a word
            pass
        self._from_outside(partial(self._end, process, 0.0))

    def freeze(self) -> SimProcess | None:
        """Let the process stand still; return it."""
        if self.process is not None and self.bus is not None:
            self.process.freeze()
            self.bus.link.stand_still(still=True)
        return self.process

    def thaw(self, process: SimProcess | None) -> None:
        """Let the process go on, if it is still the one that goes by this name."""
        if process is not None and process is self.process and self.bus is not None:
            self.bus.link.stand_still(still=False)
            process.thaw()

    def cut(self, cut: Cut) -> None:
        """Cut the way to the broker, for this process and those to come."""
        self._cuts.append(cut)
        self._apply_cuts()

    def heal(self, cut: Cut) -> None:
        """Take one reason away; the way is whole again when none is left."""
        self._cuts.remove(cut)
        if self.bus is not None:
            if not self._cuts:
                self.bus.link.heal()
            self._apply_cuts()

    def _apply_cuts(self) -> None:
        if self.bus is not None:
            for cut in self._cuts:
                self.bus.link.cut(out=cut.out, into=cut.into)

    def on_failure(self, name: str, error: BaseException) -> None:
        """One of the service's own tasks died: the real process ends with code 1."""
        self.failures.append((name, error))
        self.kill_from_inside()

    def draw_incarnation(self) -> Incarnation:
        """Return a number that no other process of this name has."""
        return Incarnation(int(self.random.integers(1, 2**48)))

    @property
    def is_running(self) -> bool:
        """Whether a process lives, is not stopped, and serves."""
        return self.is_serving and self.process is not None and self.process.state is ProcessState.RUNNING

    def _from_outside(self, action: Callable[[], None]) -> None:
        self.loop.call_soon(action, context=self._outside.copy())

    def _end(self, process: SimProcess, restart_s: float | None) -> None:
        if process is not self.process or self.bus is None:
            return  # it has ended already
        self.bus.abort()
        self.process, self.bus, self.is_serving, self._is_leaving = None, None, False, False
        process.kill()
        if restart_s is not None:
            self._restart = self.loop.call_later(restart_s, self.launch)

    def bury(self) -> None:
        """End the process for good: the run is over."""
        if self._restart is not None:
            self._restart.cancel()
        self.kill(None)


class WorkerNode(Node):
    """A worker with a modelled device."""

    def __init__(
        self,
        params: SimWorkerParams,
        broker: MemoryBroker,
        random: np.random.Generator,
        network: ModelledNetwork | None = None,
    ) -> None:
        super().__init__(params.worker_id, broker, random)
        self._network = network or ModelledNetwork()
        self.params = replace(params, failure=self._fail_step)
        self.worker: SimWorker | None = None
        self.failing_ratio = 0.0
        """Chance of each step to fail."""

    @property
    def group(self) -> str:
        """Name of its group's leader; empty: it is alone, or its process has not begun."""
        agent = None if self.worker is None else self.worker.service.agent
        return "" if agent is None else agent.role.group

    async def serve(self, bus: MemoryBus) -> None:
        """See `Node`."""
        assert self.process is not None, "it serves in one"
        self.process.on_death[partial(self._network.lose, WorkerId(self.name))] = None
        params = replace(self.params, incarnation=self.draw_incarnation())
        self.worker = SimWorker(params, bus, self.on_failure, self._network)
        await self.worker.start()

    async def leave(self, limit_s: float) -> None:
        """See `Node`."""
        assert self.worker is not None, "it serves"
        await self.worker.stop(drain_limit_s=limit_s)

    def _fail_step(self, batch: Batch) -> str | None:
        if any(init.sampling.seed == POISON_SEED for init in batch.admits):
            self.kill_from_inside()
        return "by chance" if self.failing_ratio and self.random.random() < self.failing_ratio else None


class DispatcherNode(Node):
    """A dispatcher below HTTP, and the connections of its clients."""

    def __init__(self, settings: DispatcherSettings, broker: MemoryBroker, random: np.random.Generator) -> None:
        super().__init__(settings.instance_id, broker, random)
        self.settings = settings
        self.service: DispatcherService | None = None

    async def serve(self, bus: MemoryBus) -> None:
        """See `Node`."""
        self.service = DispatcherService(self.settings, bus, self.on_failure, incarnation=self.draw_incarnation())
        await self.service.start()

    async def leave(self, limit_s: float) -> None:
        """See `Node`."""
        assert self.service is not None, "it serves"
        await self.service.drain(limit_s)
        self.is_serving = False  # nobody listens any more
        while len(self.service.sessions.table):  # handlers take leave of their clients
            await asyncio.sleep(0.01)
        await self.service.stop()

    async def call(self, handle: Callable[[DispatcherService], Coroutine[Any, Any, None]]) -> None:
        """Run a handler in the process, as an HTTP request does; return when it has ended.

        If the caller is cancelled, so is the handler, as when the client disconnects.

        Raises:
            LostConnectionError: nobody listens, or the process died meanwhile.
            Exception: what the handler raised.
        """
        process, service = self.process, self.service
        if process is None or service is None or not self.is_serving:
            raise LostConnectionError(self.name)
        done: asyncio.Future[None] = self.loop.create_future()

        def lose() -> None:
            if not done.done():
                done.set_exception(LostConnectionError(self.name))

        def pass_on(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None and not done.done():
                done.set_exception(error)
            elif not done.done():
                done.set_result(None)

        process.on_death[lose] = None
        task = process.start(handle(service), name="handler")
        task.add_done_callback(pass_on, context=contextvars.copy_context())
        try:
            await done
        finally:
            process.on_death.pop(lose, None)
            task.cancel()


class MonitorNode(Node):
    """The monitor."""

    def __init__(self, settings: MonitorSettings, broker: MemoryBroker, random: np.random.Generator) -> None:
        super().__init__(settings.instance_id, broker, random)
        self.settings = settings
        self.monitor: Monitor | None = None

    async def serve(self, bus: MemoryBus) -> None:
        """See `Node`."""
        self.monitor = Monitor(self.settings, bus, self.on_failure)
        await self.monitor.start()

    async def leave(self, limit_s: float) -> None:
        """See `Node`; it has nothing to drain."""
        del limit_s
        assert self.monitor is not None, "it serves"
        await self.monitor.stop()


class PlannerNode(Node):
    """A planner."""

    def __init__(self, settings: PlannerSettings, broker: MemoryBroker, random: np.random.Generator) -> None:
        super().__init__(settings.instance_id, broker, random)
        self.settings = settings
        self.planner: Planner | None = None

    async def serve(self, bus: MemoryBus) -> None:
        """See `Node`."""
        self.planner = Planner(self.settings, bus, on_failure=self.on_failure)
        await self.planner.start()

    async def leave(self, limit_s: float) -> None:
        """See `Node`; it has nothing to drain."""
        del limit_s
        assert self.planner is not None, "it serves"
        await self.planner.stop()
