"""What a plan claims is what the group then has, and what requests then get: a real planner, on the virtual clock."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from shared.cost import load_profile
from shared.messages.event import Event
from shared.messages.plan import PLAN_KEY, FormGroup, Plan, PlanPhase
from shared.subjects import Subjects
from shared.transport.bus import KvEntry, Message
from shared.wire import decode_json
from sim.cluster import ClusterParams, SimCluster
from sim.devices.modelled_device import ModelledGroupDevice
from sim.requests import SimRequest
from sim.virtual_time import run
from sim.worker import SimWorkerParams
from tests.sim.test_group_conservation import odd_facts
from tests.support.capacity_fill import fill

SYSTEM = "kunserve"
SUBJECTS = Subjects()
BLOCK_SIZE = 8


@dataclass
class Seen:
    """What passed the bus."""

    plans: list[Plan] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def on_event(self, message: Message) -> None:
        self.events.append(decode_json(message.data, Event))

    def on_plan(self, entry: KvEntry) -> None:
        assert entry.value is not None
        self.plans.append(decode_json(entry.value, Plan))

    def reasons(self, name: str) -> list[str]:
        return [event.reason for event in self.events if event.name == name]


async def watch(cluster: SimCluster) -> Seen:
    seen, bus = Seen(), cluster.broker.connect("watch")
    await bus.subscribe("sluice.*.event.>", seen.on_event)
    await (await bus.key_value(SUBJECTS.plan_bucket())).watch(PLAN_KEY, seen.on_plan)
    return seen


def params(seed: int) -> ClusterParams:
    rng = np.random.default_rng(seed)
    facts, cost = odd_facts(rng, int(rng.integers(20, 60))), load_profile("llama-3-8b-tp1-a100").cost
    workers = tuple(
        SimWorkerParams(
            f"w{i}",
            cost,
            0,
            block_size=BLOCK_SIZE,
            system=SYSTEM,
            max_model_len=120,
            max_batch_rows=1024,
            elastic=facts,
        )
        for i in range(int(rng.integers(2, 4)))
    )
    return ClusterParams(workers, system=SYSTEM)


async def by_hand(cluster: SimCluster, verb: str) -> dict[str, Any]:
    bus = cluster.broker.connect(f"person-{verb}")
    names = [worker.params.worker_id for worker in cluster.workers] if verb == "drop" else []
    question = json.dumps({"workers": names} if names else {}).encode()
    answer: dict[str, Any] = json.loads(
        await bus.request(SUBJECTS.admin("planner", "planner", verb), question, timeout_s=30)
    )
    return answer


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
def test_the_room_that_a_plan_claims_is_the_room_that_requests_get(seed: int) -> None:
    async def main() -> tuple[int, int]:
        async with SimCluster(params(seed)) as cluster:
            seen = await watch(cluster)
            await asyncio.sleep(1.0)
            before = [worker.service.engine.capacity_blocks for worker in cluster.workers]
            answer = await by_hand(cluster, "drop")
            if not answer["done"]:  # sizes of which no group would gain anything
                assert "nothing would be gained" in answer["reason"] or "cannot be cut" in answer["reason"], answer
                assert answer["reason"] in seen.reasons("plan_refused")[-1]
                return 0, 0
            (group,) = seen.plans[-1].steps
            assert isinstance(group, FormGroup)
            leader = next(w for w in cluster.workers if w.params.worker_id == group.stages[0].worker_id)
            assert sum(before) < group.num_blocks == measured(cluster, group)
            assert group.num_blocks == leader.service.engine.capacity_blocks
            assert f"have {group.num_blocks} KV blocks, as claimed" in seen.reasons("plan_done")[-1]
            gained = (group.num_blocks - sum(before)) * BLOCK_SIZE
            assert f"room for {gained} more tokens" in seen.reasons("plan_done")[-1]
            await asyncio.sleep(2.0)  # the dispatcher has heard of it
            filled = await fill(leader.service, cluster.ask, group.num_blocks, BLOCK_SIZE)
            await asyncio.sleep(1.0)  # reports say that they are over
            restored = await by_hand(cluster, "restore")
            assert restored["done"], restored
            assert [worker.service.engine.capacity_blocks for worker in cluster.workers] == before
            return group.num_blocks, filled

    claimed, filled = run(main(), allow_leaks=True)
    assert filled == claimed


def test_plans_by_need_have_the_room_that_they_claim() -> None:
    async def main() -> list[Plan]:
        async with SimCluster(params(1)) as cluster:
            seen = await watch(cluster)
            await asyncio.sleep(1.0)
            rng = np.random.default_rng(3)
            asked = [
                asyncio.ensure_future(cluster.ask(SimRequest(f"r{i}", rng.integers(256, 9999, 60), 50, seed=i)))
                for i in range(60)
            ]
            while not seen.reasons("plan_done"):
                await asyncio.sleep(0.01)
            assert "as claimed" in seen.reasons("plan_done")[0]
            drop = next(plan for plan in seen.plans if plan.phase is PlanPhase.DONE and plan.steps)
            for group in drop.steps:
                assert isinstance(group, FormGroup)
                leader = next(w for w in cluster.workers if w.params.worker_id == group.stages[0].worker_id)
                assert group.num_blocks == measured(cluster, group) == leader.service.engine.capacity_blocks
            for answer, request in zip(await asyncio.gather(*asked), asked, strict=True):
                assert answer.failure is None, request
                assert answer.tokens == cluster.undisturbed(answer.request)
            return seen.plans

    assert any(plan.lever == "drop" for plan in run(main(), allow_leaks=True))
