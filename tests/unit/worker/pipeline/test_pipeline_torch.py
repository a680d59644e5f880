"""A model split into stages: the same bits as in one piece, in one process and over sockets between threads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import BatchFailedError
from services.worker.engine.engine import Engine
from services.worker.engine.invariants import check_engine
from services.worker.executor.model_runner import ModelRunner
from services.worker.executor.thread import ThreadExecutor
from services.worker.pipeline.hidden_link import as_numpy
from services.worker.pipeline.runner_stage import RunnerStage
from services.worker.pipeline.stage_messages import Hidden
from shared.layers import LayerRange, even_split
from tests.support.live_groups import SHAPES, new_engine, tokens_of
from tests.support.runner_driver import Driver
from tests.support.runners import KERNELS, open_runner
from tests.support.stage_texts import stages_of, texts_of
from tests.support.thread_pipeline import wire_up

pytestmark = pytest.mark.kernels

MOST_BLOCKS = -(-(65 + 12 - 1) // 16)
"""That the longest request takes."""
SPLITS = {
    ("llama", (1, 3), "float32", "auto"),
    ("llama", (2, 1, 1), "bfloat16", "auto"),
    ("llama", (1, 2, 1), "float32", "torch"),
    ("tied, learned positions", (1, 2, 1), "float32", "auto"),
    ("projected embedding", (1, 3), "float32", "auto"),
    ("projected embedding", (1, 2, 1), "bfloat16", "torch"),
}


@cache
def whole(name: str, dtype: str, kernels: str) -> ModelRunner:
    return open_runner(SHAPES[name], deterministic=True, dtype=dtype, kernels=kernels)


def result_of(stage: RunnerStage, batch: Batch, hidden: Hidden | None) -> Hidden | BatchOutput:
    """Return what a step of a stage produces, which stays as it is."""
    step = stage.launch(batch, hidden)
    result = step.end()
    kept = result.copy() if isinstance(result, np.ndarray) else result
    step.free()
    return kept


class Chain:
    """Stages one after the other in this thread, behind what the driver knows of a runner."""

    def __init__(self, stages: Sequence[RunnerStage]) -> None:
        self.stages = stages
        self.capacity = stages[0].capacity

    def run(self, batch: Batch) -> BatchOutput:
        hidden: Hidden | None = None
        for stage in self.stages[:-1]:
            said = result_of(stage, batch, hidden)
            assert isinstance(said, np.ndarray)
            hidden = said
        output = result_of(self.stages[-1], batch, hidden)
        assert isinstance(output, BatchOutput)
        return output

    def logits(self, batch: Batch) -> torch.Tensor:
        hidden: torch.Tensor | None = None
        for stage in self.stages[:-1]:
            hidden = stage._runner.advance(batch, hidden)
        return self.stages[-1]._runner.logits(batch, hidden)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes", "dtype", "kernels"), sorted(SPLITS))
def test_logits_of_a_split_model_are_those_of_the_whole_to_the_bit(
    name: str, sizes: tuple[int, ...], dtype: str, kernels: str
) -> None:
    ends = np.cumsum(sizes).tolist()
    ranges = [LayerRange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    runners = (whole(name, dtype, kernels), Chain(stages_of(name, ranges, dtype, kernels)))
    tokens, logits = tokens_of(1, 60), []
    for runner in runners:
        driver = Driver(runner, seed=3, num_blocks=16)  # type: ignore[arg-type]
        first, second = driver.add(tokens), driver.add(tokens_of(2, 41))
        for counts in ((17, 40), (42, 0), (1, 1)):
            work = [(s, n) for s, n in zip((first, second), counts, strict=True) if n]
            driver.step_logits(work, [None] * len(work))
        logits.append(torch.stack(first.logits + second.logits))
        driver.drop(first)
    assert torch.equal(logits[0].view(torch.int32), logits[1].view(torch.int32))


@pytest.mark.slow
def test_stages_hold_their_own_parameters_and_kv_and_no_others() -> None:
    model = whole("llama", "float32", "auto")
    stages = stages_of("llama", even_split(4, 3), "float32", "auto")
    infos = [stage._runner.info for stage in stages]
    assert [len(info.layers) for info in infos] == [2, 1, 1]
    assert sum(info.param_bytes for info in infos) == model.info.param_bytes, "the head is not tied: nothing is twice"
    assert [info.bytes_per_block * 4 for info in infos] == [model.info.bytes_per_block * n for n in (2, 1, 1)]
    assert infos[1].capacity.num_blocks > 3 * model.info.capacity.num_blocks


def test_hidden_states_that_do_not_fit_fail_the_step_and_no_other() -> None:
    first, last = stages_of("llama", even_split(4, 2), "float32", "auto")
    driver = Driver(Chain([first, last]), num_blocks=8)  # type: ignore[arg-type]
    batch = driver.batch([(driver.add(tokens_of(1, 5)), 5)])
    hidden = result_of(first, batch, None)
    assert isinstance(hidden, np.ndarray)
    for wrong in (hidden[:4], hidden.astype(np.float64), hidden.view(np.uint32)):
        with pytest.raises(BatchFailedError, match="do not fit"):
            last.launch(batch, wrong)
    assert isinstance(result_of(last, batch, hidden), BatchOutput)


def test_bfloat16_travels_as_its_bits() -> None:
    values = torch.tensor([[1.5, -2.0, 3e38, float("nan")]], dtype=torch.bfloat16)
    assert as_numpy(values).tobytes() == values.view(torch.int16).numpy().tobytes()


# Over sockets, with the engine


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2, 3])
async def test_a_pipeline_of_threads_over_sockets_says_what_the_whole_model_says(num_stages: int) -> None:
    loop, dtype = asyncio.get_running_loop(), "bfloat16" if num_stages == 2 else "float32"
    runner = open_runner(SHAPES["llama"], deterministic=True, dtype=dtype, kernels="auto")
    expected = await texts_of(new_engine(1), ThreadExecutor(runner, loop))
    devices = stages_of("llama", even_split(4, num_stages), dtype, "auto")
    pipeline = wire_up(devices, loop)
    executor = pipeline.executor
    assert executor.depth == num_stages
    assert await texts_of(new_engine(num_stages), executor) == expected
    assert sorted(len(text) for text in expected.values()) == [12] * 6
    assert all(busy_s > 0 for busy_s in executor.stats.busy_s)
    pipeline.join()
    assert [server.reason for server in pipeline.servers] == [None] * (num_stages - 1)


class Limits:
    """Limits an engine to about what it holds; once that is kept, lifts the limit; and so on.

    The upper half of the blocks is handed out first, so that the first limit has something to move.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        engine.memory.limit(12)
        engine.memory.limit(None)
        self.num_moved = 0
        self._is_limited = False

    def note(self, batch: Batch, _output: BatchOutput) -> None:
        self.num_moved += batch.copies.source.size
        check_engine(self.engine)
        if not self._is_limited:
            self.engine.memory.limit(max(self.engine.blocks.num_used, MOST_BLOCKS))
            self._is_limited = True
        elif self.engine.blocks.is_within_limit:
            self.engine.memory.limit(None)
            self._is_limited = False


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2])
async def test_moved_blocks_do_not_change_the_text(num_stages: int) -> None:
    loop = asyncio.get_running_loop()
    runner = open_runner(SHAPES["llama"], deterministic=True)
    expected = await texts_of(new_engine(1), ThreadExecutor(runner, loop))
    pipeline = wire_up(stages_of("llama", even_split(4, num_stages), "float32", KERNELS), loop)
    limits = Limits(new_engine(num_stages))
    assert await texts_of(limits.engine, pipeline.executor, limits.note) == expected
    assert limits.num_moved > 0
    pipeline.join()
