"""Groups of workers of one device that hand over KV in its pages: texts, pages, and deaths in the middle of it.

On the CPU that is main memory; it is on by itself only on a GPU.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.faults.test_groups import load, there_and_back
from tests.support.fault_checks import staged
from tests.support.fault_cluster import Shape
from tests.support.group_changes import FLAGS, change, group_env, until_whole
from tests.support.mapped_pages import check_process
from tests.support.seeds import first_of
from tests.support.waiting import rounds

pytestmark = pytest.mark.timeout(180)

ENV = {**group_env(), "SLUICE_WORKER_HAND_OVER_PAGES": "true"}


@pytest.mark.parametrize("seed", first_of(range(2), in_ci=1))
async def test_texts_are_those_of_an_undisturbed_run(seed: int, tmp_path: Path) -> None:
    """Drops and restores at moments that the seed chooses; each time the system is asked who has which pages.

    At least three hand over pages, by both stages; a drop that comes when no answer is open hands over none.
    """
    rng = np.random.default_rng(seed)
    shape = Shape(num_workers=2, env=ENV, flags=FLAGS)
    with staged(tmp_path, shape, load()) as cluster:
        async with cluster.bus() as bus, cluster.unchanged(1 + int(rng.integers(3))):
            for _ in rounds("both stages of three groups have handed over pages", 10):
                num_told = len(cluster.told("kv_handed_over"))
                await there_and_back(cluster, bus, rng)
                told = cluster.told("kv_handed_over")
                assert len(told) - num_told in (0, 2), "both stages of a group, or none"
                if len(told) >= 6:
                    break
        assert all(event["num_pages"] for event in told)
        assert not cluster.told("kv_arrived"), "nothing came later"


@pytest.mark.parametrize(
    ("moment", "victim"),
    first_of(
        [("at-apply", "worker-0"), ("at-commit", "worker-1"), ("at-apply", "worker-1"), ("at-commit", "worker-0")],
        in_ci=1,
    ),
)
async def test_a_worker_that_dies_while_pages_change_hands_changes_no_text(
    victim: str, moment: str, tmp_path: Path
) -> None:
    """Before anybody may keep what it has, or when all may; the leader, which the planner chooses, or the other one."""
    shape = Shape(
        num_workers=2,
        env={**ENV, "ODD_WORKER": f"pages {moment}"},
        flags=FLAGS,
        modules={victim: "tests.support.odd_worker"},
    )
    with staged(tmp_path, shape, load()) as cluster:
        async with cluster.bus() as bus, cluster.unchanged(3):
            answer = await change(cluster, bus, "drop", ["worker-0", "worker-1"])
            assert not answer["done"]
            (survivor,) = {*cluster.workers} - {victim}
            check_process(await until_whole(cluster, survivor))
        assert len(cluster.told("worker_ready", victim)) > 1, "it has died, and come back"
