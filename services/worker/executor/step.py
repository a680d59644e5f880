"""One forward pass: from a batch to the logits of its sampled rows. Knows no sampling and no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from services.worker.attention.base import Attention, RaggedRows
from services.worker.attention.remote import RemoteKeys, RemoteRows, attended_of, new_states
from services.worker.contract.arrays import I32, I64
from services.worker.contract.batch import Batch
from services.worker.executor.inputs import InputBuffers, StepInputs
from services.worker.memory.kv_cache import KVCache
from services.worker.models.decoder import Decoder
from services.worker.models.rope import RopeTable
from services.worker.sampling.own_samples import OwnSamples
from services.worker.sampling.scoring import Scores, Scoring

Attend = Callable[[int, torch.Tensor], torch.Tensor]
"""Takes a layer and its queries, returns attention's output."""
_NONE: I64 = np.zeros(0, dtype=np.int64)


class ForwardPass(Protocol):
    """The layers of the model, or of one stage of it, over a cache of theirs."""

    remote: RemoteKeys | None
    """Keys of its rows that lie elsewhere, while KV is on its way; changed between steps. None: all are here."""

    @property
    def cache(self) -> KVCache:
        """Keys and values of its layers; `cache.layers` says which they are."""

    def run(self, batch: Batch, tables: I32, sampled: I64, hidden: torch.Tensor | None = None) -> Scores:
        """Compute a step from the first layer here to the head, and store its keys and values. Only the last stage can.

        Args:
            batch: tokens and where they stand; its rows are rows of `tables`. A token below 0 stands for a row's own
                sample that only the device has (`OwnSamples`).
            tables: [max_rows, max_blocks] block tables of all rows, contiguous.
            sampled: [k] places in the batch of the rows whose next token is wanted, ascending.
            hidden: [t, hidden_size] in the model's dtype, behind the layer before the first one here; None: from the
                tokens.

        Raises:
            IndexError: a token, position or block does not exist.
            RemoteLostError: keys that lie elsewhere are not to be had.
        """

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


class DecodeLayers:
    """Layers of the model, those of the cache, around an attention that somebody else computes.

    Args:
        decoder: of these layers.
        scoring: of the last layer's rows.
        rope: angles of every position that may occur.
        cache: of these layers.
    """

    def __init__(self, decoder: Decoder, scoring: Scoring, rope: RopeTable, cache: KVCache) -> None:
        self.cache = cache
        self._decoder = decoder
        self._scoring = scoring
        self.rope = rope

    def compute(self, inputs: StepInputs, hidden: torch.Tensor | None, attend: Attend) -> torch.Tensor:
        """Store a step's keys and values; return the hidden states [t, hidden_size] behind the last layer here.

        Args:
            inputs: of the step.
            hidden: behind the layer before the first one here, may be overwritten; None: from the tokens.
            attend: called for each layer with its queries [t, num_heads, head_dim]; keys and values are stored then.
        """
        decoder = self._decoder
        rotate = decoder.operators.rotation(inputs.positions, inputs.slots)
        if hidden is None:
            hidden = decoder.embed(inputs.tokens, inputs.positions)
        for layer in self.cache.layers:
            queries = decoder.pre(layer, hidden, rotate)
            hidden = decoder.post(layer, hidden, attend(layer, queries))
        return hidden

    def scores(self, hidden: torch.Tensor, inputs: StepInputs, into: Scores | None = None) -> Scores:
        """Return what a step says of its rows.

        Args:
            hidden: [t, hidden_size] behind the last layer.
            inputs: of the step.
            into: where it is put; None: into new memory.
        """
        finite = self._scoring.finite(hidden, inputs.last, None if into is None else into.finite)
        if not len(inputs.sampled):
            products = hidden.new_empty((0, self.vocab_size))
        else:
            products = self._decoder.head(hidden.index_select(0, inputs.sampled))
        return Scores(finite, *self._scoring.largest(products, None if into is None else (into.logits, into.largest)))

    @property
    def vocab_size(self) -> int:
        """Logits of a row."""
        return self._decoder.spec.vocab_size

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield everything that is read or written beside a step's own."""
        yield from self.cache.pools()
        yield self.rope.cos
        yield self._decoder.weights.outer.storage
        for layer in self._decoder.weights.layers:
            yield layer.storage


class StepGraph(Protocol):
    """Steps that were recorded (`step_graphs.py`)."""

    def has_for(self, batch: Batch, tables: I32) -> bool:
        """Return whether a batch can be computed by what was recorded.

        Args:
            batch: of the step.
            tables: see `ForwardPass.run`.
        """

    def run(self, batch: Batch, tables: I32, sampled: I64) -> Scores:
        """Compute a step; see `ForwardPass.run`."""


class TorchForward:
    """Layers of the model, those of the cache, by torch's operators, on any device of torch.

    Args:
        layers: of the model.
        attention: over the same cache.
        max_tokens: of one batch.
        samples: of the rows.
        record: of steps of the same layers, if there is one.
    """

    def __init__(
        self,
        layers: DecodeLayers,
        attention: Attention[Any],
        *,
        max_tokens: int,
        samples: OwnSamples | None = None,
        record: StepGraph | None = None,
    ) -> None:
        self.cache = layers.cache
        self.remote: RemoteKeys | None = None
        """Keys that lie elsewhere; see `ForwardPass`."""
        self._layers = layers
        self._attention = attention
        self._record = record
        self._inputs = InputBuffers(max_tokens, self.cache.block_size, self.cache.keys[0].device, samples)

    def run(self, batch: Batch, tables: I32, sampled: I64, hidden: torch.Tensor | None = None) -> Scores:
        """Compute a step up to the logits; see `ForwardPass`."""
        record = self._record if hidden is None and self.remote is None else None
        if record is not None and record.has_for(batch, tables):
            return record.run(batch, tables, sampled)
        inputs = self._inputs.fill(batch, tables, sampled)
        return self._layers.scores(self._compute(inputs, hidden), inputs)

    def advance(self, batch: Batch, tables: I32, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Compute a step's layers here; see `ForwardPass`."""
        return self._compute(self._inputs.fill(batch, tables, _NONE), hidden)

    def _compute(self, inputs: StepInputs, hidden: torch.Tensor | None) -> torch.Tensor:
        plan = self._attention.plan(inputs.rows)
        partly = self._partly_remote(inputs.rows)

        def attend(layer: int, queries: torch.Tensor) -> torch.Tensor:
            if partly is not None:
                partly.ask(layer, queries)
            attended = self._attention.attend(plan, layer, queries)
            if partly is not None:
                partly.take(layer, queries, attended)
            return attended

        return self._layers.compute(inputs, hidden, attend)

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
