"""Changes what a worker computes and holds, step by step of a plan, and makes it whole again if its group breaks.

    a whole instance ──► leader or member of a group ──► of another group, with parameters beside, or whole again

A change of role preempts all sequences that are here. A leader's wait for their turn again; a member's are released,
and their dispatchers bring them to the leader. Their KV travels by what it is, not by whose it is: full blocks with
their names (`blocks/prefix.py`), so that in the group they are found as any cached prefix is. A group of which a stage
or a connection is lost is over: each of its members, by itself, loads the layers that it lacks, and computes KV anew.

Source: KunServe v2, section 4.1 (a drop changes page tables and roles between two steps) and 4.2 (KV is exchanged).
Deviation: the way back, in detail. Before a group dissolves, most of its KV moves while it serves (`kv_shares.py`).
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable
from dataclasses import replace

from services.worker.contract.executor import overlaps
from services.worker.engine.describe import num_struck
from services.worker.engine.engine import Engine
from services.worker.engine.gate import GateClosedError, StepGate
from services.worker.engine.loop import StepLoop
from services.worker.engine.stats import count_awaiting_kv
from services.worker.kv_moves.arrivals import ArrivingKv
from services.worker.roles.block_limit import BlockLimit
from services.worker.roles.device import GroupDevice, GroupFailedError, GroupPlace, Led, Parting, StagePlace
from services.worker.roles.moves import Moves
from services.worker.roles.residence import Residence, Resident, residence_in, resident_in_group, why_not_resident
from services.worker.roles.role import Role, role_in, why_not_taken
from services.worker.roles.role_executor import RoleExecutor
from services.worker.roles.turn import Outcome
from services.worker.roles.way_apart import WayApart
from services.worker.sequences.sequence import SequenceKey
from services.worker.serving.intake import Intake
from services.worker.serving.reporter import Reporter
from shared.ids import WorkerId
from shared.layers import LayerRange
from shared.messages.plan import PlannedGroup, PlanState, PreparePlan
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner
from shared.sizes import describe_bytes

CLOSED = "its leader has closed the pipeline"
"""Why a pipeline is over that ended in order: the leader's part of the same plan may come first."""
_log = get_logger()


class RoleChanges:
    """The only one to change the worker's role.

    Args:
        worker_id: of this worker.
        device: whose layers come and go.
        engine, loop, gate, executor: of this worker.
        intake: closed while the worker is a member.
        reporter: tells the role.
        now: the worker's clock, seconds.
        tasks: owns what is under way.
    """

    def __init__(  # noqa: PLR0913  one argument per part that is joined here
        self,
        *,
        worker_id: WorkerId,
        device: GroupDevice,
        engine: Engine,
        loop: StepLoop,
        gate: StepGate,
        executor: RoleExecutor,
        intake: Intake,
        reporter: Reporter,
        now: Callable[[], float],
        tasks: TaskOwner,
    ) -> None:
        self.role = Role(device.layers)
        self.is_mending = False
        """The group is over, and this worker may not be whole again yet."""
        self._worker_id = worker_id
        self._device = device
        self._engine = engine
        self._loop = loop
        self._gate = gate
        self._executor = executor
        self._intake = intake
        self._reporter = reporter
        self._now = now
        self._tasks = tasks
        self._moves = Moves(lambda: count_awaiting_kv(engine), self._announce, now, tasks)
        self._arriving = ArrivingKv(engine, loop.wake, now, tasks, self._moves)
        self._way_apart = WayApart(engine, device, self._moves, loop.wake, now)
        self._limit = BlockLimit(engine, loop.wake)
        self._num_layers = len(device.facts.layer_bytes)
        self._pipeline: int | None = None
        """Plan of the pipeline that this worker is a stage of, or is about to be."""
        self._place_now: GroupPlace | None = None
        """In the group that stands."""
        self._num_blocks = 0
        """KV blocks of the layers that are held, since the last change to a part of a group."""
        self._broken: str | None = None
        """Why that pipeline is over, until this worker has left it."""
        reporter.take_role(self.role)
        reporter.watch_memory(self._resident)
        reporter.watch_moves(self._moves.look)

    @property
    def is_settled(self) -> bool:
        """No KV is on its way here, and no block is left to others for a while."""
        return not self._arriving.is_under_way and not self._limit.is_kept

    def refusal(self, group: PlannedGroup) -> str | None:
        """Return why this worker cannot take the part that it has in a group."""
        reason = why_not_taken(self.role, group, self._worker_id, self._reporter.incarnation, self._num_layers)
        if reason is not None:
            return reason
        if not self._intake.is_serving:
            return "it is about to stop"
        residence = residence_in(self._place_now, group, self._worker_id)
        if residence is not None:
            return self._why_not_resident(residence, group)
        if group.is_residence or any(stage.resident is not None for stage in group.stages):
            return "what lies beside can change in a group that stands, and this is another one"
        part = next(stage for stage in group.stages if stage.worker_id == self._worker_id)
        return self._device.refusal(LayerRange(*part.layers))

    def _why_not_resident(self, residence: Residence, group: PlannedGroup) -> str | None:
        if self.is_mending:
            return "its group is over: " + (self._broken or "it is about to be whole again")
        num_blocks = self._device.blocks_beside(residence.layers)
        return why_not_resident(residence, group, self._num_layers, num_blocks)

    async def kv_over(self, given_up: Future[bool]) -> None:
        """Return when no KV of the last change is on its way any more: the rest would have to be computed again."""
        await self._arriving.over(given_up)

    async def make_do(self, group: PlannedGroup, given_up: Future[bool]) -> bool:
        """Before memory goes to parameters beside, let a leader's sequences leave the blocks that it takes.

        `go_back` comes in the end, whatever becomes of the plan.

        Returns:
            Whether that was to be done; the leader has served meanwhile.

        Raises:
            BlocksNeededError: the blocks that are left do not suffice; nothing has changed.
        """
        residence = residence_in(self._place_now, group, self._worker_id)
        if residence is None or not self.role.is_leader or residence.layers == self.role.layers:
            return False
        await self._limit.reach(residence.num_blocks, given_up)
        return True

    async def copy_ahead(self, group: PlannedGroup, limit_s: float, given_up: Future[bool]) -> bool:
        """Before a group dissolves, let most of its KV be where it will go; all members do it at the same time.

        Without memory for it, or if it breaks off, all moves when the group dissolves. `go_back` comes in the end,
        whatever becomes of the plan.

        Args:
            group: of this worker alone, if its group dissolves.
            limit_s: that the plan has.
            given_up: done when it is over.

        Returns:
            Whether that took time; the leader has served meanwhile.
        """
        place = self._place_now
        if place is None or len(group.stages) > 1 or self._broken is not None or not self._device.most_copied:
            return False
        await self._way_apart.copy(place, self._num_blocks, limit_s, given_up)
        return True

    def go_back(self) -> None:
        """Use all blocks again, if their memory has stayed, and forget what was copied ahead. Idempotent."""
        self._limit.go_back()
        self._way_apart.forget()

    async def carry_out(self, asked: PreparePlan) -> Outcome:
        """Take the part that was prepared; the gate is held."""
        before, began_s = self.role, self._now()
        num_prefills, num_decodes = num_struck(self._engine)
        place = self._place(asked)
        residence = residence_in(self._place_now, asked.group, self._worker_id)
        try:
            if residence is not None:
                num_blocks = await self._reside(residence, asked.plan_id)
            elif place is None:
                num_blocks = await self._part(asked.plan_id)
            elif place.index == 0:
                num_blocks = await self._lead(place)
            else:
                num_blocks = await self._join(place)
        except GroupFailedError as error:
            return Outcome(asked.plan_id, PlanState.FAILED, str(error), await self._stand_alone(asked.plan_id))
        _log.info(
            "role_changed" if residence is None else "parameters_beside",
            plan=asked.plan_id,
            layers=str(self.role.layers),
            before=str(before.layers),
            group=self.role.group,
            stage=self.role.stage,
            num_blocks=num_blocks,
            num_prefills=num_prefills,
            num_decodes=num_decodes,
            resident=str(self._device.resident),
            took_s=round(self._now() - began_s, 4),
        )
        return Outcome(asked.plan_id, PlanState.DONE, num_blocks=num_blocks)

    async def _reside(self, residence: Residence, plan_id: int) -> int:
        """Have other parameters beside those that are computed; who computes what stays as it is."""
        if self.role.is_leader and not self._engine.blocks.is_within_limit:
            raise GroupFailedError("KV is in use that would lose its memory")
        loads = residence.layers != self.role.layers
        device = self._device
        is_ahead = loads and device.blocks_ahead(self.role.layers, residence.num_blocks) > 0
        num_blocks = await device.reside(residence.layers, residence.num_blocks, is_ahead=is_ahead)
        if loads:
            self._limit.keep()
            self._moves.follow(lambda: device.load_now)
        else:
            self._moves.follow_no_more()
            self._limit.lift()  # the other stages have given theirs up before
        self._num_blocks = num_blocks
        self._enter(replace(self.role, plan_id=plan_id))
        return num_blocks

    def _place(self, asked: PreparePlan) -> GroupPlace | None:
        """Return the place in the group; None: it stands alone."""
        stages = asked.group.stages
        if len(stages) == 1:
            return None
        places = tuple(StagePlace(stage.worker_id, stage.address, LayerRange(*stage.layers)) for stage in stages)
        index = next(i for i, stage in enumerate(stages) if stage.worker_id == self._worker_id)
        return GroupPlace(asked.plan_id, asked.token, places, index)

    async def _lead(self, place: GroupPlace) -> int:
        await self._leave_pipeline()
        kept = self._engine.leave_executor(self._now())
        self._pipeline = place.plan_id
        led = await self._device.lead(place, lambda reason: self._on_end(place.plan_id, reason), kept)
        self._take(led, place)
        if led.num_moved_bytes:
            self._announce(
                "kv_handed_over",
                f"{describe_bytes(led.num_moved_bytes)} of KV went between {len(place.stages)} workers in "
                f"{len(led.kept)} blocks, in the pages where they lie",
            )
        self._num_blocks = led.executor.capacity.num_blocks
        self._enter(role_in(place))
        self._place_now = place
        return led.executor.capacity.num_blocks

    async def _join(self, place: GroupPlace) -> int:
        await self._leave_pipeline()
        self._intake.stand_aside()
        kept = self._engine.leave_executor(self._now())
        self._engine.residents.release(sorted(self._engine.residents.row_of.values()), place.stages[0].worker_id)
        self._engine.enter_executor(0, 1)
        self._loop.flush()  # who waits for these sequences hears of it now, not when the group stands
        self._pipeline = place.plan_id
        num_blocks = await self._device.join(place, lambda reason: self._on_end(place.plan_id, reason), kept)
        self._num_blocks = num_blocks
        self._enter(role_in(place))
        self._place_now = place
        return num_blocks

    async def _part(self, plan_id: int) -> int:
        """Dissolve the group together with its other members: a leader shares out sequences and KV."""
        place = self._place_now
        if place is None or self._broken not in (None, CLOSED):
            return await self._stand_alone(plan_id)
        await self._leave_pipeline()
        self._engine.leave_executor(self._now())
        shares: list[list[SequenceKey]] = []
        row_of, parting = self._engine.residents.row_of, Parting()
        if self.role.is_leader:
            known = self._way_apart.take_shares(place)
            shares = known.final()
            kept = tuple(self._engine.sharing.kept([row_of[key] for key in keys]) for keys in shares)
            parting = Parting(kept, known.there)
        began_s = self._now()
        alone = await self._go_on_alone(plan_id, parting)
        if shares:
            num_sequences = sum(map(len, shares))
            self._announce(
                "kv_parted",
                f"{describe_bytes(alone.num_moved_bytes)} of KV went between {len(shares)} workers, "
                f"where {num_sequences} requests go on after {self._now() - began_s:.3f} s",
            )
        for stage, keys in list(zip(place.stages, shares, strict=False))[1:]:
            # now, when that worker is about to serve again; some have ended meanwhile
            self._engine.residents.release([row_of[key] for key in keys if key in row_of], stage.worker_id)
        return alone.executor.capacity.num_blocks

    async def _stand_alone(self, plan_id: int) -> int:
        """Be a whole instance, whatever the others do; KV is lost."""
        await self._leave_pipeline()
        self._engine.leave_executor(self._now())
        return (await self._go_on_alone(plan_id, None)).executor.capacity.num_blocks

    async def _go_on_alone(self, plan_id: int, parting: Parting | None) -> Led:
        alone = await self._device.alone(parting)
        self._take(alone)
        self._intake.serve_again()
        self._enter(Role(self._device.layers, plan_id=plan_id))
        self._place_now = None
        return alone

    async def _leave_pipeline(self) -> None:
        """Count as in no pipeline; one that this worker leads ends in order."""
        self._arriving.stop()
        self._moves.follow_no_more()
        self._pipeline, self._broken = None, None
        if self.role.is_leader:
            await self._executor.close()

    def _take(self, led: Led, place: GroupPlace | None = None) -> None:
        """Go on with an executor that knows no sequence, and with what is here, or comes, of what they had computed."""
        executor, arrivals = led.executor, led.arrivals
        self._executor.switch(executor)
        self._limit.forget()
        if arrivals is None:
            self._engine.enter_executor(
                executor.capacity.num_blocks, executor.num_lanes, led.kept, overlaps=overlaps(executor)
            )
        else:
            self._engine.enter_executor(
                arrivals.num_blocks,
                executor.num_lanes,
                led.kept,
                arrivals.coming,
                arrivals.spans,
                overlaps=overlaps(executor),
            )
            stages = () if place is None else place.stages
            self._arriving.begin(arrivals, tuple(stages[source].worker_id for source in arrivals.sources))
        self._loop.mended()

    def _resident(self) -> Resident:
        """Return what is resident, and how far it is loaded; during a change of layers what the role says."""
        device = self._device
        if device.layers != self.role.layers:
            return Resident(self.role.layers, 1.0)
        if not self.role.group:
            return Resident(device.resident, device.loaded_ratio)
        return resident_in_group(device.facts, device.layers, device.resident, device.loaded_ratio, self._num_blocks)

    def _announce(self, name: str, reason: str) -> None:
        """Tell people, without waiting for it."""
        self._tasks.start(self._reporter.announce(name, reason), name="event")

    def _enter(self, role: Role) -> None:
        self.role = role
        self._reporter.take_role(role)

    # The end of a group

    def on_lost(self, cause: str) -> bool:
        """The executor is lost: return whether that was a group, which is over now. The step loop waits meanwhile."""
        if not self.role.is_leader:
            return False
        self._break(cause)
        return True

    def _on_end(self, plan_id: int, reason: str | None) -> None:
        """A pipeline has ended in which this worker is a stage."""
        if plan_id == self._pipeline:
            self._break(reason or CLOSED)

    def _break(self, reason: str) -> None:
        if self._broken is None:
            self._broken, self.is_mending = reason, True
            self._tasks.start(self._mend(), name="mend-group")

    async def _mend(self) -> None:
        """Be a whole instance again, unless a plan has changed the role meanwhile."""
        try:
            async with self._gate.exclusive():
                if self._broken is not None:
                    _log.warning("group_broken", group=self.role.group, stage=self.role.stage, reason=self._broken)
                    await self._stand_alone(self.role.plan_id)
        except GateClosedError:
            pass  # the worker stops
        self.is_mending = self._broken is not None  # a group that came meanwhile may be over too
