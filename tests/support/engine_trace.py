"""A run of the step loop on the virtual clock, and the hash of all that it did.

`python -m tests.support.engine_trace SEED` prints the hash and the number of events.
The trace has the columns of every batch, every block of a table, every event, and the time of each.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys

import numpy as np

from services.worker.contract.batch import Batch
from services.worker.engine.engine import Engine
from services.worker.engine.gate import StepGate
from services.worker.engine.loop import StepLoop
from services.worker.modelled.executor import ModelledExecutor
from services.worker.modelled.shadow_kv import ShadowKv, TokenDraw
from services.worker.sequences.events import StepEvents
from shared.cost import CostModel
from sim.virtual_time import run
from tests.support.engine_builders import engine_config, make_engine, new_sequence

COST = CostModel(g0_s=0.010, b0_s=0.0001, g1_s=0.005, b1_s=0.0002, d_s=1e-6, a_s=1e-8)


class Trace:
    """Takes note of everything, in order."""

    def __init__(self) -> None:
        self.num_events = 0
        self._hash = hashlib.sha256()

    def batch(self, batch: Batch) -> str | None:
        delta = batch.table_delta
        self._note(batch.rows, batch.num_tokens, batch.start, batch.tokens, delta.row, delta.index, delta.block_id)
        return "struck" if batch.step_id % 17 == 11 and batch.rows.size > 1 else None

    def events(self, events: StepEvents) -> None:
        self.num_events += len(events)
        self._note(events.stream, events.first_index, events.tokens, events.finish)

    def digest(self) -> str:
        return self._hash.hexdigest()

    def _note(self, *columns: np.ndarray) -> None:
        self._hash.update(repr((asyncio.get_running_loop().time(), [c.tolist() for c in columns])).encode())


async def _traffic(engine: Engine, loop: StepLoop, random: np.random.Generator) -> None:
    clock = asyncio.get_running_loop()
    for name in range(60):
        await asyncio.sleep(float(random.exponential(0.05)))
        num_prompt, max_tokens = int(random.integers(1, 40)), int(random.integers(1, 30))
        engine.residents.add(new_sequence(name, num_prompt=num_prompt, max_tokens=max_tokens, arrival_s=clock.time()))
        if random.random() < 0.2:
            new = new_sequence(int(random.integers(name + 1)))
            engine.residents.cancel(new.request_id, new.attempt)
        loop.wake()
    while engine.table.num_live:
        await asyncio.sleep(0.5)
    loop.close()


async def _run(seed: int) -> tuple[str, int]:
    trace, config = Trace(), engine_config(max_model_len=96)
    engine = make_engine("chunked", num_blocks=40, config=config)
    draw = TokenDraw.of_vocabulary(config.vocab_size, config.eos_token_ids)
    executor = ModelledExecutor(COST, ShadowKv(40, config.block_size, draw, verify_ratio=0.2), failure=trace.batch)
    loop = StepLoop(engine, executor, trace.events, asyncio.get_running_loop().time, StepGate())
    async with asyncio.TaskGroup() as group:
        group.create_task(loop.run())
        group.create_task(_traffic(engine, loop, np.random.default_rng(seed)))
    await executor.close()
    return trace.digest(), trace.num_events


def trace_hash(seed: int) -> tuple[str, int]:
    """Return the hash of the whole run, and how many events it had."""
    return run(_run(seed))


if __name__ == "__main__":
    print(*trace_hash(int(sys.argv[1])))
