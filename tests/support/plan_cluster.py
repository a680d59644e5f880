"""Tests in a cluster of workers that keep the protocol of plans, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Concatenate

from services.planner.config import PlannerSettings
from tests.support.plan_workers import Faults, PlanCluster
from tests.support.staged import P, played_in


def settings(**changes: object) -> PlannerSettings:
    """A planner that drops."""
    return PlannerSettings.model_validate({"instance_id": "p", "system": "kunserve", **changes})


@asynccontextmanager
async def open_cluster(
    num_workers: int = 4,
    planner: PlannerSettings | None = None,
    deliver: Faults | None = None,
    *,
    loads_beside: bool = False,
) -> AsyncIterator[PlanCluster]:
    """A cluster whose workers are ready and whose planner is not started."""
    cluster = PlanCluster(num_workers, planner or settings(), deliver, loads_beside=loads_beside)
    await cluster.start()
    await asyncio.sleep(2)
    yield cluster
    await cluster.close()


def clustered(
    num_workers: int = 4, *, loads_beside: bool = False, **changes: object
) -> Callable[[Callable[Concatenate[PlanCluster, P], Awaitable[None]]], Callable[P, None]]:
    """Have a test be given an `open_cluster`, and hold what its workers have heard to the laws when it has ended.

    Args:
        num_workers: of the cluster.
        loads_beside: whether its workers can load parameters while they serve.
        changes: of the planner's settings.
    """

    @asynccontextmanager
    async def open_checked() -> AsyncIterator[PlanCluster]:
        async with open_cluster(num_workers, settings(**changes), loads_beside=loads_beside) as cluster:
            yield cluster
        cluster.check()

    return played_in(open_checked)
