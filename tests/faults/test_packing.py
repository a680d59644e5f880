"""Requests that lie on several workers come together on fewer, with real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from services.planner.policy.packing.classes import SizeClass
from shared.messages.fetch import FetchOutcome, FetchReason
from shared.messages.plan import FILLING_KEY, Filling
from shared.subjects import Subjects
from shared.wire import decode_json
from tests.faults.conftest import SMALL_STEPS
from tests.support.fault_checks import StagedCluster, staged
from tests.support.fault_cluster import Shape, http_session
from tests.support.fault_streams import COMPLETIONS, ask
from tests.support.live_movers import moving
from tests.support.seeds import first_of
from tests.support.waiting import rounds

pytestmark = pytest.mark.timeout(240)

LASTING = [ask(f"long-{number}", COMPLETIONS, max_tokens=900, seed=number, temperature=1.0) for number in range(6)]


@pytest.fixture(scope="module", params=first_of(["pack", "mell"], in_ci=1))
def system(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, system: str) -> Iterator[StagedCluster]:
    flags = dict.fromkeys(("worker", "dispatcher", "planner"), ("--system", system))
    env = {**SMALL_STEPS, "SLUICE_PLANNER_BALANCE_PAUSE_S": "0.1"}
    with staged(tmp_path_factory.mktemp("cluster"), Shape(num_workers=3, env=env, flags=flags)) as cluster:
        yield cluster


async def packed(cluster: StagedCluster) -> float:
    """Return how many requests have moved so that fewer workers are in use."""
    async with http_session() as http, http.get(cluster.url() + "/metrics") as response:
        lines = (await response.text()).splitlines()
    labels = (f'reason="{FetchReason.PACK}"', f'outcome="{FetchOutcome.MOVED}"')
    found = [
        line for line in lines if line.startswith("sluice:migration_total{") and all(each in line for each in labels)
    ]
    return sum(float(line.rpartition(" ")[2]) for line in found)


async def test_requests_that_are_scattered_come_together_and_no_text_changes(cluster: StagedCluster) -> None:
    """They are placed on one worker, and others scatter them; then the planner alone is at work."""
    await cluster.settle(LASTING)
    for seed in rounds("the planner has moved a request"):
        before = await packed(cluster)
        async with cluster.unchanged(5, LASTING), moving(cluster, seed) as movers:
            for _ in range(300):
                if movers.num_moved >= 4:
                    break
                await asyncio.sleep(0.01)
        if await packed(cluster) > before:
            break


async def test_operators_see_who_is_filled_next_by_requests_of_each_class(cluster: StagedCluster, system: str) -> None:
    async with cluster.bus() as bus:
        entry = await (await bus.key_value(Subjects().plan_bucket())).get(FILLING_KEY)
    if system == "pack":
        assert entry is None
        return
    assert entry is not None
    assert entry.value is not None
    by_size = decode_json(entry.value, Filling).by_size
    assert [each.min_tokens for each in by_size] == sorted({each.min_tokens for each in by_size})
    assert len(by_size) == len(SizeClass)
    assert {each.worker_id for each in by_size} <= {f"worker-{number}" for number in range(3)}
