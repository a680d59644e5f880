"""Groups of workers of one device that hand over KV in its pages: texts, pages, and deaths in the middle of it.

On the CPU that is main memory; it is on by itself only on a GPU.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from shared.messages.report import WorkerReport
from tests.faults.conftest import set_up_with
from tests.faults.test_groups import check_pages, drop_among_prompts, load
from tests.support.fault_checks import unchanged
from tests.support.fault_cluster import Cluster, Shape, running, until_async
from tests.support.fault_streams import seen
from tests.support.group_changes import FLAGS, NUM_LASTING, change, change_until_done, group_env
from tests.support.mapped_pages import check_process
from tests.support.waiting import rounds

pytestmark = pytest.mark.timeout(180)

ENV = {**group_env(), "SLUICE_WORKER_HAND_OVER_PAGES": "true"}


def hand_overs(cluster: Cluster) -> list[dict[str, object]]:
    return [e for name in cluster.workers for e in cluster.events(name) if e.get("event") == "kv_handed_over"]


@pytest.mark.parametrize("seed", range(2))
async def test_texts_are_those_of_an_undisturbed_run(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Drops and restores at moments that the seed chooses; each time the system is asked who has which pages.

    At least three hand over pages, by both stages; a drop that comes when no answer is open hands over none.
    """
    rng = np.random.default_rng(seed)
    shape = Shape(num_workers=2, env=ENV, flags=FLAGS)
    with running(tmp_path_factory.mktemp("cluster"), shape) as cluster:
        asks = load()
        stage = set_up_with(cluster, asks)
        async with cluster.bus() as bus, unchanged(cluster, asks, stage.expected, stage.before) as readers:
            await seen(readers[:NUM_LASTING], 1 + int(rng.integers(3)))
            for _ in rounds("both stages of three groups have handed over pages", 10):
                num_told = len(hand_overs(cluster))
                await drop_among_prompts(cluster, bus, stage.expected)
                await check_pages(cluster, num_stages=2)
                await asyncio.sleep(float(rng.uniform(0.05, 0.5)))
                await change_until_done(cluster, bus, "restore")
                await check_pages(cluster, num_stages=1)
                await asyncio.sleep(float(rng.uniform(0.05, 0.5)))
                told = hand_overs(cluster)
                assert len(told) - num_told in (0, 2), "both stages of a group, or none"
                if len(told) >= 6:
                    break
        assert all(event["num_pages"] for event in told)
        names = {event.get("event") for name in cluster.workers for event in cluster.events(name)}
        assert "kv_arrived" not in names, "nothing came later"


@pytest.mark.parametrize("victim", ["worker-0", "worker-1"])
@pytest.mark.parametrize("moment", ["at-apply", "at-commit"])
async def test_a_worker_that_dies_while_pages_change_hands_changes_no_text(
    victim: str, moment: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Before anybody may keep what it has, or when all may; the leader, which the planner chooses, or the other one."""
    shape = Shape(
        num_workers=2,
        env={**ENV, "ODD_WORKER": f"pages {moment}"},
        flags=FLAGS,
        modules={victim: "tests.support.odd_worker"},
    )
    with running(tmp_path_factory.mktemp("cluster"), shape) as cluster:
        asks = load()
        stage = set_up_with(cluster, asks)
        async with cluster.bus() as bus, unchanged(cluster, asks, stage.expected, stage.before) as readers:
            await seen(readers[:NUM_LASTING], 3)
            answer = await change(cluster, bus, "drop", ["worker-0", "worker-1"])
            assert not answer["done"]
            reports: list[WorkerReport] = []

            async def is_whole() -> bool:
                _, view = await cluster.get("/v1/cluster")
                known = {worker["report"]["worker_id"]: worker["report"] for worker in view["workers"]}
                reports[:] = [WorkerReport.model_validate(known[name]) for name in cluster.workers if name != victim]
                (report,) = reports
                return report.num_stages == 1 and report.layers == (0, report.num_layers)

            await until_async(is_whole, "the survivor is whole again", 20.0)
            check_process(reports[0])
        told = cluster.events(victim)
        assert sum(event.get("event") == "worker_ready" for event in told) > 1, "it has died, and come back"
