"""A step loop with a modelled executor on the virtual clock, for tests: of one device, or of a pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.worker.contract.arrays import I32
from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import Executor, HostMemory
from services.worker.engine.engine import Engine
from services.worker.engine.gate import StepGate
from services.worker.engine.invariants import check_engine
from services.worker.engine.loop import StepLoop
from services.worker.modelled.executor import FailureInjector, ModelledExecutor
from services.worker.modelled.shadow_kv import ShadowKv, TokenDraw, expected_outputs
from services.worker.pipeline.pipeline import PipelineExecutor
from services.worker.sequences.config import AddRefusal, NewSequence
from services.worker.sequences.events import StepEvents
from shared.cost import CostModel
from shared.layers import even_split
from shared.types import FinishReason
from sim.devices.channel import ModelledLink
from sim.devices.modelled_pipeline import ModelledStages, PipelineParams, modelled_stages
from tests.support.engine_builders import make_engine, per_token

STEP_S = 0.1
FLAT_COST = CostModel(g0_s=STEP_S, b0_s=0, g1_s=0, b1_s=0, d_s=0, a_s=0)
"""Every step takes a tenth of a second."""
NUM_LAYERS = 12
"""Of the model on a pipeline."""


@dataclass
class LiveEngine:
    """One engine that runs, and everything that it said; its invariants are checked after each step."""

    engine: Engine
    executor: Executor
    draw: TokenDraw
    gate: StepGate = field(default_factory=StepGate)
    said: list[tuple[float, StepEvents]] = field(default_factory=list)
    """With the time."""
    texts: dict[int, list[int]] = field(default_factory=dict)
    """By stream."""
    heard_s: dict[int, list[float]] = field(default_factory=dict)
    """When each of its tokens was said."""
    ends: dict[int, FinishReason] = field(default_factory=dict)
    ended_s: dict[int, float] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    """Those that succeeded."""
    num_moved: int = 0
    """Blocks that such batches have copied from beyond a limit."""

    def __post_init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self.loop = StepLoop(self.engine, self.executor, self._say, self._now, self.gate, on_step=self._note)
        self.task = asyncio.create_task(self.loop.run())

    def add(self, new: NewSequence) -> NewSequence:
        assert not isinstance(self.engine.registry.add(new), AddRefusal)
        self.texts[new.stream], self.heard_s[new.stream] = [], []
        self.loop.wake()
        return new

    def cancel(self, new: NewSequence) -> bool:
        found = self.engine.registry.cancel(new.request_id, new.attempt)
        self.loop.wake()
        return found

    def _say(self, events: StepEvents) -> None:
        self.said.append((self._now(), events))
        columns = (events.stream, events.first_index, events.tokens, events.finish)
        for stream, first, token, finish in zip(*(column.tolist() for column in columns), strict=True):
            assert stream not in self.ends, "an event after the end"
            if token >= 0:
                assert first == len(self.texts[stream]), "a token is lost or doubled"
                self.texts[stream].append(token)
                self.heard_s[stream].append(self._now())
            if finish:
                self.ends[stream], self.ended_s[stream] = FinishReason(finish), self._now()

    def _note(self, batch: Batch, _output: BatchOutput) -> None:
        check_engine(self.engine)
        self.batches.append(batch)
        self.num_moved += int((batch.copies.source >= self.engine.capacity_blocks).sum())

    def undisturbed(self, new: NewSequence) -> list[int]:
        prompt, sampling = new.prompt.astype(np.int32), new.sampling
        return [int(t) for t in expected_outputs(prompt, prompt[:0], sampling.max_tokens, sampling.seed, self.draw)]

    async def until_idle(self) -> None:
        while self.engine.table.num_sequences and not self.task.done():
            await asyncio.sleep(STEP_S)
        await asyncio.sleep(STEP_S)

    async def close(self) -> None:
        """Return when the loop has ended; raises what it ended with."""
        self.loop.close()
        try:
            await self.task
        finally:
            await self.executor.close()


@dataclass
class LivePipeline(LiveEngine):
    """An engine on a pipeline."""

    executor: PipelineExecutor
    stages: ModelledStages = field(kw_only=True)


@asynccontextmanager
async def live_engine(
    *, cost: CostModel = FLAT_COST, failure: FailureInjector | None = None, verify_ratio: float = 1.0, **engine: Any
) -> AsyncIterator[LiveEngine]:
    """Run an engine of `make_engine` inside the block; it is closed, and its loop awaited, at the end."""
    made, draw, host = _parts(**engine)
    num_blocks, num_host_blocks = made.blocks.num_usable, 0 if host is None else host.num_blocks
    kv = ShadowKv(num_blocks, made.config.block_size, draw, num_host_blocks=num_host_blocks, verify_ratio=verify_ratio)
    made.blocks.on_lost = kv.poison
    executor = ModelledExecutor(cost, kv, host=host, failure=failure, overlaps=made.config.overlaps)
    live = LiveEngine(made, executor, draw)
    try:
        yield live
    finally:
        await live.close()


@asynccontextmanager
async def live_pipeline(
    num_stages: int,
    *,
    num_blocks: int = 200,
    cost: CostModel = FLAT_COST,
    link: ModelledLink | None = None,
    failures: Sequence[FailureInjector | None] = (),
    **engine: Any,
) -> AsyncIterator[LivePipeline]:
    """Run an engine on a pipeline inside the block; it is closed, and its loop awaited, at the end."""
    made, draw, host = _parts(num_blocks=num_blocks, num_lanes=num_stages, **engine)
    params = PipelineParams(
        cost=cost,
        num_layers=NUM_LAYERS,
        ranges=even_split(NUM_LAYERS, num_stages),
        num_blocks=num_blocks,
        block_size=made.config.block_size,
        draw=draw,
        link=link or ModelledLink(),
        host=host,
        verify_ratio=1.0,
    )
    stages = modelled_stages(params, failures)

    def lose(ids: I32) -> None:
        for device in stages.devices:
            device.kv.poison(ids)

    made.blocks.on_lost = lose
    live = LivePipeline(made, PipelineExecutor(stages, asyncio.get_running_loop().time), draw, stages=stages)
    try:
        yield live
    finally:
        await live.close()


def _parts(*, block_copy_s: float = 0.01, **engine: Any) -> tuple[Engine, TokenDraw, HostMemory | None]:
    made = make_engine(block_copy_s=block_copy_s, cost=per_token(STEP_S), **engine)
    draw = TokenDraw.of_vocabulary(made.config.vocab_size, made.config.eos_token_ids)
    return made, draw, None if made.swapping is None else made.swapping._memory
