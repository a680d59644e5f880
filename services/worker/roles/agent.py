"""Carries out the worker's part of plans: prepare, commit, abort.

    idle ──prepare──► the gate is closed: nothing is in flight ──commit──► memory and role change ──► idle, another role
      ▲                        │ abort, or `limit_s` of silence                    │ the group did not come about
      └────────────────────────┴◄──────────────────────────────────────────────────┴─ a whole instance again

Everything is fenced by epochs and idempotent by plan: a message may come twice, late, or never. What a change does is
in `role_changes.py`. Source: none; of the protocol and epochs the papers say nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

from pydantic import Field, TypeAdapter

from services.worker.engine.engine import Engine
from services.worker.engine.gate import GateClosedError, StepGate
from services.worker.engine.loop import StepLoop
from services.worker.roles.block_limit import BlocksNeededError
from services.worker.roles.queue import WaitingQueue
from services.worker.roles.role import Role
from services.worker.roles.role_changes import RoleChanges
from services.worker.roles.turn import Outcome, Turn
from services.worker.serving.reporter import Reporter
from shared.ids import WorkerId
from shared.messages.plan import AbortPlan, CommitPlan, PlanAnswer, PlanState, PreparePlan
from shared.messages.queue import ListQueued, MoveQueued
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner
from shared.transport.bus import Message
from shared.wire import decode_union_json, encode_json

_log = get_logger()
_Message = Annotated[PreparePlan | CommitPlan | AbortPlan | ListQueued | MoveQueued, Field(discriminator="kind")]
_MESSAGES: TypeAdapter[PreparePlan | CommitPlan | AbortPlan | ListQueued | MoveQueued] = TypeAdapter(_Message)


class PlanAgent:
    """Hears planners; one plan at a time has its turn.

    Args:
        worker_id: of this worker.
        changes: carries out what is decided.
        engine, loop, gate: of this worker.
        reporter: announces refusals.
        now: the worker's clock, seconds.
        tasks: owns what is under way.
    """

    def __init__(  # noqa: PLR0913  one argument per part that is joined here
        self,
        *,
        worker_id: WorkerId,
        changes: RoleChanges,
        engine: Engine,
        loop: StepLoop,
        gate: StepGate,
        reporter: Reporter,
        now: Callable[[], float],
        tasks: TaskOwner,
    ) -> None:
        self.changes = changes
        self._worker_id = worker_id
        self._loop = loop
        self._gate = gate
        self._reporter = reporter
        self._now = now
        self._tasks = tasks
        self._queue = WaitingQueue(worker_id, engine, loop.flush, now)
        self._newest_epoch = 0
        self._turn: Turn | None = None
        self._last = Outcome(0, PlanState.DONE)

    @property
    def role(self) -> Role:
        """What the worker is now."""
        return self.changes.role

    @property
    def is_changing(self) -> bool:
        """A plan has its turn, or a group that is over is being left."""
        return self._turn is not None or self.changes.is_mending

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
            reason = self.changes.refusal(asked.group)
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

    # Turns

    async def _carry_out(self, turn: Turn) -> None:
        """Hold the gate from prepare to the outcome."""
        plan_id, outcome, busy_with = turn.ask.plan_id, None, "KV of the last change was on its way"
        try:
            async with asyncio.timeout_at(turn.until_s) as limit:
                await self.changes.kv_over(turn.decision)
                busy_with = "KV was being moved to other blocks"
                if await self.changes.make_do(turn.ask.group, turn.decision):
                    turn.until_s = self._now() + turn.ask.limit_s  # it has served so far
                    limit.reschedule(turn.until_s)
                busy_with = "KV was being copied ahead"
                if await self.changes.copy_ahead(turn.ask.group, turn.ask.limit_s, turn.decision):
                    turn.until_s = self._now() + turn.ask.limit_s
                    limit.reschedule(turn.until_s)
                busy_with = "a step, or a copy to the host, was under way"
                async with self._gate.exclusive():
                    limit.reschedule(None)
                    outcome = await self._hear_word(turn)
        except GateClosedError:
            outcome = Outcome(plan_id, PlanState.REFUSED, "it is about to stop")
        except BlocksNeededError as error:
            outcome = Outcome(plan_id, PlanState.REFUSED, str(error))
        except TimeoutError:
            outcome = Outcome(plan_id, PlanState.ABORTED, f"{busy_with} for {turn.ask.limit_s:g} s")
        finally:
            self.changes.go_back()
            self._settle(turn, outcome)
        if outcome is not None and outcome.state is PlanState.ABORTED:
            await self._reporter.announce("plan_refused", f"plan {plan_id}: {outcome.reason}")

    async def _hear_word(self, turn: Turn) -> Outcome | None:
        """Be ready, wait for the planner's word, and take the part; the gate is held. None: it is not to be done."""
        group = turn.ask.group
        # its group may have ended meanwhile; then a worker that is to be whole is so already, and others cannot begin
        reason = self.changes.refusal(group) if len(group.stages) > 1 else None
        if reason is not None:
            return Outcome(turn.ask.plan_id, PlanState.REFUSED, reason)
        turn.is_ready.set_result(True)
        await asyncio.wait([turn.decision], timeout=max(turn.until_s - self._now(), 0.0))
        return await self.changes.carry_out(turn.ask) if turn.is_to_be_done else None

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
