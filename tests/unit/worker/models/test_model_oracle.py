"""The decoder against the reference implementation, through the runner, in ragged batches with chunked prompts."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.checkpoints import CheckpointShape, difference_from, greedy_text, stored_checkpoint
from tests.support.runner_driver import Driver
from tests.support.runners import open_runner

pytestmark = pytest.mark.kernels

NUM_TOKENS = 64
PROMPT_LENGTHS = (1, 9, 47, 150)
MIN_MARGIN = 1e-3
"""Every choice along the reference's text is at least this clear, so that rounding cannot excuse a difference."""

LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5, 3.0, 4.0],
    "long_factor": [9.0] * 8,
}
PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.8}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

SHAPES = {
    "group of 2": CheckpointShape(seed=7),
    "group of 1, tied": CheckpointShape(num_kv_heads=4, tied=True, seed=0),
    "group of 4, wide heads": CheckpointShape(num_kv_heads=1, head_dim=40, seed=7),
    "group of 8, three layers": CheckpointShape(num_heads=8, num_kv_heads=1, head_dim=8, num_layers=3, seed=13),
    "biases": CheckpointShape(extra={"attention_bias": True, "mlp_bias": True}, seed=3),
    "linear rope": CheckpointShape(extra={"rope_parameters": LINEAR}, seed=8),
    "llama3 rope": CheckpointShape(extra={"rope_parameters": LLAMA3}, seed=2),
    "mistral": CheckpointShape(family="mistral", seed=7),
    "qwen2": CheckpointShape(family="qwen2", seed=2),
    "qwen3, tied": CheckpointShape(family="qwen3", tied=True, seed=0),
    "yarn rope": CheckpointShape(extra={"rope_parameters": YARN}, seed=12),
    "mistral, window": CheckpointShape(family="mistral", extra={"sliding_window": 24}, seed=7),
    "qwen2, window from layer 1": CheckpointShape(
        family="qwen2",
        num_layers=3,
        num_heads=6,
        num_kv_heads=3,
        extra={"use_sliding_window": True, "sliding_window": 37, "max_window_layers": 1},
        seed=13,
    ),
    "qwen3, windows by layer, biases": CheckpointShape(
        family="qwen3",
        num_layers=3,
        num_kv_heads=1,
        head_dim=24,
        extra={"use_sliding_window": True, "sliding_window": 50, "layer_types": MIXED, "attention_bias": True},
        seed=12,
    ),
    "phi3": CheckpointShape(family="phi3", num_kv_heads=1, seed=13),
    "phi3, partial rotary, window": CheckpointShape(
        family="phi3", head_dim=20, tied=True, extra={"rope_parameters": PARTIAL, "sliding_window": 30}, seed=1
    ),
    "phi3, longrope": CheckpointShape(
        family="phi3", extra={"rope_parameters": LONGROPE, "original_max_position_embeddings": 256}, seed=8
    ),
    "opt": CheckpointShape(family="opt", tied=True),
    "opt, norms behind, projected embedding": CheckpointShape(
        family="opt", tied=True, extra={"do_layer_norm_before": False, "word_embed_proj_dim": 40}
    ),
    "opt, bare norms, gelu, odd heads": CheckpointShape(
        family="opt",
        hidden_size=60,
        extra={"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    ),
}


def prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in PROMPT_LENGTHS]


def reference_text(reference: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Greedy text by the reference's own `generate`, after checking that every choice in it is clear."""
    text = greedy_text(reference, prompt, NUM_TOKENS)
    with torch.inference_mode():
        top = reference(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].topk(2).values
    assert (top[:, 0] - top[:, 1]).min() > MIN_MARGIN, "choose another seed: the checkpoint has near-ties"
    return text


FAST = [(name, False) for name in SHAPES]
DETERMINISTIC = [
    (name, True)
    for name in (
        "group of 2",
        "group of 4, wide heads",
        "biases",
        "qwen3, tied",
        "qwen2, window from layer 1",
        "phi3, partial rotary, window",
        "opt, norms behind, projected embedding",
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "deterministic"), FAST + DETERMINISTIC)
def test_greedy_text_equals_the_references(name: str, deterministic: bool) -> None:
    shape = SHAPES[name]
    reference = stored_checkpoint(shape)[1]
    driver = Driver(open_runner(shape, deterministic=deterministic), seed=len(name))
    sequences = [driver.add(prompt) for prompt in prompts(shape.vocab_size)]
    driver.run(NUM_TOKENS, chunk=41, max_tokens=96)
    for sequence in sequences:
        assert sequence.output == reference_text(reference, sequence.tokens[: sequence.num_prompt])


@pytest.mark.parametrize("name", SHAPES)
def test_logits_agree_with_the_references_at_every_position(name: str) -> None:
    shape = SHAPES[name]
    reference = stored_checkpoint(shape)[1]
    driver = Driver(open_runner(shape))
    tokens = prompts(shape.vocab_size)[2]
    sequence = driver.add(tokens[:1])
    for following in (*tokens[1:], None):
        driver.step_logits([(sequence, 1)], [following])
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    assert difference_from(torch.stack(sequence.logits), expected) < 1e-4


@pytest.mark.parametrize("name", ["group of 2", "mistral, window", "phi3, partial rotary, window", "opt"])
def test_bfloat16_stays_near_the_float32_reference(name: str) -> None:
    """bfloat16 keeps 8 bits of mantissa: 2^-8 is 0.4 % per rounding, a few per cent after two layers."""
    shape = SHAPES[name]
    reference = stored_checkpoint(shape)[1]
    driver = Driver(open_runner(shape, dtype="bfloat16"))
    tokens = prompts(shape.vocab_size)[3]
    sequence = driver.add(tokens)
    for count in (70, 79, 1):
        driver.step_logits([(sequence, count)], [None])
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0, -1]
    assert 1e-5 < difference_from(sequence.logits[-1], expected) < 5e-2
