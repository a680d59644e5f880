"""A conversation and a document in one KV block of a real model: each text is what a worker says undisturbed."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.blocks.shared_blocks import SharedBlocks
from services.worker.contract.executor import Executor
from services.worker.engine.engine import Engine
from shared.api_keys import Tier
from tests.support.engine_builders import engine_config, make_engine, per_token
from tests.support.live_groups import Texts, add_request, live_devices, run_engine, tokens_of
from tests.support.runners import KERNELS, MIB

pytestmark = [pytest.mark.kernels, pytest.mark.slow]

NUM, NUM_BLOCKS = 14, 16
"""Of 16 tokens: KV for half of the requests."""


def make(scheduler: str, executor: Executor, num_blocks: int, *, shares_blocks: bool) -> Engine:
    """Return an engine of a few rows, with the host memory that its executor has."""
    sizes = {"max_sequences": NUM, "max_batch_tokens": 48, "max_batch_rows": 10, "vocab_size": 384, "block_size": 16}
    config = engine_config(**sizes, shares_blocks=shares_blocks)
    host = executor.capacity.host
    return make_engine(scheduler, num_blocks=num_blocks, config=config, host=host, cost=per_token(1e-3))


async def serve(engine: Engine, executor: Executor, seed: int) -> Texts:
    rng = np.random.default_rng(seed)
    for name in range(NUM):
        prompt, tier = tokens_of(100 * seed + name, int(rng.integers(4, 14))), (Tier.DEFAULT, Tier.FLEX)[name % 2]
        add_request(engine, name, prompt, int(rng.integers(25, 60)), tier=tier, arrival_s=0.0)
    return await run_engine(engine, executor)


@pytest.mark.parametrize("host_memory", [0, MIB], ids=["computed again", "to the host"])
@pytest.mark.parametrize("kernels", sorted({KERNELS, "torch"}))
async def test_texts_are_the_same_to_the_bit(kernels: str, host_memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic kernels, so that a wrong bit shows in what is sampled; in these seeds requests meet."""
    monkeypatch.setattr(SharedBlocks, "_num_lacking", lambda _blocks, _held, ends: ends.size)  # seldom else
    num_opened = num_met = 0
    async with live_devices(1, kernels=kernels, host_memory_bytes=host_memory, max_rows=NUM) as devices:
        executor = (await devices[0].alone()).executor
        for seed, scheduler in enumerate(("bros", "chunked", "bros", "chunked")):
            expected = await serve(make("chunked", executor, 200, shares_blocks=False), executor, seed)
            engine = make(scheduler, executor, NUM_BLOCKS, shares_blocks=True)
            assert await serve(engine, executor, seed) == expected
            num_opened += engine.totals.num_opened_blocks
            num_met += engine.totals.num_met_blocks
    assert num_opened > 4
    assert num_met > 0
