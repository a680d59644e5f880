"""What a layer computes of each token beside its products, and how torch does it.

    hidden ─norm─► ─(product)─► heads ─rotate─► queries; keys and values go into the cache
    projections ─gate or activate─► ─(product)─► added to hidden

Another room computes the same with fewer kernels on a GPU; see `services/worker/fused`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch.nn import functional

from services.worker.models.rope import RopeTable, rotate
from services.worker.models.spec import Activation, ModelSpec
from services.worker.models.weights import ParameterBuffer

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}

Rotation = Callable[[int, torch.Tensor, ParameterBuffer], torch.Tensor]
"""Takes a layer, its heads [t, num_heads + 2 * num_kv_heads, head_dim] (queries, keys, values; may be overwritten) and
its weights. Stores the keys and values in the cache, and returns the queries [t, num_heads, head_dim]. Queries and keys
are normalised if the model has norms over heads, and rotated if it has a rotary embedding."""


class KvStore(Protocol):
    """Where keys and values go; see `KVCache`."""

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one layer's keys and values [t, num_kv_heads, head_dim] in slots [t]."""


class LayerOperators:
    """The operators of a model's layers over a cache, by torch's own, on any device. Results are in the model's type.

    Args:
        spec: the model.
        rope: angles of every position that may occur.
        cache: for keys and values.
    """

    def __init__(self, spec: ModelSpec, rope: RopeTable, cache: KvStore) -> None:
        self._spec = spec
        self._rope = rope
        self._cache = cache
        self._activate = _ACTIVATIONS[spec.activation]

    def norm(self, hidden: torch.Tensor, weights: ParameterBuffer, name: str) -> torch.Tensor:
        """Return the hidden states [t, hidden_size] normalised, by the model's kind of norm.

        Args:
            hidden: [t, hidden_size]; unchanged.
            weights: have those of the norm, if it has any.
            name: of the norm in them.
        """
        width, eps = hidden.shape[-1:], self._spec.norm_eps
        if self._spec.norm_kind == "layer":
            return functional.layer_norm(hidden, width, weights.get(name), weights.get(f"{name}_bias"), eps)
        return functional.rms_norm(hidden, width, weights.get(name), eps)

    def rotation(self, positions: torch.Tensor, slots: torch.Tensor) -> Rotation:
        """Return what takes the heads of a step's layers; the step's angles are looked up once.

        Args:
            positions: [t] int64, of each token in its sequence.
            slots: [t] int64, where its keys and values go: block * block_size + offset.
        """
        spec, cache = self._spec, self._cache
        cos, sin = self._rope.rows(positions)
        num_rotated = spec.num_heads + spec.num_kv_heads

        def rotate_heads(layer: int, heads: torch.Tensor, weights: ParameterBuffer) -> torch.Tensor:
            turned = heads[:, :num_rotated]
            if spec.head_norm:
                turned = self._norm_heads(turned, weights)
            turned = rotate(turned, cos, sin)
            cache.write(layer, slots, turned[:, spec.num_heads :], heads[:, num_rotated:])
            return turned[:, : spec.num_heads]

        return rotate_heads

    def gate(self, pair: torch.Tensor) -> torch.Tensor:
        """Return [t, n]: the activation of the first n columns of `pair` [t, 2 * n], times the others."""
        inner = pair.shape[-1] // 2
        return self._activate(pair[:, :inner]).mul_(pair[:, inner:])

    def activate(self, inside: torch.Tensor) -> torch.Tensor:
        """Return the activation of `inside`, of the same shape."""
        return self._activate(inside)

    def add_product(
        self, hidden: torch.Tensor, inputs: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return hidden + inputs @ matrix.T + bias.

        Args:
            hidden: [t, n]; may be overwritten.
            inputs: [t, m].
            matrix: [n, m].
            bias: [n]; None: there is none.
        """
        return functional.linear(inputs, matrix, bias).add_(hidden)

    def _norm_heads(self, heads: torch.Tensor, weights: ParameterBuffer) -> torch.Tensor:
        num_heads = self._spec.num_heads
        queries = self.norm(heads[:, :num_heads], weights, "q_norm")
        return torch.cat((queries, self.norm(heads[:, num_heads:], weights, "k_norm")), dim=1)
