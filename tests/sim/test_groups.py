"""Workers that form groups and dissolve them while they serve: on the virtual clock, every text as undisturbed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest

from services.worker.executor.channel import ModelledLink
from shared.cost import load_profile
from shared.layers import LayerRange, even_split
from shared.messages.report import ElasticFacts
from shared.types import FinishReason
from sim.cluster import ClusterParams, SimCluster
from sim.plan_driver import PlanDriver, group_of, states
from sim.requests import SimAnswer, SimRequest
from sim.virtual_time import run
from sim.worker import SimWorkerParams

NUM_LAYERS = 8
PAGE_BYTES = 4096
LINK_BYTES_PER_S = 1e6


def elastic_facts(num_pages: int = 500) -> ElasticFacts:
    """Parameters of 8 layers take 40 pages each, half of the budget or more; a page has two blocks."""
    return ElasticFacts(
        layer_bytes=(40 * PAGE_BYTES,) * NUM_LAYERS,
        outer_bytes=0,
        first_stage_end=0,
        last_stage_begin=0,
        block_bytes=PAGE_BYTES // 2,
        page_bytes=PAGE_BYTES,
        num_pages=num_pages,
        max_blocks=2000,
        has_host_copy=True,
    )


def params(num_workers: int = 2, system: str = "fcfs-chunked", num_pages: int = 500) -> ClusterParams:
    cost = load_profile("llama-3-8b-tp1-a100").cost
    workers = [
        SimWorkerParams(
            f"w{i}",
            cost,
            0,
            system=system,
            max_model_len=320,
            max_batch_tokens=256,
            elastic=elastic_facts(num_pages),
        )
        for i in range(num_workers)
    ]
    return ClusterParams(tuple(workers), system=system)


def requests(seed: int, count: int) -> list[SimRequest]:
    rng = np.random.default_rng(seed)
    return [
        SimRequest(f"r{i}", rng.integers(300, 30_000, int(rng.integers(1, 200))), int(rng.integers(1, 100)), seed=i)
        for i in range(count)
    ]


class Room:
    """A cluster, a planner by hand, and readers."""

    def __init__(self, cluster: SimCluster, driver: PlanDriver) -> None:
        self.cluster = cluster
        self.driver = driver
        self.answers: list[asyncio.Task[SimAnswer]] = []

    def ask(self, *asked: SimRequest) -> None:
        self.answers += [asyncio.ensure_future(self.cluster.ask(request)) for request in asked]

    async def check(self) -> None:
        """Wait for all answers, and check that each is what it is alone."""
        for answer in await asyncio.gather(*self.answers):
            assert answer.failure is None, answer.request.request_id
            assert answer.finish is FinishReason.LENGTH
            assert answer.tokens == self.cluster.undisturbed(answer.request), answer.request.request_id

    def num_blocks(self, index: int) -> int:
        return self.cluster.workers[index].service.engine.capacity_blocks

    def role(self, index: int) -> tuple[str, int, tuple[int, int]]:
        agent = self.cluster.workers[index].service.agent
        assert agent is not None
        return agent.role.group, agent.role.stage, (agent.role.layers.first, agent.role.layers.end)


def in_room(test: Callable[[Room], Awaitable[None]], cluster_params: ClusterParams) -> None:
    async def main() -> None:
        async with SimCluster(cluster_params) as cluster:
            driver = PlanDriver(cluster.broker.connect("hand"))
            await driver.start()
            await asyncio.sleep(1.0)
            await test(Room(cluster, driver))
            await asyncio.sleep(3.0)
            cluster.check_idle()

    run(main())


def test_a_drop_gives_the_group_more_blocks_than_both_had_and_a_restore_gives_them_back() -> None:
    async def main(room: Room) -> None:
        before = [room.num_blocks(0), room.num_blocks(1)]
        answers = await room.driver.drop(["w0", "w1"], even_split(NUM_LAYERS, 2))
        assert states(answers) == ["done", "done"]
        assert room.role(0) == ("w0", 0, (0, 4))
        assert room.role(1) == ("w0", 1, (4, 8))
        claimed = answers["w1"]
        assert claimed is not None
        assert room.num_blocks(0) == claimed.num_blocks > sum(before)
        await asyncio.sleep(1.0)
        assert states(await room.driver.restore(["w0", "w1"])) == ["done", "done"]
        assert [room.num_blocks(0), room.num_blocks(1)] == before
        assert room.role(0) == ("", 0, (0, 8))

    in_room(main, params())


@pytest.mark.parametrize("seed", range(6))
def test_texts_are_the_same_through_drops_and_restores_at_any_moment(seed: int) -> None:
    async def main(room: Room) -> None:
        rng = np.random.default_rng(seed)
        asked = requests(seed, 60)
        room.ask(*asked[:30])
        for step in range(4):
            await asyncio.sleep(float(rng.exponential(0.4)))
            if step % 2 == 0:
                answers = await room.driver.drop(["w0", "w1"], even_split(NUM_LAYERS, 2))
            else:
                answers = await room.driver.restore(["w0", "w1"])
            assert states(answers) == ["done", "done"], answers
            room.ask(*asked[30 + 7 * step : 37 + 7 * step])
        await room.check()
        assert sum(room.cluster.dispatcher.sessions.recovery.num_lost.values()) > 0, "sequences were released"

    in_room(main, params())


def test_groups_of_one_plan_do_not_meet_each_other() -> None:
    """Two pairs come about, and part again, in the same moment and under the same plan."""

    async def main(room: Room) -> None:
        asked = requests(7, 90)
        room.ask(*asked[:50])
        await asyncio.sleep(0.3)
        reports, halves = room.driver.reports, even_split(NUM_LAYERS, 2)
        pairs = [group_of([reports[a], reports[b]], halves) for a, b in (("w0", "w1"), ("w2", "w3"))]
        assert states(await room.driver.carry_out(*pairs)) == ["done"] * 4
        assert [room.role(i)[0] for i in range(4)] == ["w0", "w0", "w2", "w2"]
        room.ask(*asked[50:])
        await asyncio.sleep(1.0)
        assert states(await room.driver.restore(["w0", "w1", "w2", "w3"])) == ["done"] * 4
        await room.check()

    in_room(main, params(4))


def test_four_workers_form_two_groups_and_then_one() -> None:
    async def main(room: Room) -> None:
        asked = requests(5, 80)
        room.ask(*asked[:50])
        await asyncio.sleep(0.3)
        halves = even_split(NUM_LAYERS, 2)
        assert states(await room.driver.drop(["w0", "w1"], halves)) == ["done"] * 2
        assert states(await room.driver.drop(["w3", "w2"], halves)) == ["done"] * 2
        await asyncio.sleep(0.7)
        room.ask(*asked[50:])
        quarters = [LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, 6), LayerRange(6, 8)]
        assert states(await room.driver.drop(["w0", "w3", "w1", "w2"], quarters)) == ["done"] * 4
        assert room.role(2) == ("w0", 3, (6, 8))
        await room.check()
        await asyncio.sleep(1.0)
        assert states(await room.driver.restore(["w0", "w1", "w2", "w3"])) == ["done"] * 4

    in_room(main, params(4))


def test_kv_goes_along_so_that_little_is_computed_again() -> None:
    """Of each sequence at most the last block, which is not full."""

    async def main(room: Room) -> None:
        rng = np.random.default_rng(9)
        room.ask(*(SimRequest(f"r{i}", rng.integers(300, 30_000, 150 + i), 90, seed=i) for i in range(8)))
        await asyncio.sleep(0.4)
        engines = [worker.service.engine for worker in room.cluster.workers]
        assert [engine.stats.num_running for engine in engines] == [4, 4]
        assert states(await room.driver.drop(["w0", "w1"], even_split(NUM_LAYERS, 2))) == ["done"] * 2
        await asyncio.sleep(0.1)
        leader = engines[0].stats
        assert leader.num_running == 8
        assert 0 <= engines[0].totals.num_recomputed_tokens <= 4 * 16
        found = leader.num_prefix_cache_hits
        assert found >= sum(150 // 16 * 16 for _ in range(4)), "what the member had computed"
        await room.check()

    in_room(main, params(num_pages=900))


def test_an_exchange_takes_the_time_of_the_link() -> None:
    async def main(room: Room) -> None:
        rng = np.random.default_rng(9)
        room.ask(*(SimRequest(f"r{i}", rng.integers(300, 30_000, 160), 90, seed=i) for i in range(8)))
        await asyncio.sleep(0.4)
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        assert states(await room.driver.drop(["w0", "w1"], even_split(NUM_LAYERS, 2))) == ["done"] * 2
        blocks = 4 * 160 // 16
        least_s = blocks * NUM_LAYERS // 2 * PAGE_BYTES / LINK_BYTES_PER_S
        assert least_s < loop.time() - begun_s < 2 * least_s + 0.2
        await room.check()

    in_room(main, replace(params(num_pages=900), link=ModelledLink(bytes_per_s=LINK_BYTES_PER_S)))


def test_sequences_and_their_kv_are_shared_out_when_a_group_dissolves() -> None:
    async def main(room: Room) -> None:
        rng = np.random.default_rng(9)
        room.ask(*(SimRequest(f"r{i}", rng.integers(300, 30_000, 150 + i), 120, seed=i) for i in range(8)))
        await asyncio.sleep(0.4)
        assert states(await room.driver.drop(["w0", "w1"], even_split(NUM_LAYERS, 2))) == ["done"] * 2
        await asyncio.sleep(0.3)
        assert states(await room.driver.restore(["w0", "w1"])) == ["done"] * 2
        await asyncio.sleep(0.1)
        engines = [worker.service.engine for worker in room.cluster.workers]
        assert [engine.stats.num_running for engine in engines] == [4, 4]
        assert engines[0].totals.num_recomputed_tokens <= 2 * 8 * 16
        came = engines[1].stats.num_prefix_cache_hits
        assert came >= 4 * (150 // 16 * 16), "what the group had computed for those that go on at the member"
        await room.check()

    in_room(main, params(num_pages=900))


def test_a_member_that_does_not_come_to_the_parting_costs_kv_and_nothing_else() -> None:
    async def main(room: Room) -> None:
        room.ask(*requests(3, 20))
        await asyncio.sleep(0.3)
        assert states(await room.driver.drop(["w0", "w1"], even_split(NUM_LAYERS, 2))) == ["done"] * 2
        await asyncio.sleep(0.3)
        assert states(await room.driver.restore(["w0"])) == ["done"]
        await room.check()
        await asyncio.sleep(2.0)
        assert room.role(1) == ("", 0, (0, 8)), "it has noticed that its group is gone"

    in_room(main, params())


def test_of_plans_that_are_prepared_at_once_the_newest_is_the_one_that_is_carried_out() -> None:
    """Two newer plans wait for the end of the first: who says that it is prepared has prepared that one."""

    async def main(room: Room) -> None:
        driver = room.driver
        group = group_of([driver.reports[name] for name in ("w0", "w1")], even_split(NUM_LAYERS, 2))
        _, first = await driver.prepare(group)
        assert states(first) == ["prepared"] * 2
        second, third = (asyncio.ensure_future(driver.prepare(group)) for _ in range(2))
        await second  # prepared for a moment, then given up for the newest
        newest, prepared = await third
        assert states(prepared) == ["prepared"] * 2
        assert states(await driver.finish(newest, ["w0", "w1"], commit=True)) == ["done"] * 2
        assert states(await driver.finish(newest - 1, ["w0", "w1"], commit=True)) == ["refused"] * 2

    in_room(main, params())
