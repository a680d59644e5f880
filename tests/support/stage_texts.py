"""A small model in one piece and in stages, and texts that an engine gets of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.engine.engine import Engine
from services.worker.engine.gate import StepGate
from services.worker.engine.loop import StepLoop
from services.worker.executor.thread import ThreadExecutor
from services.worker.pipeline.pipeline import PipelineExecutor
from services.worker.pipeline.runner_stage import RunnerStage
from services.worker.sequences.events import StepEvents
from shared.layers import LayerRange
from tests.support.checkpoints import CheckpointShape
from tests.support.engine_builders import make_engine, new_sequence
from tests.support.runners import open_runner

SHAPES = {
    "llama": CheckpointShape(num_layers=4, hidden_size=32, num_heads=2, num_kv_heads=1),
    "tied, learned positions": CheckpointShape(family="opt", tied=True, num_layers=3, hidden_size=32, num_heads=2),
    "projected embedding": CheckpointShape(
        family="opt", num_layers=3, hidden_size=32, num_heads=2, extra=(("word_embed_proj_dim", 24),)
    ),
}


def stages_of(name: str, ranges: Sequence[LayerRange], dtype: str, kernels: str, **changes: Any) -> list[RunnerStage]:
    settings: dict[str, Any] = {"deterministic": True, "dtype": dtype, "kernels": kernels, **changes}
    return [RunnerStage(open_runner(SHAPES[name], layers=layers, **settings)) for layers in ranges]


def tokens_of(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 384) for _ in range(count)]


def new_engine(num_lanes: int) -> Engine:
    return make_engine(
        num_blocks=24,
        max_sequences=8,
        max_batch_tokens=48,
        max_batch_rows=4,
        vocab_size=384,
        block_size=16,
        num_lanes=num_lanes,
    )


async def texts_of(
    engine: Engine,
    executor: PipelineExecutor | ThreadExecutor,
    on_step: Callable[[Batch, BatchOutput], None] = lambda _batch, _output: None,
) -> dict[int, list[int]]:
    """Serve six requests, two of which share a prompt and some of which sample, and return their texts."""
    texts: dict[int, list[int]] = {}

    def say(events: StepEvents) -> None:
        for stream, token in zip(events.stream.tolist(), events.tokens.tolist(), strict=True):
            if token >= 0:
                texts.setdefault(stream, []).append(token)

    now = asyncio.get_running_loop().time
    loop = StepLoop(engine, executor, say, now, StepGate(), on_step=on_step)
    for name in range(6):
        new = new_sequence(name, prompt=tokens_of(min(name, 4), 20 + 9 * name), max_tokens=12, seed=name)
        if name % 2:
            object.__setattr__(new, "sampling", new.sampling.model_copy(update={"temperature": 0.8, "top_p": 0.9}))
        assert isinstance(engine.residents.add(new), int)
    task = asyncio.create_task(loop.run())
    async with asyncio.timeout(30):
        while engine.table.num_live and not task.done():
            await asyncio.sleep(0.002)
    loop.close()
    await task
    await executor.close()
    return texts
