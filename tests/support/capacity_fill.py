"""How many blocks of KV requests really get at a worker: as many as there are, when more want to grow than can."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

from services.worker.engine.stats import take_stats
from services.worker.serving.service import WorkerService
from sim.requests import SimAnswer, SimRequest

BLOCKS_EACH = 10
"""That a request grows to."""
LOOK_S = 0.0005


async def fill(
    service: WorkerService, ask: Callable[[SimRequest], Awaitable[SimAnswer]], num_blocks: int, block_size: int
) -> int:
    """Send requests that want twice the blocks that there should be; return how many were in use at most.

    They come in with two thirds of theirs, and grow until somebody has to give way. All of them end.

    Args:
        service: of the worker; it has nothing to do, and is the only one that takes requests.
        ask: sends a request and waits for its answer.
        num_blocks: that it should have.
        block_size: tokens of each.
    """
    rng, count, most = np.random.default_rng(num_blocks), 2 * num_blocks // BLOCKS_EACH, 0
    lengths = rng.integers(BLOCKS_EACH * block_size // 2, BLOCKS_EACH * block_size * 2 // 3, count)
    prompts = [rng.integers(256, 380, length) for length in lengths]
    service.engine.reorders = True  # so that all may wait here
    async with service._machine.gate.exclusive():  # nobody runs before all are here
        asked = [
            asyncio.ensure_future(ask(SimRequest(f"fill{i}", prompt, BLOCKS_EACH * block_size - prompt.size, seed=i)))
            for i, prompt in enumerate(prompts)
        ]
        while take_stats(service.engine).num_waiting < count:
            await asyncio.sleep(LOOK_S)
    while not all(task.done() for task in asked):
        most = max(most, take_stats(service.engine).num_used_blocks)
        await asyncio.sleep(LOOK_S)
    for task, prompt in zip(asked, prompts, strict=True):
        assert len(task.result().tokens) == BLOCKS_EACH * block_size - prompt.size
    return most
