"""One forward pass: from a laid-out batch to logits. Knows no rows, no sampling and no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from services.worker.attention.base import Attention
from services.worker.engine.types import I64, Bool
from services.worker.executor.inputs import StepInputs
from services.worker.memory.kv_cache import KVCache
from services.worker.models.decoder import Angles, Decoder
from services.worker.models.rope import RopeTable
from services.worker.models.spec import ModelSpec
from services.worker.models.weights import ModelWeights

TILE_ROWS = 32
"""Rows of every product in deterministic mode."""


@dataclass(frozen=True, slots=True)
class LastHidden:
    """What a step leaves of each of its rows."""

    values: torch.Tensor
    """[n, hidden] of each row's last token"""
    finite: Bool
    """[n] whether they are numbers"""


@dataclass(frozen=True, slots=True)
class Logits:
    """Scores of the next tokens, valid until the forward pass is asked again."""

    values: torch.Tensor
    """[n, vocab_size] float32; the owner may change them"""
    largest: I64 | None = None
    """[n] id of the largest of each row as they were given out, the lowest id on a tie; vocab_size for a row with what
    is not a number. None: not known"""


class ForwardPass(Protocol):
    """The model's layers over a cache."""

    @property
    def cache(self) -> KVCache:
        """Keys and values of all layers."""
        ...

    def run(self, inputs: StepInputs) -> LastHidden:
        """Compute a step, and store its keys and values."""
        ...

    def logits(self, hidden: torch.Tensor) -> Logits:
        """Return the logits behind hidden states [n, hidden] that `run` returned."""
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

    def run(self, inputs: StepInputs) -> LastHidden:
        """Compute a step, and store its keys and values."""
        decoder, cache, attention = self._decoder, self.cache, self._attention
        plan = attention.plan(inputs.rows)
        angles = Angles(*self._rope.rows(inputs.positions))
        hidden = decoder.embed(inputs.tokens, inputs.positions)
        for layer in range(decoder.spec.num_layers):
            queries, keys, values = decoder.pre(layer, hidden, angles)
            cache.write(layer, inputs.slots, keys, values)
            hidden = decoder.post(layer, hidden, attention.attend(plan, layer, queries))
        last = (inputs.rows.first_token + inputs.rows.num_tokens - 1).astype(np.int64)
        hidden = hidden.index_select(0, torch.from_numpy(last).to(hidden.device))
        finite: Bool = torch.isfinite(hidden.sum(dim=-1, dtype=torch.float32)).cpu().numpy()
        return LastHidden(hidden, finite)

    def logits(self, hidden: torch.Tensor) -> Logits:
        """Return the logits behind hidden states [n, hidden] that `run` returned."""
        return Logits(self._decoder.head(hidden))
