"""Agents over modelled links: KV moves whole and once, whatever happens to wires, messages, requests and workers."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest

from services.worker.transfer.modelled_link import ModelledWire
from sim.virtual_time import run
from tests.support.move_cluster import MoveCluster


async def chaos(seed: int) -> MoveCluster:
    random = np.random.default_rng(10_000 + seed)
    cluster = MoveCluster(seed, num_workers=int(random.integers(2, 4)), num_blocks=int(random.integers(8, 60)))
    cluster.shake_ratio = float(random.choice([0.0, 0.3]))
    for worker in cluster.workers:
        worker.memory.fails_ratio = float(random.choice([0.0, 0.0, 0.02]))
    await cluster.connect()
    count, kills = len(cluster.workers), int(random.random() < 0.3)
    for _ in range(int(random.integers(5, 60))):
        await _happen(cluster, random, count)
        await asyncio.sleep(float(random.exponential(0.2)))
        await cluster.connect() if random.random() < 0.3 else None
    if kills:
        cluster.kill(int(random.integers(count)))
        await asyncio.sleep(float(random.exponential(1.0)))
    await cluster.settle()
    cluster.judge()
    for worker in cluster.workers:
        if not worker.is_dead:
            await worker.process.start(worker.agent.close(), name="close")
    return cluster


async def _happen(cluster: MoveCluster, random: np.random.Generator, count: int) -> None:
    kind = random.random()
    wires: list[ModelledWire] = list(cluster.wires.values())
    if kind < 0.5:
        source, target = random.permutation(count)[:2].tolist()
        await cluster.begin(
            source,
            target,
            int(random.integers(1, 12)),
            by_chunk=bool(random.random() < 0.5),
            epoch=int(random.integers(1, 3)),
            slack_s=float(random.normal()),
        )
    elif kind < 0.62 and cluster.moves:
        worker, move, _ = cluster.moves[int(random.integers(len(cluster.moves)))]
        await worker.act(lambda: move.cancel("cancelled"))
        if random.random() < 0.5:
            await worker.act(lambda: worker.memory.release(move.spec.request_id))
    elif kind < 0.72 and wires:
        wires[int(random.integers(len(wires)))].cut()
    elif kind < 0.82:
        for wire in wires:
            wire.heal()
    elif kind < 0.86 and wires:
        wires[int(random.integers(len(wires)))].damage(int(random.integers(2)))
    elif kind < 0.9 and wires:
        wires[int(random.integers(len(wires)))].extra_latency_s = float(random.choice([0.0, 0.3]))
    elif kind < 0.92:
        worker = cluster.workers[int(random.integers(count))]
        await worker.act(partial(worker.agent.raise_epoch, 2))


@pytest.mark.parametrize("part", range(6))
def test_moves_survive_chaos_or_end_cleanly(part: int) -> None:
    committed = aborted = 0
    for seed in range(part * 10, (part + 1) * 10):
        try:
            cluster = run(chaos(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        committed += sum(outcome.is_committed for outcome in cluster.outcomes.values())
        aborted += sum(not outcome.is_committed for outcome in cluster.outcomes.values())
    assert committed > 20
    assert aborted > 20
