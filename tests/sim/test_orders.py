"""Two kinds of orders to one worker, by doubles of both: a change, which holds the gate, and errands, many at once."""

from __future__ import annotations

import asyncio
from typing import Literal, TypeVar

from services.worker.roles.agent import OrderAgent
from services.worker.roles.role_keeper import RoleKeeper
from services.worker.roles.steps.change import Change
from shared.messages.base import ControlMessage
from shared.messages.errand import Errand, ErrandRefused
from shared.messages.plan import (
    CommitPlan,
    PlanAnswer,
    PlannedWorker,
    PlanState,
    PreparePlan,
    RestoreInstance,
)
from shared.transport.bus import Message
from shared.wire import decode_json, encode_json
from tests.support.group_room import Room, draw_requests, group_params, room_test

M = TypeVar("M", bound=ControlMessage)


class Look(Errand):
    """How does it look?"""

    kind: Literal["look"] = "look"
    what: str


class Looked(ControlMessage):
    """So."""

    kind: Literal["looked"] = "looked"
    what: str
    num_steps: int


class Pause(Change):
    """Changes nothing, and notes who held the gate when."""

    def __init__(self, _step: RestoreInstance, keeper: RoleKeeper) -> None:
        self.keeper = keeper

    def refusal(self) -> str | None:
        """Nothing is against it."""
        return None

    async def carry_out(self, asked: PreparePlan) -> int:
        """Say a number."""
        return 100 + asked.plan_id


class Worker:
    """One worker of a room, which looks for as long as `may_look` is not set."""

    def __init__(self, room: Room) -> None:
        served = room.cluster.workers[0].service.agent
        assert served is not None
        self.engine = room.engine()
        self.may_look = asyncio.Event()
        self.num_looking = 0
        self.agent = OrderAgent(served.keeper, {Look: self.look}, {RestoreInstance: Pause})

    @classmethod
    async def busy(cls, room: Room) -> Worker:
        """Return the worker once it has something to do."""
        room.ask(*draw_requests(1, 8))
        await asyncio.sleep(0.2)
        return cls(room)

    async def look(self, asked: Look) -> Looked:
        """Take some time."""
        self.num_looking += 1
        await self.may_look.wait()
        self.num_looking -= 1
        return Looked(what=asked.what, num_steps=self.engine.totals.num_steps)

    async def ask(self, message: ControlMessage, kind: type[M]) -> M:
        """Return what it answers."""
        return decode_json(await self.agent.answer(Message("plan", encode_json(message))), kind)

    async def plan(self, epoch: int, plan_id: int) -> PlanState:
        """Prepare a change."""
        step = RestoreInstance(worker=PlannedWorker(worker_id=self.agent.keeper.worker_id, held=(0, 8)))
        prepare = PreparePlan(epoch=epoch, plan_id=plan_id, step=step)
        return (await self.ask(prepare, PlanAnswer)).state


@room_test(group_params())
async def test_errands_are_under_way_and_answered_while_a_change_is_prepared_and_holds_the_gate(room: Room) -> None:
    worker = await Worker.busy(room)
    first = asyncio.ensure_future(worker.ask(Look(epoch=3, what="one"), Looked))
    await asyncio.sleep(0.01)
    assert await worker.plan(3, 3) is PlanState.PREPARED
    held_at = worker.engine.totals.num_steps
    second = asyncio.ensure_future(worker.ask(Look(epoch=3, what="two"), Looked))
    await asyncio.sleep(0.5)
    assert (worker.num_looking, first.done(), second.done()) == (2, False, False)
    worker.may_look.set()
    answers = await asyncio.gather(first, second)
    assert [answer.what for answer in answers] == ["one", "two"]
    assert [answer.num_steps for answer in answers] == [held_at] * 2, "no step is made meanwhile"
    done = await worker.ask(CommitPlan(epoch=3, plan_id=3), PlanAnswer)
    assert (done.state, done.num_blocks) == (PlanState.DONE, 103)
    await asyncio.sleep(0.5)
    assert worker.engine.totals.num_steps > held_at
    await room.check()


@room_test(group_params())
async def test_an_errand_of_an_older_epoch_is_not_done_and_none_lets_an_older_plan_pass(room: Room) -> None:
    worker = await Worker.busy(room)
    worker.may_look.set()
    assert await worker.plan(5, 5) is PlanState.PREPARED
    refused = await worker.ask(Look(epoch=4, what="late"), ErrandRefused)
    assert refused.reason == "epoch 4 is over: a planner of epoch 5 has spoken"
    assert (await worker.ask(Look(epoch=6, what="next"), Looked)).what == "next"
    late = await worker.ask(CommitPlan(epoch=5, plan_id=5), PlanAnswer)
    assert (late.state, late.newest_epoch) == (PlanState.REFUSED, 6)
    assert (await worker.ask(CommitPlan(epoch=6, plan_id=5), PlanAnswer)).state is PlanState.DONE
    await room.check()


@room_test(group_params())
async def test_one_change_at_a_time_has_its_turn_at_a_worker(room: Room) -> None:
    worker = await Worker.busy(room)
    assert await worker.plan(3, 3) is PlanState.PREPARED
    assert await worker.plan(4, 4) is PlanState.PREPARED
    gone = await worker.ask(CommitPlan(epoch=4, plan_id=3), PlanAnswer)
    assert gone.state is PlanState.ABORTED, "its planner has gone on to another one"
    done = await worker.ask(CommitPlan(epoch=4, plan_id=4), PlanAnswer)
    assert (done.state, done.num_blocks) == (PlanState.DONE, 104)
    await room.check()
