"""A step loop with the modelled executor on the virtual clock, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.worker.contract.executor import HostMemory
from services.worker.engine.engine import Engine
from services.worker.engine.gate import StepGate
from services.worker.engine.loop import StepLoop
from services.worker.modelled.executor import FailureInjector, ModelledExecutor
from services.worker.modelled.shadow_kv import ShadowKv, TokenDraw
from services.worker.sequences.config import AddRefusal, EngineConfig, NewSequence
from services.worker.sequences.events import StepEvents
from shared.cost import CostModel
from shared.types import FinishReason
from tests.support.engine_builders import engine_config, make_engine, per_token

STEP_S = 0.1
FLAT_COST = CostModel(g0_s=STEP_S, b0_s=0, g1_s=0, b1_s=0, d_s=0, a_s=0)
"""Every step takes a tenth of a second."""


@dataclass
class LiveEngine:
    """One engine that runs, and everything that it said, with the time."""

    engine: Engine
    loop: StepLoop
    gate: StepGate
    executor: ModelledExecutor
    kv: ShadowKv
    said: list[tuple[float, StepEvents]]

    def add(self, new: NewSequence) -> int:
        row = self.engine.residents.add(new)
        assert not isinstance(row, AddRefusal)
        self.loop.wake()
        return row

    def cancel(self, new: NewSequence) -> bool:
        found = self.engine.residents.cancel(new.request_id, new.attempt)
        self.loop.wake()
        return found

    def text(self, new: NewSequence) -> list[int]:
        columns = [(e.stream, e.tokens) for _, e in self.said]
        return [int(t) for s, ts in columns for t in ts[s == new.stream] if t >= 0]

    def ends(self, new: NewSequence) -> list[tuple[float, FinishReason]]:
        """When, and how, the sequence ended."""
        return [
            (at_s, FinishReason(finish))
            for at_s, events in self.said
            for finish in events.finish[events.stream == new.stream].tolist()
            if finish
        ]

    async def until_idle(self) -> None:
        while self.engine.table.num_live:
            await asyncio.sleep(STEP_S)
        await asyncio.sleep(STEP_S)


@asynccontextmanager
async def live_engine(
    *,
    scheduler: str = "chunked",
    num_blocks: int = 64,
    config: EngineConfig | None = None,
    failure: FailureInjector | None = None,
    num_host_blocks: int = 0,
    block_copy_s: float = 0.01,
) -> AsyncIterator[LiveEngine]:
    """Run an engine inside the block; it is closed, and its loop awaited, at the end."""
    config = config or engine_config()
    engine = make_engine(
        scheduler,
        num_blocks=num_blocks,
        config=config,
        num_host_blocks=num_host_blocks,
        block_copy_s=block_copy_s,
        cost=per_token(STEP_S),
    )
    draw, gate = TokenDraw.of_vocabulary(config.vocab_size, config.eos_token_ids), StepGate()
    kv = ShadowKv(num_blocks, config.block_size, draw, num_host_blocks=num_host_blocks, verify_ratio=1.0)
    engine.blocks.on_lost = kv.poison
    host = HostMemory(num_host_blocks, 1024, block_copy_s) if num_host_blocks else None
    executor = ModelledExecutor(FLAT_COST, kv, host=host, failure=failure, overlaps=config.overlaps)
    said: list[tuple[float, StepEvents]] = []
    now = asyncio.get_running_loop().time

    def say(events: StepEvents) -> None:
        if ((events.tokens >= 0) | (events.finish != 0)).any():  # more than that a sequence has been started
            said.append((now(), events))

    loop = StepLoop(engine, executor, say, now, gate)
    task = asyncio.create_task(loop.run())
    try:
        yield LiveEngine(engine, loop, gate, executor, kv, said)
    finally:
        loop.close()
        await task
        await executor.close()
