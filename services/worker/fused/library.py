"""All of this room that a forward pass needs, once a trial has shown that it computes here what torch computes.

Triton compiles its kernels when they are first started, with a C compiler for what starts them. So each is started
once, with a model's own sizes, beside torch's operators; only if all agree are they used. Nothing is compiled after
that: the sizes of a model are constants, and nothing is made of a step's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from services.worker.contract.arrays import F64, I64
from services.worker.fused.drawing import choose
from services.worker.fused.operators import FusedOperators, FusedScoring
from services.worker.memory.kv_cache import KVCache
from services.worker.models.operators import LayerOperators
from services.worker.models.rope import RopeTable
from services.worker.models.spec import ModelSpec
from services.worker.models.weights import ParameterBuffer, buffer_bytes, layer_parts
from services.worker.sampling.draw import RowSampling, draw
from services.worker.sampling.scoring import Scoring

LIMIT: Final = 0.02
"""Difference that is taken for rounding, in relation to 1 and to the number itself."""
_NUM_TOKENS: Final = 5
_NUM_POSITIONS: Final = 64
_BLOCK_SIZE: Final = 16
_IN_LAYERS: Final = ("attention_norm", "attention_norm_bias", "q_norm", "k_norm")


class FusedKernels:
    """Triton's kernels for a model on a device of CUDA."""

    operators = FusedOperators
    scoring = FusedScoring
    choose = staticmethod(choose)


def open_fused(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> tuple[FusedKernels | None, str | None]:
    """Return the kernels for a model, or None and why they are not to be used."""
    kernels = FusedKernels()
    try:
        with torch.inference_mode():
            found = _results(kernels.operators, kernels.scoring(), spec, dtype, device)
            chosen = kernels.choose(*_draws(spec.vocab_size, device)).cpu()
    except Exception as error:  # whatever a compiler or a driver raises, the worker can go on without them
        return None, f"they failed: {type(error).__name__}: {str(error).strip()[:500]}"
    with torch.inference_mode():
        expected = _results(LayerOperators, Scoring(), spec, dtype, device)
        drawn = torch.from_numpy(_sampled(*_draws(spec.vocab_size, torch.device("cpu"))))
    for name, ours in found.items():
        theirs = expected[name].float()
        excess = (ours.float() - theirs).abs() / (1 + theirs.abs())
        if not bool((excess <= LIMIT).all()):  # also if it is not a number
            return None, f"their {name} differ from torch's by {float(excess.max()):.3g}"
    if not torch.equal(chosen, drawn):
        return None, f"they drew tokens {chosen.tolist()} where torch draws {drawn.tolist()}"
    return kernels, None


def _results(
    operators_of: Callable[[ModelSpec, RopeTable, KVCache], LayerOperators],
    scoring: Scoring,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Return what operators say to the same made-up numbers, by what it is."""
    one_layer = replace(spec, num_layers=1, windows=(None,))
    cache = KVCache(one_layer, _NUM_TOKENS, _BLOCK_SIZE, dtype, device)
    rope = RopeTable(spec.rope, spec.rotary_dim, _NUM_POSITIONS, dtype, device)
    operators = operators_of(one_layer, rope, cache)
    weights = _weights(spec, dtype, device)
    made = _MadeUp(dtype, device)
    hidden = made(_NUM_TOKENS, spec.hidden_size)
    positions, slots, last = torch.tensor([[0, 3, 9, 17, 63], [70, 3, 40, 5, 6], [4, 0, 2, 1, 3]]).to(device).unbind()
    heads = made(_NUM_TOKENS, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    found = {"norms": operators.norm(hidden, weights, "attention_norm")}
    found["queries"] = operators.rotation(positions, slots)(0, heads, weights)
    found["keys"], found["values"] = (pool[0].flatten(0, 1)[slots] for pool in (cache.keys, cache.values))
    if spec.gated_mlp:
        found["gates"] = operators.gate(made(_NUM_TOKENS, 2 * spec.intermediate_size))
    hidden[2, 1] = torch.nan
    found["finite rows"] = scoring.finite(hidden, last, None)
    products = made(3, spec.vocab_size)
    products[1, spec.vocab_size // 2] = torch.inf
    products[2, [1, spec.vocab_size - 1]] = 9.0
    logits, found["largest logits"] = scoring.largest(products, None)
    found["logits"] = logits.nan_to_num(posinf=0.0)
    return found


def _draws(vocab_size: int, device: torch.device) -> tuple[torch.Tensor, RowSampling, F64]:
    """Return logits, what is asked of them, and points well inside what they say."""
    logits = _MadeUp(torch.float32, device)(6, vocab_size) * 4
    sampling = RowSampling(
        temperature=np.array([0.0, 1.0, 0.7, 1.0, 1.0, 1.3]),
        top_p=np.array([1.0, 1.0, 0.9, 1.0, 0.5, 0.95]),
        top_k=np.array([0, 0, 0, 7, 0, 50]),
        min_p=np.array([0.0, 0.0, 0.0, 0.0, 0.1, 0.0]),
        seed=np.arange(6),
    )
    return logits, sampling, np.array([0.1, 0.2, 0.35, 0.5, 0.65, 0.9])


def _sampled(logits: torch.Tensor, sampling: RowSampling, points: F64) -> I64:
    tokens: I64 = logits.argmax(dim=-1).numpy()
    drawn = np.flatnonzero(sampling.temperature)
    tokens[drawn] = draw(logits[drawn], sampling.select(drawn), points[drawn])
    return tokens


def _weights(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> ParameterBuffer:
    """Return made-up norms of a layer."""
    parts = tuple(part for part in layer_parts(spec, 0) if part.name in _IN_LAYERS)
    weights = ParameterBuffer(parts, dtype, torch.zeros(buffer_bytes(parts, dtype), dtype=torch.uint8, device=device))
    for index, part in enumerate(parts):
        weights[part.name].copy_(_MadeUp(dtype, device, seed=1 + index)(*part.shape) + 1)
    return weights


class _MadeUp:
    """Makes numbers up, always the same."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype
        self._device = device

    def __call__(self, *shape: int) -> torch.Tensor:
        """Return normal numbers."""
        return torch.randn(shape, generator=self._generator).to(self._dtype).to(self._device)
