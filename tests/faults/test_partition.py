"""A link between a service and the broker is dead in one direction or both (row 16)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.faults.conftest import SMALL_STEPS, Stage, set_up
from tests.support.fault_checks import assert_nothing_left, unchanged
from tests.support.fault_cluster import Shape, running
from tests.support.fault_streams import mixed_load, seen

pytestmark = pytest.mark.timeout(180)

LOSS_S = 3.0


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A cluster whose links can be cut one by one."""
    shape = Shape(env=SMALL_STEPS, proxied=("worker-0", "dispatcher-0"))
    with running(tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield set_up(cluster)


@pytest.mark.parametrize(("up", "down"), [(True, True), (True, False), (False, True)])
async def test_a_worker_that_is_cut_off_is_replaced_and_generates_nothing_twice(
    split: Stage, *, up: bool, down: bool
) -> None:
    """Nobody hears the worker, or it hears nobody, or both; healed after its requests went on elsewhere."""
    async with unchanged(split.cluster, mixed_load(), split.expected, split.before) as readers:
        await seen(readers, 15)
        split.cluster.proxies["worker-0"].withhold(up=up, down=down)
        await asyncio.gather(*(reader.task for reader in readers))
        gaps = [reader.told.longest_gap_s for reader in readers if reader.asked.is_streamed]
        assert max(gaps) < LOSS_S + 5
    await assert_nothing_left(split.cluster, split.before)


@pytest.mark.parametrize("duration_s", [1.0, 5.0])
async def test_a_worker_that_is_cut_off_for_a_while_does_no_harm_when_it_is_back(
    split: Stage, duration_s: float
) -> None:
    async with unchanged(split.cluster, mixed_load(), split.expected, split.before) as readers:
        await seen(readers, 15)
        split.cluster.proxies["worker-0"].withhold()
        await asyncio.sleep(duration_s)
        split.cluster.proxies["worker-0"].heal()


@pytest.mark.parametrize("duration_s", [1.0, 6.0])
async def test_a_dispatcher_that_is_cut_off_goes_on_where_it_was(split: Stage, duration_s: float) -> None:
    """After 3 s the workers stop generating for it, but keep its sequences."""
    async with unchanged(split.cluster, mixed_load(), split.expected, split.before) as readers:
        await seen(readers, 15)
        split.cluster.proxies["dispatcher-0"].withhold()
        await asyncio.sleep(duration_s)
        split.cluster.proxies["dispatcher-0"].heal()


async def test_a_connection_that_is_reset_is_mended(split: Stage) -> None:
    async with unchanged(split.cluster, mixed_load(), split.expected, split.before) as readers:
        await seen(readers, 5)
        for _ in range(5):
            split.cluster.proxies["worker-0"].cut()
            split.cluster.proxies["dispatcher-0"].cut()
            await asyncio.sleep(0.3)
