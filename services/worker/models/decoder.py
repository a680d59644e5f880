"""One decoder for all families, by layers: embed, then per layer `pre` and `post` around attention, then head.

Attention is not here: whoever runs the layers calls it between `pre` and `post`, where it may also lie on another
machine. Any range of layers can be run, with hidden states from anywhere.

    tokens ─embed─► h ─┬─ pre(i) ─► q, and k, v into the cache ─(attention)─► o ─┐
                       └──────────────────── post(i, h, o) ◄─────────────────────┘─► h … ─head─► logits

The architecture is here, and its products; `LayerOperators` computes what lies between them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from services.worker.models.operators import LayerOperators, Rotation
from services.worker.models.spec import ModelSpec
from services.worker.models.weights import ModelWeights, ParameterBuffer


class Decoder:
    """The part of the model that works on each token by itself.

    Args:
        spec: the model.
        weights: of the layers that are run.
        operators: of these layers.
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights, operators: LayerOperators) -> None:
        self.spec = spec
        self.weights = weights
        self.operators = operators
        self._head = weights.outer.get("embedding" if spec.tied_embeddings else "head")

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [t, hidden_size] of the tokens [t] (int64) at their positions [t] (int64)."""
        outer = self.weights.outer
        hidden = functional.embedding(tokens, outer["embedding"])
        if self.spec.embedding_size is not None:
            hidden = functional.linear(hidden, outer["project_in"])
        if self.spec.position_kind == "learned":
            hidden = hidden + functional.embedding(positions + self.spec.position_offset, outer["positions"])
        return hidden

    def pre(self, layer: int, hidden: torch.Tensor, rotate: Rotation) -> torch.Tensor:
        """Return the layer's queries [t, num_heads, head_dim]; its keys and values are in the cache then.

        Args:
            layer: numbered in the whole model.
            hidden: [t, hidden_size].
            rotate: of the same tokens.
        """
        heads = self._heads(layer, hidden).unflatten(1, (-1, self.spec.head_dim))
        return rotate(layer, heads, self.weights.layers[layer])

    def post(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the hidden states behind the layer.

        Args:
            layer: numbered in the whole model.
            hidden: [t, hidden_size] as given to `pre`; may be overwritten.
            attended: [t, num_heads * head_dim], attention's output.
        """
        operators, weights = self.operators, self.weights.layers[layer]
        hidden = operators.add_product(hidden, attended, weights["output"], weights.get("output_bias"))
        if self.spec.norm_first:
            return self._add_mlp(hidden, operators.norm(hidden, weights, "mlp_norm"), weights)
        hidden = operators.norm(hidden, weights, "attention_norm")
        return operators.norm(self._add_mlp(hidden, hidden, weights), weights, "mlp_norm")

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [t, vocab_size], in the model's type, behind the hidden states of the last layer."""
        outer = self.weights.outer
        if self.spec.final_norm:
            hidden = self.operators.norm(hidden, outer, "norm")
        if self.spec.embedding_size is not None:
            hidden = functional.linear(hidden, outer["project_out"])
        assert self._head is not None, "only the last stage has the head"
        return functional.linear(hidden, self._head)

    def _heads(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the projections of queries, keys and values [t, (num_heads + 2 * num_kv_heads) * head_dim]."""
        weights = self.weights.layers[layer]
        normed = self.operators.norm(hidden, weights, "attention_norm") if self.spec.norm_first else hidden
        return functional.linear(normed, weights["qkv"], weights.get("qkv_bias"))

    def _add_mlp(self, hidden: torch.Tensor, inputs: torch.Tensor, weights: ParameterBuffer) -> torch.Tensor:
        """Return hidden [t, hidden_size] with the MLP of the inputs, of the same shape, added."""
        operators = self.operators
        if self.spec.gated_mlp:
            pair = functional.linear(inputs, weights["gate_up"], weights.get("gate_up_bias"))
            inside = operators.gate(pair)
        else:
            inside = operators.activate(functional.linear(inputs, weights["up"], weights.get("up_bias")))
        return operators.add_product(hidden, inside, weights["down"], weights.get("down_bias"))


class TiledDecoder(Decoder):
    """A decoder each of whose products has exactly `tile_rows` rows, the last tile padded with zeros.

    A product's bits depend on its number of rows; so a token's bits no longer depend on what else is in the batch. Its
    operators must compute each token by itself.
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights, operators: LayerOperators, tile_rows: int) -> None:
        super().__init__(spec, weights, operators)
        self._tile_rows = tile_rows

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of the tokens; see `Decoder`."""
        return self._tiled(super().embed, tokens, positions)

    def post(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the hidden states behind the layer; see `Decoder`."""

        def of_tile(hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
            return Decoder.post(self, layer, hidden, attended)

        return self._tiled(of_tile, hidden, attended)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits; see `Decoder`."""
        return self._tiled(super().head, hidden)

    def _heads(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        def of_tile(hidden: torch.Tensor) -> torch.Tensor:
            return Decoder._heads(self, layer, hidden)  # noqa: SLF001  its own

        return self._tiled(of_tile, hidden)

    def _tiled(self, function: Callable[..., torch.Tensor], *columns: torch.Tensor) -> torch.Tensor:
        """Return a function of the rows of some tensors, computed in tiles."""
        tiles = _tiles(self._tile_rows, *columns)
        return torch.cat([function(*tile) for tile in tiles])[: columns[0].shape[0]]


def _tiles(num_rows: int, *columns: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Cut tensors of equal length into tiles of exactly `num_rows` rows, the last one filled up with zeros."""
    total = columns[0].shape[0]
    padding = -total % num_rows
    if padding:
        columns = tuple(torch.cat((column, column.new_zeros(padding, *column.shape[1:]))) for column in columns)
    return [
        tuple(column[first : first + num_rows] for column in columns) for first in range(0, total + padding, num_rows)
    ]
