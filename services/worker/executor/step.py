"""One forward pass: from a laid-out batch to logits. Knows no rows, no sampling and no engine."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from services.worker.attention.base import Attention
from services.worker.executor.inputs import StepInputs
from services.worker.memory.kv_cache import KVCache
from services.worker.models.decoder import Angles, Decoder
from services.worker.models.rope import RopeTable
from services.worker.models.spec import ModelSpec
from services.worker.models.weights import ModelWeights

TILE_ROWS = 32
"""Rows of every product in deterministic mode."""


class ForwardPass(Protocol):
    """The model's layers over a cache."""

    @property
    def cache(self) -> KVCache:
        """Keys and values of all layers."""
        ...

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Compute a step, store its keys and values; return the hidden states [n, hidden] of each row's last token."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocab_size], float32, behind hidden states that `run` returned.

        The caller may change them; they are valid until the next call.
        """
        ...


class TorchForward:
    """The model's layers by torch's operators, on any device of torch.

    Args:
        rope: angles of every position that may occur.
        attention: over the same cache.
        deterministic: every product in fixed shapes (see `Decoder`).
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        rope: RopeTable,
        cache: KVCache,
        attention: Attention[Any],
        *,
        deterministic: bool,
    ) -> None:
        self.cache = cache
        self._rope = rope
        self._decoder = Decoder(spec, weights, TILE_ROWS if deterministic else 0)
        self._attention = attention

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Compute a step, store its keys and values; return the hidden states [n, hidden] of each row's last token."""
        decoder, cache, attention = self._decoder, self.cache, self._attention
        plan = attention.plan(inputs.rows)
        angles = Angles(*self._rope.rows(inputs.positions))
        hidden = decoder.embed(inputs.tokens, inputs.positions)
        for layer in range(decoder.spec.num_layers):
            queries, keys, values = decoder.pre(layer, hidden, angles)
            cache.write(layer, inputs.slots, keys, values)
            hidden = decoder.post(layer, hidden, attention.attend(plan, layer, queries))
        return hidden.index_select(0, inputs.last)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocab_size], float32, behind hidden states that `run` returned."""
        return self._decoder.head(hidden)
