"""What a plan claims is what a group of live workers then has, and what requests then get."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from shared.messages.plan import FormGroup, PlanPhase
from tests.support.capacity_fill import fill
from tests.support.live_groups import SHAPES
from tests.support.runners import MIB
from tests.support.torch_cluster import LIMIT_S, SUBJECTS, TorchCluster, check_pages

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(120)]
BLOCK_SIZE = 16


async def by_hand(cluster: TorchCluster, verb: str) -> dict[str, Any]:
    """Ask the planner until it has seen who is there."""
    answer: dict[str, Any] = {}
    async with asyncio.timeout(LIMIT_S):
        while not answer.get("done"):
            subject = SUBJECTS.admin("planner", "planner", verb)
            answer = json.loads(await cluster.bus.request(subject, b"", timeout_s=LIMIT_S))
            await asyncio.sleep(0.02)
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "tied"])
async def test_the_room_that_a_plan_claims_is_the_room_that_requests_get(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with TorchCluster(2, monkeypatch, memory_bytes=5 * MIB, shape=SHAPES[name], max_batch_rows=16) as cluster:
        await cluster.planner.start()
        before = {worker_id: worker.num_blocks for worker_id, worker in cluster.workers.items()}
        answer = await by_hand(cluster, "drop")
        (group,) = next(plan for plan in cluster.plans if plan.phase is PlanPhase.COMMITTING).steps
        assert isinstance(group, FormGroup)
        members = [cluster.workers[stage.worker_id] for stage in group.stages]
        assert [stage.layers for stage in group.stages] == [(w.layers.first, w.layers.end) for w in members]
        assert sum(before.values()) < group.num_blocks == min(member.memory.num_blocks for member in members)
        assert group.num_blocks == members[0].num_blocks
        assert f"have {group.num_blocks} KV blocks, as claimed" in answer["reason"]
        (done,) = [event.reason for event in cluster.events if event.name == "plan_done"]
        assert answer["reason"] in done
        for member in members:
            check_pages(member.memory)
        await cluster.settle()
        while cluster.dispatcher.sessions.cluster.num_ready > 1:  # until it has heard of the group
            await asyncio.sleep(0.005)
        filled = await fill(members[0].service, cluster.ask, group.num_blocks, BLOCK_SIZE)
        assert filled == group.num_blocks
        await by_hand(cluster, "restore")
        assert {worker_id: worker.num_blocks for worker_id, worker in cluster.workers.items()} == before
        await cluster.check()
