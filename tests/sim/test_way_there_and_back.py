"""Each seed: KV is attended where it lies while a group forms, and a restore is given up for a new burst.

A group's whole life under load: live exchange, parameters beside, the burst that ends that, and the way back; every
text is that of an undisturbed run, and nothing is left. Splits are of two blocks, since prompts are short.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from services.worker.blocks import remote_kv
from services.worker.kv_moves import exchange_modes
from shared.systems import KvExchange
from sim.cluster import ClusterParams
from sim.devices.channel import ModelledLink
from sim.requests import SimRequest
from tests.support.group_room import BOTH, HALVES, NUM_LAYERS, PAGE_BYTES, Room, group_params, open_room
from tests.support.hand_planner import states
from tests.support.seeds import first_of

LOAD_S = 1.0
"""In which half of the parameters come."""
NUM_SEEDS = 20


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (remote_kv, exchange_modes):
        monkeypatch.setattr(module, "SPLIT_KEYS", 32)


def params(rng: np.random.Generator) -> ClusterParams:
    """Links on which the KV of a few sequences takes from a tenth of a second to some."""
    rate = float(10 ** rng.uniform(5.5, 6.8))
    return group_params(
        system="kunserve-v1",
        num_pages=2400,
        load_bytes_per_s=NUM_LAYERS * 20 * PAGE_BYTES / LOAD_S,
        link=ModelledLink(bytes_per_s=rate),
        kv_exchange=KvExchange.LIVE,
    )


def draw(rng: np.random.Generator, names: Iterator[int], count: int) -> list[SimRequest]:
    """Requests of 3 to 11 blocks when they are done."""
    return [
        SimRequest(f"r{next(names)}", rng.integers(300, 30_000, int(rng.integers(40, 90))), int(rng.integers(40, 90)))
        for _ in range(count)
    ]


@pytest.mark.virtual_time
@pytest.mark.parametrize("seed", first_of(range(NUM_SEEDS), 6))
async def test_kv_is_attended_elsewhere_and_a_restore_is_given_up_and_no_text_changes(seed: int) -> None:
    rng, names = np.random.default_rng(seed), iter(range(1000))

    async def decoding(room: Room, count: int) -> None:
        """Ask for more, and wait until so many are in the middle of their answers."""
        room.ask(*draw(rng, names, count))
        engines = [worker.service.engine for worker in room.cluster.workers]
        before = sum(engine.totals.num_generated_tokens for engine in engines)
        while sum(engine.totals.num_generated_tokens for engine in engines) < before + 8 * count:
            await asyncio.sleep(0.002)

    async with open_room(params(np.random.default_rng([seed, 1]))) as room:
        await decoding(room, int(rng.integers(6, 12)))
        assert states(await room.driver.drop(BOTH, HALVES)) == ["done"] * 2
        await decoding(room, int(rng.integers(1, 4)))
        await asyncio.sleep(0.6)

        grouped = min(room.device(i).num_blocks(HALVES[i]) for i in range(2))
        ahead = min(room.device(i).whole_blocks for i in range(2))
        assert (
            states(await room.driver.load(BOTH, ahead if rng.random() < 0.5 else room.beside_blocks())) == ["done"] * 2
        )
        await asyncio.sleep(float(rng.uniform(0, 0.9 * LOAD_S)))
        assert room.device(0).loaded_ratio < 1, "the restore is under way"
        room.ask(*draw(rng, names, int(rng.integers(4, 12))))  # the burst
        assert states(await room.driver.unload(BOTH, grouped)) == ["done"] * 2
        assert (room.num_blocks(0), room.device(0).resident) == (grouped, HALVES[0])
        await decoding(room, 2)

        assert states(await room.driver.restore(BOTH)) == ["done"] * 2
        assert room.cluster.network.num_remote_steps > 0, "KV was attended where it lay"
        room.ask(*draw(rng, names, 4))
        await room.check()
