"""Before a group dissolves its KV moves while it serves: what is left is little, and nobody's text changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from services.worker.engine.stats import take_stats
from services.worker.kv_moves.kv_table import KvTable
from shared.ids import WorkerId
from shared.layers import even_split
from sim.cluster import ClusterParams
from sim.devices import modelled_network
from sim.devices.channel import ModelledLink
from sim.devices.modelled_exchange import Share, carry
from sim.plan_driver import alone
from tests.support.group_room import BOTH, NUM_LAYERS, WHOLE, Room, draw_requests, group_params, in_room
from tests.support.hand_planner import states

SLOW = 4e6
"""Bytes per second: 4 ms for half of a block's layers."""


def params(bytes_per_s: float = SLOW, num_pages: int = 3200, num_workers: int = 2) -> ClusterParams:
    return replace(group_params(num_workers, num_pages=num_pages), link=ModelledLink(bytes_per_s=bytes_per_s))


def most_ahead(room: Room, names: tuple[WorkerId, ...] = BOTH) -> int:
    """Return the largest group in which each worker has memory for all layers of its share."""
    found, layers = [worker.groups for worker in room.cluster.workers[: len(names)]], even_split(NUM_LAYERS, len(names))

    def suffices(count: int) -> bool:
        return all(
            each is not None and each.blocks_ahead(own, count) * len(names) >= count
            for each, own in zip(found, layers, strict=True)
        )

    count = 1
    while suffices(count + 1):
        count += 1
    return count


async def form(room: Room, names: tuple[WorkerId, ...] = BOTH) -> int:
    """Let workers be a group with everything beside; return the blocks that it has then."""
    layers = even_split(NUM_LAYERS, len(names))
    assert states(await room.driver.drop(names, layers)) == ["done"] * len(names)
    await asyncio.sleep(0.6)
    count = most_ahead(room, names)
    assert states(await room.driver.load(names, count)) == ["done"] * len(names)
    await asyncio.sleep(0.6)
    return count


def num_computed_again(room: Room) -> int:
    return sum(worker.service.engine.totals.num_recomputed_tokens for worker in room.cluster.workers)


def test_readers_go_on_while_kv_moves_and_little_is_left_when_the_group_dissolves() -> None:
    """The same load twice: with memory for KV ahead, and without, where all of it moves while nobody is served."""
    stood: dict[bool, float] = {}
    went_on: dict[bool, int] = {}
    again: dict[bool, int] = {}

    def measure(is_ahead: bool) -> None:
        async def main(room: Room) -> None:
            loop = asyncio.get_running_loop()
            await room.form()
            groups = [worker.groups for worker in room.cluster.workers]
            beside = min(each.blocks_beside(WHOLE) for each in groups if each is not None)
            count = most_ahead(room) if is_ahead else beside
            assert states(await room.driver.load(BOTH, count)) == ["done"] * 2
            await asyncio.sleep(0.6)
            room.ask(*(replace(each, num_output=100) for each in draw_requests(1, 12)))
            engine = room.engine()
            while take_stats(engine).num_running < 12 or engine.totals.num_generated_tokens < 150:
                await asyncio.sleep(0.01)
            before, seen = num_computed_again(room), engine.totals.num_generated_tokens
            plan_id, answers = await room.driver.prepare(*(alone(room.driver.reports[name]) for name in BOTH))
            assert states(answers) == ["prepared"] * 2, answers
            went_on[is_ahead] = engine.totals.num_generated_tokens - seen
            began_s = loop.time()
            assert states(await room.driver.finish(plan_id, BOTH, commit=True)) == ["done"] * 2
            stood[is_ahead] = loop.time() - began_s
            await room.check()
            again[is_ahead] = num_computed_again(room) - before

        in_room(main, params())

    measure(False)
    measure(True)
    assert stood[True] < stood[False] / 3
    assert went_on[True] > 10 * (went_on[False] + 1), "it served while KV moved"
    assert again[True] <= again[False] <= 12 * 16, "at most a block of each is computed again"


def test_a_group_that_uses_more_than_one_of_its_workers_has_alone_stands_still_hardly_longer() -> None:
    """Each needs memory for all layers of its share only: the same load with all moving at once, and copied ahead."""
    names = tuple(WorkerId(f"w{i}") for i in range(4))
    stood: dict[bool, float] = {}

    def measure(is_ahead: bool) -> None:
        async def main(room: Room) -> None:
            loop = asyncio.get_running_loop()
            assert states(await room.driver.drop(names, even_split(NUM_LAYERS, 4))) == ["done"] * 4
            await asyncio.sleep(0.6)
            groups = [worker.groups for worker in room.cluster.workers]
            beside = min(each.blocks_beside(WHOLE) for each in groups if each is not None)
            alone_blocks = min(each.whole_blocks for each in groups if each is not None)
            count = most_ahead(room, names) if is_ahead else beside
            assert count > 2 * alone_blocks
            assert states(await room.driver.load(names, count)) == ["done"] * 4
            await asyncio.sleep(0.6)
            room.ask(*(replace(each, num_output=100) for each in draw_requests(1, 20)))
            engine = room.engine()
            while take_stats(engine).num_used_blocks < 1.2 * alone_blocks:
                await asyncio.sleep(0.01)
            plan_id, answers = await room.driver.prepare(*(alone(room.driver.reports[name]) for name in names))
            assert states(answers) == ["prepared"] * 4, answers
            assert take_stats(engine).num_used_blocks > 1.2 * alone_blocks
            began_s = loop.time()
            assert states(await room.driver.finish(plan_id, names, commit=True)) == ["done"] * 4
            stood[is_ahead] = loop.time() - began_s
            await room.check()

        in_room(main, params(num_pages=1300, num_workers=4))

    measure(False)
    measure(True)
    assert stood[True] < stood[False] / 3


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("seed", range(10))
def test_texts_are_the_same_whatever_becomes_of_what_is_copied_ahead(seed: int, num_workers: int) -> None:
    """Plans are given up while KV moves, connections are cut and heal, and requests come; all at random."""
    names = tuple(WorkerId(f"w{i}") for i in range(num_workers))

    async def main(room: Room) -> None:
        rng, asked = np.random.default_rng(seed), draw_requests(seed, 60)
        more = iter(asked)
        for _ in range(3):
            await form(room, names)
            room.ask(*(next(more) for _ in range(int(rng.integers(4, 12)))))
            is_cut = False
            for fate in rng.choice(["give up", "cut", "wait"], int(rng.integers(0, 3))):
                await asyncio.sleep(float(rng.exponential(0.2)))
                groups = [alone(room.driver.reports[name]) for name in names]
                preparing = asyncio.ensure_future(room.driver.prepare(*groups))
                await asyncio.sleep(float(rng.exponential(0.1)))
                if fate == "cut":
                    room.cluster.network.cut(names[0], names[-1])
                elif fate == "give up":
                    await room.driver.finish(room.driver.epoch, names, commit=False)
                room.ask(next(more))
                plan_id, _ = await preparing
                await room.driver.finish(plan_id, names, commit=False)
                if fate == "cut":
                    is_cut = True  # the group is over
                    room.cluster.network.heal(names[0], names[-1])
                    break
            await asyncio.sleep(0.6 if not is_cut else 3.0)
            if is_cut:
                assert [room.role(i)[0] for i in range(num_workers)] == [""] * num_workers
                continue
            plan_id, prepared = await room.driver.prepare(*(alone(room.driver.reports[name]) for name in names))
            assert states(prepared) == ["prepared"] * num_workers, prepared
            assert states(await room.driver.finish(plan_id, names, commit=True)) == ["done"] * num_workers
            await asyncio.sleep(0.6)
        room.ask(*more)
        await room.check()

    in_room(main, params(float(np.random.default_rng(seed).choice([5e5, 4e6, 1e9])), num_workers=num_workers))


def test_blocks_that_are_said_to_be_there_and_are_not_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof that texts depend on every copy: with one of each round left out, other words are said."""

    def forget_one(table: KvTable, members: Sequence[Share]) -> None:
        lots = (replace(lot, ids=lot.ids[1:], names=lot.names[1:], places=lot.target_ids[1:]) for lot in table.lots)
        carry(replace(table, lots=tuple(lots)), members)

    monkeypatch.setattr(modelled_network, "carry", forget_one)

    async def main(room: Room) -> None:
        await form(room)
        room.ask(*(replace(each, num_output=90) for each in draw_requests(1, 12)))
        await asyncio.sleep(0.5)
        assert states(await room.driver.restore(BOTH)) == ["done"] * 2
        with pytest.raises(AssertionError):
            await room.check()

    in_room(main, params())
