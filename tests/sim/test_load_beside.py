"""Groups that load parameters beside serving, give them up again, or are restored when all is there: virtual clock."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from services.worker.blocks import compaction
from services.worker.engine.engine import Engine
from services.worker.engine.stats import take_stats
from services.worker.roles.role import InGroup
from shared.messages.plan import CommitPlan, PlanState, PreparePlan
from sim.cluster import ClusterParams
from sim.plan_driver import load_beside, unload_beside
from tests.support.group_room import (
    BOTH,
    HALVES,
    NUM_LAYERS,
    PAGE_BYTES,
    Room,
    draw_requests,
    group_params,
    room_test,
)
from tests.support.hand_planner import states

LOAD_S = 2.0
"""In which half of the parameters come."""
LOAD_BYTES_PER_S = NUM_LAYERS // 2 * 40 * PAGE_BYTES / LOAD_S


def slow_params(num_pages: int = 500) -> ClusterParams:
    """Parameters take their time."""
    return group_params(num_pages=num_pages, load_bytes_per_s=LOAD_BYTES_PER_S)


def usable(room: Room, index: int = 0) -> int:
    return take_stats(room.engine(index)).num_blocks


async def hold_beyond(room: Room, num_blocks: int) -> Engine:
    """Let the leader's requests hold blocks beyond so many, though no more than those; return its engine."""
    room.ask(*draw_requests(3, 40))
    engine = room.engine()
    while take_stats(engine).num_waiting or not 10 < take_stats(engine).num_used_blocks < 0.8 * num_blocks:
        await asyncio.sleep(0.01)
    assert (engine.blocks.refcount[num_blocks:] > 0).any(), "some lie beyond"
    return engine


@room_test(slow_params())
async def test_parameters_come_beside_serving_and_a_restore_then_has_nothing_to_load(room: Room) -> None:
    loop = asyncio.get_running_loop()
    before = [room.num_blocks(0), room.num_blocks(1)]
    assert states(await room.driver.drop(BOTH, HALVES)) == ["done"] * 2
    grouped, count = usable(room), room.beside_blocks()
    assert sum(before) <= count + 1 < grouped, "without what the drop gave, rounded to pages"
    await asyncio.sleep(1.0)
    room.ask(*draw_requests(1, 4))
    assert states(await room.driver.load(BOTH, count)) == ["done"] * 2
    assert usable(room) == count
    assert room.role(0) == ("w0", 0, (0, 4)), "computes what it did"
    await asyncio.sleep(LOAD_S / 2)
    report = room.driver.reports["w1"]
    assert report.resident == (0, NUM_LAYERS)
    assert 0.5 < report.loaded_ratio < 0.9, "half of the model was there, and half of the rest is by now"
    await asyncio.sleep(LOAD_S / 2 + 0.6)
    assert room.driver.reports["w1"].loaded_ratio == 1.0
    began_s = loop.time()
    assert states(await room.driver.restore(BOTH)) == ["done"] * 2
    assert loop.time() - began_s < LOAD_S / 4, "nothing was left to load"
    assert [room.num_blocks(0), room.num_blocks(1)] == before
    assert room.driver.reports["w0"].resident == (0, NUM_LAYERS)
    await room.check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@room_test(slow_params(num_pages=800))
async def test_texts_are_the_same_whenever_parameters_come_and_go(room: Room, seed: int) -> None:
    rng, asked = np.random.default_rng(seed), draw_requests(seed, 70)
    room.ask(*asked[:30])
    more, done = iter(asked[30:]), 0
    for _ in range(3):
        await asyncio.sleep(float(rng.exponential(0.4)))
        await room.form()
        grouped, count = usable(room), room.beside_blocks()
        for _ in range(int(rng.integers(1, 4))):
            room.ask(next(more), next(more))
            await asyncio.sleep(float(rng.exponential(0.3)))
            found = states(await room.driver.load(BOTH, count))
            assert found in (["done"] * 2, ["refused", "aborted"]), "what is held may not fit"
            if found == ["done"] * 2:
                done += 1
                await asyncio.sleep(float(rng.exponential(LOAD_S)))
                if rng.random() < 0.6:
                    assert states(await room.driver.unload(BOTH, grouped)) == ["done"] * 2
                    assert usable(room) == grouped
            await asyncio.sleep(0.6)
        assert states(await room.driver.restore(BOTH)) == ["done"] * 2
        await asyncio.sleep(0.6)
    room.ask(*more)
    await room.check()
    assert done, "it came to pass"


@room_test(slow_params())
async def test_sequences_leave_the_blocks_that_go_while_they_run(room: Room) -> None:
    """KV is moved, not computed again, and nobody is preempted."""
    await room.form()
    count = room.beside_blocks()
    engine = await hold_beyond(room, count)
    counted = (engine.totals.num_recomputed_tokens, engine.totals.num_preemptions)
    answers = await room.driver.load(BOTH, count)
    assert states(answers) == ["done"] * 2, answers
    assert not (engine.blocks.refcount[count:] > 0).any()
    assert (engine.totals.num_recomputed_tokens, engine.totals.num_preemptions) == counted
    await room.check()


@room_test(slow_params())
async def test_a_commit_that_comes_before_the_blocks_are_left_takes_no_memory(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No planner sends one; a group that hears one is over rather than wrong. Here blocks leave one by one."""
    monkeypatch.setattr(compaction, "MAX_MOVED_BLOCKS", 1)
    await room.form()
    count, driver = room.beside_blocks(), room.driver
    await hold_beyond(room, count)
    driver.epoch += 1
    step = load_beside([driver.reports[name] for name in BOTH], count)
    epoch = plan_id = driver.epoch
    asked = PreparePlan(epoch=epoch, plan_id=plan_id, step=step)
    preparing = asyncio.ensure_future(driver.answer("w0", asked))
    await asyncio.sleep(0.001)
    answer = await driver.answer("w0", CommitPlan(epoch=epoch, plan_id=plan_id))
    assert (answer.state, answer.reason) == (PlanState.FAILED, "KV is in use that would lose its memory")
    await preparing
    await room.check()


@room_test(slow_params())
async def test_a_worker_says_why_it_does_not_load_beside(room: Room) -> None:
    await asyncio.sleep(0.6)
    reports = room.driver.reports
    whole = [reports["w0"], reports["w1"]]
    wrong = load_beside(whole, 100)  # they are no group
    _, answers = await room.driver.prepare(wrong)
    assert states(answers) == ["refused"] * 2
    stages, count = await room.form(), room.beside_blocks()
    other = unload_beside([stages[0], stages[1].model_copy(update={"worker_id": "w9"})], count)
    answer = await room.driver.answer("w0", PreparePlan(epoch=9, plan_id=9, step=other))
    assert "a group that stands" in answer.reason
    room.driver.epoch = 9
    _, answers = await room.driver.prepare(load_beside(stages, count + 1))
    assert states(answers) == ["refused"] * 2
    part = f"the memory holds {count} KV blocks, not {count + 1}"
    assert all(answer is not None and part in answer.reason for answer in answers.values()), answers
    assert usable(room) > count


@room_test(slow_params())
async def test_a_plan_that_is_abandoned_gives_the_blocks_back(room: Room) -> None:
    reports = await room.form()
    grouped, count = usable(room), room.beside_blocks()
    plan_id, answers = await room.driver.prepare(load_beside(reports, count))
    assert states(answers) == ["prepared"] * 2
    assert usable(room) == count
    assert states(await room.driver.finish(plan_id, BOTH, commit=False)) == ["aborted"] * 2
    assert usable(room) == grouped
    assert [room.device(i).resident for i in range(2)] == list(HALVES)
    room.ask(*draw_requests(4, 20))
    await room.check()


@pytest.mark.parametrize("lost", [0, 1])
@room_test(slow_params())
async def test_survivors_of_a_group_load_only_what_has_not_come_yet(room: Room, lost: int) -> None:
    loop = asyncio.get_running_loop()
    assert states(await room.driver.drop(BOTH, HALVES)) == ["done"] * 2
    room.ask(*draw_requests(5, 4))
    await asyncio.sleep(0.6)
    count = room.beside_blocks()
    answers = await room.driver.load(BOTH, count)
    assert states(answers) == ["done"] * 2, answers
    await asyncio.sleep(LOAD_S * 0.2)
    began_s = loop.time()
    answer = await room.driver.restore([BOTH[1 - lost]])
    assert states(answer) == ["done"]
    took_s = loop.time() - began_s  # a second of it for the other one, who does not come
    assert LOAD_S * 0.8 - 0.1 < took_s < LOAD_S * 0.8 + 0.1
    assert answer[BOTH[1 - lost]] is not None
    await room.check()
    await asyncio.sleep(LOAD_S + 1.0)
    assert all(report.num_stages == 1 for report in room.driver.reports.values())


async def wait_until_broken(room: Room) -> None:
    """Let `w1` leave the group; return when `w0` is about to be whole again, of which no report tells yet."""
    agent = room.agent()
    asyncio.ensure_future(room.driver.restore(["w1"]))  # noqa: RUF006  it ends long before the test does
    while isinstance(agent.keeper.state, InGroup):
        await asyncio.sleep(0.001)


@room_test(slow_params())
async def test_nothing_is_loaded_beside_a_group_that_is_over(room: Room) -> None:
    stages, count = await room.form(), room.beside_blocks()
    await wait_until_broken(room)
    await asyncio.sleep(LOAD_S / 2)
    assert room.driver.reports["w0"].group == "w0", "says what it was"
    asked = PreparePlan(epoch=room.driver.epoch, plan_id=9, step=load_beside(stages, count))
    answer = await room.driver.answer("w0", asked)
    assert answer.state is PlanState.REFUSED
    assert "its group is over" in answer.reason
    await asyncio.sleep(LOAD_S)
    assert room.role(0) == ("", 0, (0, NUM_LAYERS)), "whole, and nobody's stage"
    assert room.driver.reports["w0"].num_stages == 1
    await room.check()


@room_test(slow_params())
async def test_a_group_that_ends_while_blocks_are_left_loads_nothing(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan was taken when the group stood; it gets its turn when the worker is whole again."""
    monkeypatch.setattr(compaction, "MAX_MOVED_BLOCKS", 1)
    stages, count = await room.form(), room.beside_blocks()
    await hold_beyond(room, count)
    agent = room.agent()
    asked = PreparePlan(epoch=9, plan_id=9, step=load_beside(stages, count))
    preparing = asyncio.ensure_future(room.driver.answer("w0", asked))
    await asyncio.sleep(0.001)
    agent.keeper.pipeline_ended(agent.role.plan_id, "the connection was cut")
    answer = await preparing
    assert answer.state is PlanState.REFUSED
    assert "the plan was made for" in answer.reason
    assert room.role(0) == ("", 0, (0, NUM_LAYERS))
    await room.check()


@room_test(slow_params())
async def test_a_group_that_ends_while_all_are_prepared_to_load_is_left_afterwards(room: Room) -> None:
    """The gate is held, so nobody becomes whole before the word has come."""
    step = load_beside(await room.form(), room.beside_blocks())
    room.ask(*draw_requests(4, 10))
    plan_id, answers = await room.driver.prepare(step)
    assert states(answers) == ["prepared"] * 2
    agent = room.agent()
    agent.keeper.pipeline_ended(agent.role.plan_id, "the connection was cut")
    assert states(await room.driver.finish(plan_id, BOTH, commit=True)) == ["done"] * 2
    await asyncio.sleep(LOAD_S + 1.0)
    assert [room.role(index) for index in range(2)] == [("", 0, (0, NUM_LAYERS))] * 2
    await room.check()


@room_test(slow_params())
async def test_a_worker_that_is_to_be_whole_may_have_become_so_by_itself(room: Room) -> None:
    """Its group ends while the plan waits for its turn: the plan is done, not refused."""
    await room.form()
    agent = room.agent()
    agent.keeper.pipeline_ended(agent.role.plan_id, "the connection was cut")
    answers = await room.driver.restore(["w0"])
    assert states(answers) == ["done"]
    assert room.role(0) == ("", 0, (0, NUM_LAYERS))
    room.ask(*draw_requests(4, 10))
    await room.check()
