"""Groups of live workers: layers are dropped and loaded again while streams run, and members die.

Token identity of the real thing: torch or native kernels, sockets between processes, a planner that is asked by hand.
Rows 9, 10 and 11. And pipelines for good, which form by themselves.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.status import run_status
from shared.messages.plan import Plan, PlanPhase
from shared.messages.report import WorkerReport
from shared.transport.nats_bus import NatsBus
from tests.support.fault_checks import StagedCluster, staged
from tests.support.fault_cluster import Cluster, Shape, run_apart, running, until
from tests.support.fault_streams import (
    Ask,
    always_reading,
    answers,
    long_prompts,
    mixed_load,
    reading,
    seen,
    undisturbed,
)
from tests.support.group_changes import (
    BY_ITSELF,
    FLAGS,
    be_whole,
    change_until_done,
    change_while_readers_leave,
    group_env,
    kill_planner_amid_drop,
    leaving,
    plan_now,
    reports_of,
    service_answers,
    shape,
    until_whole,
)
from tests.support.hand_planner import HandPlanner, states
from tests.support.mapped_pages import check_process
from tests.support.seeds import first_of
from tests.support.stage_tap import StageTap
from tests.support.waiting import rounds

pytestmark = pytest.mark.timeout(180)

PHASES = (PlanPhase.PREPARING, PlanPhase.COMMITTING, PlanPhase.COMMITTING, PlanPhase.COMMITTING)
"""In which a planner is killed; the last one may be over too soon, so it is tried more than once."""
MET = ("num_prefills", "num_decodes")
BLOCK_TOKENS = 16


def load() -> list[Ask]:
    return [*mixed_load(), *long_prompts(6)]


def released(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the sequences that a worker has given up when it became a stage, or left its group."""
    return [event for event in cluster.told("request_lost_worker", "dispatcher-0") if event["how"] == "released"]


async def in_prefill(cluster: Cluster, bus: NatsBus) -> bool:
    """Return whether a worker is in the middle of a prompt."""
    dumps = [await cluster.dump(bus, name) for name in cluster.workers]
    return any(
        0 < each["num_computed_tokens"] < each["num_prompt_tokens"] for dump in dumps for each in dump["sequences"]
    )


async def drop_among_prompts(cluster: StagedCluster, bus: NatsBus, tap: StageTap | None = None) -> bool:
    """Drop while new prompts are computed, whose answers are as ever; with a tap readers leave meanwhile: have they?"""
    async with reading(cluster, leaving() if tap is not None else []) as leavers:
        await seen(leavers, 2)
        async with cluster.among_prompts(lambda: in_prefill(cluster, bus), count=5):
            if tap is not None:
                return await change_while_readers_leave(cluster, bus, "drop", tap, leavers)
            await change_until_done(cluster, bus, "drop")
    return False


async def check_pages(cluster: Cluster, num_stages: int) -> None:
    """Check what each worker's process has mapped, no page twice, once reports show the last change."""
    reports: list[WorkerReport] = []

    async def is_told() -> bool:
        reports[:] = (await reports_of(cluster)).values()
        return all(report.num_stages == num_stages for report in reports)

    await until(is_told, f"all are in groups of {num_stages}")
    mapped = [check_process(report) for report in reports]
    assert len(set.union(*mapped)) == sum(map(len, mapped)), "two workers use the same page"


async def there_and_back(
    cluster: StagedCluster, bus: NatsBus, rng: np.random.Generator, tap: StageTap | None = None
) -> bool:
    """Drop among prompts, and restore, with looks at pages; with a tap readers leave meanwhile: have they?"""
    has_left = await drop_among_prompts(cluster, bus, tap)
    await check_pages(cluster, num_stages=2)
    await asyncio.sleep(float(rng.uniform(0.05, 0.5)))
    await change_until_done(cluster, bus, "restore")
    await check_pages(cluster, num_stages=1)
    await asyncio.sleep(float(rng.uniform(0.05, 0.5)))
    return has_left


@pytest.mark.parametrize(
    ("seed", "system"),
    first_of(
        [(4, "kunserve-sluice"), (0, "kunserve"), (1, "kunserve"), (2, "kunserve"), (3, "kunserve-sluice")], in_ci=1
    ),
)
async def test_texts_are_those_of_an_undisturbed_run_through_drops_and_restores(
    seed: int, system: str, tmp_path: Path
) -> None:
    """Two workers; four changes at moments that the seed chooses. Row 19: a cancel while the group forms.

    After each change the operating system is asked which pages a worker has mapped. Each seed is sure to have met a
    prefill, a decode and a cancel in transfer with its drops: if two have not, there is one more.
    """
    rng = np.random.default_rng(seed)
    pair = shape(2, system, exchange_limit_s=20)
    with StageTap(2) as tap, staged(tmp_path, tap.before(pair), load()) as cluster:
        async with cluster.bus() as bus, cluster.unchanged(1 + int(rng.integers(3))):
            has_left, met = False, set[str]()
            for number in rounds(f"drops have met {MET} and a reader that leaves"):
                round_tap = None if has_left else tap
                has_left = await there_and_back(cluster, bus, rng, round_tap) or has_left
                changes = cluster.told("role_changed")
                met = {kind for kind in MET if any(event[kind] for event in changes if event["group"])}
                met |= {"tokens" for event in released(cluster) if event["tokens"] > 0}
                if number > 0 and has_left and met == {*MET, "tokens"}:
                    break
        assert len(changes) == 4 * (number + 1), "each worker has changed its role twice a round"


@pytest.mark.parametrize(("seed", "load_from"), first_of([(1, "peers"), (0, "host")], in_ci=1))
async def test_texts_are_the_same_while_parameters_come_back_beside_serving(
    seed: int, load_from: str, tmp_path: Path
) -> None:
    """Dropped by hand; the planner has each group load beside, and restores it when all is there."""
    rng = np.random.default_rng(seed)
    quiet = Shape(num_workers=2, env={**BY_ITSELF, "SLUICE_WORKER_LOAD_FROM": load_from}, flags=FLAGS)
    with staged(tmp_path, quiet, mixed_load()) as cluster:
        async with cluster.bus() as bus, cluster.unchanged(1 + int(rng.integers(3))), always_reading(cluster):
            for count in (1, 2):
                await change_until_done(cluster, bus, "drop")
                await until(lambda n=count: num_restored(cluster) == n, "the group is whole again", 40.0)
                await check_pages(cluster, num_stages=1)
                await asyncio.sleep(float(rng.uniform(0.05, 0.5)))
        beside = cluster.told("parameters_beside")
        assert len(beside) >= 4, "both workers, twice"
        assert sum(event["num_decodes"] for event in beside) > 0, "a load met a decode"
        given = {
            (name, source.partition(":")[0])
            for name in cluster.workers
            for event in cluster.told("parameters_loaded", name)
            for source in event["sources"].split(", ")
        }
        first, second = cluster.workers
        peers = {(first, second), (second, first)}
        files = {(name, "the checkpoint") for name in (first, second)}
        if load_from == "peers":  # one that is not found within a second is done without
            assert peers <= given <= peers | files
        else:
            assert given == files
        assert len([event for event in cluster.told("role_changed") if not event["group"]]) == 4, "restored, twice"


@pytest.mark.parametrize("ratio", first_of([1.25, 1.0], in_ci=1))
async def test_kv_moves_while_a_group_serves_and_little_is_left_when_it_dissolves(ratio: float, tmp_path: Path) -> None:
    """All by hand and at once, since answers are short: nobody's text changes.

    The group has so many times the blocks of one worker meanwhile; with more, each has all layers of its share only.
    Answers may be over before the group dissolves, if somebody is late; then it is done once more.
    """
    long: dict[str, Any] = {"max_tokens": 800, "ignore_eos": True}
    asks = [replace(each, body={**each.body, **long}) for each in long_prompts(3, num_repeats=6)]
    with staged(tmp_path, shape(2), asks) as cluster:
        async with cluster.bus() as bus:
            driver = HandPlanner(bus)
            await driver.start()
            await until(lambda: len(driver.reports) == 2, "both have reported")
            room = int(ratio * min(report.num_blocks for report in driver.reports.values()))
            for _ in rounds("three answers were there when the group dissolved"):
                async with cluster.unchanged(5):
                    leader, num_decodes = await copy_and_dissolve(cluster, bus, driver, room, len(asks))
                if num_decodes == len(asks):
                    break
        num_full = sum(answer["usage"][0] // BLOCK_TOKENS for answer in cluster.expected.values())
        copied = cluster.told("kv_copied", leader)[-1]
        assert copied["is_whole"]
        assert copied["num_blocks"] >= num_full, "what the prompts have filled, and more"
        moved = [cluster.told("kv_exchanged", name)[-1] for name in cluster.workers]
        num_blocks = sum(event["num_blocks"] for event in moved)
        assert max(event["num_moved"] for event in moved) <= num_blocks - num_full, "a full block does not move again"


async def copy_and_dissolve(
    cluster: Cluster, bus: NatsBus, driver: HandPlanner, num_blocks: int, num_answers: int
) -> tuple[str, int]:
    """Have a group formed, its KV copied as it serves, and its members parted: who led it, how many decoded then?"""
    await change_until_done(cluster, bus, "drop")
    plan = await plan_now(cluster, bus)
    driver.epoch = plan.plan_id
    names = [worker.worker_id for worker in plan.steps[0].workers]
    await until(lambda: all(driver.reports[name].num_stages == 2 for name in names), "reports show the group")
    await until(lambda: _decode_or_end(cluster, bus, names[0], num_answers), "who was released is there")
    loaded = await driver.load(names, num_blocks)
    assert states(loaded) == ["done"] * 2, loaded
    restored = await driver.restore(names)
    if states(restored) == ["refused"] * 2:  # on a slow machine the planner comes between: it finds a group by half
        await change_until_done(cluster, bus, "restore")
        return names[0], 0
    assert states(restored) == ["done"] * 2, restored
    return names[0], int(cluster.told("role_changed", names[0])[-1]["num_decodes"])


async def _decode_or_end(cluster: Cluster, bus: NatsBus, leader: str, num_answers: int) -> bool:
    """Return whether the leader decodes so many answers, or one has ended."""
    sequences = (await cluster.dump(bus, leader))["sequences"]
    held = [each for each in sequences if not each["awaits_kv"]]
    num_decodes = sum(each["num_computed_tokens"] >= each["num_prompt_tokens"] for each in held)
    _, view = await cluster.get("/v1/cluster")
    return bool(num_decodes == num_answers or view["dispatcher"]["num_requests"] < num_answers)


def num_restored(cluster: Cluster) -> int:
    """Return how many restores the planner has seen carried out."""
    return sum("become whole" in event["reason"] for event in cluster.told("plan_done", "planner"))


async def test_four_workers_form_groups_of_two_and_of_four(tmp_path: Path) -> None:
    with staged(tmp_path, shape(4), load()) as cluster:
        async with cluster.bus() as bus, cluster.unchanged(3):
            await change_until_done(cluster, bus, "drop", ["worker-0", "worker-2"])
            await change_until_done(cluster, bus, "drop", ["worker-1", "worker-3"])
            _, view = await cluster.get("/v1/cluster")
            await asyncio.sleep(0.3)
            await change_until_done(cluster, bus, "restore", [view["workers"][0]["report"]["group"] or "worker-0"])
            await asyncio.sleep(0.3)
            await change_until_done(cluster, bus, "restore")
        assert released(cluster)


@pytest.mark.parametrize("victim", first_of([0, 1], in_ci=1))
async def test_a_member_that_dies_breaks_its_group_and_no_answer(victim: int, tmp_path: Path) -> None:
    """Row 9: the survivor loads the missing layers; the leader's death and the member's."""
    with staged(tmp_path, shape(3), load()) as cluster:
        async with cluster.bus() as bus, cluster.unchanged(3):
            answer = await change_until_done(cluster, bus, "drop", ["worker-0", "worker-1"])
            members = answer["groups"][0]
            await asyncio.sleep(0.2)
            cluster.kill(members[victim])
            await until_whole(cluster, members[1 - victim])


async def test_a_planner_that_dies_while_it_carries_a_plan_out_leaves_nothing_half_done(tmp_path: Path) -> None:
    """Rows 10 and 11: it is killed when a worker is prepared, or all are; a new one takes over under a newer epoch.

    Two planners at once: `test_group_transfers`.
    """
    with staged(tmp_path, shape(2), load()) as cluster:
        met: list[PlanPhase] = []
        async with cluster.bus() as bus:
            await service_answers(cluster, bus)
            await be_whole(cluster, bus)
            for number in rounds("a planner was killed in each phase"):
                phase = PHASES[number % len(PHASES)]
                async with cluster.unchanged(3):
                    left = await kill_planner_amid_drop(cluster, bus, phase)
                    met.append(left.phase)
                    cluster.start("planner")
                    await until(lambda left=left: _is_over(cluster, bus, left), "the plan is over", 20.0)
                    await until(lambda: _agree(cluster), "the workers agree on their group", 20.0)
                    await until(lambda left=left: all(ends_of(cluster, left)), "each worker has ended it", 20.0)
                    if left.phase is PlanPhase.PREPARING:
                        assert ends_of(cluster, left) == [["plan_not_done"]] * 2
                    await service_answers(cluster, bus)
                    await be_whole(cluster, bus)
                if number + 1 >= len(PHASES) and set(met) >= set(PHASES):
                    break


def ends_of(cluster: Cluster, plan: Plan) -> list[list[str]]:
    """Return what each worker says at the end of its part of a plan."""
    ends = ("role_changed", "plan_not_done")
    return [
        [e["event"] for e in cluster.events(name) if e.get("plan") == plan.plan_id and e.get("event") in ends]
        for name in cluster.workers
    ]


async def _is_over(cluster: Cluster, bus: NatsBus, left: Plan) -> bool:
    """Return whether another planner has seen to the end of the plan that was left."""
    plan = await plan_now(cluster, bus)
    return plan.epoch > left.epoch and plan.phase is PlanPhase.DONE


async def test_a_static_pipeline_forms_by_itself_and_says_what_one_worker_says_also_after_a_death(
    tmp_path: Path,
) -> None:
    """`fcfs-pp` beside a single worker of `fcfs`; a member dies while streams run, and is joined again later."""
    asks, static = load(), ("--system", "fcfs-pp")
    flags = {"worker": (*static, "--memory", "22MiB"), "planner": static, "dispatcher": static}
    folders = [tmp_path / name for name in ("alone", "cluster")]
    for folder in folders:
        folder.mkdir()
    with running(Cluster(folders[0], Shape(num_workers=1, env=group_env()))) as cluster:
        expected = run_apart(undisturbed(cluster, asks))
    with running(Cluster(folders[1], Shape(env=group_env(), flags=flags))) as cluster:
        await until(lambda: _is_joined(cluster), "both workers are one pipeline", 20.0)
        table = await run_status(cluster.url(), as_json=False)
        assert sorted(line.split("  ")[-3].strip() for line in table.splitlines()[1:3]) == ["1 of 2", "2 of 2"], table
        async with reading(cluster, asks) as readers:
            assert await answers(readers) == expected
        async with reading(cluster, asks) as readers:
            await seen(readers, 3)
            cluster.kill("worker-1")
            cluster.start("worker-1")
            await until(lambda: _is_joined(cluster), "they are one pipeline again", 30.0)
            assert await answers(readers) == expected


async def _is_joined(cluster: Cluster) -> bool:
    """Return whether both workers are alive and stages of one pipeline."""
    _, view = await cluster.get("/v1/cluster")
    workers = (view or {}).get("workers", [])
    stages = [(w["report"]["num_stages"], w["report"]["stage"], w["liveness"]) for w in workers]
    pids = {w["report"]["pid"] for w in workers}
    return sorted(stages) == [(2, 0, "alive"), (2, 1, "alive")] and pids == {cluster.pid(w) for w in cluster.workers}


async def _agree(cluster: Cluster) -> bool:
    """Return whether all workers are in one group, or none is."""
    reports = (await reports_of(cluster)).values()
    return len({report.num_stages for report in reports}) == 1 and len({report.group for report in reports}) == 1
