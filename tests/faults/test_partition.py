"""A link between a service and the broker is dead in one direction or both (row 16)."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.conftest import SMALL_STEPS
from tests.support.fault_checks import StagedCluster
from tests.support.fault_cluster import Shape
from tests.support.fault_streams import all_read, longest_gap_s
from tests.support.seeds import first_of

pytestmark = pytest.mark.timeout(180)

LOSS_S = 3.0
SHAPE = Shape(env=SMALL_STEPS, proxied=("worker-0", "dispatcher-0"))
"""Links can be cut one by one."""


@pytest.mark.parametrize(("up", "down"), first_of([(True, False), (False, True), (True, True)], in_ci=2))
async def test_a_worker_that_is_cut_off_is_replaced_and_generates_nothing_twice(
    cluster: StagedCluster, *, up: bool, down: bool
) -> None:
    """Nobody hears the worker, or it hears nobody, or both; healed after its requests went on elsewhere."""
    async with cluster.unchanged(15) as readers:
        cluster.proxies["worker-0"].withhold(up=up, down=down)
        await all_read(readers)
        assert longest_gap_s(readers) < LOSS_S + 5
    await cluster.assert_nothing_left()


@pytest.mark.parametrize("duration_s", first_of([5.0, 1.0], in_ci=1))
async def test_a_worker_that_is_cut_off_for_a_while_does_no_harm_when_it_is_back(
    cluster: StagedCluster, duration_s: float
) -> None:
    async with cluster.unchanged(15):
        cluster.proxies["worker-0"].withhold()
        await asyncio.sleep(duration_s)
        cluster.proxies["worker-0"].heal()


@pytest.mark.parametrize("duration_s", first_of([6.0, 1.0], in_ci=1))
async def test_a_dispatcher_that_is_cut_off_goes_on_where_it_was(cluster: StagedCluster, duration_s: float) -> None:
    """After 3 s the workers stop generating for it, but keep its sequences."""
    async with cluster.unchanged(15):
        cluster.proxies["dispatcher-0"].withhold()
        await asyncio.sleep(duration_s)
        cluster.proxies["dispatcher-0"].heal()


async def test_a_connection_that_is_reset_is_mended(cluster: StagedCluster) -> None:
    async with cluster.unchanged(5):
        for _ in range(5):
            cluster.proxies["worker-0"].cut()
            cluster.proxies["dispatcher-0"].cut()
            await asyncio.sleep(0.3)
