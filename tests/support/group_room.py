"""A simulated cluster whose workers can drop layers, a planner by hand, and readers whose texts are checked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Concatenate

import numpy as np

from services.worker.engine.engine import Engine
from services.worker.roles.agent import OrderAgent
from shared.ids import WorkerId
from shared.layers import LayerRange, even_split
from shared.messages.report import ElasticFacts, WorkerReport
from shared.types import FinishReason
from sim.cluster import ClusterParams, SimCluster
from sim.devices.modelled_device import ModelledGroupDevice
from sim.requests import SimAnswer, SimRequest
from tests.support.drop_builders import make_elastic, make_model
from tests.support.hand_planner import HandPlanner, states
from tests.support.sim_clusters import cluster_of
from tests.support.staged import P, played_in

NUM_LAYERS = 8
PAGE_BYTES = 4096
WHOLE = LayerRange(0, NUM_LAYERS)
HALVES = even_split(NUM_LAYERS, 2)
BOTH = (WorkerId("w0"), WorkerId("w1"))


def elastic_facts(num_pages: int = 500) -> ElasticFacts:
    """Parameters of 8 layers take 40 pages each, half of the budget or more; a page has two blocks."""
    model = make_model(layer_bytes=(40 * PAGE_BYTES,) * NUM_LAYERS, block_bytes=PAGE_BYTES // 2, page_bytes=PAGE_BYTES)
    return make_elastic(model, num_pages=num_pages, max_blocks=2000)


def group_params(
    num_workers: int = 2,
    system: str = "fcfs-chunked",
    num_pages: int = 500,
    load_bytes_per_s: float = 25e9,
    num_copies: int = 1024,
    **changes: Any,
) -> ClusterParams:
    """Workers of that many pages each, named w0 and following; parameters come back at that rate.

    The hosts of the first `num_copies` workers have copies of them.
    """
    made = cluster_of(
        num_workers, 0, system=system, max_model_len=320, max_batch_tokens=256, host_link_bytes_per_s=load_bytes_per_s
    )
    facts = [elastic_facts(num_pages).model_copy(update={"has_host_copy": i < num_copies}) for i in range(num_workers)]
    workers = tuple(replace(worker, elastic=own) for worker, own in zip(made.workers, facts, strict=True))
    return replace(made, workers=workers, **changes)


def draw_requests(seed: int, count: int) -> list[SimRequest]:
    """Requests of up to 299 tokens in all."""
    rng = np.random.default_rng(seed)
    return [
        SimRequest(f"r{i}", rng.integers(300, 30_000, int(rng.integers(1, 200))), int(rng.integers(1, 100)), seed=i)
        for i in range(count)
    ]


class Room:
    """A cluster, a planner by hand, and readers."""

    def __init__(self, cluster: SimCluster, driver: HandPlanner) -> None:
        self.cluster = cluster
        self.driver = driver
        self.answers: list[asyncio.Task[SimAnswer]] = []

    def ask(self, *asked: SimRequest) -> None:
        """Send requests; `check` waits for their answers."""
        self.answers += [asyncio.ensure_future(self.cluster.ask(request)) for request in asked]

    async def check(self) -> None:
        """Wait for all answers, and check that each is what it is alone."""
        for answer in await asyncio.gather(*self.answers):
            assert answer.failure is None, answer.request.request_id
            assert answer.finish is FinishReason.LENGTH
            assert answer.tokens == self.cluster.undisturbed(answer.request), answer.request.request_id

    async def form(self) -> list[WorkerReport]:
        """Let the first two workers be a group; return what they report then."""
        assert states(await self.driver.drop(BOTH, HALVES)) == ["done"] * 2
        await asyncio.sleep(0.6)
        return [self.driver.reports[name] for name in BOTH]

    def engine(self, index: int = 0) -> Engine:
        """Return the engine of a worker."""
        return self.cluster.workers[index].service.engine

    def agent(self, index: int = 0) -> OrderAgent:
        """Return who hears planners at a worker."""
        agent = self.cluster.workers[index].service.agent
        assert agent is not None
        return agent

    def device(self, index: int) -> ModelledGroupDevice:
        """Return the device of a worker."""
        device = self.cluster.workers[index].groups
        assert isinstance(device, ModelledGroupDevice)
        return device

    def num_blocks(self, index: int) -> int:
        """Return the KV blocks of a worker."""
        return self.engine(index).capacity_blocks

    def beside_blocks(self, num_workers: int = 2) -> int:
        """Return the blocks that each of the first workers has memory for beside all parameters."""
        return min(self.device(index).blocks_beside(WHOLE) for index in range(num_workers))

    def role(self, index: int) -> tuple[str, int, tuple[int, int]]:
        """Return the group of a worker, its stage and its layers."""
        role = self.agent(index).role
        return role.group, role.stage, (role.layers.first, role.layers.end)


@asynccontextmanager
async def open_room(cluster_params: ClusterParams) -> AsyncIterator[Room]:
    """Have a room inside the block, at the end of which nothing may be left."""
    async with SimCluster(cluster_params) as cluster:
        driver = HandPlanner(cluster.broker.connect("hand"))
        await driver.start()
        await asyncio.sleep(1.0)
        yield Room(cluster, driver)
        await asyncio.sleep(3.0)
        cluster.check_idle()


def room_test(
    cluster_params: ClusterParams,
) -> Callable[[Callable[Concatenate[Room, P], Awaitable[None]]], Callable[P, None]]:
    """Make a test of what is given a room of its own, beside what pytest gives; see `open_room`."""
    return played_in(partial(open_room, cluster_params))
