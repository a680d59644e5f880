"""One decoder for all families, by layers: embed, then per layer `pre` and `post` around attention, then head.

Attention is not here: whoever runs the layers calls it between `pre` and `post`, where it may also lie on another
machine. Any range of layers can be run, with hidden states from anywhere.

    tokens ─embed─► h ─┬─ pre(i) ─► q, k, v ─(attention)─► o ─┐
                       └──────────────── post(i, h, o) ◄──────┘─► h … ─head─► logits
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from services.worker.models.rope import rotate
from services.worker.models.spec import ModelSpec
from services.worker.models.weights import ModelWeights, ParameterBuffer


@dataclass(frozen=True, slots=True)
class Angles:
    """Rotary angles of a step's tokens: cos and sin, each [t, 1, head_dim]."""

    cos: torch.Tensor
    sin: torch.Tensor


class Decoder:
    """The part of the model that works on each token by itself.

    Args:
        tile_rows: 0 computes all rows in one product. Otherwise every product has exactly this many rows, the last tile
            padded with zeros: a product's bits depend on its number of rows, and so a token's bits no longer depend on
            what else is in the batch.
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights, tile_rows: int = 0) -> None:
        self.spec = spec
        self._weights = weights
        self._tile_rows = tile_rows
        self._head = weights.outer["embedding" if spec.tied_embeddings else "head"]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [t, hidden_size] of the tokens [t] (int64)."""
        return functional.embedding(tokens, self._weights.outer["embedding"])

    def pre(self, layer: int, hidden: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what attention needs from the layer.

        Args:
            layer: numbered in the whole model.
            hidden: [t, hidden_size].
            angles: of the same tokens.

        Returns:
            Query [t, num_heads, head_dim], key and value [t, num_kv_heads, head_dim]; query and key are rotated. They
            may be views of one buffer.
        """
        if not self._tile_rows:
            return self._pre(layer, hidden, angles.cos, angles.sin)
        tiles = [self._pre(layer, *tile) for tile in _tiles(self._tile_rows, hidden, angles.cos, angles.sin)]
        queries, keys, values = (torch.cat(list(column))[: hidden.shape[0]] for column in zip(*tiles, strict=True))
        return queries, keys, values

    def post(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the hidden states behind the layer.

        Args:
            layer: numbered in the whole model.
            hidden: [t, hidden_size] as given to `pre`; may be overwritten.
            attended: [t, num_heads * head_dim], attention's output.
        """
        if not self._tile_rows:
            return self._post(layer, hidden, attended)
        tiles = [self._post(layer, *tile) for tile in _tiles(self._tile_rows, hidden, attended)]
        return torch.cat(tiles)[: hidden.shape[0]]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [t, vocab_size], float32, behind the hidden states of the last layer."""
        if not self._tile_rows:
            return self._logits(hidden)
        tiles = [self._logits(*tile) for tile in _tiles(self._tile_rows, hidden)]
        return torch.cat(tiles)[: hidden.shape[0]]

    def _pre(
        self, layer: int, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spec, weights = self.spec, self._weights.layers[layer]
        normed = self._norm(hidden, weights["attention_norm"])
        heads = functional.linear(normed, weights["qkv"], weights.get("qkv_bias"))
        heads = heads.view(-1, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        num_rotated = spec.num_heads + spec.num_kv_heads
        turned = heads[:, :num_rotated]
        if spec.head_norm:
            turned = self._norm_heads(turned, weights)
        turned = rotate(turned, cos, sin)
        return turned[:, : spec.num_heads], turned[:, spec.num_heads :], heads[:, num_rotated:]

    def _post(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        weights = self._weights.layers[layer]
        inner = self.spec.intermediate_size
        hidden = hidden + functional.linear(attended, weights["output"], weights.get("output_bias"))
        normed = self._norm(hidden, weights["mlp_norm"])
        pair = functional.linear(normed, weights["gate_up"], weights.get("gate_up_bias"))
        gated = functional.silu(pair[:, :inner]).mul_(pair[:, inner:])
        return hidden.add_(functional.linear(gated, weights["down"], weights.get("down_bias")))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(self._norm(hidden, self._weights.outer["norm"]), self._head).float()

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self.spec.norm_eps)

    def _norm_heads(self, heads: torch.Tensor, weights: ParameterBuffer) -> torch.Tensor:
        num_heads = self.spec.num_heads
        queries = self._norm(heads[:, :num_heads], weights["q_norm"])
        return torch.cat((queries, self._norm(heads[:, num_heads:], weights["k_norm"])), dim=1)


def _tiles(num_rows: int, *columns: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Cut tensors of equal length into tiles of exactly `num_rows` rows, the last one filled up with zeros."""
    total = columns[0].shape[0]
    padding = -total % num_rows
    if padding:
        columns = tuple(torch.cat((column, column.new_zeros(padding, *column.shape[1:]))) for column in columns)
    return [
        tuple(column[first : first + num_rows] for column in columns) for first in range(0, total + padding, num_rows)
    ]
