"""Carries out the worker's part of plans: prepare, commit, abort; and goes back to a whole instance if a group breaks.

    idle ──prepare──► the gate is closed: nothing is in flight ──commit──► memory and role change ──► idle, another role
      ▲                        │ abort, or `limit_s` of silence                    │ the group did not come about
      └────────────────────────┴◄──────────────────────────────────────────────────┴─ a whole instance again

Everything is fenced by epochs and idempotent by plan: a message may come twice, late, or never. A change of role
preempts all sequences that are here. A leader's wait for their turn again; a member's are released, and their
dispatchers bring them to the leader. Their KV travels by what it is, not by whose it is: full blocks with their names
(`engine/prefix.py`), so that in the group they are found as any cached prefix is. A group of which a stage or a
connection is lost is over: each of its members, by itself, loads the layers that it lacks, and computes KV anew.

Source: KunServe v2, section 4.1 (a drop changes page tables and roles between two steps) and 4.2 (KV is exchanged).
Deviations: the protocol, epochs and the way back, of which the papers say nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

from pydantic import Field, TypeAdapter

from services.worker.engine.describe import num_struck
from services.worker.engine.engine import Engine
from services.worker.engine.gate import GateClosedError, StepGate
from services.worker.engine.loop import StepLoop
from services.worker.engine.sequence import SequenceKey
from services.worker.groups.arrivals import ArrivingKv
from services.worker.groups.block_limit import BlockLimit, BlocksNeededError
from services.worker.groups.device import GroupDevice, GroupFailedError, GroupPlace, Led, Parting, StagePlace
from services.worker.groups.queue import WaitingQueue
from services.worker.groups.residence import Residence, residence_in, why_not_resident
from services.worker.groups.role import Role, role_in, why_not_taken
from services.worker.groups.role_executor import RoleExecutor
from services.worker.groups.turn import Outcome, Turn
from services.worker.intake import Intake
from services.worker.policy.parting import share_out
from services.worker.reporter import Reporter
from shared.bus import Message
from shared.ids import WorkerId
from shared.layers import LayerRange
from shared.log import get_logger
from shared.messages.plan import (
    AbortPlan,
    CommitPlan,
    PlanAnswer,
    PlannedGroup,
    PlanState,
    PreparePlan,
)
from shared.messages.queue import ListQueued, MoveQueued
from shared.tasks import TaskOwner
from shared.wire import decode_union_json, encode_json

CLOSED = "its leader has closed the pipeline"
"""Why a pipeline is over that ended in order: the leader's part of the same plan may come first."""
_log = get_logger()
_Message = Annotated[PreparePlan | CommitPlan | AbortPlan | ListQueued | MoveQueued, Field(discriminator="kind")]
_MESSAGES: TypeAdapter[PreparePlan | CommitPlan | AbortPlan | ListQueued | MoveQueued] = TypeAdapter(_Message)


class PlanAgent:
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
        self._arriving = ArrivingKv(engine, loop.wake, now, tasks)
        self._limit = BlockLimit(engine, loop.wake)
        self._queue = WaitingQueue(worker_id, engine, loop.flush, now)
        self._num_layers = len(device.facts.layer_bytes)
        self._newest_epoch = 0
        self._turn: Turn | None = None
        self._last = Outcome(0, PlanState.DONE)
        self._pipeline: int | None = None
        """Plan of the pipeline that this worker is a stage of, or is about to be."""
        self._place_now: GroupPlace | None = None
        """In the group that stands."""
        self._broken: str | None = None
        """Why that pipeline is over, until this worker has left it."""
        self._is_mending = False
        """The group is over, and this worker may not be whole again yet."""
        reporter.take_role(self.role)
        reporter.watch_parameters(self._parameters)

    # Messages

    async def answer(self, message: Message) -> bytes:
        """Answer a `PreparePlan`, `CommitPlan` or `AbortPlan` with a `PlanAnswer`, and what `WaitingQueue` answers."""
        asked = decode_union_json(message.data, _MESSAGES)
        if isinstance(asked, ListQueued):
            return encode_json(self._queue.list(asked, max(self._newest_epoch, asked.epoch)))
        if isinstance(asked, MoveQueued):
            moves = asked if asked.epoch >= self._newest_epoch else asked.model_copy(update={"moves": ()})
            return encode_json(self._queue.move(moves, self._newest_epoch))
        if asked.epoch < self._newest_epoch:
            reason = f"epoch {asked.epoch} is over: a planner of epoch {self._newest_epoch} has spoken"
            return await self._say(Outcome(asked.plan_id, PlanState.REFUSED, reason))
        self._newest_epoch = asked.epoch
        match asked:
            case PreparePlan():
                outcome = await self._prepare(asked)
            case CommitPlan():
                outcome = await self._commit(asked)
            case AbortPlan():
                outcome = await self._abort(asked)
        return await self._say(outcome)

    async def _say(self, outcome: Outcome) -> bytes:
        """Return the answer; a refusal is an event besides."""
        if outcome.state is PlanState.REFUSED:
            await self._reporter.announce("plan_refused", f"plan {outcome.plan_id}: {outcome.reason}")
        return encode_json(
            PlanAnswer(
                worker_id=self._worker_id,
                plan_id=outcome.plan_id,
                state=outcome.state,
                reason=outcome.reason,
                newest_epoch=self._newest_epoch,
                num_blocks=outcome.num_blocks,
            )
        )

    async def _prepare(self, asked: PreparePlan) -> Outcome:
        plan_id = asked.plan_id
        while self._turn is not None and self._turn.ask.plan_id != plan_id:
            self._turn.decide(commit=False)  # its planner has gone on to another one
            await asyncio.shield(self._turn.outcome)
        if self._turn is None:
            if plan_id <= self._last.plan_id:
                return self._past(plan_id)
            reason = self._refusal(asked.group)
            if reason is not None:
                return Outcome(plan_id, PlanState.REFUSED, reason)
            self._turn = Turn(asked, self._now() + asked.limit_s)
            self._tasks.start(self._carry_out(self._turn), name=f"plan-{plan_id}")
        turn = self._turn
        if await asyncio.shield(turn.is_ready):
            return Outcome(plan_id, PlanState.PREPARED)
        return await asyncio.shield(turn.outcome)

    async def _commit(self, asked: CommitPlan) -> Outcome:
        turn = self._turn
        if turn is None or turn.ask.plan_id != asked.plan_id:
            return self._past(asked.plan_id)
        turn.decide(commit=True)
        return await asyncio.shield(turn.outcome)

    async def _abort(self, asked: AbortPlan) -> Outcome:
        turn = self._turn
        if turn is not None and turn.ask.plan_id == asked.plan_id:
            turn.decide(commit=False)
            return await asyncio.shield(turn.outcome)
        if asked.plan_id > self._last.plan_id:  # its prepare may still be on its way
            self._last = Outcome(asked.plan_id, PlanState.ABORTED, "it was abandoned before it was prepared")
        return self._past(asked.plan_id)

    def _past(self, plan_id: int) -> Outcome:
        """Return what became of a plan that is not under way."""
        if plan_id == self._last.plan_id:
            return self._last
        return Outcome(plan_id, PlanState.REFUSED, f"plan {plan_id} is not prepared here, or no longer")

    def _refusal(self, group: PlannedGroup) -> str | None:
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
        if self._is_mending:
            return "its group is over: " + (self._broken or "it is about to be whole again")
        num_blocks = self._device.blocks_beside(residence.layers)
        return why_not_resident(residence, group, self._num_layers, num_blocks)

    # Changes

    async def _carry_out(self, turn: Turn) -> None:
        """Hold the gate from prepare to the outcome."""
        plan_id, outcome, busy_with = turn.ask.plan_id, None, "KV of the last change was on its way"
        try:
            async with asyncio.timeout_at(turn.until_s) as limit:
                await self._arriving.over(turn.decision)  # what has not arrived would have to be computed again
                busy_with = "KV was being moved to other blocks"
                await self._make_do(turn)
                limit.reschedule(turn.until_s)
                busy_with = "a step, or a copy to the host, was under way"
                async with self._gate.exclusive():
                    limit.reschedule(None)
                    reason = self._refusal(turn.ask.group)  # its group may have ended while the gate was waited for
                    if reason is None:
                        turn.is_ready.set_result(True)
                        await asyncio.wait([turn.decision], timeout=max(turn.until_s - self._now(), 0.0))
                    if turn.is_to_be_done and reason is None:
                        outcome = await self._change(turn.ask)
                    elif reason is not None:
                        outcome = Outcome(plan_id, PlanState.REFUSED, reason)
        except GateClosedError:
            outcome = Outcome(plan_id, PlanState.REFUSED, "it is about to stop")
        except BlocksNeededError as error:
            outcome = Outcome(plan_id, PlanState.REFUSED, str(error))
        except TimeoutError:
            outcome = Outcome(plan_id, PlanState.ABORTED, f"{busy_with} for {turn.ask.limit_s:g} s")
        finally:
            self._limit.go_back()
            self._settle(turn, outcome)
        if outcome is not None and outcome.state is PlanState.ABORTED:
            await self._reporter.announce("plan_refused", f"plan {plan_id}: {outcome.reason}")

    async def _make_do(self, turn: Turn) -> None:
        """Before memory goes to parameters beside, let a leader's sequences leave the blocks that it takes."""
        residence = residence_in(self._place_now, turn.ask.group, self._worker_id)
        if residence is not None and self.role.is_leader and residence.layers != self.role.layers:
            await self._limit.reach(residence.num_blocks, turn.decision)
            turn.until_s = self._now() + turn.ask.limit_s  # it has served so far

    def _settle(self, turn: Turn, outcome: Outcome | None) -> None:
        if outcome is None and turn.is_to_be_done:
            outcome = Outcome(turn.ask.plan_id, PlanState.FAILED, "the change broke off")
        elif outcome is None:
            reason = "" if turn.decision.done() else f"nothing was heard for {turn.ask.limit_s:g} s"
            outcome = Outcome(turn.ask.plan_id, PlanState.ABORTED, reason)
        self._turn, self._last = None, outcome
        if not turn.is_ready.done():
            turn.is_ready.set_result(False)
        turn.outcome.set_result(outcome)
        if outcome.state is not PlanState.DONE:
            _log.warning("plan_not_done", plan=outcome.plan_id, state=outcome.state.value, reason=outcome.reason)
        self._loop.wake()

    async def _change(self, asked: PreparePlan) -> Outcome:
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
        if self.role.is_leader and not self._engine.is_within_limit:
            raise GroupFailedError("KV is in use that would lose its memory")
        num_blocks = await self._device.reside(residence.layers, residence.num_blocks)
        if residence.layers != self.role.layers:
            self._limit.keep()
        else:
            self._limit.lift()  # the other stages have given theirs up before
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
        self._take(led)
        self._enter(role_in(place))
        self._place_now = place
        return led.executor.capacity.num_blocks

    async def _join(self, place: GroupPlace) -> int:
        await self._leave_pipeline()
        self._intake.stand_aside()
        kept = self._engine.leave_executor(self._now())
        self._engine.release(sorted(self._engine.row_of.values()), place.stages[0].worker_id)
        self._engine.enter_executor(0, 1)
        self._loop.flush()  # who waits for these sequences hears of it now, not when the group stands
        self._pipeline = place.plan_id
        num_blocks = await self._device.join(place, lambda reason: self._on_end(place.plan_id, reason), kept)
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
        shares = self._share_out(place) if self.role.is_leader else []
        row_of = self._engine.row_of
        kept = tuple(self._engine.sharing.kept([row_of[key] for key in keys]) for keys in shares)
        num_blocks = await self._go_on_alone(plan_id, Parting(kept))
        for stage, keys in list(zip(place.stages, shares, strict=False))[1:]:
            # now, when that worker is about to serve again; some have ended meanwhile
            self._engine.release([row_of[key] for key in keys if key in row_of], stage.worker_id)
        return num_blocks

    def _share_out(self, place: GroupPlace) -> list[list[SequenceKey]]:
        """Return which sequences go on at which stage's worker, the own ones first."""
        table, row_of = self._engine.table, self._engine.row_of
        keys = sorted(row_of, key=lambda key: (table.arrival_s[row_of[key]], table.order[row_of[key]]))
        sizes = -(-table.num_known[[row_of[key] for key in keys]] // self._engine.config.block_size)
        return share_out(keys, sizes.tolist(), len(place.stages), self._device.whole_blocks)

    async def _stand_alone(self, plan_id: int) -> int:
        """Be a whole instance, whatever the others do; KV is lost."""
        await self._leave_pipeline()
        self._engine.leave_executor(self._now())
        return await self._go_on_alone(plan_id, None)

    async def _go_on_alone(self, plan_id: int, parting: Parting | None) -> int:
        alone = await self._device.alone(parting)
        self._take(alone)
        self._intake.serve_again()
        self._enter(Role(self._device.layers, plan_id=plan_id))
        self._place_now = None
        return alone.executor.capacity.num_blocks

    async def _leave_pipeline(self) -> None:
        """Count as in no pipeline; one that this worker leads ends in order."""
        self._arriving.stop()
        self._pipeline, self._broken = None, None
        if self.role.is_leader:
            await self._executor.close()

    def _take(self, led: Led) -> None:
        """Go on with an executor that knows no sequence, and with what is here, or comes, of what they had computed."""
        executor, arrivals = led.executor, led.arrivals
        self._executor.switch(executor)
        self._limit.forget()
        if arrivals is None:
            self._engine.enter_executor(executor.capacity.num_blocks, executor.depth, led.kept)
        else:
            self._engine.enter_executor(arrivals.num_blocks, executor.depth, led.kept, arrivals.coming)
            self._arriving.begin(arrivals)
        self._loop.mended()

    def _parameters(self) -> tuple[LayerRange, float]:
        """Return what is resident, and how far it is loaded; during a change of layers what the role says."""
        device = self._device
        if device.layers != self.role.layers:
            return self.role.layers, 1.0
        return device.resident, device.loaded_ratio

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
            self._broken, self._is_mending = reason, True
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
        self._is_mending = self._broken is not None  # a group that came meanwhile may be over too
