"""A step loop with a modelled pipeline on the virtual clock, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from services.worker.contract.arrays import I32
from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import HostMemory
from services.worker.engine.engine import Engine
from services.worker.engine.gate import StepGate
from services.worker.engine.invariants import check_engine
from services.worker.engine.loop import StepLoop
from services.worker.modelled.executor import FailureInjector
from services.worker.modelled.shadow_kv import TokenDraw, expected_outputs
from services.worker.pipeline.pipeline import PipelineExecutor
from services.worker.sequences.config import AddRefusal, EngineConfig, NewSequence
from services.worker.sequences.events import StepEvents
from shared.cost import CostModel
from shared.layers import even_split
from shared.types import FinishReason
from sim.devices.channel import ModelledLink
from sim.devices.modelled_pipeline import ModelledStages, PipelineParams, modelled_stages
from tests.support.engine_builders import engine_config, make_engine, per_token
from tests.support.engine_live import FLAT_COST, STEP_S

NUM_LAYERS = 12


@dataclass
class LivePipeline:
    """An engine on a pipeline, and what it said of each stream."""

    engine: Engine
    loop: StepLoop
    gate: StepGate
    stages: ModelledStages
    executor: PipelineExecutor
    draw: TokenDraw
    texts: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, FinishReason] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    """Those that succeeded."""
    num_moved: int = 0
    """Blocks that such batches have copied from beyond a limit."""
    task: asyncio.Task[None] | None = None

    def add(self, new: NewSequence) -> None:
        assert not isinstance(self.engine.residents.add(new), AddRefusal)
        self.texts[new.stream] = []
        self.loop.wake()

    def say(self, events: StepEvents) -> None:
        for stream, first, token, finish in zip(
            *(c.tolist() for c in (events.stream, events.first_index, events.tokens, events.finish)), strict=True
        ):
            assert stream not in self.ends, "an event after the end"
            if token >= 0:
                assert first == len(self.texts[stream]), "a token is lost or doubled"
                self.texts[stream].append(token)
            if finish:
                self.ends[stream] = FinishReason(finish)

    def note(self, batch: Batch, _output: BatchOutput) -> None:
        check_engine(self.engine)
        self.batches.append(batch)
        self.num_moved += int((batch.copies.source >= self.engine.capacity_blocks).sum())

    def undisturbed(self, new: NewSequence) -> list[int]:
        prompt, sampling = new.prompt.astype(np.int32), new.sampling
        return [int(t) for t in expected_outputs(prompt, prompt[:0], sampling.max_tokens, sampling.seed, self.draw)]

    async def until_idle(self) -> None:
        assert self.task is not None
        while self.engine.table.num_live and not self.task.done():
            await asyncio.sleep(STEP_S)
        await asyncio.sleep(STEP_S)


@asynccontextmanager
async def live_pipeline(
    num_stages: int,
    *,
    scheduler: str = "chunked",
    num_blocks: int = 200,
    config: EngineConfig | None = None,
    cost: CostModel = FLAT_COST,
    link: ModelledLink | None = None,
    failures: Sequence[FailureInjector | None] = (),
    num_host_blocks: int = 0,
    on_step: Callable[[], None] = lambda: None,
) -> AsyncIterator[LivePipeline]:
    """Run an engine inside the block; it is closed, and its loop awaited, at the end."""
    config = config or engine_config(num_lanes=num_stages)
    engine = make_engine(
        scheduler,
        num_blocks=num_blocks,
        config=config,
        num_host_blocks=num_host_blocks,
        block_copy_s=0.01,
        cost=per_token(STEP_S),
    )
    draw = TokenDraw.of_vocabulary(config.vocab_size, config.eos_token_ids)
    params = PipelineParams(
        cost=cost,
        num_layers=NUM_LAYERS,
        ranges=even_split(NUM_LAYERS, num_stages),
        num_blocks=num_blocks,
        block_size=config.block_size,
        draw=draw,
        link=link or ModelledLink(),
        host=HostMemory(num_host_blocks, 1024, 0.01) if num_host_blocks else None,
        verify_ratio=1.0,
    )
    stages, gate, now = modelled_stages(params, failures), StepGate(), asyncio.get_running_loop().time

    def lose(ids: I32) -> None:
        for device in stages.devices:
            device.kv.poison(ids)

    engine.blocks.on_lost = lose
    executor = PipelineExecutor(stages, now)

    def note(batch: Batch, output: BatchOutput) -> None:
        live.note(batch, output)
        on_step()

    loop = StepLoop(engine, executor, lambda events: live.say(events), now, gate, on_step=note)
    live = LivePipeline(engine, loop, gate, stages, executor, draw)
    live.task = asyncio.create_task(loop.run())
    try:
        yield live
    finally:
        loop.close()
        try:
            await live.task
        finally:
            await executor.close()
