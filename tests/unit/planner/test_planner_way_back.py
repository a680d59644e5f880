"""The whole way back of a group: load beside serving, restore; and a planner, a worker or a burst that ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from shared.ids import WorkerId
from shared.messages.plan import LoadBeside, PlanPhase
from shared.transport.memory_bus import Delivery
from sim.faults.nodes import PlannerNode
from tests.support.kinds import some
from tests.support.plan_cluster import clustered, open_cluster, settings
from tests.support.plan_workers import Faults, PlanCluster
from tests.support.seeds import first_of

W0, W1 = WorkerId("w0"), WorkerId("w1")


async def until_lever(cluster: PlanCluster, lever: str, phase: PlanPhase = PlanPhase.DONE) -> float:
    """Return when the plan key holds a plan of this lever in this phase, with the time that it is then."""
    async with asyncio.timeout(120.0):
        while not (cluster.plan.lever == lever and cluster.plan.phase is phase and cluster.plan.steps):
            await cluster.next_plan()
    return asyncio.get_running_loop().time()


async def until_whole(cluster: PlanCluster, limit_s: float = 120.0) -> None:
    """Return when no group is left, and nothing is under way."""
    await cluster.until(lambda: cluster.groups() == [] and cluster.plan.phase is PlanPhase.DONE, limit_s)


async def group_of_two(cluster: PlanCluster, until: str = "") -> PlannerNode:
    """Let a burst make a group of w0 and w1, let it be over, and wait for this lever."""
    node = await cluster.burst("w0", after_s=1.3, until_groups=1)
    cluster.relax()
    if until:
        await until_lever(cluster, until)
    return node


async def too_much(cluster: PlanCluster) -> None:
    """Let w0 have more to do than a group has room for that has the whole model beside."""
    await cluster.strain("w0", queued=5, demanded=11)


def let_go(cluster: PlanCluster, name: WorkerId) -> None:
    """Have a worker give up what it was prepared for, before it hears of the commit."""
    prepared = some(cluster.workers[name].prepared)
    prepared.until_s = 0.0


async def two_groups(cluster: PlanCluster) -> None:
    """Form w0+w1, which loads, and w2+w3: 24 blocks each, and 52 as one group. Return as soon as w0+w1 load."""
    for worker in cluster.workers.values():
        worker.load_s = 40
    await cluster.burst("w0", after_s=1.3, until_groups=1)
    await cluster.strain("w2")
    await cluster.until(lambda: len(cluster.groups()) == 2)
    cluster.relax(1, "w0", "w1")
    cluster.relax(6, "w2", "w3")
    await until_lever(cluster, "load")


def told(cluster: PlanCluster, lever: str, kind: str = "") -> list[tuple[str, str]]:
    """Who was told what of the last plan of this lever, in order."""
    plan_id = [plan.plan_id for plan in cluster.plans if plan.lever == lever and plan.steps][-1]
    return [(each.worker_id, each.kind) for each in cluster.heard if each.plan_id == plan_id and kind in each.kind]


# --- the way, undisturbed --------------------------------------------------------------------------------------------


@clustered(2, loads_beside=True)
async def test_a_calm_group_loads_while_it_serves_and_is_restored_as_soon_as_all_is_there(cluster: PlanCluster) -> None:
    """Alone 10 blocks each, as a group 24, beside the whole model with KV of all layers 10; loading takes 3 s."""
    await group_of_two(cluster)
    began_s = asyncio.get_running_loop().time()
    loading_s = await until_lever(cluster, "load")
    (step,) = cluster.plan.steps
    assert isinstance(step, LoadBeside)
    assert [worker.held for worker in step.stages] == [(0, 4), (4, 8)]
    assert step.num_blocks == 10
    assert cluster.workers[W0].usable_blocks == 10
    assert len(cluster.groups()) == 1, "it serves"
    whole_s = await until_lever(cluster, "restore")
    assert cluster.groups() == []
    assert cluster.levers == ["drop", "load", "restore"]
    assert 10.0 <= loading_s - began_s < 11.5
    assert 3.0 <= whole_s - loading_s < 4.5, "no second hold"
    (preparing,) = cluster.reasons("plan_preparing", "beside")
    loads = "w0+w1: 0.00 GiB of parameters are loaded beside serving; room for 160 tokens meanwhile, 384 before"
    assert loads in preparing
    (done,) = cluster.reasons("plan_done", "beside")
    assert "w0+w1 have 10 KV blocks, as claimed" in done
    await asyncio.sleep(0.1)
    assert cluster.reasons("plan_done", "their parameters are loaded already")


@clustered(loads_beside=True, max_group_size=2)
async def test_each_group_loads_in_a_plan_of_its_own(cluster: PlanCluster) -> None:
    """Whoever has made room waits for no other group with its gate closed."""
    await cluster.burst(*cluster.workers, after_s=1.3, queued=5, demanded=9, until_groups=2)
    cluster.relax(1)
    await asyncio.sleep(40)
    assert cluster.groups() == []
    assert all(len(plan.steps) == 1 for plan in cluster.plans if plan.lever == "load")
    assert cluster.levers.count("load") == 2


@pytest.mark.parametrize("how", ["switched off", "not able"])
@clustered(2, loads_beside=True)
async def test_without_loads_beside_a_group_is_restored_in_one_step(cluster: PlanCluster, how: str) -> None:
    cluster.settings = settings(restore_beside=how != "switched off")
    cluster.workers[W1].loads_beside = how != "not able"
    await group_of_two(cluster)
    await asyncio.sleep(20)
    assert cluster.groups() == []
    assert cluster.levers == ["drop", "restore"]


# --- a stage that is told to stop ------------------------------------------------------------------------------------


@clustered(4, max_group_size=2)
async def test_a_group_of_which_a_stage_is_told_to_stop_is_restored_at_once_and_forms_without_it(
    cluster: PlanCluster,
) -> None:
    """All that its pressure needs is w2 and w3; before, there was no calm in which it would have been due."""
    await cluster.burst("w0", after_s=1.3, until_groups=1)
    (group,) = cluster.groups()
    assert "w0" in group
    leaving = next(name for name in group if name != "w0")
    cluster.workers[WorkerId(leaving)].is_leaving = True
    await cluster.workers[WorkerId(leaving)].report()
    began_s = asyncio.get_running_loop().time()
    assert await until_lever(cluster, "restore") - began_s < 1.0
    assert any(reason.endswith(f"told to stop: {leaving}") for reason in cluster.reasons("plan_preparing"))
    await cluster.strain("w0")
    await cluster.until(lambda: bool(cluster.groups()) and cluster.plan.phase is PlanPhase.DONE)
    assert leaving not in cluster.groups()[0]


@clustered(2)
async def test_one_whose_group_cannot_be_restored_is_no_reason_to_try_for_ever(cluster: PlanCluster) -> None:
    """What it holds finds no room in whole instances; nothing else is held up by it."""
    await cluster.burst("w0", after_s=1.3, until_groups=1)
    cluster.relax(22, "w0")
    cluster.relax(0, "w1")
    await cluster.until(lambda: cluster.plan.phase is PlanPhase.DONE)
    cluster.workers[W1].is_leaving = True
    num_plans = len(cluster.plans)
    await asyncio.sleep(10)
    assert len(cluster.groups()) == 1
    assert len(cluster.plans) == num_plans
    cluster.relax(4)
    began_s = asyncio.get_running_loop().time()
    assert await until_lever(cluster, "restore") - began_s < 2.0


# --- a burst on the way ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0.05, 1.0, 2.9])
@clustered(2, loads_beside=True)
async def test_a_burst_while_it_loads_gives_the_room_back_before_anything_is_dropped(
    cluster: PlanCluster, after_s: float
) -> None:
    """The leader makes room first, and takes it back last."""
    await group_of_two(cluster, until="load")
    assert told(cluster, "load", "commit") == [("w0", "commit_plan"), ("w1", "commit_plan")]
    await asyncio.sleep(after_s)
    await too_much(cluster)
    began_s = await until_lever(cluster, "unload")
    assert told(cluster, "unload", "commit") == [("w1", "commit_plan"), ("w0", "commit_plan")]
    assert cluster.workers[W0].usable_blocks == 24
    assert len(cluster.groups()) == 1
    cluster.relax()
    assert await until_lever(cluster, "load") - began_s >= 9.5, "the full hold, before it loads again"
    await until_whole(cluster)
    assert cluster.levers == ["drop", "load", "unload", "load", "restore"]
    short = cluster.reasons("plan_preparing", "short")
    assert "w0: it runs short of memory; room for 384 tokens, now 160" in short[0]


@clustered(2, loads_beside=True, restore_ratio=0.7)
async def test_a_group_that_is_used_more_and_more_gives_the_room_back_before_it_runs_short(
    cluster: PlanCluster,
) -> None:
    """It wants 12, too many of 20 for all of its KV to move ahead, so it has 15 meanwhile: 14 are kept, 16 are not."""
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
    assert cluster.levers == ["drop", "load"]
    cluster.relax(14, "w0")
    await until_lever(cluster, "unload")
    assert cluster.reasons("plan_preparing", "w0: it runs short of memory; room for 384 tokens, now 240")


@clustered(2, loads_beside=True)
async def test_a_group_whose_kv_can_move_ahead_has_the_room_of_one_and_gives_it_back_when_that_is_short(
    cluster: PlanCluster,
) -> None:
    for worker in cluster.workers.values():
        worker.load_s = 40
    await group_of_two(cluster, until="load")
    assert cluster.workers[W0].usable_blocks == 10
    for used in (3, 4, 5):  # slowly, as above
        cluster.relax(used, "w0")
        await asyncio.sleep(5)
    assert cluster.levers == ["drop", "load"]
    cluster.relax(9, "w0")
    await until_lever(cluster, "unload")
    await asyncio.sleep(2)
    assert cluster.workers[W0].usable_blocks == 24
    assert "; room for 384 tokens, now 160" in cluster.reasons("plan_preparing", "w0")[-1]


@clustered(loads_beside=True, batch_per_worker=0, drop_wait_s=3600)
async def test_a_drop_that_needs_a_group_which_loads_has_it_give_back_first(cluster: PlanCluster) -> None:
    """Then it waits for the next view, and not for a tick: both come every half second, 0.3 s apart."""
    await asyncio.sleep(0.3)
    await two_groups(cluster)
    await cluster.strain("w2", queued=5, demanded=20)
    await cluster.until(lambda: [len(group) for group in cluster.groups()] == [4])
    assert cluster.levers == ["drop", "drop", "load", "unload", "drop"]
    assert cluster.reasons("plan_preparing", "w0 is needed for a drop")
    await until_lever(cluster, "drop")
    unloaded_s, dropped_s = cluster.times("plan_done")[3], cluster.times("plan_preparing")[4]
    assert 0 < dropped_s - unloaded_s < 0.2, "the tick comes after 0.45 s"


@clustered(loads_beside=True, batch_per_worker=0, drop_wait_s=3600, load_stall_s=60)
async def test_a_drop_waits_for_a_group_that_refuses_to_give_back(cluster: PlanCluster) -> None:
    await two_groups(cluster)
    cluster.workers[W0].refuses = "not now"
    await cluster.strain("w2", queued=5, demanded=20)
    await cluster.until(lambda: len(cluster.reasons("plan_aborted", "not now")) == 2)
    cluster.workers[W0].refuses = ""
    await cluster.until(lambda: [len(group) for group in cluster.groups()] == [4])
    await until_lever(cluster, "drop")
    assert cluster.levers == ["drop", "drop", "load", "unload", "drop"]
    assert all(plan.steps for plan in cluster.plans if plan.lever == "drop"), "a drop that waits is none"
    waits = cluster.reasons("plan_refused", "but w0 would not give back what is loaded beside serving")
    assert len(waits) == 2, "once in each pause"


@clustered(loads_beside=True)
async def test_a_person_restores_a_group_in_the_middle_of_its_load_and_forms_none_with_it(cluster: PlanCluster) -> None:
    await group_of_two(cluster, until="load")
    refused = await cluster.ask("drop", {"workers": ["w0", "w1", "w2", "w3"]})
    assert refused["reason"] == "the group of w0 loads parameters beside serving; restore it first"
    assert (await cluster.ask("restore", {"groups": ["w0"]}))["done"]
    assert cluster.groups() == []
    assert cluster.levers == ["drop", "load", "restore"]


# --- what goes wrong -------------------------------------------------------------------------------------------------


@clustered(2, loads_beside=True)
async def test_loads_that_are_refused_get_rarer_and_in_the_end_the_group_is_restored_in_one_step(
    cluster: PlanCluster,
) -> None:
    await group_of_two(cluster)
    cluster.workers[W1].refuses = "no load today"
    await cluster.until(lambda: len(cluster.reasons("plan_aborted", "no load today")) >= 3)
    cluster.workers[W1].refuses = ""
    await asyncio.sleep(10)
    assert cluster.groups() == []
    assert cluster.levers == ["drop", "restore"]
    begun = [at_s for at_s, name, reason in cluster.events if name == "plan_preparing" and "beside" in reason]
    assert [2 <= begun[1] - begun[0] <= 2.6, 4 <= begun[2] - begun[1] <= 4.6] == [True, True], begun


@clustered(loads_beside=True, batch_per_worker=0, max_group_size=2)
async def test_a_refused_load_keeps_no_drop_waiting(cluster: PlanCluster) -> None:
    await group_of_two(cluster)
    cluster.workers[W1].refuses = "no load today"
    began_s = await cluster.until(lambda: bool(cluster.reasons("plan_aborted", "no load today")))
    for name in ("w2", "w3"):
        await cluster.strain(name, queued=5, demanded=9)
    assert await cluster.until(lambda: len(cluster.groups()) == 2) - began_s < 1
    await until_lever(cluster, "drop")


@clustered(2, loads_beside=True, load_stall_s=5)
async def test_a_load_that_stands_still_is_given_up_and_tried_again_a_few_times(cluster: PlanCluster) -> None:
    cluster.workers[W1].stalls_at = 0.5
    await group_of_two(cluster)
    await until_whole(cluster, limit_s=300)
    assert cluster.levers == ["drop", *["load", "unload"] * 3, "restore"]
    assert len(cluster.reasons("plan_done", "nothing has been loaded for 5 s")) == 3


@pytest.mark.parametrize("lever", ["load", "unload"])
@pytest.mark.parametrize("who", [W0, W1])
@clustered(2, loads_beside=True)
async def test_a_worker_that_fails_at_it_leaves_whole_instances(
    cluster: PlanCluster, lever: str, who: WorkerId
) -> None:
    await group_of_two(cluster, until="load" if lever == "unload" else "")
    cluster.workers[who].breaks = True
    if lever == "unload":
        await too_much(cluster)
    await until_lever(cluster, lever)
    cluster.workers[who].breaks = False
    cluster.relax()
    await asyncio.sleep(30)
    assert cluster.groups() == []
    assert cluster.reasons("plan_failed", f"{who}: failed")


@pytest.mark.parametrize("lever", ["load", "unload"])
@clustered(2, loads_beside=True)
async def test_who_comes_second_goes_on_as_before_if_the_first_has_not_done_it(
    cluster: PlanCluster, lever: str
) -> None:
    first, second = (W0, W1) if lever == "load" else (W1, W0)
    await group_of_two(cluster, until="load" if lever == "unload" else "")
    if lever == "unload":
        await too_much(cluster)
    await until_lever(cluster, lever, PlanPhase.PREPARING)
    await asyncio.sleep(0.002)
    let_go(cluster, first)
    await until_lever(cluster, lever)
    assert (cluster.workers[W0].limit is None) == (lever == "load")
    assert told(cluster, lever)[2:] == [(first, "commit_plan"), (second, "abort_plan")]
    cluster.relax()
    await until_whole(cluster)


@clustered(2, loads_beside=True)
async def test_a_group_of_which_only_some_have_made_room_goes_back_and_begins_anew(cluster: PlanCluster) -> None:
    await group_of_two(cluster)
    await until_lever(cluster, "load", PlanPhase.PREPARING)
    await asyncio.sleep(0.002)
    let_go(cluster, W1)
    await until_lever(cluster, "load")
    assert [cluster.workers[name].resident is None for name in (W0, W1)] == [False, True]
    began_s = await until_lever(cluster, "unload")
    assert await until_lever(cluster, "load") - began_s >= 9.5, "the full hold"
    await until_whole(cluster)
    assert cluster.levers == ["drop", "load", "unload", "load", "restore"]
    assert cluster.reasons("plan_preparing", "not all of its members have made room")


@pytest.mark.parametrize("at_ms", first_of(sorted(range(25), key=lambda ms: ms % 3), 9))
@pytest.mark.parametrize("lever", ["load", "unload", "restore"])
@clustered(2, loads_beside=True)
async def test_a_planner_that_is_killed_anywhere_on_the_way_is_followed_by_one_that_goes_on(
    cluster: PlanCluster, lever: str, at_ms: int
) -> None:
    node = await group_of_two(cluster, until="" if lever == "load" else "load")
    if lever == "unload":
        await too_much(cluster)
    await until_lever(cluster, lever, PlanPhase.PREPARING)
    await asyncio.sleep(at_ms / 1000)
    node.kill(0.5 if at_ms % 2 else 8.0)  # before, or after, who was prepared has given up
    cluster.relax()
    await until_whole(cluster)


def faults_of(rng: np.random.Generator, is_over: Callable[[], bool]) -> Faults:
    """Lose, double or delay messages to workers about plans, until it is over."""

    def deliver(delivery: Delivery) -> tuple[float, ...]:
        about_plans = ".plan" in delivery.subject and not delivery.subject.startswith("$KV.")
        if is_over() or not (about_plans or "_INBOX" in delivery.subject):
            return (0.0,)
        draw = rng.random()
        if draw < 0.06:
            return ()
        if draw < 0.14:
            return (0.0, float(rng.random()))
        return (float(rng.random()) * 0.05,) if draw < 0.6 else (0.0,)

    return deliver


TROUBLE = ("death", "planner", "refusal", "calm", "burst", "burst")
TROUBLE_BESIDE = ("death", "planner", "refusal", "stall", "failure", "failure", *["burst"] * 4, *["calm"] * 5)


async def trouble(cluster: PlanCluster, node: PlannerNode, what: str, rng: np.random.Generator) -> None:
    """Let something happen to a worker, to the load, or to the planner."""
    worker = cluster.workers[list(cluster.workers)[int(rng.integers(len(cluster.workers)))]]
    if not worker.is_alive:
        await cluster.restart(worker.worker_id)
    worker.refuses = "not now" if what == "refusal" else ""
    worker.stalls_at, worker.breaks = 0.5 if what == "stall" else 1.0, what == "failure"
    if what == "death":
        worker.die()
    elif what == "planner":
        node.kill(float(rng.random()) * 6)
    elif what == "burst":
        await cluster.strain(worker.worker_id, queued=5, demanded=11)
    elif what == "calm":
        cluster.relax(int(rng.integers(0, 8)))


@pytest.mark.slow
@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("beside", "seed"), first_of([(beside, seed) for seed in range(12) for beside in (False, True)], in_ci=12)
)
async def test_whatever_is_lost_doubled_late_or_dead_all_ends_in_order_and_calm_makes_all_whole(
    seed: int, *, beside: bool
) -> None:
    """A leader never uses what the others lack: its workers note it."""
    rng = np.random.default_rng(seed)
    is_over = False
    patience = settings(restore_hold_s=4, load_stall_s=5, batch_per_worker=0) if beside else settings()
    num_workers, faults = int(rng.integers(2, 7)), faults_of(rng, lambda: is_over)
    async with open_cluster(num_workers, patience, faults, loads_beside=beside) as cluster:
        node = cluster.start_planner()
        for _ in range(30):
            await asyncio.sleep(float(rng.random()) * (6 if beside else 3))
            await trouble(cluster, node, str(rng.choice(TROUBLE_BESIDE if beside else TROUBLE)), rng)
        is_over = True
        for name in list(cluster.workers):
            cluster.workers[name].refuses, cluster.workers[name].breaks = "", False
            if not cluster.workers[name].is_alive:
                await cluster.restart(name)
        cluster.relax()
        await asyncio.sleep(180)
        cluster.is_lossless = False
        cluster.check()
        assert cluster.groups() == [], "when all is calm, all are whole"
