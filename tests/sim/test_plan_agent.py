"""What a worker answers to plans: fences, repetitions, and each plan that it cannot take, with the reason."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest

from services.worker.engine.stats import take_stats
from shared.ids import Incarnation
from shared.layers import LayerRange
from shared.messages.event import Event
from shared.messages.plan import (
    AbortPlan,
    CommitPlan,
    FormGroup,
    PlanAnswer,
    PlannedStage,
    PlanState,
    PreparePlan,
    RestoreInstance,
    Step,
)
from sim.devices.channel import ModelledLink
from sim.devices.modelled_device import ModelledGroupDevice
from sim.plan_driver import alone, group_of
from tests.support.group_room import BOTH, HALVES, NUM_LAYERS, Room, draw_requests, group_params, room_test
from tests.support.hand_planner import HandPlanner, states
from tests.support.sim_clusters import hear_events


def pair(driver: HandPlanner) -> FormGroup:
    """The group of both, as they are now."""
    return group_of([driver.reports[name] for name in BOTH], HALVES)


def changed(group: FormGroup, index: int, **fields: object) -> FormGroup:
    """A group with another stage at an index."""
    stage = PlannedStage.model_validate(group.stages[index].model_dump() | fields)
    return FormGroup(stages=(*group.stages[:index], stage, *group.stages[index + 1 :]))


def refusals(events: list[Event]) -> list[tuple[str, str]]:
    """The worker and the reason of each refusal among events."""
    return [
        (event.instance_id, event.reason)
        for event in events
        if (event.service, event.name) == ("worker", "plan_refused")
    ]


async def check_refused(room: Room, step: Step, reason: str) -> None:
    """Check that w0 refuses a plan for a reason, and stays what it is."""
    before, events = (room.role(0), room.num_blocks(0)), await hear_events(room.driver.bus)
    room.driver.epoch += 1
    epoch = room.driver.epoch
    answer = await room.driver.answer("w0", PreparePlan(epoch=epoch, plan_id=epoch, step=step, limit_s=5))
    assert answer.state is PlanState.REFUSED
    assert re.search(reason, answer.reason), answer.reason
    assert (room.role(0), room.num_blocks(0)) == before
    await asyncio.sleep(0.01)
    assert refusals(events) == [("w0", f"plan {answer.plan_id}: {answer.reason}")]


def assert_aborted(answer: PlanAnswer | None, reason: str) -> None:
    assert answer is not None
    assert (answer.state, answer.reason) == (PlanState.ABORTED, reason)


@room_test(group_params())
async def test_whoever_speaks_under_an_older_epoch_is_refused_and_moves_nothing(room: Room) -> None:
    """A plan is prepared under epoch 3. Under epoch 2 somebody begins another one, or ends this one."""
    driver = room.driver
    driver.epoch = 2
    plan_id, prepared = await driver.prepare(pair(driver))
    assert states(prepared) == ["prepared"] * 2
    begin = PreparePlan(epoch=2, plan_id=9, step=pair(driver), limit_s=5)
    for late in (begin, CommitPlan(epoch=2, plan_id=3), AbortPlan(epoch=2, plan_id=3)):
        for name in BOTH:
            answer = await driver.answer(name, late)
            assert (answer.state, answer.newest_epoch) == (PlanState.REFUSED, 3)
            assert "epoch 2 is over: a planner of epoch 3 has spoken" in answer.reason
        assert [room.role(index)[0] for index in range(2)] == ["", ""], "nobody has committed"
    assert states(await driver.finish(plan_id, BOTH, commit=True)) == ["done"] * 2, "nobody has aborted"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda group: changed(group, 0, incarnation=Incarnation(77)), "made for another process"),
        (lambda group: changed(group, 0, held=(0, 6)), r"made for layers \[?0.*6.*, held are .*8"),
        (lambda group: changed(group, 1, layers=(5, 8)), "do not begin where those before them end, at 4"),
        (lambda group: FormGroup(stages=(group.stages[1], group.stages[1])), "names this worker 0 times"),
        (lambda group: FormGroup(stages=(group.stages[0], group.stages[0])), "names this worker 2 times"),
        (lambda group: RestoreInstance(worker=group.stages[0]), "a whole instance already"),
    ],
)
@room_test(group_params())
async def test_a_worker_that_is_alone_refuses(room: Room, change: Callable[[FormGroup], Step], reason: str) -> None:
    await check_refused(room, change(pair(room.driver)), reason)


@room_test(group_params())
async def test_a_stage_refuses_layers_that_it_does_not_hold(room: Room) -> None:
    wider = [LayerRange(0, 5), LayerRange(5, NUM_LAYERS)]
    group = group_of(await room.form(), wider)
    words = r"layers \[0, 5\) are not all among those held, \[0, 4\), as stage 1 of 2 in the group of w0"
    await check_refused(room, group, words)


@room_test(group_params())
async def test_what_the_device_refuses_is_refused(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelledGroupDevice, "refusal", lambda *_: "too little memory")
    await check_refused(room, pair(room.driver), "^too little memory$")


@room_test(group_params())
async def test_a_worker_that_is_about_to_stop_takes_part_in_nothing_new(room: Room) -> None:
    room.ask(*draw_requests(1, 4))
    await asyncio.sleep(0.1)
    group = pair(room.driver)
    draining = asyncio.ensure_future(room.cluster.workers[0].service.drain(5.0))
    await asyncio.sleep(0.0)
    await check_refused(room, group, "it is about to stop")
    await draining
    await room.check()


@room_test(group_params())
async def test_what_is_abandoned_before_it_is_prepared_is_not_prepared_any_more(room: Room) -> None:
    """The abort is quicker than the prepare."""
    driver = room.driver
    for _ in range(2):
        answer = await driver.answer("w0", AbortPlan(epoch=5, plan_id=5))
        assert answer.state is PlanState.ABORTED
    answer = await driver.answer("w0", PreparePlan(epoch=5, plan_id=5, step=pair(driver), limit_s=5))
    assert answer.state is PlanState.ABORTED
    driver.epoch = 5
    assert states(await driver.drop(BOTH, HALVES)) == ["done"] * 2, "the next one is prepared as ever"


@room_test(group_params())
async def test_a_plan_that_is_over_is_told_of_and_not_begun_again(room: Room) -> None:
    driver = room.driver
    group = pair(driver)
    assert states(await driver.drop(BOTH, HALVES)) == ["done"] * 2
    roles = [room.role(index) for index in range(2)]
    again = PreparePlan(epoch=1, plan_id=1, step=group, limit_s=5)
    answers = [(await driver.answer("w0", question)).state for question in (again, CommitPlan(epoch=1, plan_id=1))]
    assert answers == [PlanState.DONE] * 2
    await asyncio.sleep(1.0)
    restored = [driver.reports[name] for name in BOTH]
    driver.epoch = 6
    assert states(await driver.carry_out(*map(alone, restored))) == ["done"] * 2
    older = PreparePlan(epoch=7, plan_id=6, step=group, limit_s=5)
    answers = [(await driver.answer("w0", question)).state for question in (older, CommitPlan(epoch=7, plan_id=3))]
    assert answers == [PlanState.REFUSED] * 2
    assert roles != [room.role(index) for index in range(2)] == [("", 0, (0, NUM_LAYERS))] * 2


@room_test(group_params())
async def test_a_step_that_takes_longer_than_the_limit_is_not_waited_for(room: Room) -> None:
    driver, worker = room.driver, room.cluster.workers[0]
    room.ask(*draw_requests(2, 6))
    await asyncio.sleep(0.1)
    assert worker.device is not None
    worker.device.stuck_until_s = asyncio.get_running_loop().time() + 3.0
    driver.limit_s = 1.0
    events = await hear_events(room.driver.bus)
    _, answers = await driver.prepare(pair(driver))
    reason = "a step, or a copy to the host, was under way for 1 s"
    assert_aborted(answers["w0"], reason)
    await room.check()
    assert refusals(events) == [("w0", f"plan 1: {reason}")]


@room_test(group_params(num_pages=900, link=ModelledLink(bytes_per_s=3e5)))
async def test_a_leader_that_waits_for_kv_says_so_if_it_takes_longer_than_the_limit(room: Room) -> None:
    """The link carries 0.3 MB/s: KV of the drop is on its way for more than a second."""
    driver, events = room.driver, await hear_events(room.driver.bus)
    room.ask(*draw_requests(2, 12))
    await asyncio.sleep(0.4)
    await room.form()
    assert take_stats(room.engine()).num_coming_blocks
    driver.limit_s = 0.1
    _, answers = await driver.prepare(*(alone(driver.reports[name]) for name in BOTH))
    reason = "KV of the last change was on its way for 0.1 s"
    assert_aborted(answers["w0"], reason)
    await asyncio.sleep(0.01)
    assert refusals(events) == [("w0", f"plan 2: {reason}")]
    await room.check()
    driver.limit_s = 5.0
    assert states(await driver.restore(BOTH)) == ["done"] * 2


@room_test(group_params())
async def test_a_plan_that_its_planner_abandons_is_no_refusal(room: Room) -> None:
    driver, events = room.driver, await hear_events(room.driver.bus)
    plan_id, prepared = await driver.prepare(pair(driver))
    assert states(prepared) == ["prepared"] * 2
    assert states(await driver.finish(plan_id, BOTH, commit=False)) == ["aborted"] * 2
    await asyncio.sleep(0.1)
    assert not refusals(events)


@room_test(group_params())
async def test_a_newer_plan_does_not_wait_until_an_older_one_is_given_up(room: Room) -> None:
    """Whoever is prepared waits 5 s for the word; the second planner's plan comes after one of them."""
    driver, clock = room.driver, asyncio.get_running_loop()
    _, prepared = await driver.prepare(pair(driver))
    assert states(prepared) == ["prepared"] * 2
    await asyncio.sleep(1.0)
    begun_s = clock.time()
    assert states(await driver.drop(BOTH, HALVES)) == ["done"] * 2
    assert clock.time() - begun_s < 1.0
