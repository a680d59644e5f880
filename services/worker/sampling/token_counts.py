"""How often each token occurs in a sequence: sparse, so that a row costs 12 bytes per distinct token."""

from __future__ import annotations

import numpy as np

from services.worker.contract.arrays import I32, I64

_ROOM = 32
"""Distinct tokens for which a grown array has room beyond those it holds."""


class TokenCounts:
    """Distinct tokens of one sequence with the number of times that each is in the output.

    Args:
        prompt: tokens that are listed even while the output has none of them.
    """

    def __init__(self, prompt: I32) -> None:
        ids = np.unique(prompt)
        self._size = int(ids.size)
        self._ids: I64 = np.concatenate([ids.astype(np.int64), np.zeros(_ROOM, dtype=np.int64)])
        self._counts: I32 = np.zeros(self._ids.size, dtype=np.int32)

    @property
    def ids(self) -> I64:
        """Distinct tokens in ascending order, [m]; valid until the next change."""
        return self._ids[: self._size]

    @property
    def counts(self) -> I32:
        """How often the output has each of them, [m]; valid until the next change."""
        return self._counts[: self._size]

    def add(self, tokens: I32) -> None:
        """Count some more output tokens."""
        for token in tokens.tolist() if tokens.size < _ROOM else ():
            self._add_one(token)
        if tokens.size < _ROOM:
            return
        ids, places = np.unique(np.concatenate([self.ids, tokens.astype(np.int64)]), return_inverse=True)
        counts = np.bincount(places[self._size :], minlength=ids.size)
        counts[places[: self._size]] += self.counts
        self._size = int(ids.size)
        self._ids = np.concatenate([ids, np.zeros(_ROOM, dtype=np.int64)])
        self._counts = np.concatenate([counts, np.zeros(_ROOM, dtype=np.int64)]).astype(np.int32)

    def _add_one(self, token: int) -> None:
        index, size = int(np.searchsorted(self.ids, token)), self._size
        if index == size or self._ids[index] != token:
            if size == self._ids.size:
                room = max(_ROOM, size // 2)
                self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.int32)])
            for column in (self._ids, self._counts):
                column[index + 1 : size + 1] = column[index:size]  # numpy buffers overlaps
            self._ids[index], self._counts[index] = token, 0
            self._size += 1
        self._counts[index] += 1
