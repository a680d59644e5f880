"""Orders that are well-formed and no planner's: they hold no worker up for long, and put no planner out of office."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from services.planner.config import PlannerSettings
from services.planner.service import Planner
from services.worker.engine.loop import StepPace
from services.worker.roles.fences import HOLD_RATIO
from shared.ids import WorkerId
from shared.messages.base import MAX_EPOCH, MAX_EPOCH_STEP, ControlMessage
from shared.messages.errand import ErrandRefused
from shared.messages.event import Event
from shared.messages.plan import (
    MAX_ASIDE_S,
    MAX_HOLD_S,
    PLAN_KEY,
    AbortPlan,
    CommitPlan,
    FormGroup,
    Plan,
    PlanPhase,
    PlanState,
    PreparePlan,
)
from shared.messages.queue import ListQueued
from shared.subjects import Subjects
from shared.transport.bus import BusError
from shared.wire import decode_json, encode_json
from sim.plan_driver import alone, group_of
from tests.support.group_room import BOTH, HALVES, Room, draw_requests, group_params, room_test
from tests.support.hand_planner import HandPlanner
from tests.support.sim_clusters import ask_planner, hear_events, reasons

SUBJECTS = Subjects()
W0 = BOTH[0]
PERIOD_S = 0.05
"""Between two looks at the steps of a worker."""


def pair(driver: HandPlanner) -> FormGroup:
    return group_of([driver.reports[name] for name in BOTH], HALVES)


def order(kind: type[PreparePlan | CommitPlan | AbortPlan | ListQueued], epoch: int, room: Room) -> ControlMessage:
    """A well-formed order."""
    if kind is ListQueued:
        return ListQueued(epoch=epoch)
    if kind is PreparePlan:
        return PreparePlan(epoch=epoch, plan_id=epoch, step=pair(room.driver), limit_s=600)
    return kind.model_validate({"epoch": epoch, "plan_id": epoch})


async def tell(room: Room, message: ControlMessage, worker_id: WorkerId = W0) -> bytes:
    """Return what a worker answers."""
    return await room.driver.bus.request(SUBJECTS.plan(worker_id), encode_json(message), timeout_s=30)


async def keep_busy(room: Room, until_s: float) -> None:
    """Have somebody read at all times, so that every worker has steps to make."""
    number = 0
    while asyncio.get_running_loop().time() < until_s:
        room.ask(*(replace(each, request_id=f"{number}-{each.request_id}") for each in draw_requests(number, 2)))
        number += 1
        await asyncio.sleep(0.25)


async def longest_pause_s(room: Room, until_s: float) -> tuple[float, float]:
    """Return how long w0 made no step at the longest, and in all, until then."""
    clock, engine = asyncio.get_running_loop(), room.engine()
    seen, since_s, longest_s, total_s = -1, clock.time(), 0.0, 0.0
    while clock.time() < until_s:
        if engine.totals.num_steps != seen:
            seen, since_s = engine.totals.num_steps, clock.time()
        else:
            total_s += PERIOD_S
        longest_s = max(longest_s, clock.time() - since_s)
        await asyncio.sleep(PERIOD_S)
    return longest_s, total_s


# Nobody holds a worker for long


@room_test(group_params())
async def test_a_plan_that_asks_for_600_s_holds_a_worker_up_for_five_and_nothing_is_placed_there(room: Room) -> None:
    events, clock = await hear_events(room.driver.bus), asyncio.get_running_loop()
    room.ask(*draw_requests(3, 12))
    await asyncio.sleep(0.1)
    begun_s, prepare = clock.time(), order(PreparePlan, 1, room)
    await tell(room, prepare)
    before = room.engine().totals.num_steps
    await asyncio.sleep(1.0)
    assert room.driver.reports["w0"].held == "plan 1"
    assert room.driver.reports["w0"].num_runnable > 0
    assert not room.cluster.dispatcher.sessions.cluster.loads()[0].ready
    assert room.cluster.dispatcher.sessions.cluster.num_ready == 2
    num_there = room.engine().table.num_sequences
    room.ask(*draw_requests(4, 6))
    await asyncio.sleep(0.1)
    assert room.engine().table.num_sequences <= num_there
    while room.engine().totals.num_steps == before:
        await asyncio.sleep(PERIOD_S)
    assert clock.time() - begun_s <= MAX_HOLD_S + 2 * PERIOD_S
    await asyncio.sleep(0.6)
    assert room.cluster.dispatcher.sessions.cluster.loads()[0].ready
    assert reasons(events, "worker_held") == ["makes no steps: plan 1"]
    assert reasons(events, "worker_goes_on") == ["makes steps again: plan 1 is over"]
    assert not [event for event in events if event.name == "worker_lost"]
    await room.check()


@room_test(group_params())
async def test_a_member_of_a_group_waits_for_ten_seconds_at_most_and_the_group_serves_meanwhile(room: Room) -> None:
    member = (await room.form())[1]
    room.ask(*draw_requests(5, 6))
    asked = PreparePlan(epoch=9, plan_id=9, step=alone(member), limit_s=600)
    begun_s = asyncio.get_running_loop().time()
    assert (await room.driver.answer("w1", asked)).state is PlanState.PREPARED
    before = room.engine().totals.num_steps
    while room.agent(1).keeper.machine.loop.pace is StepPace.HELD_UP:
        await asyncio.sleep(PERIOD_S)
    assert MAX_HOLD_S < asyncio.get_running_loop().time() - begun_s <= MAX_ASIDE_S + 2 * PERIOD_S
    assert room.engine().totals.num_steps > before
    await room.check()


@pytest.mark.slow
@room_test(group_params())
async def test_prepares_that_come_again_and_again_leave_a_worker_most_of_its_time(room: Room) -> None:
    """One a second, each of another plan, for 40 s: no pause is longer than a hold, and all take a fifth."""
    clock = asyncio.get_running_loop()
    until_s = clock.time() + 40.0
    busy = asyncio.ensure_future(keep_busy(room, until_s))
    looking = asyncio.ensure_future(longest_pause_s(room, until_s))
    number = 0
    asked = []
    while clock.time() < until_s:
        number += 1
        asked.append(asyncio.ensure_future(tell(room, order(PreparePlan, number, room))))
        await asyncio.sleep(1.0)
    await asyncio.gather(busy, *asked)
    longest_s, total_s = await looking
    assert 0.5 < longest_s <= MAX_HOLD_S + 2 * PERIOD_S
    assert MAX_HOLD_S < total_s <= 1.2 * (MAX_HOLD_S + HOLD_RATIO * 40.0)
    await room.check()


@room_test(group_params())
async def test_a_plan_that_is_prepared_suffers_nothing_from_one_that_is_refused(room: Room) -> None:
    driver = room.driver
    plan_id, _ = await driver.prepare(pair(driver))
    wrong = FormGroup(stages=(pair(driver).stages[0],) * 2)
    for epoch, number in ((plan_id + 1, plan_id + 1), (plan_id, plan_id - 1 or 1), (plan_id, plan_id + 5)):
        if number != plan_id:
            await driver.answer("w0", PreparePlan(epoch=epoch, plan_id=number, step=wrong, limit_s=600))
    answers = await driver.finish(plan_id, BOTH, commit=True)
    assert [answer.state for answer in answers.values() if answer is not None] == [PlanState.DONE] * 2


@room_test(group_params())
async def test_a_worker_that_makes_no_step_loses_its_streams_whatever_the_cause(room: Room) -> None:
    """Somebody holds the gate for a minute and says nothing. All that ran there gives way, and goes on elsewhere."""
    clock, keeper = asyncio.get_running_loop(), room.agent().keeper
    room.ask(*draw_requests(6, 12))
    await asyncio.sleep(0.2)
    engine = room.engine()
    assert engine.table.num_sequences

    async def stand_still() -> None:
        async with keeper.machine.gate.exclusive():
            for row in engine.table.running.view.tolist():
                engine._transitions.preempt(row)
            await asyncio.sleep(60.0)

    since_s, standing = clock.time(), asyncio.ensure_future(stand_still())
    await room.check()
    assert 10.0 < clock.time() - since_s < 20.0
    await standing


# An epoch cannot be poisoned


@pytest.mark.parametrize("kind", [PreparePlan, CommitPlan, AbortPlan, ListQueued])
@pytest.mark.parametrize("epoch", [MAX_EPOCH_STEP + 2, 2**53, MAX_EPOCH])
@room_test(group_params())
async def test_a_giant_epoch_is_refused_and_told_and_leaves_nothing_behind(
    room: Room, kind: type[PreparePlan | CommitPlan | AbortPlan | ListQueued], epoch: int
) -> None:
    events = await hear_events(room.driver.bus)
    room.driver.epoch = 1
    await room.driver.answer("w0", AbortPlan(epoch=1, plan_id=1))
    said = await tell(room, order(kind, epoch, room))
    words = f"epoch {epoch} is more than {MAX_EPOCH_STEP} above 1"
    if kind is ListQueued:
        refused = decode_json(said, ErrandRefused)
        assert refused.newest_epoch == 1
        assert words in refused.reason
    await asyncio.sleep(0.01)
    told = [event for event in events if event.service == "worker" and words in event.reason]
    assert [event.name for event in told] == ["errand_refused" if kind is ListQueued else "plan_refused"]
    await room.form()  # by the planner of epoch 2


@pytest.mark.parametrize("number", [2**63, 10**30, -1, 0, 1.5, "many"])
@pytest.mark.parametrize("field", ["epoch", "plan_id"])
@room_test(group_params())
async def test_what_is_no_epoch_is_no_order(room: Room, field: str, number: object) -> None:
    fields: dict[str, Any] = {"kind": "abort_plan", "epoch": 5, "plan_id": 5, field: number}
    with pytest.raises(BusError, match=field):
        await tell(room, _Raw(**fields))
    await room.form()


@room_test(group_params())
async def test_no_plan_is_named_by_an_epoch_that_is_still_to_come(room: Room) -> None:
    """Else all plans up to that one would count as abandoned."""
    answer = await room.driver.answer("w0", AbortPlan(epoch=5, plan_id=MAX_EPOCH))
    assert answer.state is PlanState.REFUSED
    assert (answer.newest_epoch, answer.reason) == (
        0,
        f"plan {MAX_EPOCH} is named by a newer epoch than 5, which asks for it",
    )
    room.driver.epoch = 5
    await room.form()


async def poison(room: Room, num_steps: int, worker_id: WorkerId = W0) -> int:
    """Bring a worker's epoch up as fast as it lets anybody; return it."""
    for number in range(1, num_steps + 1):
        await tell(room, ListQueued(epoch=number * MAX_EPOCH_STEP), worker_id)
    return num_steps * MAX_EPOCH_STEP


async def claim_of(room: Room) -> Plan:
    """Return what the plan key holds."""
    bucket = await room.driver.bus.key_value(SUBJECTS.plan_bucket())
    entry = await bucket.get(PLAN_KEY)
    assert entry is not None
    assert entry.value is not None
    return decode_json(entry.value, Plan)


@pytest.mark.parametrize("num_steps", [1, 3, 40])
@room_test(group_params())
async def test_a_planner_goes_on_whatever_a_worker_was_told(room: Room, num_steps: int) -> None:
    """One worker knows an epoch that is far above all others; the plan is for both."""
    events = await hear_events(room.driver.bus)
    newest = await poison(room, num_steps)
    answer = await ask_planner(room.cluster, "drop", *BOTH)
    assert answer["done"], answer
    assert (await claim_of(room)).epoch > newest
    assert not reasons(events, "planner_superseded")
    await asyncio.sleep(1.0)
    assert (await ask_planner(room.cluster, "restore"))["done"]


@pytest.mark.parametrize("num_steps", [1, 3, 40])
@room_test(group_params())
async def test_a_planner_that_starts_anew_goes_on_whatever_was_claimed(room: Room, num_steps: int) -> None:
    await poison(room, num_steps)
    assert (await ask_planner(room.cluster, "drop", *BOTH))["done"]
    claimed = (await claim_of(room)).epoch
    second = await another_planner(room)
    await asyncio.sleep(1.0)
    answer = await ask_second(room, "restore")
    assert answer, "the second planner has the workers' ears"
    assert second.epoch > claimed
    await second.stop()


@pytest.mark.parametrize("epoch", [900_001, MAX_EPOCH_STEP * 5, MAX_EPOCH, 10**30])
@pytest.mark.parametrize("phase", list(PlanPhase))
@room_test(group_params())
async def test_a_plan_key_with_a_giant_epoch_puts_no_planner_out_of_office(
    room: Room, phase: PlanPhase, epoch: int
) -> None:
    bucket = await room.driver.bus.key_value(SUBJECTS.plan_bucket())
    begun: dict[str, Any] = {} if phase is PlanPhase.DONE else {"plan_id": epoch, "steps": (pair(room.driver),)}
    await bucket.put(PLAN_KEY, encode_json(Plan(epoch=epoch, phase=phase, **begun)))
    await asyncio.sleep(1.0)
    planner = await another_planner(room)
    await asyncio.sleep(6.0)
    assert await ask_second(room, "drop")
    await planner.stop()


async def another_planner(room: Room) -> Planner:
    """Start one, which takes over."""
    bus = room.cluster.broker.connect("second")
    planner = Planner(PlannerSettings(instance_id="second"), bus)
    await planner.start()
    return planner


async def ask_second(room: Room, verb: str) -> bool:
    """Return whether the second planner has done something by hand."""
    subject = SUBJECTS.admin("planner", "second", verb)
    said = await room.driver.bus.request(subject, b"{}", timeout_s=30)
    return b'"done": true' in said


@room_test(group_params())
async def test_a_stale_planner_stays_stale_while_epochs_are_made_up(room: Room) -> None:
    """I6: after the second planner's order nothing of the first one passes, poisoned or not."""
    events: list[Event] = await hear_events(room.driver.bus)
    await poison(room, 2)
    second = await another_planner(room)
    await asyncio.sleep(1.0)
    assert await ask_second(room, "drop")
    answer = await ask_planner(room.cluster, "restore")
    assert not answer["done"]
    assert "another planner has taken over" in answer["reason"]
    assert len(reasons(events, "planner_superseded")) == 1
    await second.stop()


class _Raw(ControlMessage, extra="allow"):
    """Anything."""
