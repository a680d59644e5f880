"""Which blocks a row holds alone, known without a look at its table: what it would free is asked in most decisions.

    row 3   a b c │ d e f      three rows share a, two of them b and c as well: row 3 took d and those behind it itself,
    row 5   a b c │ g          and nobody has come to share them since
    row 8   a │ h i j k

A row comes to share blocks from the beginning of what it lacks, so a row's shared ones are among its first, and only
those have to be looked up. Who holds a block that somebody pins is known in the same way.
"""

from __future__ import annotations

import numpy as np

from services.worker.contract.arrays import I32, AnyRows, Bool

NOBODY = -1
_ONE = np.int32(1)  # adds up in a twentieth of the time of a Python number
_ALL = np.iinfo(np.int32).max


class SoleHolders:
    """Who took each block, and where in its table each row begins to hold what nobody else ever held.

    Args:
        num_blocks: that are known.
        num_rows: of the tables.
    """

    def __init__(self, num_blocks: int, num_rows: int) -> None:
        self._row_of: I32 = np.full(num_blocks, NOBODY, dtype=np.int32)  # who took it; until somebody comes to share it
        self._end_of: I32 = np.zeros(num_rows, dtype=np.int32)  # of a row's blocks that it may share; not too small

    def take(self, rows: AnyRows | int, ids: I32) -> None:
        """Note who has taken blocks, [n] each, that were free and hold nothing."""
        self._row_of[ids] = rows

    def share(self, row: int, first: int, ids: I32, is_shared: Bool, table: I32) -> None:
        """Note that a row refers to blocks with contents.

        Args:
            row: has them from now on.
            first: index of the first one in its table.
            ids: [n] the blocks, one after the other.
            is_shared: [n] which of them somebody else holds.
            table: [num_rows, num_indices] of blocks.
        """
        self._row_of[ids[~is_shared]] = row
        places = is_shared.nonzero()[0]
        if not places.size:
            return
        ids, indices = ids[places], places + first
        holders = self._row_of[ids]
        is_known = holders != NOBODY
        holders, at = holders[is_known], indices[is_known]
        ends = np.where(table[holders, at] == ids[is_known], at + 1, _ALL)
        np.maximum.at(self._end_of, holders, ends.astype(np.int32))
        self._row_of[ids] = NOBODY
        self._end_of[row] = max(int(self._end_of[row]), int(indices[-1]) + 1)

    def release(self, row: int, num_kept: int) -> None:
        """Note that a row has only its first blocks still."""
        self._end_of[row] = min(int(self._end_of[row]), num_kept)

    def rename(self, source: I32, target: I32) -> None:
        """Note that who held blocks `source` [n] holds `target` [n] instead."""
        self._row_of[target] = self._row_of[source]

    def grow(self, num_blocks: int) -> None:
        """Take note of ids up to num_blocks - 1."""
        more = np.full(num_blocks - self._row_of.size, NOBODY, dtype=np.int32)
        self._row_of = np.concatenate([self._row_of, more])

    def freeable(self, rows: AnyRows, held: I32, table: I32, refcount: I32, pinned: I32) -> I32:
        """Return [n]: blocks that become free when rows[i:] let go of theirs, beyond those that rows[i + 1:] free.

        Args:
            rows: [n] each once.
            held: [n] blocks of each.
            table: [num_rows, num_indices] of blocks.
            refcount: [num_blocks] rows that hold each.
            pinned: blocks that stay whoever lets go of them, each once.
        """
        ends = np.minimum(self._end_of[rows], held)
        counts, places = held - ends, ends.nonzero()[0]
        num_seen: I32 = np.zeros(refcount.size, dtype=np.int32)
        if places.size:
            ends = ends[places]
            ids = table[rows[places], : int(ends.max())]
            ids, places = ids[np.arange(ids.shape[1]) < ends[:, None]], np.repeat(places, ends)
            np.add.at(num_seen, ids, _ONE)
            first = np.empty(refcount.size, dtype=np.int32)
            first[ids[::-1]] = places[::-1]  # who comes first is written last
            num_seen[pinned] = 0
            is_freed = (first[ids] == places) & (num_seen[ids] == refcount[ids])
            counts += np.bincount(places[is_freed], minlength=rows.size)
            num_seen[ids] = 1
        pinned = pinned[(refcount[pinned] == 1) & (num_seen[pinned] == 0)]
        holders = self._row_of[pinned]
        if holders.size:
            place_of = np.full(self._end_of.size, rows.size, dtype=np.int32)
            place_of[rows] = np.arange(rows.size)
            counts -= np.bincount(place_of[holders[holders != NOBODY]], minlength=rows.size + 1)[:-1]
        return counts.astype(np.int32)

    def check_invariants(self, rows: I32, held: I32, table: I32, refcount: I32) -> None:
        """Check that nobody else holds the blocks that a row is said to hold alone.

        Args:
            rows: those that hold something.
            held: [num_rows] blocks of each.
            table: as in `freeable`.
            refcount: as in `freeable`.
        """
        for row in rows.tolist():
            ids = table[row, min(int(self._end_of[row]), int(held[row])) : held[row]]
            assert (refcount[ids] == 1).all(), f"row {row} shares a block that it is said to hold alone"
            assert (self._row_of[ids] == row).all(), f"another row than {row} is said to hold its blocks"
