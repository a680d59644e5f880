"""Workers that form groups and dissolve them while they serve: on the virtual clock, every text as undisturbed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace

import numpy as np
import pytest

from services.dispatcher.session.leases import Loss
from services.worker.engine.invariants import check_engine
from services.worker.engine.stats import take_stats
from services.worker.kv_moves.arrivals import Arrivals, ArrivingKv
from services.worker.roles.role import Leading
from services.worker.roles.steps.restore import Restore
from shared.ids import WorkerId
from shared.layers import LayerRange
from shared.types import ReaderTarget
from sim.devices.channel import ModelledLink
from sim.plan_driver import alone, group_of
from sim.requests import SimRequest
from tests.support.group_room import (
    BOTH,
    HALVES,
    NUM_LAYERS,
    PAGE_BYTES,
    Room,
    draw_requests,
    group_params,
    open_room,
    room_test,
)
from tests.support.hand_planner import states
from tests.support.sim_clusters import COST

LINK_BYTES_PER_S = 1e6
SLOW = replace(COST, d_s=700 * COST.d_s)
"""Steps of as many decodes as a group's memory holds take longer than a token of the fastest reader."""


async def ask_eight(room: Room, lengths: Iterable[int], num_output: int) -> None:
    """Let eight requests, with prompts of these lengths, be under way."""
    rng = np.random.default_rng(9)
    prompts = [rng.integers(300, 30_000, length) for length in lengths]
    room.ask(*(SimRequest(f"r{i}", prompt, num_output, seed=i) for i, prompt in enumerate(prompts)))
    await asyncio.sleep(0.4)


@room_test(group_params())
async def test_a_drop_gives_the_group_more_blocks_than_both_had_and_a_restore_gives_them_back(room: Room) -> None:
    before = [room.num_blocks(0), room.num_blocks(1)]
    answers = await room.driver.drop(BOTH, HALVES)
    assert states(answers) == ["done"] * 2
    assert room.role(0) == ("w0", 0, (0, 4))
    assert room.role(1) == ("w0", 1, (4, 8))
    claimed = answers["w1"]
    assert claimed is not None
    assert room.num_blocks(0) == claimed.num_blocks > sum(before)
    await asyncio.sleep(1.0)
    assert states(await room.driver.restore(BOTH)) == ["done"] * 2
    assert [room.num_blocks(0), room.num_blocks(1)] == before
    assert room.role(0) == ("", 0, (0, 8))
    (pipeline,) = room.cluster.workers[0].pipelines
    assert pipeline._lost == "the executor is closed", "it has ended in order"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@room_test(group_params())
async def test_texts_are_the_same_through_drops_and_restores_at_any_moment(room: Room, seed: int) -> None:
    rng = np.random.default_rng(seed)
    asked = draw_requests(seed, 60)
    room.ask(*asked[:30])
    for step in range(4):
        await asyncio.sleep(float(rng.exponential(0.4)))
        if step % 2 == 0:
            answers = await room.driver.drop(BOTH, HALVES)
        else:
            answers = await room.driver.restore(BOTH)
        assert states(answers) == ["done"] * 2, answers
        room.ask(*asked[30 + 7 * step : 37 + 7 * step])
    await room.check()
    assert sum(room.cluster.dispatcher.sessions.recovery.num_lost.values()) > 0, "sequences were released"


async def serve_in_group(room: Room, forms: Iterable[list[SimRequest]]) -> Counter[str]:
    """Form a group twice, and ask it for something each time; return what its leader has counted meanwhile."""
    leader, found = room.engine(), Counter[str]()
    for asked in forms:
        assert states(await room.driver.drop(BOTH, HALVES)) == ["done"] * 2
        assert leader.limits.num_lanes == 2
        before = asdict(leader.totals)
        room.ask(*asked)
        for _ in range(160):
            await asyncio.sleep(0.05)
            found["lent"] += leader.table.num_lent_blocks
        found.update({name: count - before[name] for name, count in asdict(leader.totals).items()})
        assert states(await room.driver.restore(BOTH)) == ["done"] * 2
    return found


@pytest.mark.slow
@pytest.mark.virtual_time
@pytest.mark.parametrize("host_bytes", [0, 2**28], ids=["computed again", "to the host"])
@pytest.mark.parametrize("seed", range(4))
async def test_texts_are_the_same_whoever_gives_way_or_pauses_in_a_group(seed: int, host_bytes: int) -> None:
    """Readers first, in two lanes, and with readers faster than steps."""
    made, rng = group_params(system="andes", num_pages=700), np.random.default_rng(seed)
    workers = (replace(worker, cost=SLOW, host_memory_bytes=host_bytes) for worker in made.workers)
    readers = [ReaderTarget(ttft_s=0.5, speed_tokens_per_s=speed) for speed in (3.0, 8.0, 19.0)]
    asked = [replace(each, qoe=readers[int(rng.integers(3))]) for each in draw_requests(seed, 100)]
    async with open_room(replace(made, workers=tuple(workers))) as room:
        room.ask(*asked[:60])
        await asyncio.sleep(float(rng.exponential(0.4)))
        found = await serve_in_group(room, (asked[60:80], asked[80:]))
        await room.check()
    ways = {"num_swap_outs", "num_swap_ins", "num_brought_back_tokens", "lent"}
    reached = {"num_preemptions", "num_pauses", "num_recomputed_tokens"} | (ways if host_bytes else set())
    assert {name for name in reached | ways if found[name]} == reached


@pytest.mark.slow
@room_test(group_params(4))
async def test_groups_of_one_plan_do_not_meet_each_other(room: Room) -> None:
    """Two pairs come about, and part again, in the same moment and under the same plan."""
    asked = draw_requests(7, 90)
    room.ask(*asked[:50])
    await asyncio.sleep(0.3)
    reports = room.driver.reports
    pairs = [group_of([reports[a], reports[b]], HALVES) for a, b in (("w0", "w1"), ("w2", "w3"))]
    assert states(await room.driver.carry_out(*pairs)) == ["done"] * 4
    assert [room.role(i)[0] for i in range(4)] == ["w0", "w0", "w2", "w2"]
    room.ask(*asked[50:])
    await asyncio.sleep(1.0)
    assert states(await room.driver.restore(["w0", "w1", "w2", "w3"])) == ["done"] * 4
    await room.check()


@pytest.mark.slow
@pytest.mark.parametrize("num_plans", [1, 2])
@room_test(group_params(4))
async def test_four_workers_form_two_groups_and_then_one_to_which_the_kv_of_both_goes_along(
    room: Room, num_plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, sources = ArrivingKv.begin, list[set[str]]()

    def noted(arriving: ArrivingKv, arrivals: Arrivals, names: tuple[str, ...]) -> None:
        sources.append(set(names))
        begin(arriving, arrivals, names)

    monkeypatch.setattr(ArrivingKv, "begin", noted)
    asked = draw_requests(5, 80)
    room.ask(*asked[:50])
    await asyncio.sleep(0.3)
    reports = room.driver.reports
    pairs = [group_of([reports[a], reports[b]], HALVES) for a, b in (("w0", "w1"), ("w3", "w2"))]
    for plan in [pairs] if num_plans == 1 else [[pair] for pair in pairs]:
        assert states(await room.driver.carry_out(*plan)) == ["done"] * 2 * len(plan)
    await asyncio.sleep(0.7)
    room.ask(*asked[50:])
    quarters = [LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, 6), LayerRange(6, 8)]
    assert states(await room.driver.drop(["w0", "w3", "w1", "w2"], quarters)) == ["done"] * 4
    assert sources[-1] == {"w0", "w1", "w2", "w3"}
    assert room.role(2) == ("w0", 3, (6, 8))
    await room.check()
    await asyncio.sleep(1.0)
    assert states(await room.driver.restore(["w0", "w1", "w2", "w3"])) == ["done"] * 4


@room_test(group_params(num_pages=900))
async def test_kv_goes_along_so_that_little_is_computed_again(room: Room) -> None:
    """Of each sequence at most the last block, which is not full."""
    await ask_eight(room, range(150, 158), 90)
    engines = [worker.service.engine for worker in room.cluster.workers]
    assert [take_stats(engine).num_running for engine in engines] == [4, 4]
    assert states(await room.driver.drop(BOTH, HALVES)) == ["done"] * 2
    await asyncio.sleep(0.1)
    leader = take_stats(engines[0])
    assert leader.num_running == 8
    assert 0 <= engines[0].totals.num_recomputed_tokens <= 4 * 16
    found = leader.totals.num_prefix_cache_hits
    assert found >= sum(150 // 16 * 16 for _ in range(4)), "what the member had computed"
    await room.check()


@pytest.mark.slow
@pytest.mark.virtual_time
@pytest.mark.parametrize(("num_pages", "is_full"), [(900, False), (690, True)], ids=["roomy", "full"])
async def test_kv_comes_while_the_group_serves_the_reader_first_who_runs_out_first(
    num_pages: int, *, is_full: bool
) -> None:
    """It takes the time of the link. What has not left yet takes room, so new requests may have to wait a while."""
    cluster_params = group_params(num_pages=num_pages, link=ModelledLink(bytes_per_s=LINK_BYTES_PER_S))
    async with open_room(cluster_params) as room:
        rng, loop = np.random.default_rng(9), asyncio.get_running_loop()
        slow, fast = ReaderTarget(ttft_s=0.1, speed_tokens_per_s=3.0), ReaderTarget(ttft_s=0.1, speed_tokens_per_s=20.0)
        readers = [slow, slow, slow, fast, fast, slow, slow, fast]
        room.ask(*(SimRequest(f"r{i}", rng.integers(300, 30_000, 160), 90, i, qoe) for i, qoe in enumerate(readers)))
        await asyncio.sleep(0.4)
        engines = [worker.service.engine for worker in room.cluster.workers]
        leader = engines[0]
        began_s, own = loop.time(), [{str(key[0]) for key in engine.registry.row_of} for engine in engines]
        assert [len(names) for names in own] == [4, 4]
        answers = await room.driver.drop(BOTH, HALVES)
        assert states(answers) == ["done"] * 2
        assert answers["w0"] is not None
        claimed = answers["w0"].num_blocks
        assert loop.time() - began_s < 0.1, "it does not wait for KV"
        room.ask(SimRequest("new", rng.integers(300, 30_000, 200), 3, seed=99))
        least_s = take_stats(leader).num_coming_blocks / 2 * NUM_LAYERS / 2 * PAGE_BYTES / LINK_BYTES_PER_S
        came: dict[str, float] = {}
        num_blocks = [leader.capacity_blocks]
        while take_stats(leader).num_coming_blocks:
            for row in leader.table.running.view.tolist():
                came.setdefault(str(leader.table.sequence(row).key[0]), loop.time() - began_s)
            num_blocks.append(leader.capacity_blocks)
            check_engine(leader)
            await asyncio.sleep(0.001)
        assert 0.4 < least_s < loop.time() - began_s < 1.5 * least_s + 0.2
        assert num_blocks == sorted(num_blocks)
        assert num_blocks[0] < leader.capacity_blocks == claimed
        assert (came.pop("new") < 0.1) == (not is_full)
        assert len(came) > 4, "most go on before the last KV is there"
        for names in own:
            speeds = [readers[int(name[1:])].speed_tokens_per_s for name in came if name in names]
            assert speeds == sorted(speeds, reverse=True)
        await room.check()


@room_test(group_params(num_pages=900))
async def test_sequences_and_their_kv_are_shared_out_when_a_group_dissolves(room: Room) -> None:
    await ask_eight(room, range(150, 158), 120)
    assert states(await room.driver.drop(BOTH, HALVES)) == ["done"] * 2
    await asyncio.sleep(0.3)
    assert states(await room.driver.restore(BOTH)) == ["done"] * 2
    await asyncio.sleep(0.1)
    engines = [worker.service.engine for worker in room.cluster.workers]
    assert [take_stats(engine).num_running for engine in engines] == [4, 4]
    assert engines[0].totals.num_recomputed_tokens <= 2 * 8 * 16
    came = engines[1].totals.num_prefix_cache_hits
    assert came >= 4 * (150 // 16 * 16), "what the group had computed for those that go on at the member"
    await room.check()


@room_test(group_params())
async def test_a_member_that_does_not_come_to_the_parting_costs_kv_and_nothing_else(room: Room) -> None:
    room.ask(*draw_requests(3, 20))
    await asyncio.sleep(0.3)
    assert states(await room.driver.drop(BOTH, HALVES)) == ["done"] * 2
    await asyncio.sleep(0.3)
    assert states(await room.driver.restore(["w0"])) == ["done"]
    await room.check()
    await asyncio.sleep(2.0)
    assert room.role(1) == ("", 0, (0, 8)), "it has noticed that its group is gone"


@pytest.mark.parametrize("num_running", [0, 12])
@room_test(group_params())
async def test_when_the_connection_breaks_both_are_whole_again_and_go_on(room: Room, num_running: int) -> None:
    """With steps in flight the leader hears of it by its executor, without by its stages."""
    assert states(await room.driver.drop(BOTH, HALVES)) == ["done"] * 2
    asked = draw_requests(8, num_running + 6)
    room.ask(*asked[:num_running])
    await asyncio.sleep(0.2)
    room.cluster.network.cut(WorkerId("w0"), WorkerId("w1"))
    await asyncio.sleep(1.0)
    assert [room.role(index) for index in range(2)] == [("", 0, (0, NUM_LAYERS))] * 2
    room.ask(*asked[num_running:])
    await room.check()


@room_test(group_params(num_pages=900, link=ModelledLink(latency_s=0.3)))
async def test_what_a_member_gives_up_is_heard_of_before_the_group_stands(room: Room) -> None:
    await ask_eight(room, [160] * 8, 90)
    changing = asyncio.ensure_future(room.driver.drop(BOTH, HALVES))
    num_lost = room.cluster.dispatcher.sessions.recovery.num_lost
    while not num_lost[Loss.RELEASED] and not changing.done():
        await asyncio.sleep(0.01)
    assert num_lost[Loss.RELEASED] == 4
    assert not changing.done(), "the stages take 0.3 s to meet"
    assert states(await changing) == ["done"] * 2
    await room.check()


@room_test(group_params())
async def test_the_end_of_an_earlier_pipeline_that_is_heard_late_breaks_no_later_one(room: Room) -> None:
    for _ in range(2):
        assert states(await room.driver.drop(BOTH, HALVES)) == ["done"] * 2
        await asyncio.sleep(1.0)
        roles = [room.role(index) for index in range(2)]
        if room.driver.epoch == 1:
            assert states(await room.driver.restore(BOTH)) == ["done"] * 2
            await asyncio.sleep(1.0)
    for index in range(2):
        room.agent(index).keeper.pipeline_ended(1, "a connection of the first group is lost")
    await asyncio.sleep(1.0)
    assert [room.role(index) for index in range(2)] == roles == [("w0", 0, (0, 4)), ("w0", 1, (4, 8))]


@room_test(group_params())
async def test_the_oldest_sequences_are_shared_out_first_when_a_group_dissolves(room: Room) -> None:
    await room.form()
    prompt = np.arange(300, 400)
    for number in range(9, 3, -1):  # the youngest has the first name
        room.ask(SimRequest(f"r{number}", prompt, 60, seed=number))
        await asyncio.sleep(0.02)
    agent = room.agent()
    group = agent.keeper.state
    assert isinstance(group, Leading)
    restore = Restore(alone(room.driver.reports["w0"]), agent.keeper)
    shares = restore.new_shares(group.place, 0, 0.0).final()
    names = [[request_id for request_id, _ in keys] for keys in shares]
    assert names == [["r9", "r7", "r5"], ["r8", "r6", "r4"]]
    await room.check()


@room_test(group_params())
async def test_of_plans_that_are_prepared_at_once_the_newest_is_the_one_that_is_carried_out(room: Room) -> None:
    """Two newer plans wait for the end of the first: who says that it is prepared has prepared that one."""
    driver = room.driver
    group = group_of([driver.reports[name] for name in BOTH], HALVES)
    _, first = await driver.prepare(group)
    assert states(first) == ["prepared"] * 2
    second, third = (asyncio.ensure_future(driver.prepare(group)) for _ in range(2))
    await second  # prepared for a moment, then given up for the newest
    newest, prepared = await third
    assert states(prepared) == ["prepared"] * 2
    assert states(await driver.finish(newest, ["w0", "w1"], commit=True)) == ["done"] * 2
    assert states(await driver.finish(newest - 1, ["w0", "w1"], commit=True)) == ["refused"] * 2
