"""KV on its way between live workers is held, cut or spoiled, its source or its target dies, or a reader leaves.

Rows 11, 19 (a cancel during the transfer), 27 and 28. All faults are made outside of the processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from shared.ids import WorkerId
from shared.layers import even_split
from shared.messages.base import MAX_EPOCH, MAX_EPOCH_STEP, ControlMessage
from shared.messages.event import Event
from shared.messages.plan import AbortPlan, CommitPlan, Plan, PlanAnswer, PlanState, PreparePlan
from shared.messages.queue import ListQueued
from shared.transport.nats_bus import NatsBus
from shared.wire import decode_json, encode_json
from sim.plan_driver import group_of
from tests.support.fault_checks import StagedCluster, staged
from tests.support.fault_cluster import Cluster, until
from tests.support.fault_streams import Ask, Reader, long_prompts, mixed_load, reading, seen
from tests.support.group_changes import (
    HALF_BYTES,
    be_whole,
    change,
    change_until_done,
    change_while_readers_leave,
    leaving,
    plan_now,
    reports_of,
    shape,
    struck,
    until_whole,
)
from tests.support.hand_planner import HandPlanner, states
from tests.support.stage_tap import StageTap
from tests.support.waiting import rounds

pytestmark = pytest.mark.timeout(180)

GREETED_BYTES = 512
"""Of one direction: two stages have met by then, which has a short limit, and have not said yet what they hold."""


@pytest.fixture(scope="module")
def cluster(tap: StageTap, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagedCluster]:
    """Two workers, shared by the tests of this module; each leaves them whole."""
    with staged(tmp_path_factory.mktemp("cluster"), tap.before(shape(2, exchange_limit_s=60)), load()) as cluster:
        yield cluster


def load() -> list[Ask]:
    return [*mixed_load(), *long_prompts(4)]


async def test_a_reader_that_leaves_while_a_group_dissolves_harms_nobody(cluster: StagedCluster, tap: StageTap) -> None:
    """Row 19: KV is held half-way, the worker hears of the cancel, then the rest passes; blocks are freed once.

    A cancel while a group forms: `test_groups`.
    """
    for _ in rounds("a reader left while KV was on its way"):
        async with (
            cluster.bus() as bus,
            cluster.unchanged(load=load()) as readers,
            reading(cluster, leaving()) as leavers,
        ):
            await seen([*readers, *leavers], 2)
            await change_until_done(cluster, bus, "drop")
            if await change_while_readers_leave(cluster, bus, "restore", tap, leavers):
                break


@pytest.mark.parametrize(("fault", "verb"), [("cut", "drop"), ("flip", "restore")])
async def test_kv_that_is_cut_or_spoiled_on_its_way_changes_no_text(
    fault: str, verb: str, cluster: StagedCluster, tap: StageTap
) -> None:
    """Row 27: a link that is cut, and a bit that is turned; what did not arrive whole is computed again."""
    known = {name: len(cluster.events(name)) for name in cluster.workers}
    for _ in rounds("KV was struck"):
        async with cluster.bus() as bus, cluster.unchanged(2, load()):
            if verb == "restore":
                await change_until_done(cluster, bus, "drop")
            met = getattr(tap, fault)(HALF_BYTES)
            asking = asyncio.ensure_future(change(cluster, bus, verb))
            is_struck = await struck(met, asking)
            await asking
            tap.go_on()
            await be_whole(cluster, bus)
        if is_struck:
            break
    said = [str(event) for name in cluster.workers for event in cluster.events(name)[known[name] :]]
    assert fault == "cut" or any("checksum" in line for line in said), "the damage was noticed"


@pytest.mark.parametrize("victim", ["leader", "member"])
async def test_a_worker_that_dies_while_kv_travels_changes_no_text(
    victim: str, cluster: StagedCluster, tap: StageTap
) -> None:
    """Row 27: both are source and target of KV; the other one is whole again, or always was."""
    for _ in rounds("KV travelled"):
        async with cluster.bus() as bus, cluster.unchanged(2, load()):
            met = tap.hold(HALF_BYTES)
            asking = asyncio.ensure_future(change(cluster, bus, "drop"))
            is_struck = await struck(met, asking)
            (step,) = (await plan_now(cluster, bus)).steps
            dying, other = [step.workers[index].worker_id for index in ((0, 1) if victim == "leader" else (1, 0))]
            cluster.kill(dying)
            tap.go_on()
            await asking  # done or not: the group may have stood already
            await until_whole(cluster, other)
        if is_struck:
            break


async def test_of_two_planners_the_older_one_is_fenced_off(cluster: StagedCluster, tap: StageTap) -> None:
    """Row 11: one is frozen in the middle of its plan, another drives it on, and the first one wakes."""
    events: list[Event] = []

    def was_told(name: str, by: str, words: str = "") -> bool:
        return any((e.name, e.instance_id) == (name, by) and words in e.reason for e in events)

    async with cluster.bus() as bus, cluster.unchanged(2, load()):
        await bus.subscribe("sluice.*.event.>", lambda message: events.append(decode_json(message.data, Event)))
        await bus.flush()
        met = tap.hold(GREETED_BYTES)  # the stages cannot agree on what moves, so the group does not come about yet
        asking = asyncio.ensure_future(change(cluster, bus, "drop"))
        await until(met.is_set, "KV is on its way", 20.0)
        cluster.freeze("planner")
        cluster.start("planner-1")
        try:
            await until(lambda: was_told("plan_committed", "planner-1", "taken up"), "it is driven on", 40.0)
            tap.go_on()
            await until(lambda: was_told("plan_done", "planner-1", "2 of 2 workers"), "it is done", 40.0)
            cluster.thaw("planner")
            await until(lambda: was_told("planner_superseded", "planner"), "the older one knows that it is over", 20.0)
            assert not (await asking)["done"]
            plan_id = (await plan_now(cluster, bus)).plan_id
            stale = encode_json(CommitPlan(epoch=plan_id, plan_id=plan_id))
            said = await bus.request(cluster.subjects.plan(WorkerId("worker-0")), stale, timeout_s=5)
            assert decode_json(said, PlanAnswer).state is PlanState.REFUSED
            words = f"epoch {plan_id} is over"
            await until(lambda: was_told("plan_refused", "worker-0", words), "the refusal is an event")
            await change_until_done(cluster, bus, "restore", planner="planner-1")
        finally:
            asking.cancel()
            cluster.kill("planner-1")
            cluster.kill("planner")  # a new one is started when all faults are undone


async def test_orders_that_somebody_made_up_hold_no_worker_and_put_no_planner_out_of_office(
    cluster: StagedCluster,
) -> None:
    """One worker is brought to an epoch far above all others, and asked to wait for 600 s; texts are as ever."""

    async def tell(order: ControlMessage) -> bytes:
        return await bus.request(cluster.subjects.plan(WorkerId("worker-0")), encode_json(order), timeout_s=10)

    async with cluster.bus() as bus, cluster.unchanged(2, load()):
        refused = decode_json(await tell(AbortPlan(epoch=MAX_EPOCH, plan_id=1)), PlanAnswer)
        assert refused.state is PlanState.REFUSED
        epoch = refused.newest_epoch
        for _ in range(3):
            epoch += MAX_EPOCH_STEP
            await tell(ListQueued(epoch=epoch))
        reports = await reports_of(cluster)
        step = group_of([reports[name] for name in cluster.workers], even_split(reports["worker-0"].num_layers, 2))
        forged = PreparePlan(epoch=epoch, plan_id=epoch, step=step, limit_s=600)
        assert decode_json(await tell(forged), PlanAnswer).state is PlanState.PREPARED

        async def is_held(words: str) -> bool:
            return (await reports_of(cluster))["worker-0"].held == words

        await until(lambda: is_held(f"plan {epoch}"), "people see that it stands still")
        await until(lambda: is_held(""), "it goes on by itself", 20.0)
        await change_until_done(cluster, bus, "drop")
        assert (await plan_now(cluster, bus)).epoch > epoch
        await change_until_done(cluster, bus, "restore")


async def test_a_group_whose_kv_has_no_room_elsewhere_stays_what_it_is_or_computes_again(
    cluster: StagedCluster, tap: StageTap
) -> None:
    """Row 28: the planner refuses, and that is an event; told all the same, workers move what fits.

    Requests fill the group to its last blocks as their answers grow: more than both have room for.
    """
    events: list[Event] = []
    for _ in rounds("the group held more than both have room for"):
        async with cluster.bus() as bus, cluster.unchanged(2, load()):
            await bus.subscribe("sluice.*.event.>", lambda message: events.append(decode_json(message.data, Event)))
            room = sum(report.num_blocks for report in (await reports_of(cluster)).values())
            await change_until_done(cluster, bus, "drop")
            leader = (await plan_now(cluster, bus)).steps[0].workers[0].worker_id
            async with reading(cluster, crowd(room)) as crowded:
                is_full = await _becomes_full(cluster, leader, room, crowded)
                if is_full:
                    await _stays_a_group(cluster, bus, leader, events)
                    await restore_all_the_same(bus, await plan_now(cluster, bus))
                for reader in crowded:
                    reader.task.cancel()
            await be_whole(cluster, bus)
        if is_full:
            break


async def _becomes_full(cluster: Cluster, leader: str, room: int, crowded: Sequence[Reader]) -> bool:
    """Return whether the leader's sequences come to hold more blocks than there is room for; they may end before."""
    seen_blocks = [0]

    async def is_known() -> bool:
        seen_blocks.append((await reports_of(cluster))[leader].num_used_blocks)
        return seen_blocks[-1] > room or all(reader.task.done() for reader in crowded)

    try:
        await until(is_known, "the crowd has been served", 60.0)
    finally:
        assert max(seen_blocks) > 0, f"{leader} served nobody of {len(crowded)}: {await reports_of(cluster)}"
    return seen_blocks[-1] > room


async def _stays_a_group(cluster: Cluster, bus: NatsBus, leader: str, events: Sequence[Event]) -> None:
    answer = await change(cluster, bus, "restore")
    assert not answer["done"]
    assert "not all would surely find a place" in answer["reason"]
    await until(lambda: any(answer["reason"] in event.reason for event in events), "the refusal is an event")
    await until(lambda: _leads(cluster, leader), "the group stands")


async def _leads(cluster: Cluster, leader: str) -> bool:
    report = (await reports_of(cluster))[leader]
    return (report.num_stages, report.group) == (2, leader)


def crowd(num_blocks: int) -> list[Ask]:
    """Return requests whose prompts together want more blocks than there are; answers are longer than prompts.

    By prompts alone a group is never filled: a new one is let in only where all that run can grow by a block.
    """
    salted = long_prompts(num_blocks * 16 // 400 + 2, num_repeats=18)
    return [replace(each, body={**each.body, "max_tokens": 600}) for each in salted]


async def restore_all_the_same(bus: NatsBus, plan: Plan) -> None:
    """Speak as the planner does, under its epoch, but without its judgement."""
    driver = HandPlanner(bus)
    await driver.start()
    await until(lambda: len(driver.reports) == 2, "both have reported")
    driver.epoch = plan.plan_id
    names = [worker.worker_id for worker in plan.workers]
    assert states(await driver.restore(names)) == ["done", "done"]
