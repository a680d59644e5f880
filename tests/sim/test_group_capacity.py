"""What a plan claims is what the group then has, and what requests then get: a real planner, on the virtual clock."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from shared.messages.event import Event
from shared.messages.plan import PLAN_KEY, FormGroup, Plan, PlanPhase
from shared.subjects import Subjects
from shared.transport.bus import KvEntry
from shared.wire import decode_json
from sim.cluster import ClusterParams, SimCluster
from sim.devices.modelled_device import ModelledGroupDevice
from sim.requests import SimRequest
from sim.worker import SimWorker
from tests.sim.test_group_conservation import odd_facts
from tests.support.capacity_fill import fill
from tests.support.sim_clusters import ask_planner, check_answers, cluster_of, hear_events, reasons

pytestmark = pytest.mark.virtual_time

BLOCK_SIZE = 8


async def watch(cluster: SimCluster) -> tuple[list[Plan], list[Event]]:
    """Return lists that grow with each plan that the planner writes, and with each event."""
    plans, bus = list[Plan](), cluster.broker.connect("watch")

    def on_plan(entry: KvEntry) -> None:
        assert entry.value is not None
        plans.append(decode_json(entry.value, Plan))

    await (await bus.key_value(Subjects().plan_bucket())).watch(PLAN_KEY, on_plan)
    return plans, await hear_events(bus)


def params(seed: int) -> ClusterParams:
    rng = np.random.default_rng(seed)
    facts, num_workers = odd_facts(rng, int(rng.integers(20, 60))), int(rng.integers(2, 4))
    return cluster_of(
        num_workers, 0, block_size=BLOCK_SIZE, system="kunserve", max_model_len=120, max_batch_rows=1024, elastic=facts
    )


def leader_of(cluster: SimCluster, group: FormGroup) -> SimWorker:
    return next(worker for worker in cluster.workers if worker.params.worker_id == group.stages[0].worker_id)


def measured(cluster: SimCluster, group: FormGroup) -> int:
    """Return the blocks of the stage that has the least."""
    found = []
    for stage in group.stages:
        device = next(w.groups for w in cluster.workers if w.params.worker_id == stage.worker_id)
        assert isinstance(device, ModelledGroupDevice)
        assert (device.layers.first, device.layers.end) == stage.layers
        found.append(device._kv.num_blocks)
    return min(found)


@pytest.mark.parametrize("seed", range(8))
async def test_the_room_that_a_plan_claims_is_the_room_that_requests_get(seed: int) -> None:
    async with SimCluster(params(seed)) as cluster:
        plans, events = await watch(cluster)
        await asyncio.sleep(1.0)
        before = [worker.service.engine.capacity_blocks for worker in cluster.workers]
        answer = await ask_planner(cluster, "drop", *(worker.params.worker_id for worker in cluster.workers))
        if not answer["done"]:  # sizes of which no group would gain anything
            assert "nothing would be gained" in answer["reason"] or "cannot be cut" in answer["reason"], answer
            assert answer["reason"] in reasons(events, "plan_refused")[-1]
            return
        (group,) = plans[-1].steps
        assert isinstance(group, FormGroup)
        leader = leader_of(cluster, group)
        assert sum(before) < group.num_blocks == measured(cluster, group)
        assert group.num_blocks == leader.service.engine.capacity_blocks
        assert f"have {group.num_blocks} KV blocks, as claimed" in reasons(events, "plan_done")[-1]
        gained = (group.num_blocks - sum(before)) * BLOCK_SIZE
        assert f"room for {gained} more tokens" in reasons(events, "plan_done")[-1]
        await asyncio.sleep(2.0)  # the dispatcher has heard of it
        assert await fill(leader.service, cluster.ask, group.num_blocks, BLOCK_SIZE) == group.num_blocks
        await asyncio.sleep(1.0)  # reports say that they are over
        restored = await ask_planner(cluster, "restore")
        assert restored["done"], restored
        assert [worker.service.engine.capacity_blocks for worker in cluster.workers] == before


@pytest.mark.slow
async def test_plans_by_need_have_the_room_that_they_claim() -> None:
    async with SimCluster(params(1)) as cluster:
        plans, events = await watch(cluster)
        await asyncio.sleep(1.0)
        rng = np.random.default_rng(3)
        asked = [
            asyncio.ensure_future(cluster.ask(SimRequest(f"r{i}", rng.integers(256, 9999, 60), 50, seed=i)))
            for i in range(60)
        ]
        while not reasons(events, "plan_done"):
            await asyncio.sleep(0.01)
        assert "as claimed" in reasons(events, "plan_done")[0]
        drop = next(plan for plan in plans if plan.phase is PlanPhase.DONE and plan.steps)
        for group in drop.steps:
            assert isinstance(group, FormGroup)
            leader = leader_of(cluster, group)
            assert group.num_blocks == measured(cluster, group) == leader.service.engine.capacity_blocks
        check_answers(cluster, await asyncio.gather(*asked))
    assert any(plan.lever == "drop" for plan in plans)
