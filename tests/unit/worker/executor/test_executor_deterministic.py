"""Deterministic mode: logits and text of a sequence are equal to the bit, whatever it is batched with."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from services.worker.executor.runner import ModelRunner
from services.worker.executor.selftest import prove_deterministic
from services.worker.models.decoder import Decoder
from shared.errors import StartupError
from tests.support.checkpoints import CheckpointShape
from tests.support.live_groups import tokens_of
from tests.support.runner_driver import Driver
from tests.support.runners import open_runner

pytestmark = pytest.mark.kernels

SHAPES = {
    "group of 2": CheckpointShape(max_positions=768),
    "group of 4, odd sizes": CheckpointShape(
        hidden_size=72, intermediate_size=106, num_kv_heads=1, head_dim=18, vocab_size=391, max_positions=768
    ),
    "window over splits, full layer": CheckpointShape(
        family="qwen2",
        max_positions=768,
        extra={
            "use_sliding_window": True,
            "sliding_window": 270,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "short window, partial rotary": CheckpointShape(
        family="phi3",
        max_positions=768,
        extra={
            "sliding_window": 37,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "opt, projected embedding": CheckpointShape(
        family="opt", tied=True, max_positions=768, extra={"word_embed_proj_dim": 40}
    ),
}
DTYPES = ("float32", "bfloat16")
LENGTH = 530
"""More than two splits of 256 keys."""


def bits(logits: torch.Tensor) -> bytes:
    return logits.contiguous().numpy().tobytes()


def alone(runner: ModelRunner, tokens: list[int]) -> bytes:
    """Logits of the last position, the prompt in the largest chunks that a batch takes."""
    return in_chunks(runner, tokens, lambda: 96)


def in_chunks(runner: ModelRunner, tokens: list[int], size: Callable[[], int]) -> bytes:
    driver = Driver(runner)
    sequence = driver.add(tokens)
    while sequence.num_computed < len(tokens):
        count = min(size(), len(tokens) - sequence.num_computed)
        driver.step_logits([(sequence, count)], [None])
    return bits(sequence.logits[-1])


def among_others(runner: ModelRunner, tokens: list[int], seed: int) -> bytes:
    """The same, in odd chunks, at changing places of ragged batches, and computed a second time from the start."""
    rng = random.Random(seed)
    driver = Driver(runner, seed=seed)
    others = [driver.add(tokens_of(seed + i, rng.randint(400, 600))) for i in range(4)]
    sequence = driver.add(tokens)
    preempt_at = rng.randint(10, 200)
    while sequence.num_computed < len(tokens):
        if sequence.num_computed >= preempt_at:
            driver.preempt(sequence)
            preempt_at = len(tokens)
        work = [(sequence, min(rng.choice((1, 2, 3, 7, 31, 33, 50)), len(tokens) - sequence.num_computed))]
        for other in others:
            left = len(other.tokens) - other.num_computed
            if left and rng.random() < 0.7:
                work.append((other, min(left, rng.randint(1, 11))))
        rng.shuffle(work)
        driver.step_logits(work, [None] * len(work))
    return bits(sequence.logits[-1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_the_same_bits_alone_in_chunks_among_others_and_after_recompute(name: str, dtype: str) -> None:
    runner = open_runner(SHAPES[name], deterministic=True, dtype=dtype)
    tokens = tokens_of(1, LENGTH)
    expected = alone(runner, tokens)
    rng = random.Random(5)
    assert in_chunks(runner, tokens, lambda: rng.choice((1, 3, 8, 37, 90))) == expected
    for seed in (1, 2):
        assert among_others(runner, tokens, seed) == expected


@pytest.mark.slow
def test_the_fast_path_does_not_promise_equal_bits() -> None:
    """Shows that the test above can tell: the same procedure without fixed shapes gives other bits."""
    runner = open_runner(SHAPES["group of 2"], kernels="torch")
    tokens = tokens_of(1, LENGTH)
    assert any(among_others(runner, tokens, seed) != alone(runner, tokens) for seed in (1, 2, 3))


@pytest.mark.slow
def test_a_platform_whose_products_depend_on_the_batch_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that lets the number of non-zero rows of its tile leak into the result stands for such a platform."""
    runner = open_runner(SHAPES["group of 2"], deterministic=True, kernels="torch")
    prove_deterministic(runner, 96)
    honest = Decoder.head

    def leaking(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        filled = int((hidden.abs().sum(dim=-1) > 0).sum())
        return honest(self, hidden) * float(np.nextafter(np.float32(1), np.float32(2))) ** filled

    monkeypatch.setattr(Decoder, "head", leaking)
    with pytest.raises(StartupError, match="deterministic"):
        prove_deterministic(runner, 96)
