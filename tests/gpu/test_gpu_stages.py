"""Stages of a pipeline on one CUDA device, whose hidden states go by way of pinned host memory and sockets."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from services.worker.executor.thread import ThreadExecutor
from services.worker.pipeline.pipeline import PipelineExecutor
from services.worker.pipeline.runner_stage import RunnerStage
from services.worker.pipeline.stage import MAX_LAUNCHED
from shared.layers import LayerRange, even_split
from tests.support.checkpoints import CheckpointShape
from tests.support.gpu import WITH_LIBRARIES
from tests.support.live_groups import SHAPES, new_engine
from tests.support.runner_driver import Driver
from tests.support.runners import MIB, open_runner
from tests.support.stage_texts import stages_of, texts_of
from tests.support.thread_pipeline import wire_up

pytestmark = WITH_LIBRARIES

ON_GPU = {"device": "cuda", "memory_bytes": 256 * MIB}
WIDE = CheckpointShape(num_layers=4, hidden_size=1024, intermediate_size=2048, num_heads=8, num_kv_heads=2)
NUM_STEPS = 30


@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.parametrize("num_stages", [2, 3])
async def test_stages_say_what_the_whole_model_says(
    monkeypatch: pytest.MonkeyPatch, num_stages: int, more: int
) -> None:
    """In deterministic float32. With more lanes than stages a step waits behind the one that computes."""
    loop = asyncio.get_running_loop()
    whole = open_runner(SHAPES["llama"], deterministic=True, kernels="torch", **ON_GPU)
    expected = await texts_of(new_engine(1), ThreadExecutor(whole, loop))
    monkeypatch.setattr(PipelineExecutor, "num_lanes", num_stages + more)
    pipeline = wire_up(stages_of("llama", even_split(4, num_stages), "float32", "torch", **ON_GPU), loop)
    assert await texts_of(new_engine(num_stages + more), pipeline.executor) == expected
    pipeline.join()
    assert [server.reason for server in pipeline.servers] == [None] * (num_stages - 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_states_of_steps_that_overlap_are_those_of_steps_one_after_the_other(dtype: str) -> None:
    """A stage in the middle is given other numbers with every step, while the step before may still compute."""
    settings = {"dtype": dtype, "kernels": "torch", "deterministic": True, "max_batch_tokens": 512, **ON_GPU}
    settings["memory_bytes"] = 768 * MIB
    runner = open_runner(WIDE, layers=LayerRange(1, 3), **settings)
    driver, stage = Driver(runner), RunnerStage(runner)
    sequence = driver.add([3] * 512)
    first = driver.batch([(sequence, 512)])
    batches = [first, *(replace(first, step_id=i, admits=()) for i in range(2, NUM_STEPS + 1))]
    random = np.random.default_rng(1)
    hidden = [random.standard_normal((512, WIDE.hidden_size)).astype(np.float32) for _ in batches]
    if dtype == "bfloat16":
        hidden = [(each.view(np.uint32) >> 16).astype(np.uint16) for each in hidden]
    apart, ahead = [], []
    for batch, given in zip(batches, hidden, strict=True):
        step = stage.launch(batch, given.copy())
        apart.append(np.array(step.end()))
        step.free()
    again = [replace(each, admits=()) for each in batches]
    under_way = []
    for batch, given in zip(again, hidden, strict=True):
        copied = given.copy()
        under_way.append(stage.launch(batch, copied))
        copied[:] = 0  # it was read
        assert not under_way[-1].is_done
        if len(under_way) == MAX_LAUNCHED:
            step = under_way.pop(0)
            ahead.append(np.array(step.end()))
            step.free()
    ahead += [np.array(step.end()) for step in under_way]
    assert len(ahead) == len(apart) == NUM_STEPS
    assert all(np.array_equal(one, other) for one, other in zip(apart, ahead, strict=True))
    assert not np.array_equal(apart[0], apart[1])
    stage.close()
