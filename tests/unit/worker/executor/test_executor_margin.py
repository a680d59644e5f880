"""The margin oracle: outside of deterministic mode a batch may flip a choice only where two logits nearly tie.

The text of each sequence alone is the undisturbed one. At the first token that differs in a ragged batch, the logits of
both tokens, computed undisturbed, must lie within a stated share of the largest. The number of flips is reported.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from services.worker.executor.model_runner import ModelRunner
from tests.support.checkpoints import CheckpointShape
from tests.support.runner_driver import Driver
from tests.support.runners import KERNELS, open_runner

pytestmark = pytest.mark.kernels

SHAPE = CheckpointShape(weight_std=0.02, num_layers=3, seed=5)
"""Narrow weights: logits so close together that rounding can choose."""
NUM_TOKENS = 96
BOUND = {"float32": 1e-4, "bfloat16": 5e-2}
"""Of the largest absolute logit."""


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, SHAPE.vocab_size) for _ in range(rng.randint(1, 60))] for _ in range(8)]


def text_alone(runner: ModelRunner, prompt: list[int]) -> list[int]:
    driver = Driver(runner)
    sequence = driver.add(prompt)
    driver.run(NUM_TOKENS, chunk=96, max_tokens=96)
    return sequence.output


def texts_together(runner: ModelRunner, seed: int) -> list[list[int]]:
    driver = Driver(runner, seed=seed)
    sequences = [driver.add(prompt) for prompt in prompts()]
    driver.run(NUM_TOKENS, chunk=17, max_tokens=96)
    return [sequence.output for sequence in sequences]


def undisturbed_logits(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """Logits [vocab_size] behind the tokens, computed alone, token by token after the first chunk as decoding does."""
    driver = Driver(runner)
    sequence = driver.add(tokens[:1])
    for following in (*tokens[1:], None):
        driver.step_logits([(sequence, 1)], [following])
    return sequence.logits[-1]


def first_difference(a: list[int], b: list[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["torch", KERNELS] if KERNELS != "torch" else ["torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_batch_flips_a_choice_only_where_two_logits_nearly_tie(
    dtype: str, kernels: str, record_property: Callable[[str, object], None]
) -> None:
    runner = open_runner(SHAPE, dtype=dtype, kernels=kernels)
    expected = [text_alone(runner, prompt) for prompt in prompts()]
    flips = 0
    for seed in (1, 2):
        for prompt, text, found in zip(prompts(), expected, texts_together(runner, seed), strict=True):
            place = first_difference(text, found)
            if place is None:
                continue
            flips += 1
            logits = undisturbed_logits(runner, [*prompt, *text[:place]])
            gap = abs(float(logits[text[place]] - logits[found[place]]))
            assert gap <= BOUND[dtype] * float(logits.abs().max()), f"token {place}: {gap}"
    record_property("flips", flips)
    print(f"{dtype}, {runner.info.kernels}: {flips} flips in {2 * len(expected)} texts of {NUM_TOKENS} tokens")
    if not runner.info.kernels.startswith("torch"):
        assert flips == 0, "the native kernels do not depend on the batch"
