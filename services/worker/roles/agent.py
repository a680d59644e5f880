"""Hears planners: the worker's part in plans, step by step, and errands beside.

    idle ──prepare──► the gate is closed: nothing is in flight ──commit──► memory and role change ──► idle, another role
      ▲                        │ abort, or silence for as long as it may hold      │ the group did not come about
      └────────────────────────┴◄──────────────────────────────────────────────────┴─ a whole instance again

Everything is fenced by epochs, and plans are idempotent: a message may come twice, late, or never. What an order may
ask at all is in `fences.py`, what a change does in `steps/`, what errands do is named in `errands.py`. Source: none; of
the protocol and epochs the papers say nothing.
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
from services.worker.roles.fences import EpochFence, HoldBudget
from services.worker.roles.plan_in_hand import ChangeOutcome, PlanInHand
from services.worker.roles.role import Role
from services.worker.roles.role_keeper import RoleKeeper
from services.worker.roles.steps.change import Change
from shared.messages.base import ControlMessage
from shared.messages.errand import Errand, ErrandRefused
from shared.messages.plan import (
    MAX_ASIDE_S,
    MAX_HOLD_S,
    AbortPlan,
    CommitPlan,
    PlanAnswer,
    PlanMessage,
    PlanState,
    PreparePlan,
)
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
        self._fence = EpochFence()
        self._budget = HoldBudget(keeper.now())
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
        if isinstance(asked, Errand):
            return encode_json(await self._run_errand(asked))
        reason = self._fence.refusal(asked.epoch)
        if reason is not None:
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
                newest_epoch=self._fence.newest,
                num_blocks=outcome.num_blocks,
            )
        )

    async def _run_errand(self, asked: Errand) -> ControlMessage:
        reason = self._fence.refusal(asked.epoch)
        if reason is not None:
            await self.keeper.reporter.announce("errand_refused", reason)
            return ErrandRefused(reason=reason, newest_epoch=self._fence.newest)
        self._fence.take(asked.epoch)
        return await self._errands[type(asked)](asked)

    async def _prepare(self, asked: PreparePlan) -> ChangeOutcome:
        while (other := self._in_hand) is not None and other.ask.plan_id != asked.plan_id:
            if not other.is_to_be_done and (refused := self._why_not(asked, self._change_of(asked))) is not None:
                return refused  # and the other one is none the worse for it
            other.decide(commit=False)  # its planner has gone on to another one
            await asyncio.shield(other.outcome)
        if self._in_hand is None:
            change = self._change_of(asked)
            refused = self._why_not(asked, change)
            if refused is not None:
                return refused
            self._begin(asked, change)
        in_hand = self._in_hand
        assert in_hand is not None, "it has begun"
        self._fence.take(asked.epoch)
        if await asyncio.shield(in_hand.is_ready):
            return ChangeOutcome(asked.plan_id, PlanState.PREPARED)
        return await asyncio.shield(in_hand.outcome)

    def _change_of(self, asked: PreparePlan) -> Change:
        return self._changes[type(asked.step)](asked.step, self.keeper)

    def _why_not(self, asked: PreparePlan, change: Change) -> ChangeOutcome | None:
        """Return what became of a plan that does not begin now, or why it does not; None: it may."""
        newest = self._last.plan_id if self._in_hand is None else self._in_hand.ask.plan_id
        if asked.plan_id <= newest:
            return self._past(asked.plan_id, asked.epoch)
        reason = change.refusal() or self._budget.refusal(self.keeper.now())
        reason = reason or self._fence.refusal(asked.epoch, asked.plan_id)  # others may have been heard meanwhile
        return None if reason is None else ChangeOutcome(asked.plan_id, PlanState.REFUSED, reason)

    def _begin(self, asked: PreparePlan, change: Change) -> None:
        now_s = self.keeper.now()
        limit_s = min(asked.limit_s, MAX_ASIDE_S if self.role.stage else MAX_HOLD_S)
        self._in_hand = PlanInHand(asked, change, limit_s, now_s + limit_s)
        self.keeper.tasks.start(self._carry_out(self._in_hand), name=f"plan-{asked.plan_id}")

    async def _commit(self, asked: CommitPlan) -> ChangeOutcome:
        in_hand = self._in_hand
        if in_hand is None or in_hand.ask.plan_id != asked.plan_id:
            return self._past(asked.plan_id, asked.epoch)
        self._fence.take(asked.epoch)
        in_hand.decide(commit=True)
        return await asyncio.shield(in_hand.outcome)

    async def _abort(self, asked: AbortPlan) -> ChangeOutcome:
        reason = self._fence.refusal(asked.epoch, asked.plan_id)
        if reason is not None:
            return ChangeOutcome(asked.plan_id, PlanState.REFUSED, reason)
        self._fence.take(asked.epoch)
        in_hand = self._in_hand
        if in_hand is not None and in_hand.ask.plan_id == asked.plan_id:
            in_hand.decide(commit=False)
            return await asyncio.shield(in_hand.outcome)
        if asked.plan_id > self._last.plan_id:  # its prepare may still be on its way
            self._last = ChangeOutcome(asked.plan_id, PlanState.ABORTED, "it was abandoned before it was prepared")
        return self._past(asked.plan_id, asked.epoch)

    def _past(self, plan_id: int, epoch: int) -> ChangeOutcome:
        """Return what became of a plan that is not under way, to whom asks under an epoch."""
        if plan_id == self._last.plan_id:
            self._fence.take(epoch)
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
                if await change.make_ready(in_hand.limit_s, in_hand.decision):
                    in_hand.until_s = keeper.now() + in_hand.limit_s  # it has served so far
                self._limit_hold(in_hand)
                limit.reschedule(in_hand.until_s)
                busy_with = "a step, or a copy to the host, was under way"
                with keeper.told_held(f"plan {ask.plan_id}"):
                    async with keeper.machine.gate.exclusive():
                        limit.reschedule(None)
                        outcome = await self._hear_word(in_hand)
        except GateClosedError:
            outcome = ChangeOutcome(ask.plan_id, PlanState.REFUSED, "it is about to stop")
        except BlocksNeededError as error:
            outcome = ChangeOutcome(ask.plan_id, PlanState.REFUSED, str(error))
        except TimeoutError:
            outcome = ChangeOutcome(ask.plan_id, PlanState.ABORTED, f"{busy_with} for {in_hand.limit_s:g} s")
        finally:
            self._budget.end(keeper.now())
            change.go_back()
            self._settle(in_hand, outcome)
        if outcome is not None and outcome.state is PlanState.ABORTED:
            await keeper.reporter.announce("plan_refused", f"plan {ask.plan_id}: {outcome.reason}")

    def _limit_hold(self, in_hand: PlanInHand) -> None:
        """From now on steps are held up; a member of a group makes none."""
        now_s = self.keeper.now()
        if not self.role.stage:
            in_hand.limit_s = min(in_hand.limit_s, self._budget.left_s(now_s))
            in_hand.until_s = min(in_hand.until_s, now_s + in_hand.limit_s)
            self._budget.begin(now_s)

    async def _hear_word(self, in_hand: PlanInHand) -> ChangeOutcome | None:
        """Be ready, wait for the planner's word, and take the part; the gate is held. None: it is not to be done."""
        reason = in_hand.change.refusal_at_gate()
        if reason is not None:
            return ChangeOutcome(in_hand.ask.plan_id, PlanState.REFUSED, reason)
        in_hand.is_ready.set_result(True)
        await asyncio.wait([in_hand.decision], timeout=max(in_hand.until_s - self.keeper.now(), 0.0))
        self._budget.end(self.keeper.now())
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
            reason = "" if in_hand.decision.done() else f"nothing was heard for {in_hand.limit_s:g} s"
            outcome = ChangeOutcome(in_hand.ask.plan_id, PlanState.ABORTED, reason)
        self._in_hand, self._last = None, outcome
        if not in_hand.is_ready.done():
            in_hand.is_ready.set_result(False)
        in_hand.outcome.set_result(outcome)
        if outcome.state is not PlanState.DONE:
            _log.warning("plan_not_done", plan=outcome.plan_id, state=outcome.state.value, reason=outcome.reason)
        self.keeper.machine.loop.wake()
