"""Readers first in live groups: whoever gives way or pauses there, every text is what a worker says undisturbed."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.contract.batch import Batch
from services.worker.contract.executor import Executor
from services.worker.engine.engine import Engine
from shared.types import ReaderTarget
from tests.support.engine_builders import engine_config, make_engine, per_token
from tests.support.live_groups import HALVES, Texts, add_request, dissolve, form, live_devices, run_engine, tokens_of
from tests.support.runners import KERNELS, MIB
from tests.support.seeds import first_of
from tests.support.waiting import rounds

pytestmark = [pytest.mark.kernels, pytest.mark.slow]

NUM = 12
NUM_BLOCKS = 20
"""Of 16 tokens: KV for a third of the requests."""

SLOW_READS = per_token(1e-3, read_s=5e-3)
"""As the policy believes, steps of as many decodes as memory holds are slower than readers, those of a few are not."""

STEP_S = 0.05
"""As the engine's clock has it."""


def make(scheduler: str, executor: Executor, num_blocks: int) -> Engine:
    """Return an engine of a few rows, with the host memory that its executor has."""
    sizes = {"max_sequences": NUM, "max_batch_tokens": 48, "max_batch_rows": 6, "vocab_size": 384, "block_size": 16}
    config = engine_config(**sizes, num_lanes=executor.depth)
    return make_engine(scheduler, num_blocks=num_blocks, config=config, host=executor.capacity.host, cost=SLOW_READS)


async def serve(engine: Engine, executor: Executor, seed: int) -> Texts:
    """Return the texts of requests of up to 150 tokens, whose readers are of all kinds.

    The clock counts steps, so that who gives way does not depend on how fast they are.
    """
    rng, done = np.random.default_rng(seed), list[Batch]()
    for name in range(NUM):
        reader = ReaderTarget(ttft_s=float(rng.uniform(0.01, 1.0)), speed_tokens_per_s=float(rng.uniform(2, 20)))
        prompt = tokens_of(100 * seed + name, int(rng.integers(4, 110)))
        add_request(engine, name, prompt, int(rng.integers(8, 40)), qoe=reader, arrival_s=0.0)
    return await run_engine(engine, executor, lambda batch, _: done.append(batch), lambda: STEP_S * len(done))


@pytest.mark.parametrize("host_memory", [0, MIB], ids=["computed again", "to the host"])
@pytest.mark.parametrize("kernels", sorted({KERNELS, "torch"}))
@pytest.mark.parametrize("seed", first_of(range(3), in_ci=1))
async def test_texts_are_the_same_whoever_gives_way_or_pauses(seed: int, kernels: str, host_memory: int) -> None:
    """As a worker that is alone says them, by first come, first served."""
    wanted = {"num_preemptions", "num_pauses"}
    wanted |= {"num_swap_outs", "num_brought_back_tokens"} if host_memory else {"num_recomputed_tokens"}
    async with live_devices(2, kernels=kernels, host_memory_bytes=host_memory, max_rows=NUM) as devices:
        alone = (await devices[0].alone()).executor
        expected = await serve(make("chunked", alone, 200), alone, seed)
        group = await form(devices, HALVES)
        for _ in rounds(f"there were {wanted}"):
            engine = make("andes", group.executor, NUM_BLOCKS)
            assert await serve(engine, group.executor, seed) == expected
            if all(getattr(engine.totals, name) for name in wanted):
                break
        await dissolve(group.executor, devices)
