"""One decoder for all families, by layers: embed, then per layer `pre` and `post` around attention, then head.

Attention is not here: whoever runs the layers calls it between `pre` and `post`, where it may also lie on another
machine. Any range of layers can be run, with hidden states from anywhere.

    tokens ─embed─► h ─┬─ pre(i) ─► q, k, v ─(attention)─► o ─┐
                       └──────────────── post(i, h, o) ◄──────┘─► h … ─head─► logits
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from services.worker.models.rope import rotate
from services.worker.models.spec import Activation, ModelSpec
from services.worker.models.weights import ModelWeights, ParameterBuffer

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class Angles:
    """Rotary angles of a step's tokens: cos and sin, each [t, 1, rotary_dim]."""

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
        self._activate = _ACTIVATIONS[spec.activation]
        self._head = weights.outer.get("embedding" if spec.tied_embeddings else "head")

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [t, hidden_size] of the tokens [t] (int64) at their positions [t] (int64)."""
        outer = self._weights.outer
        hidden = functional.embedding(tokens, outer["embedding"])
        if self.spec.embedding_size is not None:
            hidden = self._tiled(self._project_in, hidden)
        if self.spec.position_kind == "learned":
            hidden = hidden + functional.embedding(positions + self.spec.position_offset, outer["positions"])
        return hidden

    def pre(self, layer: int, hidden: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what attention needs from the layer.

        Args:
            layer: numbered in the whole model.
            hidden: [t, hidden_size].
            angles: of the same tokens.

        Returns:
            Query [t, num_heads, head_dim], key and value [t, num_kv_heads, head_dim]; query and key are rotated if the
            model has a rotary embedding. They may be views of one buffer.
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
        return self._tiled(self._logits, hidden)

    def _tiled(self, function: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """Return a function of the rows [t, ...], computed in tiles if this decoder computes in tiles."""
        if not self._tile_rows:
            return function(hidden)
        return torch.cat([function(*tile) for tile in _tiles(self._tile_rows, hidden)])[: hidden.shape[0]]

    def _pre(
        self, layer: int, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spec, weights = self.spec, self._weights.layers[layer]
        normed = self._norm(hidden, weights, "attention_norm") if spec.norm_first else hidden
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
        hidden = hidden + functional.linear(attended, weights["output"], weights.get("output_bias"))
        if self.spec.norm_first:
            return hidden.add_(self._mlp(self._norm(hidden, weights, "mlp_norm"), weights))
        hidden = self._norm(hidden, weights, "attention_norm")
        return self._norm(hidden.add_(self._mlp(hidden, weights)), weights, "mlp_norm")

    def _mlp(self, hidden: torch.Tensor, weights: ParameterBuffer) -> torch.Tensor:
        if self.spec.gated_mlp:
            pair = functional.linear(hidden, weights["gate_up"], weights.get("gate_up_bias"))
            inner = self.spec.intermediate_size
            inside = self._activate(pair[:, :inner]).mul_(pair[:, inner:])
        else:
            inside = self._activate(functional.linear(hidden, weights["up"], weights.get("up_bias")))
        return functional.linear(inside, weights["down"], weights.get("down_bias"))

    def _project_in(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self._weights.outer["project_in"])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        outer = self._weights.outer
        if self.spec.final_norm:
            hidden = self._norm(hidden, outer, "norm")
        if self.spec.embedding_size is not None:
            hidden = functional.linear(hidden, outer["project_out"])
        assert self._head is not None, "only the last stage has the head"
        return functional.linear(hidden, self._head).float()

    def _norm(self, hidden: torch.Tensor, weights: ParameterBuffer, name: str) -> torch.Tensor:
        width, eps = hidden.shape[-1:], self.spec.norm_eps
        if self.spec.norm_kind == "layer":
            return functional.layer_norm(hidden, width, weights.get(name), weights.get(f"{name}_bias"), eps)
        return functional.rms_norm(hidden, width, weights.get(name), eps)

    def _norm_heads(self, heads: torch.Tensor, weights: ParameterBuffer) -> torch.Tensor:
        num_heads = self.spec.num_heads
        queries = self._norm(heads[:, :num_heads], weights, "q_norm")
        return torch.cat((queries, self._norm(heads[:, num_heads:], weights, "k_norm")), dim=1)


def _tiles(num_rows: int, *columns: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Cut tensors of equal length into tiles of exactly `num_rows` rows, the last one filled up with zeros."""
    total = columns[0].shape[0]
    padding = -total % num_rows
    if padding:
        columns = tuple(torch.cat((column, column.new_zeros(padding, *column.shape[1:]))) for column in columns)
    return [
        tuple(column[first : first + num_rows] for column in columns) for first in range(0, total + padding, num_rows)
    ]
