"""A small model in stages, and texts that an engine gets of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.worker.engine.engine import Engine
from services.worker.executor.thread import ThreadExecutor
from services.worker.pipeline.pipeline import PipelineExecutor
from services.worker.pipeline.runner_stage import RunnerStage
from shared.layers import LayerRange
from tests.support.live_groups import SHAPES, OnStep, Texts, serve
from tests.support.runners import open_runner


def stages_of(name: str, ranges: Sequence[LayerRange], dtype: str, kernels: str, **changes: Any) -> list[RunnerStage]:
    settings: dict[str, Any] = {"deterministic": True, "dtype": dtype, "kernels": kernels, **changes}
    return [RunnerStage(open_runner(SHAPES[name], layers=layers, **settings)) for layers in ranges]


async def texts_of(
    engine: Engine, executor: PipelineExecutor | ThreadExecutor, on_step: OnStep = lambda _batch, _output: None
) -> Texts:
    """As `serve`; the executor is closed then."""
    texts = await serve(engine, executor, on_step, num_tokens=12)
    await executor.close()
    return texts
