"""KV of a real model that goes to host memory and comes back into other blocks: the text goes on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.engine.types import CopyFailedError, HostCopy
from services.worker.executor.model_runner import ModelRunner
from shared.errors import StartupError
from tests.support.checkpoints import CheckpointShape
from tests.support.runner_driver import Driver
from tests.support.runners import MIB, open_runner

pytestmark = pytest.mark.kernels

PROMPT = list(range(5, 55))


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return open_runner(CheckpointShape(), host_memory_bytes=MIB)


def ids(blocks: list[int]) -> np.ndarray:
    return np.array(blocks, dtype=np.int32)


def test_the_runner_says_how_much_host_memory_there_is(runner: ModelRunner) -> None:
    host = runner.capacity.host
    assert host is not None
    assert host.block_bytes == runner.info.bytes_per_block
    assert host.num_blocks == MIB // host.block_bytes
    assert 0 < host.block_copy_s < 1
    assert open_runner(CheckpointShape()).capacity.host is None


def test_kv_comes_back_into_other_blocks_and_the_text_goes_on(runner: ModelRunner) -> None:
    whole = Driver(runner)
    expected = whole.add(PROMPT)
    whole.run(12, chunk=50, max_tokens=96)
    driver = Driver(runner, seed=3)
    sequence = driver.add(PROMPT, row=2)
    driver.step([(sequence, len(PROMPT))])
    for _ in range(4):
        driver.step([(sequence, 1)])
    old, host = list(sequence.blocks), list(range(2, 2 + len(sequence.blocks)))[::-1]
    runner.copy(HostCopy(0, ids(old), ids(host), to_host=True))
    for pool in (*runner.cache.keys, *runner.cache.values):
        pool[old] = torch.nan
    computed = sequence.num_computed
    driver.preempt(sequence)
    new = [block for block in range(min(runner.capacity.num_blocks, 4096) - 1, 0, -1) if block not in old][: len(old)]
    runner.copy(HostCopy(1, ids(new), ids(host), to_host=False))
    driver.give(sequence, new, computed)
    for _ in range(7):
        driver.step([(sequence, 1)])
    assert sequence.output == expected.output
    assert len(expected.output) == 12


def test_a_copy_that_torch_refuses_is_a_failed_copy(runner: ModelRunner) -> None:
    with pytest.raises(CopyFailedError, match="copy 7 failed: "):
        runner.copy(HostCopy(7, ids([0]), ids([10**6]), to_host=True))


def test_too_little_host_memory_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(StartupError, match=r"host_memory holds no KV block of [0-9]+ bytes"):
        open_runner(CheckpointShape(), host_memory_bytes=1)
