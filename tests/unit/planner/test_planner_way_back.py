"""The whole way back of a group: load beside serving, restore; and a planner, a worker or a burst that ends it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from services.planner.config import PlannerSettings
from shared.ids import WorkerId
from shared.messages.plan import LoadBeside, PlanPhase
from shared.transport.memory_bus import Delivery
from sim.faults.nodes import PlannerNode
from tests.support.plan_workers import SUBJECTS, PlanCluster, in_cluster, settings

W0, W1 = WorkerId("w0"), WorkerId("w1")


def run_beside(
    test: Callable[[PlanCluster], Awaitable[None]],
    num_workers: int = 2,
    planner: PlannerSettings | None = None,
    deliver: Callable[[Delivery], tuple[float, ...]] | None = None,
) -> PlanCluster:
    """Run a test in a cluster whose workers load beside serving."""
    return in_cluster(test, num_workers, planner, deliver, loads_beside=True)


async def until(is_so: Callable[[], bool], limit_s: float = 120.0) -> None:
    """Return soon after something is so."""
    async with asyncio.timeout(limit_s):
        while not is_so():
            await asyncio.sleep(0.02)


async def until_lever(cluster: PlanCluster, lever: str, phase: PlanPhase = PlanPhase.DONE) -> None:
    """Return when the plan key holds a plan of this lever in this phase."""
    async with asyncio.timeout(120.0):
        while not (cluster.plan.lever == lever and cluster.plan.phase is phase and cluster.plan.steps):
            await cluster.next_plan()


async def until_whole(cluster: PlanCluster, limit_s: float = 120.0) -> None:
    """Return when no group is left, and nothing is under way."""
    await until(lambda: cluster.groups() == [] and cluster.plan.phase is PlanPhase.DONE, limit_s)


async def group_of_two(cluster: PlanCluster) -> None:
    """Let a burst make a group of w0 and w1, and let it be over."""
    cluster.start_planner()
    await asyncio.sleep(1.3)
    await cluster.strain("w0")
    await until(lambda: len(cluster.groups()) == 1)
    cluster.relax()


async def ask(cluster: PlanCluster, verb: str, fields: dict[str, list[str]]) -> dict[str, Any]:
    """Ask the planner by hand."""
    subject = SUBJECTS.admin("planner", "p", verb)
    answer: dict[str, Any] = json.loads(await cluster.bus.request(subject, json.dumps(fields).encode(), timeout_s=30))
    return answer


def has_groups(cluster: PlanCluster, number: int) -> bool:
    """Whether there are so many groups."""
    return len(cluster.groups()) == number


async def two_groups(cluster: PlanCluster) -> None:
    """Form w0+w1, which loads, and w2+w3: 24 blocks each, and 52 as one group. Return as soon as w0+w1 load."""
    for worker in cluster.workers.values():
        worker.load_s = 40
    cluster.start_planner()
    await asyncio.sleep(1.3)
    for name, number in (("w0", 1), ("w2", 2)):
        await cluster.strain(name)
        await until(partial(has_groups, cluster, number))
    cluster.relax(1, "w0", "w1")
    cluster.relax(6, "w2", "w3")
    await until_lever(cluster, "load")


def levers(cluster: PlanCluster) -> list[str]:
    """Levers of the plans that were committed, in order."""
    return [plan.lever for plan in cluster.plans if plan.phase is PlanPhase.COMMITTING]


def commits(cluster: PlanCluster, lever: str) -> list[str]:
    """Who was told to carry the last plan of this lever out, in order."""
    plan_id = [plan.plan_id for plan in cluster.plans if plan.lever == lever and plan.steps][-1]
    return [heard.worker_id for heard in cluster.heard if heard.plan_id == plan_id and heard.kind == "commit_plan"]


def reasons(cluster: PlanCluster, name: str, word: str) -> list[str]:
    return [reason for _, event, reason in cluster.events if event == name and word in reason]


# --- the way, undisturbed --------------------------------------------------------------------------------------------


def test_a_calm_group_loads_while_it_serves_and_is_restored_as_soon_as_all_is_there() -> None:
    """Alone 10 blocks each, as a group 24, beside the whole model with KV of all layers 10; loading takes 3 s."""
    times: dict[str, float] = {}

    async def calm(cluster: PlanCluster) -> None:
        await group_of_two(cluster)
        began_s = asyncio.get_running_loop().time()
        await until_lever(cluster, "load")
        times["loading"] = asyncio.get_running_loop().time() - began_s
        assert cluster.workers[W0].usable_blocks == 10
        assert len(cluster.groups()) == 1, "it serves"
        await until_lever(cluster, "restore")
        times["whole"] = asyncio.get_running_loop().time() - began_s
        assert cluster.groups() == []

    cluster = run_beside(calm)
    cluster.check()
    assert levers(cluster) == ["drop", "load", "restore"]
    assert 10.0 <= times["loading"] < 11.5
    assert 3.0 <= times["whole"] - times["loading"] < 4.5, "no second hold"
    (preparing,) = reasons(cluster, "plan_preparing", "beside")
    assert (
        "w0+w1: 0.00 GiB of parameters are loaded beside serving; room for 160 tokens meanwhile, 384 before"
        in preparing
    )
    (done,) = reasons(cluster, "plan_done", "beside")
    assert "w0+w1 have 10 KV blocks, as claimed" in done
    assert reasons(cluster, "plan_done", "their parameters are loaded already")


def test_workers_are_told_to_load_the_whole_model_beside_what_they_compute() -> None:
    async def calm(cluster: PlanCluster) -> None:
        await group_of_two(cluster)
        await until_lever(cluster, "load")

    (step,) = run_beside(calm).plan.steps
    assert isinstance(step, LoadBeside)
    assert [worker.held for worker in step.stages] == [(0, 4), (4, 8)]
    assert step.num_blocks == 10


def test_each_group_loads_in_a_plan_of_its_own() -> None:
    """Whoever has made room waits for no other group with its gate closed."""

    async def calm(cluster: PlanCluster) -> None:
        cluster.start_planner()
        await asyncio.sleep(1.3)
        for name in cluster.workers:
            await cluster.strain(name, queued=5, demanded=9)
        await until(lambda: len(cluster.groups()) == 2)
        cluster.relax(1)
        await asyncio.sleep(40)
        assert cluster.groups() == []

    cluster = run_beside(calm, num_workers=4, planner=settings(max_group_size=2))
    cluster.check()
    assert all(len(plan.steps) == 1 for plan in cluster.plans if plan.lever == "load")
    assert levers(cluster).count("load") == 2


@pytest.mark.parametrize("how", ["switched off", "not able"])
def test_without_loads_beside_a_group_is_restored_in_one_step(how: str) -> None:
    async def calm(cluster: PlanCluster) -> None:
        cluster.workers[W1].loads_beside = how != "not able"
        await group_of_two(cluster)
        await asyncio.sleep(20)
        assert cluster.groups() == []

    cluster = run_beside(calm, planner=settings(restore_beside=how != "switched off"))
    cluster.check()
    assert levers(cluster) == ["drop", "restore"]


# --- a burst on the way ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0.05, 1.0, 2.9])
def test_a_burst_while_it_loads_gives_the_room_back_before_anything_is_dropped(after_s: float) -> None:
    async def burst(cluster: PlanCluster) -> None:
        await group_of_two(cluster)
        await until_lever(cluster, "load")
        await asyncio.sleep(after_s)
        await cluster.strain("w0", queued=5, demanded=11)
        await until_lever(cluster, "unload")
        assert cluster.workers[W0].usable_blocks == 24
        assert len(cluster.groups()) == 1
        cluster.relax()
        began_s = asyncio.get_running_loop().time()
        await until(lambda: levers(cluster)[-1] == "load")
        assert asyncio.get_running_loop().time() - began_s >= 9.5, "the full hold, before it loads again"
        await until_whole(cluster)

    cluster = run_beside(burst)
    expected = ["drop", "load", "unload", "load", "restore"]
    assert levers(cluster) == expected
    assert "w0: it runs short of memory; room for 384 tokens, now 160" in reasons(cluster, "plan_preparing", "short")[0]


def test_a_group_that_is_used_more_and_more_gives_the_room_back_before_it_runs_short() -> None:
    """It wants 12, too many of 20 for all of its KV to move ahead, so it has 15 meanwhile: 14 are kept, 16 are not."""

    async def grow(cluster: PlanCluster) -> None:
        for worker in cluster.workers.values():
            worker.load_s = 40
        await group_of_two(cluster)
        cluster.relax(10, "w0")
        await until_lever(cluster, "load")
        assert cluster.workers[W0].usable_blocks == 15
        for used in range(10, 13):  # slowly, so that no forecast sees it run short
            cluster.relax(used, "w0")
            await asyncio.sleep(2)
        await asyncio.sleep(36)
        assert cluster.workers[W0].loaded_ratio == 1.0
        assert levers(cluster) == ["drop", "load"]
        cluster.relax(14, "w0")
        await until_lever(cluster, "unload")

    cluster = run_beside(grow, planner=settings(restore_ratio=0.7))
    cluster.check()
    assert reasons(cluster, "plan_preparing", "w0: it runs short of memory; room for 384 tokens, now 240")


def test_a_group_whose_kv_can_move_ahead_has_the_room_of_one_and_gives_it_back_when_that_is_short() -> None:
    async def grow(cluster: PlanCluster) -> None:
        for worker in cluster.workers.values():
            worker.load_s = 40
        await group_of_two(cluster)
        await until_lever(cluster, "load")
        assert cluster.workers[W0].usable_blocks == 10
        for used in (3, 4, 5):  # slowly, as above
            cluster.relax(used, "w0")
            await asyncio.sleep(5)
        assert levers(cluster) == ["drop", "load"]
        cluster.relax(9, "w0")
        await until_lever(cluster, "unload")
        await asyncio.sleep(2)
        assert cluster.workers[W0].usable_blocks == 24

    cluster = run_beside(grow)
    cluster.check()
    assert "; room for 384 tokens, now 160" in reasons(cluster, "plan_preparing", "w0")[-1]


def test_a_drop_that_needs_a_group_which_loads_has_it_give_back_first() -> None:
    """Then it waits for the next view, and not for a tick: both come every half second, 0.3 s apart."""

    async def burst(cluster: PlanCluster) -> None:
        await asyncio.sleep(0.3)
        await two_groups(cluster)
        await cluster.strain("w2", queued=5, demanded=20)
        await until(lambda: [len(group) for group in cluster.groups()] == [4])

    cluster = run_beside(burst, num_workers=4, planner=settings(batch_per_worker=0, drop_wait_s=3600))
    cluster.check()
    assert levers(cluster) == ["drop", "drop", "load", "unload", "drop"]
    assert reasons(cluster, "plan_preparing", "w0 is needed for a drop")
    *_, unloaded_s, dropped_s, _ = (at_s for at_s, name, _ in cluster.events if name in ("plan_preparing", "plan_done"))
    assert dropped_s - unloaded_s < 0.2, "the tick comes after 0.45 s"


def test_a_drop_waits_for_a_group_that_refuses_to_give_back() -> None:
    async def refuse(cluster: PlanCluster) -> None:
        await two_groups(cluster)
        cluster.workers[W0].refuses = "not now"
        await cluster.strain("w2", queued=5, demanded=20)
        await until(lambda: len(reasons(cluster, "plan_aborted", "not now")) == 2)
        cluster.workers[W0].refuses = ""
        await until(lambda: [len(group) for group in cluster.groups()] == [4])

    cluster = run_beside(refuse, num_workers=4, planner=settings(batch_per_worker=0, drop_wait_s=3600, load_stall_s=60))
    cluster.check()
    assert levers(cluster) == ["drop", "drop", "load", "unload", "drop"]
    assert all(plan.steps for plan in cluster.plans if plan.lever == "drop"), "a drop that waits is none"
    told = reasons(cluster, "plan_refused", "but w0 would not give back what is loaded beside serving")
    assert len(told) == 2, "once in each pause"


def test_a_person_restores_a_group_in_the_middle_of_its_load_and_forms_none_with_it() -> None:
    async def by_hand(cluster: PlanCluster) -> None:
        await group_of_two(cluster)
        await until_lever(cluster, "load")
        refused = await ask(cluster, "drop", {"workers": ["w0", "w1", "w2", "w3"]})
        assert refused["reason"] == "the group of w0 loads parameters beside serving; restore it first"
        assert (await ask(cluster, "restore", {"groups": ["w0"]}))["done"]
        assert cluster.groups() == []

    cluster = run_beside(by_hand, num_workers=4)
    cluster.check()
    assert levers(cluster) == ["drop", "load", "restore"]


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_loads_that_are_refused_get_rarer_and_in_the_end_the_group_is_restored_in_one_step() -> None:
    async def refuse(cluster: PlanCluster) -> None:
        await group_of_two(cluster)
        cluster.workers[W1].refuses = "no load today"
        await until(lambda: len(reasons(cluster, "plan_aborted", "no load today")) == 3)
        cluster.workers[W1].refuses = ""
        await asyncio.sleep(10)
        assert cluster.groups() == []

    cluster = run_beside(refuse)
    cluster.check()
    assert levers(cluster) == ["drop", "restore"]
    begun = [at_s for at_s, name, reason in cluster.events if name == "plan_preparing" and "beside" in reason]
    assert [2 <= begun[1] - begun[0] <= 2.6, 4 <= begun[2] - begun[1] <= 4.6] == [True, True], begun


def test_a_refused_load_keeps_no_drop_waiting() -> None:
    async def refuse(cluster: PlanCluster) -> None:
        await group_of_two(cluster)
        cluster.workers[W1].refuses = "no load today"
        await until(lambda: bool(reasons(cluster, "plan_aborted", "no load today")))
        for name in ("w2", "w3"):
            await cluster.strain(name, queued=5, demanded=9)
        began_s = asyncio.get_running_loop().time()
        await until(lambda: len(cluster.groups()) == 2)
        assert asyncio.get_running_loop().time() - began_s < 1

    run_beside(refuse, num_workers=4, planner=settings(batch_per_worker=0, max_group_size=2)).check()


def test_a_load_that_stands_still_is_given_up_and_tried_again_a_few_times() -> None:
    async def stall(cluster: PlanCluster) -> None:
        cluster.workers[W1].stalls_at = 0.5
        await group_of_two(cluster)
        await until_whole(cluster, limit_s=300)

    cluster = run_beside(stall, planner=settings(load_stall_s=5))
    cluster.check()
    assert levers(cluster) == ["drop", *["load", "unload"] * 3, "restore"]
    assert len(reasons(cluster, "plan_done", "nothing has been loaded for 5 s")) == 3


@pytest.mark.parametrize("lever", ["load", "unload"])
@pytest.mark.parametrize("who", [W0, W1])
def test_a_worker_that_fails_at_it_leaves_whole_instances(lever: str, who: WorkerId) -> None:
    async def fail(cluster: PlanCluster) -> None:
        await group_of_two(cluster)
        if lever == "unload":
            await until_lever(cluster, "load")
        cluster.workers[who].breaks = True
        if lever == "unload":
            await cluster.strain("w0", queued=5, demanded=11)
        await until_lever(cluster, lever)
        cluster.workers[who].breaks = False
        cluster.relax()
        await asyncio.sleep(30)
        assert cluster.groups() == []

    cluster = run_beside(fail)
    cluster.check()
    assert reasons(cluster, "plan_failed", f"{who}: failed")


def test_the_leader_makes_room_first_and_takes_it_back_last() -> None:
    async def there_and_back(cluster: PlanCluster) -> None:
        await group_of_two(cluster)
        await until_lever(cluster, "load")
        await cluster.strain("w0", queued=5, demanded=11)
        await until_lever(cluster, "unload")

    cluster = run_beside(there_and_back)
    assert commits(cluster, "load") == ["w0", "w1"]
    assert commits(cluster, "unload") == ["w1", "w0"]


@pytest.mark.parametrize("lever", ["load", "unload"])
def test_who_comes_second_goes_on_as_before_if_the_first_has_not_done_it(lever: str) -> None:
    """The first one gives up what it was prepared for, before it hears of the commit."""
    first, second = (W0, W1) if lever == "load" else (W1, W0)

    async def too_late(cluster: PlanCluster) -> None:
        await group_of_two(cluster)
        if lever == "unload":
            await until_lever(cluster, "load")
            await cluster.strain("w0", queued=5, demanded=11)
        await until_lever(cluster, lever, PlanPhase.PREPARING)
        await asyncio.sleep(0.002)
        prepared = cluster.workers[first].prepared
        assert prepared is not None
        prepared.until_s = 0.0
        await until_lever(cluster, lever)
        assert (cluster.workers[W0].limit is None) == (lever == "load")
        cluster.relax()
        await until_whole(cluster)

    cluster = run_beside(too_late)
    cluster.check()
    plan_id = next(plan.plan_id for plan in cluster.plans if plan.lever == lever and plan.steps)
    told = [(heard.worker_id, heard.kind) for heard in cluster.heard if heard.plan_id == plan_id]
    assert told[2:] == [(first, "commit_plan"), (second, "abort_plan")]


def test_a_group_of_which_only_some_have_made_room_goes_back_and_begins_anew() -> None:
    async def by_half(cluster: PlanCluster) -> None:
        await group_of_two(cluster)
        await until_lever(cluster, "load", PlanPhase.PREPARING)
        await asyncio.sleep(0.002)
        prepared = cluster.workers[W1].prepared
        assert prepared is not None
        prepared.until_s = 0.0
        await until_lever(cluster, "load")
        assert [cluster.workers[name].resident is None for name in (W0, W1)] == [False, True]
        await until_lever(cluster, "unload")
        began_s = asyncio.get_running_loop().time()
        await until_lever(cluster, "load")
        assert asyncio.get_running_loop().time() - began_s >= 9.5, "the full hold"
        await until_whole(cluster)

    cluster = run_beside(by_half)
    cluster.check()
    assert levers(cluster) == ["drop", "load", "unload", "load", "restore"]
    assert reasons(cluster, "plan_preparing", "not all of its members have made room")


STEPS_MS = range(25)


@pytest.mark.parametrize("at_ms", STEPS_MS)
@pytest.mark.parametrize("lever", ["load", "unload", "restore"])
def test_a_planner_that_is_killed_anywhere_on_the_way_is_followed_by_one_that_goes_on(lever: str, at_ms: int) -> None:
    async def kill(cluster: PlanCluster) -> None:
        await group_of_two(cluster)
        if lever != "load":
            await until_lever(cluster, "load")
        if lever == "unload":
            await cluster.strain("w0", queued=5, demanded=11)
        await until_lever(cluster, lever, PlanPhase.PREPARING)
        await asyncio.sleep(at_ms / 1000)
        cluster.planners["p"].kill(0.5 if at_ms % 2 else 8.0)  # before, or after, who was prepared has given up
        cluster.relax()
        await until_whole(cluster)

    run_beside(kill).check()


def faults_of(rng: np.random.Generator, is_over: Callable[[], bool]) -> Callable[[Delivery], tuple[float, ...]]:
    """Lose, double or delay messages about plans, until it is over."""

    def deliver(delivery: Delivery) -> tuple[float, ...]:
        if is_over() or (".plan" not in delivery.subject and "_INBOX" not in delivery.subject):
            return (0.0,)
        draw = rng.random()
        if draw < 0.05:
            return ()
        return (0.0, float(rng.random())) if draw < 0.12 else (float(rng.random()) * 0.05,)

    return deliver


async def trouble(cluster: PlanCluster, node: PlannerNode, rng: np.random.Generator) -> None:
    """Let something happen to a worker, to the load, or to the planner."""
    worker = cluster.workers[list(cluster.workers)[int(rng.integers(len(cluster.workers)))]]
    if not worker.is_alive:
        await cluster.restart(worker.worker_id)
    worker.refuses, worker.breaks, worker.stalls_at = "", False, 1.0
    match int(rng.integers(16)):
        case 0:
            worker.die()
        case 1:
            node.kill(float(rng.random()) * 6)
        case 2:
            worker.refuses = "not now"
        case 3 | 4:
            worker.stalls_at = 0.5
        case 5:
            worker.breaks = True
        case 6 | 7 | 8 | 9:
            await cluster.strain(worker.worker_id, queued=5, demanded=11)
        case _:
            cluster.relax(int(rng.integers(0, 5)))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_leader_never_uses_what_others_lack_and_calm_makes_all_whole(seed: int) -> None:
    rng = np.random.default_rng(seed)
    is_over = False

    async def chaos(cluster: PlanCluster) -> None:
        nonlocal is_over
        node = cluster.start_planner()
        for _ in range(30):
            await asyncio.sleep(float(rng.random()) * 6)
            await trouble(cluster, node, rng)
        is_over = True
        for name in list(cluster.workers):
            cluster.workers[name].refuses, cluster.workers[name].breaks = "", False
            if not cluster.workers[name].is_alive:
                await cluster.restart(name)
        cluster.relax()
        await asyncio.sleep(180)
        cluster.check(is_lossless=False)
        assert cluster.groups() == [], "when all is calm, all are whole"

    patience = settings(restore_hold_s=4, load_stall_s=5, batch_per_worker=0)
    run_beside(chaos, int(rng.integers(2, 6)), patience, faults_of(rng, lambda: is_over))
