"""The decoder against the reference over shapes drawn at random: heads, widths, biases, rotations, windows, norms."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.support.checkpoints import FAMILIES, CheckpointShape, difference_from, stored_checkpoint
from tests.support.runner_driver import Driver
from tests.support.runners import open_runner

pytestmark = pytest.mark.kernels

CHUNKS = ((1, 70), (37, 1), (2, 1), (50, 16), (1, 1), (9, 31))
"""Tokens of two sequences, by step: prompts of 100 and 120 tokens in odd pieces."""
ACTIVATIONS = ("silu", "gelu", "relu", "gelu_new")


def draw(family: str, seed: int) -> CheckpointShape:
    """Return a checkpoint of at least 12 hidden dimensions: narrower products have other bits in other rows."""
    rng = random.Random(f"{family} {seed}")
    num_kv_heads = rng.choice((1, 2, 3))
    num_heads = num_kv_heads * (1 if family == "opt" else rng.choice((1, 2, 3, 5)))
    head_dim = rng.choice((12, 20, 32, 36) if family == "opt" else (4, 12, 20, 32, 36))
    return CheckpointShape(
        family=family,
        vocab_size=rng.choice((259, 300, 384)),
        hidden_size=num_heads * (head_dim if family == "opt" else rng.choice((12, 14, 22))),
        intermediate_size=rng.choice((30, 65, 96)),
        num_layers=rng.choice((1, 2, 3)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        tied=rng.random() < 0.5,
        seed=seed,
        weight_std=0.1,
        extra=draw_fields(family, rng, num_heads * head_dim),
    )


def draw_fields(family: str, rng: random.Random, q_size: int) -> dict[str, Any]:
    """Return fields of the family's own."""
    activation, window = rng.choice(ACTIVATIONS), rng.choice((None, 1, 7, 40, 80))
    flags = [rng.random() < 0.5 for _ in range(4)]
    if family == "opt":
        return {
            "activation_function": activation,
            "enable_bias": flags[0],
            "layer_norm_elementwise_affine": flags[1],
            "do_layer_norm_before": flags[2],
            "_remove_final_layer_norm": flags[3],
            "word_embed_proj_dim": rng.choice((q_size, 22)),
        }
    fields: dict[str, Any] = {"hidden_act": activation, "rms_norm_eps": rng.choice((1e-6, 1e-4))}
    if family == "phi3":
        rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": rng.choice((0.5, 1.0))}
        return {**fields, "sliding_window": window, "rope_parameters": rope}
    fields["rope_parameters"] = rng.choice(
        (
            {"rope_type": "default", "rope_theta": 1e6},
            {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
            {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0},
            {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 3.0, "original_max_position_embeddings": 40},
        )
    )
    if family in ("llama", "qwen3"):
        fields["attention_bias"] = flags[0]
    if family == "llama":
        return {**fields, "mlp_bias": flags[1]}
    if family == "mistral":
        return {**fields, "sliding_window": window}
    return {**fields, "use_sliding_window": flags[2], "sliding_window": window, "max_window_layers": rng.choice((0, 1))}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_the_references_for_any_shape(family: str, seed: int) -> None:
    shape = draw(family, seed)
    reference = stored_checkpoint(shape)[1]
    rng = random.Random(seed)
    driver = Driver(open_runner(shape, deterministic=seed == 2), seed=seed)
    sequences = [
        driver.add([rng.randrange(3, shape.vocab_size) for _ in range(sum(sizes))])
        for sizes in zip(*CHUNKS, strict=True)
    ]
    ends: list[list[int]] = [[], []]
    for counts in CHUNKS:
        driver.step_logits(list(zip(sequences, counts, strict=True)), [None, None])
        for sequence, done in zip(sequences, ends, strict=True):
            done.append(sequence.num_computed - 1)
    for sequence, done in zip(sequences, ends, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([sequence.tokens])).logits[0, done]
        assert difference_from(torch.stack(sequence.logits), expected) < 1e-4
