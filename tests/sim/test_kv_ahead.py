"""Before a group dissolves its KV moves while it serves: what is left is little, and nobody's text changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from services.worker.engine.engine import Engine
from services.worker.engine.stats import take_stats
from services.worker.kv_moves.kv_table import KvTable
from shared.ids import WorkerId
from shared.layers import even_split
from sim.cluster import ClusterParams
from sim.devices import modelled_network
from sim.devices.channel import ModelledLink
from sim.devices.modelled_exchange import Share, carry
from sim.plan_driver import alone
from tests.support.group_room import BOTH, NUM_LAYERS, Room, draw_requests, group_params, open_room
from tests.support.hand_planner import states
from tests.support.seeds import first_of

pytestmark = pytest.mark.virtual_time

SLOW = 4e6
"""Bytes per second: 4 ms for half of a block's layers."""


def params(bytes_per_s: float = SLOW, num_pages: int = 3200, num_workers: int = 2) -> ClusterParams:
    return group_params(num_workers, num_pages=num_pages, link=ModelledLink(bytes_per_s=bytes_per_s))


def most_ahead(room: Room, names: tuple[WorkerId, ...] = BOTH) -> int:
    """Return the largest group in which each worker has memory for all layers of its share."""
    layers = even_split(NUM_LAYERS, len(names))

    def suffices(count: int) -> bool:
        found = (room.device(i).blocks_ahead(own, count) for i, own in enumerate(layers))
        return all(blocks * len(names) >= count for blocks in found)

    count = 1
    while suffices(count + 1):
        count += 1
    return count


async def form(room: Room, names: tuple[WorkerId, ...] = BOTH, *, is_ahead: bool = True) -> int:
    """Let workers be a group with everything beside, and memory for KV ahead or not; return the blocks that it has."""
    layers = even_split(NUM_LAYERS, len(names))
    assert states(await room.driver.drop(names, layers)) == ["done"] * len(names)
    await asyncio.sleep(0.6)
    count = most_ahead(room, names) if is_ahead else room.beside_blocks(len(names))
    assert states(await room.driver.load(names, count)) == ["done"] * len(names)
    await asyncio.sleep(0.6)
    return count


def num_computed_again(room: Room) -> int:
    return sum(worker.service.engine.totals.num_recomputed_tokens for worker in room.cluster.workers)


@dataclass
class Parting:
    """What happened while a group dissolved under load."""

    stood_s: float
    """For how long nobody was served."""
    num_tokens: int
    """Said while KV moved."""
    num_again: int
    """Tokens that were computed again."""


async def part(
    num_workers: int, num_pages: int, num_requests: int, is_loaded: Callable[[Engine, int], bool], *, is_ahead: bool
) -> Parting:
    """Dissolve a group that serves: with memory for KV ahead, or without, so that all of it moves while it stands.

    Args:
        num_workers: of the group.
        num_pages: of each.
        num_requests: that it is asked.
        is_loaded: from the leader's engine and the blocks that a worker has alone, whether it begins.
        is_ahead: there is memory for KV ahead.
    """
    names, loop = tuple(WorkerId(f"w{i}") for i in range(num_workers)), asyncio.get_running_loop()
    async with open_room(params(num_pages=num_pages, num_workers=num_workers)) as room:
        alone_blocks = min(room.device(i).whole_blocks for i in range(num_workers))
        count = await form(room, names, is_ahead=is_ahead)
        assert num_workers == 2 or count > 2 * alone_blocks
        room.ask(*(replace(each, num_output=100) for each in draw_requests(1, num_requests)))
        engine = room.cluster.workers[0].service.engine
        while not is_loaded(engine, alone_blocks):
            await asyncio.sleep(0.01)
        again, seen = num_computed_again(room), engine.totals.num_generated_tokens
        plan_id, answers = await room.driver.prepare(*(alone(room.driver.reports[name]) for name in names))
        assert states(answers) == ["prepared"] * num_workers, answers
        assert is_loaded(engine, alone_blocks)
        num_tokens = engine.totals.num_generated_tokens - seen
        began_s = loop.time()
        assert states(await room.driver.finish(plan_id, names, commit=True)) == ["done"] * num_workers
        stood_s = loop.time() - began_s
        await room.check()
        return Parting(stood_s, num_tokens, num_computed_again(room) - again)


async def test_readers_go_on_while_kv_moves_and_little_is_left_when_the_group_dissolves() -> None:
    """The same load twice: with memory for KV ahead, and without, where all of it moves while nobody is served."""

    def is_loaded(engine: Engine, _: int) -> bool:
        return take_stats(engine).num_running == 12 and engine.totals.num_generated_tokens >= 150

    ahead, at_once = [await part(2, 3200, 12, is_loaded, is_ahead=is_ahead) for is_ahead in (True, False)]
    assert ahead.stood_s < at_once.stood_s / 3
    assert ahead.num_tokens > 10 * (at_once.num_tokens + 1), "it served while KV moved"
    assert ahead.num_again <= at_once.num_again <= 12 * 16, "at most a block of each is computed again"


@pytest.mark.slow
async def test_a_group_that_uses_more_than_one_of_its_workers_has_alone_stands_still_hardly_longer() -> None:
    """Each needs memory for all layers of its share only: the same load with all moving at once, and copied ahead."""

    def is_loaded(engine: Engine, alone_blocks: int) -> bool:
        return take_stats(engine).num_used_blocks > 1.2 * alone_blocks

    ahead, at_once = [await part(4, 1300, 20, is_loaded, is_ahead=is_ahead) for is_ahead in (True, False)]
    assert ahead.stood_s < at_once.stood_s / 3


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("seed", first_of(range(10), in_ci=5))
async def test_texts_are_the_same_whatever_becomes_of_what_is_copied_ahead(seed: int, num_workers: int) -> None:
    """Plans are given up while KV moves, connections are cut and heal, and requests come; all at random."""
    names = tuple(WorkerId(f"w{i}") for i in range(num_workers))
    link_bytes_per_s = float(np.random.default_rng(seed).choice([5e5, 4e6, 1e9]))
    async with open_room(params(link_bytes_per_s, num_workers=num_workers)) as room:
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


async def test_blocks_that_are_said_to_be_there_and_are_not_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof that texts depend on every copy: with one of each round left out, other words are said."""

    def forget_one(table: KvTable, members: Sequence[Share]) -> None:
        lots = (replace(lot, ids=lot.ids[1:], names=lot.names[1:], places=lot.target_ids[1:]) for lot in table.lots)
        carry(replace(table, lots=tuple(lots)), members)

    monkeypatch.setattr(modelled_network, "carry", forget_one)

    async with open_room(params()) as room:
        await form(room)
        room.ask(*(replace(each, num_output=90) for each in draw_requests(1, 12)))
        await asyncio.sleep(0.5)
        assert states(await room.driver.restore(BOTH)) == ["done"] * 2
        with pytest.raises(AssertionError):
            await room.check()
