"""An ordered set of table rows: one array, changed by whole-array operations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.worker.contract.arrays import I32


class RowQueue:
    """Rows in an order. `view` is read-only and valid until the next change."""

    def __init__(self, num_rows: int) -> None:
        self._rows: I32 = np.zeros(num_rows, dtype=np.int32)
        self._marked: NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)
        self._size = 0
        self.num_changes = 0
        self.view: I32 = self._rows[:0]
        self._publish()

    def __len__(self) -> int:
        return self._size

    def append(self, row: int) -> None:
        """Put a row at the end."""
        self._insert(self._size, row)

    def insert(self, row: int, major: NDArray[np.float64], minor: NDArray[np.int64]) -> None:
        """Put a row where the columns (major, then minor) say, given that the rows are in that order."""
        rows = self._rows[: self._size]
        key = major[row]
        if self._size == 0 or major[rows[-1]] < key:
            self._insert(self._size, row)
            return
        keys = major[rows]
        first, last = np.searchsorted(keys, key, "left"), np.searchsorted(keys, key, "right")
        self._insert(int(first + np.searchsorted(minor[rows[first:last]], minor[row])), row)

    def remove(self, rows: NDArray[np.integer]) -> None:
        """Take out some rows, each of which is in the queue."""
        self._marked[rows] = True
        current = self._rows[: self._size]
        kept = current[~self._marked[current]]
        self._marked[rows] = False
        assert kept.size == self._size - rows.size, "a row to remove is not in the queue"
        self._size = int(kept.size)
        self._rows[: self._size] = kept
        self._publish()

    def _insert(self, position: int, row: int) -> None:
        self._rows[position + 1 : self._size + 1] = self._rows[position : self._size]  # numpy buffers overlaps
        self._rows[position] = row
        self._size += 1
        self._publish()

    def _publish(self) -> None:
        self.num_changes += 1
        self.view = self._rows[: self._size]
        self.view.flags.writeable = False
