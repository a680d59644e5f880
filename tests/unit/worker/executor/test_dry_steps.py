"""Steps that are tried at the start: within the limits of the worker, and no burden to what it says afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.worker.cost.steps import MIN_KINDS, StepSample
from services.worker.executor.dry_steps import try_steps
from tests.support.checkpoints import CheckpointShape
from tests.support.runner_driver import Driver
from tests.support.runners import open_runner

pytestmark = [pytest.mark.kernels, pytest.mark.slow]


@pytest.mark.parametrize(
    ("max_batch_tokens", "max_rows", "max_model_len"), [(1, 1, 8), (4, 8, 64), (96, 4, 1), (96, 8, 64)]
)
def test_steps_keep_the_limits(max_batch_tokens: int, max_rows: int, max_model_len: int) -> None:
    runner = open_runner(
        CheckpointShape(),
        max_batch_tokens=max_batch_tokens,
        max_batch_rows=max_rows,
        max_rows=max_rows,
        max_model_len=max_model_len,
    )
    steps = try_steps(runner, max_rows)
    assert steps
    for (num_tokens, kv_decode_tokens, prefill_pairs), duration_s in steps:
        assert duration_s > 0
        assert num_tokens <= max_batch_tokens
        assert kv_decode_tokens <= max_rows * max_model_len
        assert prefill_pairs <= num_tokens * max_model_len
    runner.close()


def test_they_are_of_kinds_enough_for_a_fit() -> None:
    runner = open_runner(CheckpointShape(), max_batch_tokens=96)
    runner.info = replace(runner.info, dry_step_s=60.0)  # however slow this machine is just now
    sample = StepSample()
    for step in try_steps(runner, 8):
        sample.add(step)
    assert len(sample.steps) >= MIN_KINDS
    assert any(step.shape.prefill_pairs for step in sample.steps)
    runner.close()


def test_what_a_model_says_afterwards_is_what_it_says_without_them() -> None:
    said = []
    for tries in (False, True):
        runner = open_runner(CheckpointShape(), max_batch_tokens=96, deterministic=True)
        if tries:
            try_steps(runner, 8)
        driver = Driver(runner)
        sequence = driver.add([7, 3, 9, 30, 31] * 9)
        driver.step([(sequence, 45)])
        for _ in range(12):
            driver.step([(sequence, 1)])
        said.append(sequence.output)
        runner.close()
    assert said[0] == said[1]
    assert len(said[0]) == 13
