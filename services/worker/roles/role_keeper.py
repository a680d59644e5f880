"""The only writer of what a worker is: steps of plans change it through here, and so does the end of a group.

A change of role preempts all sequences that are here. A leader's wait for their turn again; a member's are released,
and their dispatchers bring them to the leader. Their KV travels by what it is, not by whose it is: full blocks with
their names (`prefix_names.py`), so that in the group they are found as any cached prefix is. A group of which a stage
or a connection is lost is over: each of its members, by itself, loads the layers that it lacks, and computes KV anew.

Source: KunServe v2, section 4.1 (a drop changes page tables and roles between two steps) and 4.2 (KV is exchanged).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from services.worker.contract.executor import overlaps
from services.worker.contract.kept_kv import KeptKv
from services.worker.engine.engine import Engine
from services.worker.engine.gate import GateClosedError, StepGate
from services.worker.engine.loop import StepLoop
from services.worker.engine.stats import count_awaiting_kv
from services.worker.kv_moves.arrivals import ArrivingKv
from services.worker.kv_moves.places import GroupPlace
from services.worker.kv_moves.transfers import Transfers
from services.worker.migration.migration import Migration
from services.worker.roles.block_limit import BlockLimit
from services.worker.roles.device import GroupDevice, Led, Parting
from services.worker.roles.resident import Resident, resident_in_group
from services.worker.roles.role import (
    Alone,
    Broken,
    Changing,
    InGroup,
    Leading,
    Member,
    Role,
    RoleState,
    group_of,
    reported,
    why_not_named,
)
from services.worker.roles.role_executor import RoleExecutor
from services.worker.serving.intake import Intake
from services.worker.serving.reporter import Reporter
from shared.messages.plan import PlanStep
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner

CLOSED = "its leader has closed the pipeline"
"""Why a pipeline is over that ended in order: the leader's part of the same plan may come first."""
_log = get_logger()


@dataclass(frozen=True, slots=True)
class StepMachine:
    """What takes the worker's steps, and stands still while its role changes."""

    engine: Engine
    loop: StepLoop
    gate: StepGate
    executor: RoleExecutor
    step_limit_s: float
    """After which a step counts as stuck."""


class RoleKeeper:
    """See the module. What changes the role holds the gate.

    Args:
        device: whose layers come and go.
        machine: of this worker.
        intake: closed while the worker is a member.
        reporter: tells the role.
        now: the worker's clock, seconds.
        tasks: owns what is under way.
    """

    def __init__(
        self,
        *,
        device: GroupDevice,
        machine: StepMachine,
        intake: Intake,
        reporter: Reporter,
        now: Callable[[], float],
        tasks: TaskOwner,
    ) -> None:
        self.state: RoleState = Alone(device.layers)
        self._holds: list[str] = []
        """Why the gate is held, or waited for, first come first."""
        self.worker_id = reporter.worker_id
        self.device = device
        self.machine = machine
        self.intake = intake
        self.reporter = reporter
        self.migration: Migration | None = None
        """Requests that go from worker to worker; None: none do."""
        self.now = now
        self.tasks = tasks
        engine, wake = machine.engine, machine.loop.wake
        self.moves = Transfers(lambda: count_awaiting_kv(engine), self.announce, now, tasks)
        self.arriving = ArrivingKv(engine, wake, now, tasks, self.moves)
        self.limit = BlockLimit(engine, wake)
        reporter.take_role(self.role)
        reporter.watch_memory(self._resident)
        reporter.watch_moves(self.moves.look)
        reporter.watch_holds(lambda: self._holds[0] if self._holds else "")

    @property
    def role(self) -> Role:
        """What is reported."""
        return reported(self.state)

    @property
    def num_layers(self) -> int:
        """Of the whole model."""
        return len(self.device.facts.layer_bytes)

    @property
    def is_needed(self) -> bool:
        """Whether it is a stage of a group that is not over; a leader only while it has sequences."""
        if isinstance(self.state, Broken) or not self.role.group:
            return False
        return not self.role.is_leader or self.machine.engine.table.num_sequences > 0

    def why_not(self, step: PlanStep) -> str | None:
        """Return why this worker, as it is now, takes part in no such step; None: it may."""
        reason = why_not_named(self.role, step.workers, self.worker_id, self.reporter.incarnation)
        if reason is None and not self.intake.is_serving:
            return "it is about to stop"
        return reason

    def why_no_migration(self) -> str:
        """Return why no request leaves or comes now; empty: they may."""
        if self._holds:
            return self._holds[0]
        return "" if isinstance(self.state, Alone) else "it is in a group, or about to be"

    @contextmanager
    def told_held(self, why: str) -> Iterator[None]:
        """Report why no steps are made: the gate is waited for, and held, inside the block."""
        self._holds.append(why)
        try:
            yield
        finally:
            self._holds.remove(why)
            self.reporter.goes_on()

    def announce(self, name: str, reason: str) -> None:
        """Tell people, without waiting for it."""
        self.tasks.start(self.reporter.announce(name, reason), name="event")

    # Transitions

    async def leave(self, joins: int | None = None) -> KeptKv:
        """Count as in no pipeline but the one that is to come; one that this worker leads ends in order.

        Args:
            joins: its plan, if one is to come.

        Returns:
            What `Engine.leave_executor` does.
        """
        self.arriving.stop()
        self.moves.follow_no_more()
        was = self.state.was if isinstance(self.state, Changing) else self.state
        self.state = Changing(was, joins)
        if self.migration is not None:
            await self.migration.abort()
        if self.role.is_leader:
            await self.machine.executor.close()
        return self.machine.engine.leave_executor(self.now())

    def go_on(self, led: Led, place: GroupPlace | None = None) -> None:
        """Go on with an executor that knows no sequence, and with what is here, or comes, of what they had computed."""
        executor, arrivals, engine = led.executor, led.arrivals, self.machine.engine
        self.machine.executor.switch(executor)
        self.limit.forget()
        if arrivals is None:
            engine.enter_executor(executor.capacity, executor.num_lanes, led.kept, overlaps=overlaps(executor))
        else:
            engine.enter_executor(
                replace(executor.capacity, num_blocks=arrivals.num_blocks),
                executor.num_lanes,
                led.kept,
                arrivals.coming,
                arrivals.spans,
                overlaps=overlaps(executor),
            )
            stages = () if place is None else place.stages
            self.arriving.begin(arrivals, tuple(stages[source].worker_id for source in arrivals.sources))
        self.machine.loop.mended()

    def stand(self, place: GroupPlace, num_blocks: int) -> None:
        """Be a stage of a group that has come about; it may be over already."""
        assert isinstance(self.state, Changing), "it left what it was before"
        group = (Member if place.index else Leading)(place, num_blocks, place.plan_id)
        self._enter(group if self.state.ended is None else Broken(group, self.state.ended))

    def hold_beside(self, num_blocks: int, plan_id: int) -> None:
        """Be the same stage, with other parameters beside and so many KV blocks; the group may be over meanwhile."""
        group = group_of(self.state)
        assert group is not None, "it is in a group"
        now = replace(group, num_blocks=num_blocks, plan_id=plan_id)
        self._enter(replace(self.state, was=now) if isinstance(self.state, Broken) else now)

    async def go_on_alone(self, plan_id: int, parting: Parting | None) -> Led:
        """Be a whole instance after `leave`; see `GroupDevice.alone`."""
        alone = await self.device.alone(parting)
        self.go_on(alone)
        self.intake.serve_again()
        self._enter(Alone(self.device.layers, plan_id))
        return alone

    async def stand_alone(self, plan_id: int) -> int:
        """Be a whole instance, whatever the others do; KV is lost. Return its KV blocks."""
        await self.leave()
        return (await self.go_on_alone(plan_id, None)).executor.capacity.num_blocks

    def _enter(self, state: RoleState) -> None:
        self.state = state
        self.reporter.take_role(self.role)

    # The end of a group

    def on_lost(self, cause: str) -> bool:
        """The executor is lost: return whether that was a group, which is over now. The step loop waits meanwhile."""
        if isinstance(self.state, Leading):
            self._break(Broken(self.state, cause))
        return self.role.is_leader

    def pipeline_ended(self, plan_id: int, reason: str | None) -> None:
        """A pipeline has ended in which this worker is a stage: it is whole again soon, unless a plan comes first.

        Args:
            plan_id: of the pipeline.
            reason: None: its leader has closed it.
        """
        match self.state:
            case InGroup(place=place) if place.plan_id == plan_id:
                self._break(Broken(self.state, reason or CLOSED))
            case Changing(joins=joins, ended=None) if joins == plan_id:
                self._break(replace(self.state, ended=reason or CLOSED))

    def _break(self, state: RoleState) -> None:
        self.state = state
        self.tasks.start(self._mend(), name="mend-group")

    async def _mend(self) -> None:
        """Be a whole instance again, unless a plan has changed the role meanwhile."""
        try:
            with self.told_held("its group has ended"):
                async with self.machine.gate.exclusive():
                    if isinstance(self.state, Broken):
                        role = self.role
                        _log.warning("group_broken", group=role.group, stage=role.stage, reason=self.state.reason)
                        await self.stand_alone(role.plan_id)
        except GateClosedError:
            pass  # the worker stops

    def _resident(self) -> Resident:
        """Return what is resident, and how far it is loaded; during a change of layers what the role says."""
        device, group = self.device, group_of(self.state)
        if device.layers != self.role.layers:
            return Resident(self.role.layers, 1.0)
        if group is None:
            return Resident(device.resident, device.loaded_ratio)
        return resident_in_group(device.facts, device.layers, device.resident, device.loaded_ratio, group.num_blocks)
