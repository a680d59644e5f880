"""Attention over a context of which a part lies elsewhere: its state goes there, and comes back with that part in it.

    positions     0 ────── first ────────────── end ────────── the query
                  │  here    │    elsewhere      │    here
    state of      └──fold──► ask ──► fold ──► take └──fold──► output
    a query

The state of a query row is what attention over its first keys leaves: the weighted values, the largest score, and the
sum of weights. Whoever has the keys that follow folds them in, split by split of `SPLIT_KEYS` positions in the order of
the context. So the result has the very bits of one pass over all keys, wherever they lie.

Source: KunServe v1, section 4.2 (remote attention). Deviations: where the paper leaves open how parts are joined, whole
splits are folded in order; the keys of the last split that is not whole are moved first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from services.worker.attention.base import KeyRanges, RaggedRows
from services.worker.contract.arrays import I32, I64
from services.worker.contract.remote import SPLIT_KEYS

STATE_EXTRA = 2
"""What a state holds behind the weighted values [head_dim]: the largest score so far, in units of log2, -inf before the
first key; and the sum of 2^(score - largest), of which the weighted values are the numerator."""


@dataclass(frozen=True, eq=False)
class RemoteRows:
    """The rows of a step some of whose keys lie elsewhere: those at positions [first, end)."""

    place: I64
    """[n] in the step, ascending."""
    rows: RaggedRows
    """These rows alone; entries of `tables` for positions [first, end) name blocks that are not filled here."""
    first: I32
    """[n] multiples of SPLIT_KEYS."""
    end: I32
    """[n] multiples of SPLIT_KEYS, above `first`, at most the row's start."""
    first_token: I64
    """[n] index in the batch of the row's first token."""

    @cached_property
    def tokens(self) -> I64:
        """[t] indices in the batch of all of their tokens, row by row."""
        counts = self.rows.num_tokens.astype(np.int64)
        return np.repeat(self.first_token - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())

    @property
    def here_before(self) -> KeyRanges:
        """What is folded in before it is asked for the rest."""
        return KeyRanges(self.rows, np.zeros_like(self.first), self.first)

    @property
    def here_after(self) -> KeyRanges:
        """What is folded in when that has come back."""
        last = -(-self.rows.num_keys // SPLIT_KEYS) * SPLIT_KEYS
        return KeyRanges(self.rows, self.end, np.asarray(last, dtype=np.int32))


class RemoteKeys(Protocol):
    """Keys of a stage's rows that lie elsewhere. Called by the thread that computes the stage."""

    def rows_of(self, rows: RaggedRows) -> RemoteRows | None:
        """Return which rows of a step need keys that are not here; None: none does.

        Args:
            rows: of the step, with the blocks of all layers of this stage.
        """

    def ask(self, rows: RemoteRows, layer: int, queries: torch.Tensor, states: torch.Tensor) -> None:
        """Send queries and states to where the keys are; does not wait for an answer.

        Args:
            rows: of the step.
            layer: numbered in the whole model.
            queries: [t, num_heads, head_dim] of their tokens, rotated, not scaled; read before this returns.
            states: [t, num_heads, head_dim + STATE_EXTRA] float32, contiguous, in main memory; kept until `take`.

        Raises:
            RemoteLostError: it cannot be had.
        """

    def take(self) -> None:
        """Wait until the states that were given to `ask` have the keys that lie elsewhere in them.

        Raises:
            RemoteLostError: it cannot be had.
        """


def new_states(num_tokens: int, num_heads: int, head_dim: int, device: torch.device | None = None) -> torch.Tensor:
    """Return states before the first key: [num_tokens, num_heads, head_dim + STATE_EXTRA] float32."""
    states = torch.zeros((num_tokens, num_heads, head_dim + STATE_EXTRA), dtype=torch.float32, device=device)
    states[..., head_dim] = -torch.inf
    return states


def attended_of(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the attention's output [t, num_heads * head_dim] of states [t, num_heads, head_dim + STATE_EXTRA].

    A query that saw no key gets zeros.
    """
    total = states[..., -1:]
    inverse = torch.where(total > 0, 1 / total, torch.zeros_like(total))
    return (states[..., :-STATE_EXTRA] * inverse).to(dtype).flatten(1)


def remote_rows(rows: RaggedRows, first: I32, end: I32) -> RemoteRows | None:
    """Return the rows of a step whose range of keys elsewhere is not empty; None: there are none.

    Args:
        rows: of the step.
        first: [n] multiples of SPLIT_KEYS.
        end: [n] multiples of SPLIT_KEYS; at most `first`: all keys of the row are here.
    """
    place = np.flatnonzero(end > first)
    if not len(place):
        return None
    assert (end[place] <= rows.start[place]).all(), "new keys are where they are computed"
    chosen = RaggedRows(rows.num_tokens[place], rows.start[place], np.ascontiguousarray(rows.tables[place]))
    return RemoteRows(place, chosen, first[place], end[place], rows.first_token[place].astype(np.int64))
