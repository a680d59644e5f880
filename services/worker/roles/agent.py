"""Hears planners: the worker's part in plans, step by step, and errands beside.

    idle ──prepare──► the gate is closed: nothing is in flight ──commit──► memory and role change ──► idle, another role
      ▲                        │ abort, or `limit_s` of silence                    │ the group did not come about
      └────────────────────────┴◄──────────────────────────────────────────────────┴─ a whole instance again

Everything is fenced by epochs, and plans are idempotent: a message may come twice, late, or never. What a change does
is in `steps/`, what errands do is named in `errands.py`. Source: none; of the protocol and epochs the papers say
nothing.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Union

from pydantic import Field, TypeAdapter

from services.worker.engine.describe import num_struck
from services.worker.engine.gate import GateClosedError
from services.worker.kv_moves.places import GroupFailedError
from services.worker.roles.block_limit import BlocksNeededError
from services.worker.roles.changes import CHANGES, Changes
from services.worker.roles.errands import Errands
from services.worker.roles.plan_in_hand import ChangeOutcome, PlanInHand
from services.worker.roles.role import Role
from services.worker.roles.role_keeper import RoleKeeper
from shared.messages.errand import Errand, ErrandRefused
from shared.messages.plan import AbortPlan, CommitPlan, PlanAnswer, PlanMessage, PlanState, PreparePlan
from shared.process.log import get_logger
from shared.transport.bus import Message
from shared.wire import decode_union_json, encode_json

_log = get_logger()


class OrderAgent:
    """Hears planners; one change at a time is in hand.

    Args:
        keeper: of this worker's role.
        errands: that it does.
        changes: that it takes part in.
    """

    def __init__(self, keeper: RoleKeeper, errands: Errands, changes: Changes = CHANGES) -> None:
        self.keeper = keeper
        self._errands = errands
        self._changes = changes
        messages = (PlanMessage, *errands)  # known only here, so no checker can read the next line
        any_message = Annotated[Union[messages], Field(discriminator="kind")]  # type: ignore[valid-type]  # noqa: UP007
        self._messages: TypeAdapter[Any] = TypeAdapter(any_message)
        self._newest_epoch = 0
        self._in_hand: PlanInHand | None = None
        self._last = ChangeOutcome(0, PlanState.DONE)

    @property
    def role(self) -> Role:
        """What the worker is now."""
        return self.keeper.role

    # Messages

    async def answer(self, message: Message) -> bytes:
        """Answer a `PreparePlan`, `CommitPlan` or `AbortPlan` with a `PlanAnswer`, and an errand as it says."""
        asked = decode_union_json(message.data, self._messages)
        is_old = asked.epoch < self._newest_epoch
        self._newest_epoch = max(self._newest_epoch, asked.epoch)
        reason = f"epoch {asked.epoch} is over: a planner of epoch {self._newest_epoch} has spoken"
        if isinstance(asked, Errand):
            if is_old:
                return encode_json(ErrandRefused(reason=reason))
            return encode_json(await self._errands[type(asked)](asked))
        if is_old:
            return await self._say(ChangeOutcome(asked.plan_id, PlanState.REFUSED, reason))
        match asked:
            case PreparePlan():
                outcome = await self._prepare(asked)
            case CommitPlan():
                outcome = await self._commit(asked)
            case AbortPlan():
                outcome = await self._abort(asked)
        return await self._say(outcome)

    async def _say(self, outcome: ChangeOutcome) -> bytes:
        """Return the answer; a refusal is an event besides."""
        if outcome.state is PlanState.REFUSED:
            await self.keeper.reporter.announce("plan_refused", f"plan {outcome.plan_id}: {outcome.reason}")
        return encode_json(
            PlanAnswer(
                worker_id=self.keeper.worker_id,
                plan_id=outcome.plan_id,
                state=outcome.state,
                reason=outcome.reason,
                newest_epoch=self._newest_epoch,
                num_blocks=outcome.num_blocks,
            )
        )

    async def _prepare(self, asked: PreparePlan) -> ChangeOutcome:
        plan_id = asked.plan_id
        while self._in_hand is not None and self._in_hand.ask.plan_id != plan_id:
            self._in_hand.decide(commit=False)  # its planner has gone on to another one
            await asyncio.shield(self._in_hand.outcome)
        if self._in_hand is None:
            if plan_id <= self._last.plan_id:
                return self._past(plan_id)
            change = self._changes[type(asked.step)](asked.step, self.keeper)
            reason = change.refusal()
            if reason is not None:
                return ChangeOutcome(plan_id, PlanState.REFUSED, reason)
            self._in_hand = PlanInHand(asked, change, self.keeper.now() + asked.limit_s)
            self.keeper.tasks.start(self._carry_out(self._in_hand), name=f"plan-{plan_id}")
        in_hand = self._in_hand
        if await asyncio.shield(in_hand.is_ready):
            return ChangeOutcome(plan_id, PlanState.PREPARED)
        return await asyncio.shield(in_hand.outcome)

    async def _commit(self, asked: CommitPlan) -> ChangeOutcome:
        in_hand = self._in_hand
        if in_hand is None or in_hand.ask.plan_id != asked.plan_id:
            return self._past(asked.plan_id)
        in_hand.decide(commit=True)
        return await asyncio.shield(in_hand.outcome)

    async def _abort(self, asked: AbortPlan) -> ChangeOutcome:
        in_hand = self._in_hand
        if in_hand is not None and in_hand.ask.plan_id == asked.plan_id:
            in_hand.decide(commit=False)
            return await asyncio.shield(in_hand.outcome)
        if asked.plan_id > self._last.plan_id:  # its prepare may still be on its way
            self._last = ChangeOutcome(asked.plan_id, PlanState.ABORTED, "it was abandoned before it was prepared")
        return self._past(asked.plan_id)

    def _past(self, plan_id: int) -> ChangeOutcome:
        """Return what became of a plan that is not under way."""
        if plan_id == self._last.plan_id:
            return self._last
        return ChangeOutcome(plan_id, PlanState.REFUSED, f"plan {plan_id} is not prepared here, or no longer")

    # One after the other

    async def _carry_out(self, in_hand: PlanInHand) -> None:
        """Hold the gate from prepare to the outcome."""
        keeper, ask, change = self.keeper, in_hand.ask, in_hand.change
        outcome, busy_with = None, "KV of the last change was on its way"
        try:
            async with asyncio.timeout_at(in_hand.until_s) as limit:
                await keeper.arriving.over(in_hand.decision)  # the rest would have to be computed again
                busy_with = change.readying
                if await change.make_ready(ask.limit_s, in_hand.decision):
                    in_hand.until_s = keeper.now() + ask.limit_s  # it has served so far
                    limit.reschedule(in_hand.until_s)
                busy_with = "a step, or a copy to the host, was under way"
                async with keeper.machine.gate.exclusive():
                    limit.reschedule(None)
                    outcome = await self._hear_word(in_hand)
        except GateClosedError:
            outcome = ChangeOutcome(ask.plan_id, PlanState.REFUSED, "it is about to stop")
        except BlocksNeededError as error:
            outcome = ChangeOutcome(ask.plan_id, PlanState.REFUSED, str(error))
        except TimeoutError:
            outcome = ChangeOutcome(ask.plan_id, PlanState.ABORTED, f"{busy_with} for {ask.limit_s:g} s")
        finally:
            change.go_back()
            self._settle(in_hand, outcome)
        if outcome is not None and outcome.state is PlanState.ABORTED:
            await keeper.reporter.announce("plan_refused", f"plan {ask.plan_id}: {outcome.reason}")

    async def _hear_word(self, in_hand: PlanInHand) -> ChangeOutcome | None:
        """Be ready, wait for the planner's word, and take the part; the gate is held. None: it is not to be done."""
        reason = in_hand.change.refusal_at_gate()
        if reason is not None:
            return ChangeOutcome(in_hand.ask.plan_id, PlanState.REFUSED, reason)
        in_hand.is_ready.set_result(True)
        await asyncio.wait([in_hand.decision], timeout=max(in_hand.until_s - self.keeper.now(), 0.0))
        return await self._change(in_hand) if in_hand.is_to_be_done else None

    async def _change(self, in_hand: PlanInHand) -> ChangeOutcome:
        keeper, plan_id = self.keeper, in_hand.ask.plan_id
        before, began_s = keeper.role, keeper.now()
        num_prefills, num_decodes = num_struck(keeper.machine.engine)
        try:
            num_blocks = await in_hand.change.carry_out(in_hand.ask)
        except GroupFailedError as error:
            return ChangeOutcome(plan_id, PlanState.FAILED, str(error), await keeper.stand_alone(plan_id))
        role = keeper.role
        _log.info(
            in_hand.change.done_event,
            plan=plan_id,
            layers=str(role.layers),
            before=str(before.layers),
            group=role.group,
            stage=role.stage,
            num_blocks=num_blocks,
            num_prefills=num_prefills,
            num_decodes=num_decodes,
            resident=str(keeper.device.resident),
            took_s=round(keeper.now() - began_s, 4),
        )
        return ChangeOutcome(plan_id, PlanState.DONE, num_blocks=num_blocks)

    def _settle(self, in_hand: PlanInHand, outcome: ChangeOutcome | None) -> None:
        if outcome is None and in_hand.is_to_be_done:
            outcome = ChangeOutcome(in_hand.ask.plan_id, PlanState.FAILED, "the change broke off")
        elif outcome is None:
            reason = "" if in_hand.decision.done() else f"nothing was heard for {in_hand.ask.limit_s:g} s"
            outcome = ChangeOutcome(in_hand.ask.plan_id, PlanState.ABORTED, reason)
        self._in_hand, self._last = None, outcome
        if not in_hand.is_ready.done():
            in_hand.is_ready.set_result(False)
        in_hand.outcome.set_result(outcome)
        if outcome.state is not PlanState.DONE:
            _log.warning("plan_not_done", plan=outcome.plan_id, state=outcome.state.value, reason=outcome.reason)
        self.keeper.machine.loop.wake()
