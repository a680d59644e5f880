"""Output tokens of all rows in one pool of chunks: appending a token to every row of a batch is one array write."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.worker.contract.arrays import EMPTY_I32, I32

CHUNK = 256
"""Tokens of one chunk; only a row that begins a chunk costs Python."""

_SHIFT = 8
_MASK = CHUNK - 1
_MASK_I32 = np.array(_MASK, dtype=np.int32)  # without a dimension: half as long as a scalar in a short operation
_FIRST_CHUNKS = 64


class TokenLog:
    """Append-only list of token ids per row, cleared when the row is freed. The caller keeps the lengths."""

    def __init__(self, num_rows: int, max_tokens: int) -> None:
        self._chunk_of: I32 = np.zeros((num_rows, (max_tokens + _MASK) >> _SHIFT), dtype=np.int32)
        self._base: NDArray[np.intp] = np.zeros(num_rows, dtype=np.intp)  # where the last chunk begins
        self._pool: I32 = np.zeros(_FIRST_CHUNKS * CHUNK, dtype=np.int32)
        self._free = list(range(_FIRST_CHUNKS - 1, -1, -1))

    @property
    def num_used_chunks(self) -> int:
        """Chunks that rows hold."""
        return (self._pool.size >> _SHIFT) - len(self._free)

    def append(self, rows: NDArray[np.intp], lengths: I32, tokens: I32) -> None:
        """Append one token to each row.

        Args:
            rows: [n], each once.
            lengths: [n] tokens that the rows have so far.
            tokens: [n] ids.
        """
        offsets = lengths & _MASK_I32
        if np.count_nonzero(offsets) < offsets.size:
            for i in (offsets == 0).nonzero()[0].tolist():
                self._begin_chunk(int(rows[i]), int(lengths[i]) >> _SHIFT)
        self._pool[self._base[rows] + offsets] = tokens

    def extend(self, row: int, tokens: I32) -> None:
        """Set the tokens of an empty row."""
        for index, begin in enumerate(range(0, int(tokens.size), CHUNK)):
            self._begin_chunk(row, index)
            part = tokens[begin : begin + CHUNK]
            self._pool[self._base[row] : self._base[row] + part.size] = part

    def read(self, row: int, start: int, stop: int) -> I32:
        """Return a copy of the row's tokens [start, stop); the caller knows that they exist."""
        if stop <= start:
            return EMPTY_I32
        chunks = self._chunk_of[row, start >> _SHIFT : ((stop - 1) >> _SHIFT) + 1]
        tokens: I32 = self._pool.reshape(-1, CHUNK)[chunks].reshape(-1)
        skip = start & _MASK
        return tokens[skip : skip + stop - start]

    def clear(self, row: int, length: int) -> None:
        """Give the row's chunks back."""
        self._free.extend(self._chunk_of[row, : (length + _MASK) >> _SHIFT][::-1].tolist())

    def _begin_chunk(self, row: int, index: int) -> None:
        if not self._free:
            num_chunks = self._pool.size >> _SHIFT
            self._pool = np.concatenate([self._pool, np.zeros_like(self._pool)])
            self._free.extend(range(2 * num_chunks - 1, num_chunks - 1, -1))
        chunk = self._free.pop()
        self._chunk_of[row, index] = chunk
        self._base[row] = chunk << _SHIFT
