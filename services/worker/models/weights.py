"""Which tensors a model has, where they come from in the checkpoint, and one buffer per layer that holds them.

Every layer's parameters lie in one flat buffer, so that a memory pool can own, drop and restore a layer as one range:

    layer buffer: | qkv | output | gate_up | down | norms | biases |   each part 64-byte aligned
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from services.worker.models.spec import ModelSpec

ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint, and the rows of the part that it fills."""

    name: str
    shape: tuple[int, ...]
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the decoder: one or several of the checkpoint, stacked by rows."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return prod(self.shape)


def _fused(name: str, sources: list[tuple[str, tuple[int, ...]]]) -> Part:
    """Return a part that stacks the sources by rows."""
    row, found = 0, []
    for source, shape in sources:
        found.append(Source(source, shape, row))
        row += shape[0]
    return Part(name, (row, *sources[0][1][1:]), tuple(found))


def layer_parts(spec: ModelSpec, layer: int) -> tuple[Part, ...]:
    """Return the parts of one layer (numbered in the whole model), in the order of its buffer."""
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    hidden, inner = spec.hidden_size, spec.intermediate_size
    heads = [("q_proj", spec.q_size), ("k_proj", spec.kv_size), ("v_proj", spec.kv_size)]
    pair = [("gate_proj", inner), ("up_proj", inner)]
    parts = [
        _fused("qkv", [(f"{attention}.{name}.weight", (rows, hidden)) for name, rows in heads]),
        _fused("output", [(f"{attention}.o_proj.weight", (hidden, spec.q_size))]),
        _fused("gate_up", [(f"{mlp}.{name}.weight", (rows, hidden)) for name, rows in pair]),
        _fused("down", [(f"{mlp}.down_proj.weight", (hidden, inner))]),
        _fused("attention_norm", [(f"model.layers.{layer}.input_layernorm.weight", (hidden,))]),
        _fused("mlp_norm", [(f"model.layers.{layer}.post_attention_layernorm.weight", (hidden,))]),
    ]
    if spec.qkv_bias:
        parts.append(_fused("qkv_bias", [(f"{attention}.{name}.bias", (rows,)) for name, rows in heads]))
    if spec.output_bias:
        parts.append(_fused("output_bias", [(f"{attention}.o_proj.bias", (hidden,))]))
    if spec.mlp_bias:
        parts.append(_fused("gate_up_bias", [(f"{mlp}.{name}.bias", (rows,)) for name, rows in pair]))
        parts.append(_fused("down_bias", [(f"{mlp}.down_proj.bias", (hidden,))]))
    if spec.head_norm:
        parts.append(_fused("q_norm", [(f"{attention}.q_norm.weight", (spec.head_dim,))]))
        parts.append(_fused("k_norm", [(f"{attention}.k_norm.weight", (spec.head_dim,))]))
    return tuple(parts)


def outer_parts(spec: ModelSpec) -> tuple[Part, ...]:
    """Return the parts outside the layers: embedding, last norm, and the head if it has a matrix of its own."""
    parts = [
        _fused("embedding", [("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))]),
        _fused("norm", [("model.norm.weight", (spec.hidden_size,))]),
    ]
    if not spec.tied_embeddings:
        parts.append(_fused("head", [("lm_head.weight", (spec.vocab_size, spec.hidden_size))]))
    return tuple(parts)


def all_parts(spec: ModelSpec) -> Iterator[Part]:
    """Yield every part of the model."""
    yield from outer_parts(spec)
    for layer in range(spec.num_layers):
        yield from layer_parts(spec, layer)


def num_parameters(spec: ModelSpec) -> int:
    """Return the number of parameters; a tied head counts once."""
    return sum(part.numel for part in all_parts(spec))


def buffer_bytes(parts: tuple[Part, ...], dtype: torch.dtype) -> int:
    """Return the size of the buffer that holds the parts, with alignment."""
    return sum(_aligned(part.numel * dtype.itemsize) for part in parts)


def parameter_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the memory that the parameters take, with alignment."""
    layers = sum(buffer_bytes(layer_parts(spec, layer), dtype) for layer in range(spec.num_layers))
    return layers + buffer_bytes(outer_parts(spec), dtype)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class ParameterBuffer:
    """The parts of one layer, or those outside the layers, as views of one flat buffer."""

    def __init__(self, parts: tuple[Part, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.parts = parts
        self.storage = torch.empty(buffer_bytes(parts, dtype), dtype=torch.uint8, device=device)
        """[bytes] uint8; owns the memory of all views."""
        self._views: dict[str, torch.Tensor] = {}
        offset = 0
        for part in parts:
            num_bytes = part.numel * dtype.itemsize
            self._views[part.name] = self.storage[offset : offset + num_bytes].view(dtype).view(part.shape)
            offset += _aligned(num_bytes)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a part."""
        return self._views[name]

    def get(self, name: str) -> torch.Tensor | None:
        """Return a part, or None if this model has none of that name."""
        return self._views.get(name)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All parameters of a model on one device."""

    outer: ParameterBuffer
    """`embedding`, `norm` and, unless tied, `head`."""
    layers: tuple[ParameterBuffer, ...]
    """By layer: see `layer_parts`."""

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return self.outer.storage.numel() + sum(layer.storage.numel() for layer in self.layers)
