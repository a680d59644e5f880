"""Block tables of rows that may fill one block from both ends: who opens an end, and who leaves where two meet.

    extend   ──► two would meet: best effort goes on in another block, where what it has is copied before
             ──► too few free blocks: rows that decode open the other end of somebody's last block, the emptiest first

What is told of it to a policy: whose blocks can be opened (`sides`), and who may have to go (`near`), so that there is
a free block for that. Source and deviations: `both_ends.py`.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from services.worker.blocks.both_ends import NOBODY, BothEnds, SharedBlock
from services.worker.blocks.manager import BlockManager
from services.worker.contract.arrays import EMPTY_I32, I32, AnyRows, Bool, Rows
from services.worker.contract.batch import TableDelta
from services.worker.scheduling.view import Sides


class SharedBlocks(BlockManager):
    """The blocks, the tables, and who fills from which end."""

    def __init__(self, num_blocks: int, block_size: int, held: I32, max_blocks_per_row: int) -> None:
        """See `BlockManager`."""
        super().__init__(num_blocks, block_size, held, max_blocks_per_row)
        self.both_ends = BothEnds(held.size, block_size)
        self._tell: list[tuple[int, int]] = []  # (row, index in its table) of blocks that are others now

    def begin(self, row: int, *, from_right: bool) -> None:
        """Note from which end a new row fills its blocks."""
        self.both_ends.from_right[row] = from_right

    def extend(self, rows: Rows, ends: I32, owner: Hashable = None, decoding: AnyRows = EMPTY_I32) -> TableDelta:
        """Give rows the blocks that they lack, their own or others' ends; see `BlockManager`."""
        both, held = self.both_ends, self.held[rows]
        both.ends[rows] = np.maximum(both.ends[rows], np.minimum(ends, held * self._block_size))
        self._make_way(owner)
        short = ends > held * self._block_size
        if np.count_nonzero(short):
            self._open_sides(rows[short], held[short], ends[short], decoding)
        delta = super().extend(rows, ends)
        both.ends[rows] = np.maximum(both.ends[rows], ends)
        return self._with_told(delta) if self._tell else delta

    def from_right_of(self, row: int, ids: I32) -> Bool:
        """Return [n] from which end a row has filled some of its blocks, or found them filled."""
        found: Bool = self.from_right[ids]
        if (shared := self.both_ends.of_row(row)) is not None:
            found[ids == shared.block] = self.both_ends.from_right[row]
        return found

    def goes_on(self, row: int, other: int, block: int) -> bool:
        """Return whether a row can go on in a copy of another one's block: it fills from that end."""
        from_right = self.from_right_of(other, np.array([block], dtype=np.int32))
        return bool(from_right[0] == self.both_ends.from_right[row])

    @property
    def num_opened_and_met(self) -> tuple[int, int]:
        """See `BlockManager`."""
        return self.both_ends.num_opened, self.both_ends.num_met

    def sides(self, rows: AnyRows) -> Sides:
        """See `BlockManager`."""
        for_left, for_right = self._openable(rows, 2)  # one is for who has it, if it is in the same step
        return Sides(np.array(for_left, np.int32), np.array(for_right, np.int32), self.both_ends.from_right)

    def near(self, num_tokens: int, decoding: AnyRows) -> list[int]:
        """Return the rows that may meet another one in their last block within so many tokens; see `BothEnds`."""
        if not len(self.both_ends):
            return []
        self._forget_read()
        return self.both_ends.near(self.held, num_tokens, decoding)

    def _openable(self, rows: AnyRows, num_left: int) -> tuple[list[int], list[int]]:
        """Return the rows whose last block one from the left can open, and one from the right, the emptiest first."""
        rows = np.asarray(rows)[self.held[rows] > 0].astype(np.intp)
        held = self.held[rows]
        last = self.block_table[rows, held - 1]
        is_open = (self.refcount[last] == 1) & (self.pins[last] == 0) & ~self.index.is_named[last]
        found = rows[self.both_ends.openable(rows, held, is_open, num_left)]
        from_right = self.both_ends.from_right[found]
        return found[from_right].tolist(), found[~from_right].tolist()

    def _open_sides(self, rows: Rows, held: I32, ends: I32, decoding: AnyRows) -> None:
        """Have rows that lack blocks open other ends, if there are too few free ones.

        Args:
            rows: [n]
            held: [n] blocks of each.
            ends: [n] tokens that each needs slots for.
            decoding: rows that may open blocks, and of which others may.
        """
        lacking = self._num_lacking(held, ends)
        if lacking <= 0:
            return
        openable = self._openable(decoding, 1)
        for row in rows[(ends == held * self._block_size + 1) & np.isin(rows, decoding)].tolist():
            holders = openable[int(self.both_ends.from_right[row])]
            if lacking > 0 and holders:
                self._open(row, holders.pop(0))
                lacking -= 1

    def _num_lacking(self, held: I32, ends: I32) -> int:
        """Return how many blocks more than the free ones rows need, which hold so many and need as many tokens."""
        return int((-(-ends // self._block_size) - held).sum()) - self.num_free

    def _open(self, row: int, holder: int) -> None:
        """Let a row fill the other end of another one's last block."""
        block, index = self.block_table[holder, self.held[holder] - 1], int(self.held[row])
        ids = np.array([block], dtype=np.int32)
        self.refcount[ids] += 1
        self._holders.share(row, index, ids, np.ones(1, dtype=np.bool_), self.block_table)
        self._append(row, ids)
        self.both_ends.add(int(block), holder, row)
        self._tell.append((row, index))

    def _make_way(self, owner: Hashable) -> None:
        """Give those who would meet another one in their last block a block of their own, with what they have there.

        Best effort goes, unless only the other one is still there.
        """
        both = self.both_ends
        if len(both):
            self._forget_read()
            for shared in list(both):
                if both.num_taken(shared, self.held) > self.block_size:
                    self._part(shared, owner)

    def _part(self, shared: SharedBlock, owner: Hashable) -> None:
        """Have one of two rows leave the block in which they meet."""
        both, block = self.both_ends, shared.block
        goes = shared.first
        if shared.second != NOBODY and both.from_right[shared.second]:
            goes = shared.second
        stays = shared.second if goes == shared.first else shared.first
        both.part(shared)
        both.num_met += 1
        index = int(self.held[goes]) - 1
        taken = self._take_for(goes, 1)
        self.pin(np.array([block], dtype=np.int32), owner)
        self.block_table[goes, index] = taken[0]
        self.refcount[block] -= 1
        if stays != NOBODY:
            self.from_right[block] = both.from_right[stays]
        self._copies.append((goes, index, block))
        self._tell.append((goes, index))

    def _forget_read(self) -> None:
        """Let go of parts that were being copied, and are."""
        for shared in list(self.both_ends):
            if shared.second == NOBODY and not self.pins[shared.block]:
                self.both_ends.part(shared)

    def _with_told(self, delta: TableDelta) -> TableDelta:
        rows, index = np.array(self._tell, dtype=np.int32).T
        self._tell.clear()
        ids = self.block_table[rows, index]
        told = np.where(self.both_ends.from_right[rows], ~ids, ids)
        return TableDelta(
            np.concatenate([delta.row, rows]),
            np.concatenate([delta.index, index]),
            np.concatenate([delta.block_id, told]),
        )

    def rename(self, rows: I32, source: I32, target: I32) -> TableDelta:
        """See `BlockManager`."""
        delta = super().rename(rows, source, target)
        self.both_ends.rename(source, target)
        ids = self.block_table[delta.row, delta.index]
        told = [self.from_right_of(row, ids[i : i + 1])[0] for i, row in enumerate(delta.row.tolist())]
        return TableDelta(delta.row, delta.index, np.where(np.array(told, dtype=np.bool_), ~ids, ids))

    def release(self, row: int, num_kept: int = 0) -> None:
        """See `BlockManager`. What is being copied of it stays as it is, whoever has the rest of the block."""
        if self.held[row] > num_kept:
            block = self.block_table[row, self.held[row] - 1]
            left = self.both_ends.leave(row, int(self.held[row]), is_read=bool(self.pins[block]))
            if left is not None:
                self.from_right[left[0]] = left[1]
            self.both_ends.ends[row] = min(int(self.both_ends.ends[row]), num_kept * self.block_size)
        super().release(row, num_kept)

    def check_invariants(self, live_rows: I32) -> None:
        """See `BlockManager`."""
        super().check_invariants(live_rows)
        assert not self._tell, "the executor was not told of a block"
        self.both_ends.check_invariants(self.held, self.block_table, self.refcount, self.index.is_named)

    def _take_for(self, rows: AnyRows | int, count: int) -> I32:
        ids = super()._take_for(rows, count)
        self.from_right[ids] = self.both_ends.from_right[rows]
        return ids

    def _entries(self, ids: I32) -> I32:
        """Return [n] blocks as executors know them, those of two as the first one does."""
        return np.where(self.from_right[ids], ~ids, ids)

    def _fill_two(self, ids: I32) -> Bool:
        return np.array([self.both_ends.of_block(block) is not None for block in ids.tolist()], dtype=np.bool_)
