"""One forward pass: from a batch to the logits of its sampled rows. Knows no sampling and no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from services.worker.attention.base import Attention, RaggedRows
from services.worker.attention.remote import RemoteKeys, RemoteRows, attended_of, new_states
from services.worker.engine.types import I32, I64, Batch, Bool
from services.worker.executor.draw import finite_largest
from services.worker.executor.inputs import InputBuffers
from services.worker.memory.kv_cache import KVCache
from services.worker.models.decoder import Angles, Decoder
from services.worker.models.rope import RopeTable
from services.worker.models.spec import ModelSpec
from services.worker.models.weights import ModelWeights

TILE_ROWS = 32
"""Rows of every product in deterministic mode."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a step says of its rows, valid until the next step."""

    finite: Bool
    """[n] whether the hidden state of each row's last token is made of numbers"""
    logits: torch.Tensor
    """[k, vocab_size] float32 of the sampled rows; the owner may change them"""
    largest: I64
    """[k] id of the largest logit of each sampled row, the lowest id on a tie; vocab_size for a row with a logit that
    is not a number or infinitely large"""


class ForwardPass(Protocol):
    """The layers of the model, or of one stage of it, over a cache of theirs."""

    remote: RemoteKeys | None
    """Keys of its rows that lie elsewhere, while KV is on its way; changed between steps. None: all are here."""

    @property
    def cache(self) -> KVCache:
        """Keys and values of its layers; `cache.layers` says which they are."""
        ...

    def run(self, batch: Batch, tables: I32, sampled: I64, hidden: torch.Tensor | None = None) -> Scores:
        """Compute a step from the first layer here to the head, and store its keys and values. Only the last stage can.

        Args:
            batch: tokens and where they stand; its rows are rows of `tables`.
            tables: [max_rows, max_blocks] block tables of all rows, contiguous.
            sampled: [k] places in the batch of the rows whose next token is wanted, ascending.
            hidden: [t, hidden_size] in the model's dtype, behind the layer before the first one here; None: from the
                tokens.

        Raises:
            IndexError: a token, position or block does not exist.
            RemoteLostError: keys that lie elsewhere are not to be had.
        """
        ...

    def advance(self, batch: Batch, tables: I32, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Compute a step's layers here and store their keys and values.

        Args:
            batch: see `run`.
            tables: see `run`.
            hidden: see `run`.

        Returns:
            [t, hidden_size] behind the last layer here, in the model's dtype; nobody else writes it.

        Raises:
            IndexError, RemoteLostError: see `run`.
        """
        ...


class TorchForward:
    """Layers of the model, those of the cache, by torch's operators, on any device of torch.

    Args:
        rope: angles of every position that may occur.
        attention: over the same cache.
        max_tokens: of one batch.
        deterministic: every product in fixed shapes (see `Decoder`).
    """

    def __init__(  # noqa: PLR0913  one argument per part that is joined here
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        rope: RopeTable,
        cache: KVCache,
        attention: Attention[Any],
        *,
        max_tokens: int,
        deterministic: bool,
    ) -> None:
        self.cache = cache
        self.remote: RemoteKeys | None = None
        """Keys that lie elsewhere; see `ForwardPass`."""
        self._rope = rope
        self._decoder = Decoder(spec, weights, TILE_ROWS if deterministic else 0)
        self._attention = attention
        self._inputs = InputBuffers(max_tokens, cache.block_size, cache.keys[0].device)

    def run(self, batch: Batch, tables: I32, sampled: I64, hidden: torch.Tensor | None = None) -> Scores:
        """Compute a step up to the logits; see `ForwardPass`."""
        decoder = self._decoder
        hidden = self.advance(batch, tables, hidden)
        last = np.cumsum(batch.num_tokens, dtype=np.int64) - 1
        hidden = hidden.index_select(0, torch.from_numpy(last).to(hidden.device))
        finite: Bool = torch.isfinite(hidden.sum(dim=-1, dtype=torch.float32)).cpu().numpy()
        if len(sampled) < len(last):
            hidden = hidden.index_select(0, torch.from_numpy(sampled).to(hidden.device))
        logits = (
            decoder.head(hidden)
            if len(sampled)
            else hidden.new_empty((0, decoder.spec.vocab_size), dtype=torch.float32)
        )
        return Scores(finite, logits, finite_largest(logits))

    def advance(self, batch: Batch, tables: I32, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Compute a step's layers here; see `ForwardPass`."""
        decoder, cache, attention = self._decoder, self.cache, self._attention
        inputs = self._inputs.fill(batch, tables)
        plan = attention.plan(inputs.rows)
        partly = self._partly_remote(inputs.rows)
        angles = Angles(*self._rope.rows(inputs.positions))
        if hidden is None:
            hidden = decoder.embed(inputs.tokens, inputs.positions)
        for layer in cache.layers:
            queries, keys, values = decoder.pre(layer, hidden, angles)
            cache.write(layer, inputs.slots, keys, values)
            if partly is not None:
                partly.ask(layer, queries)
            attended = attention.attend(plan, layer, queries)
            if partly is not None:
                partly.take(layer, queries, attended)
            hidden = decoder.post(layer, hidden, attended)
        return hidden

    def _partly_remote(self, rows: RaggedRows) -> _PartlyRemote | None:
        """Return what attends rows some of whose keys lie elsewhere; None: there are none."""
        if self.remote is None:
            return None
        found = self.remote.rows_of(rows)
        return None if found is None else _PartlyRemote(self._attention, self.remote, found, self.cache.keys[0].device)


class _PartlyRemote:
    """The rows of a step some of whose keys lie elsewhere.

    Args:
        attention: over the keys that are here.
        remote: those that are not.
        rows: of the step.
        device: of the cache.
    """

    def __init__(self, attention: Attention[Any], remote: RemoteKeys, rows: RemoteRows, device: torch.device) -> None:
        self._remote = remote
        self._rows = rows
        self._tokens = torch.from_numpy(rows.tokens).to(device)
        self._before, self._after = attention.plan_fold(rows.here_before), attention.plan_fold(rows.here_after)
        self._states = new_states(0, 0, 0)

    def ask(self, layer: int, queries: torch.Tensor) -> None:
        """Attend the first keys, and send for the next ones."""
        chosen = queries[self._tokens]
        num_tokens, num_heads, head_dim = chosen.shape
        states = new_states(num_tokens, num_heads, head_dim, chosen.device)
        self._before(layer, chosen, states)
        self._states = states.cpu()
        self._remote.ask(self._rows, layer, chosen, self._states)

    def take(self, layer: int, queries: torch.Tensor, attended: torch.Tensor) -> None:
        """Attend the last keys, and put the output of these rows [num_tokens, num_heads * head_dim] in its place."""
        self._remote.take()
        states = self._states.to(queries.device)
        self._after(layer, queries[self._tokens], states)
        attended[self._tokens] = attended_of(states, attended.dtype)
