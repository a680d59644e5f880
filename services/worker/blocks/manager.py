"""Block tables: which KV blocks each row holds, and what the executor has yet to hear of it. No tensor, no tokens.

A row writes only into blocks that it alone refers to and that have no name: full blocks are shared by reference, and of
a block that is not full a row that shares it gets a copy when it is admitted, before it writes. Where two rows may
write one block from both ends: `shared_blocks.py`.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from services.worker.blocks.block_pool import BlockPool
from services.worker.blocks.sole_holders import SoleHolders
from services.worker.contract.arrays import EMPTY_I32, I32, AnyRows, Bool, Rows
from services.worker.contract.batch import NO_COPIES, NO_TABLE_DELTA, CopyOps, TableDelta
from services.worker.scheduling.view import NO_SIDES, Sides

_ONE = np.array(1, dtype=np.int32)


class BlockManager(BlockPool):
    """The blocks, and the block tables of all rows."""

    def __init__(self, num_blocks: int, block_size: int, held: I32, max_blocks_per_row: int) -> None:
        """Begin with blocks 0 to num_blocks - 1 usable and free.

        Args:
            num_blocks: usable blocks.
            block_size: token slots of a block.
            held: [num_rows] the table's column `held_blocks`, written here only.
            max_blocks_per_row: of a sequence as long as the model's context.
        """
        super().__init__(num_blocks)
        self.block_size = block_size
        self._block_size = np.array(block_size, dtype=np.int32)  # half as long as a scalar, in a short operation
        self.held = held
        self.block_table: I32 = np.zeros((held.size, max_blocks_per_row), dtype=np.int32)
        self._holders = SoleHolders(num_blocks, held.size)
        # since the last `extend`, (row, index of the first in its table, blocks): those that it has come to share, ...
        self._shared: list[tuple[int, int, I32]] = []
        self._ahead: list[tuple[int, int, I32]] = []  # ... and those that `take_for` gave it
        self._copies: list[tuple[int, int, int]] = []  # (row, index in its table, source) since the last `take_copies`

    def begin(self, row: int, *, from_right: bool) -> None:
        """Note from which end a new row fills its blocks."""
        assert not from_right, "these blocks are filled from the left"

    def extend(self, rows: Rows, ends: I32, owner: Hashable = None, decoding: AnyRows = EMPTY_I32) -> TableDelta:
        """Give rows the blocks that they lack for tokens [0, end); the scheduler has seen to it that they are free.

        Args:
            rows: [n], each once.
            ends: [n] tokens that each row must have slots for.
            owner: pins blocks that are left until their copy is made; see `SharedBlocks`, so the next.
            decoding: rows that may open blocks, and of which others may.
        """
        del owner, decoding
        held = self.held[rows]
        short = ends > held * self._block_size
        delta = self._extend(rows[short], held[short], ends[short]) if np.count_nonzero(short) else NO_TABLE_DELTA
        return self._with_first(delta) if self._shared or self._ahead else delta

    def _extend(self, rows: Rows, held: I32, ends: I32) -> TableDelta:
        next_held = held + _ONE
        if not np.count_nonzero(ends > next_held * self._block_size):  # decodes: one block for each row
            ids = self._take_for(rows, rows.size)
            self.block_table[rows, held] = ids
            self.held[rows] = next_held
            return TableDelta(rows.astype(np.int32), held, self._entries(ids))
        more = -(-ends // self._block_size) - held
        total = int(more.sum())
        first = np.cumsum(more) - more
        row, index = np.repeat(rows, more), np.repeat(held - first, more) + np.arange(total, dtype=np.int32)
        ids = self._take_for(row, total)
        self.block_table[row, index] = ids
        self.held[rows] += more
        return TableDelta(row.astype(np.int32), index.astype(np.int32), self._entries(ids))

    def _take_for(self, rows: AnyRows | int, count: int) -> I32:
        """Return so many free blocks, which are to be those of rows [count]."""
        ids = self._take(count)
        self._holders.take(rows, ids)
        return ids

    def _entries(self, ids: I32) -> I32:
        """Return [n] blocks as executors know them (`contract/table_entries.py`)."""
        return ids

    def from_right_of(self, row: int, ids: I32) -> Bool:
        """Return [n] from which end a row has filled some of its blocks, or found them filled."""
        return self.from_right[ids]

    def goes_on(self, row: int, other: int, block: int) -> bool:
        """Return whether a row can go on in a copy of another one's block: it fills from that end."""
        return True

    @property
    def num_opened_and_met(self) -> tuple[int, int]:
        """Blocks whose other end was opened, and those in which two met, in all."""
        return 0, 0

    def sides(self, rows: AnyRows) -> Sides:
        """Return whose last blocks others may open, of rows that decode."""
        return NO_SIDES

    def near(self, num_tokens: int, decoding: AnyRows) -> list[int]:
        """Return the rows that may meet another one in their last block within so many tokens; see `BothEnds`."""
        return []

    def _with_first(self, delta: TableDelta) -> TableDelta:
        before, self._shared, self._ahead = [*self._shared, *self._ahead], [], []
        return TableDelta(
            np.concatenate([*(np.full(ids.size, row, dtype=np.int32) for row, _, ids in before), delta.row]),
            np.concatenate([*(np.arange(i, i + ids.size, dtype=np.int32) for _, i, ids in before), delta.index]),
            np.concatenate([*(self._entries(ids) for _, _, ids in before), delta.block_id]),
        )

    def take_for(self, row: int, shared: I32, count: int) -> I32:
        """Give a row more blocks behind its own, ahead of its next step: full ones to share, then free ones.

        Args:
            row: is known to its executor.
            shared: in sequence order; held by somebody, pinned, or free and named.
            count: of free ones, besides those of them that are shared.

        Returns:
            [count] the free ones.
        """
        first = self._append_shared(row, shared)
        taken = self._take_for(row, count)
        self._append(row, taken)
        self._ahead.append((row, first, np.concatenate([shared, taken])))
        return taken

    def share(self, row: int, ids: I32, partial: int | None, owner: Hashable) -> None:
        """Let a row refer to full blocks, behind those that it holds, and copy one more that is not full.

        Args:
            row: is in the next batch, so that its executor learns of them.
            ids: in sequence order; held by somebody, pinned, or free and named.
            partial: held by somebody; the block that the row is given next becomes its copy.
            owner: pins the source of the copy, which must stay as it is until the copy is made.
        """
        first = self._append_shared(row, ids)
        if ids.size:
            self._shared.append((row, first, ids))
        if partial is not None:
            self.pin(np.array([partial], dtype=np.int32), owner)
            self._copies.append((row, first + int(ids.size), partial))

    def _append_shared(self, row: int, ids: I32) -> int:
        """Let a row refer to blocks behind those that it holds; return where in its table."""
        is_shared = self.refcount[ids] > 0
        self._refer(ids)
        self._holders.share(row, int(self.held[row]), ids, is_shared, self.block_table)
        return self._append(row, ids)

    def _append(self, row: int, ids: I32) -> int:
        """Put blocks behind those that a row holds; return where in its table."""
        first = int(self.held[row])
        self.block_table[row, first : first + ids.size] = ids
        self.held[row] = first + ids.size
        return first

    def take_copies(self) -> CopyOps:
        """Return the copies that rows asked for since the last call; they have been extended since."""
        if not self._copies:
            return NO_COPIES
        rows, indices, sources = np.array(self._copies, dtype=np.int32).T
        self._copies.clear()
        return CopyOps(sources, self.block_table[rows, indices])

    def rename(self, rows: I32, source: I32, target: I32) -> TableDelta:
        """Let tables of some rows name blocks `target` [n] where they name `source` [n]; return what has changed."""
        names = np.arange(self.refcount.size, dtype=np.int32)
        names[source] = target
        self._holders.rename(source, target)
        held = self.held[rows]
        table = self.block_table[rows, : int(held.max(initial=0))]
        is_renamed = (np.arange(table.shape[1]) < held[:, None]) & (names[table] != table)
        place, index = is_renamed.nonzero()
        ids: I32 = names[table[is_renamed]]
        self.block_table[rows[place], index] = ids
        return TableDelta(rows[place], index.astype(np.int32), self._entries(ids))

    def release(self, row: int, num_kept: int = 0) -> None:
        """Take all but its first blocks from a row; those that nobody else refers to or pins become free."""
        ids = self.block_table[row, num_kept : self.held[row]]
        self.held[row] = num_kept
        self._holders.release(row, num_kept)
        self._let_go(ids)
        if self._ahead:
            kept = [(of, i, ids[: max(num_kept - i, 0)] if of == row else ids) for of, i, ids in self._ahead]
            self._ahead = [entry for entry in kept if entry[2].size]

    def freeable(self, rows: AnyRows) -> I32:
        """Return [n]: how many blocks become free when rows[i:] are released, beyond those that rows[i + 1:] free.

        So the sum is what all of them free together, and the sum of an end is what that end frees.
        """
        held: I32 = self.held[rows]
        if not self._pins and int(self.held.sum()) == self.num_used:
            return held  # nothing is shared or pinned
        return self._holders.freeable(rows, held, self.block_table, self.refcount, self._pins.ids)

    def learn(self, num_blocks: int) -> None:
        """See `BlockPool`."""
        super().learn(num_blocks)
        self._holders.grow(num_blocks)

    def check_invariants(self, live_rows: I32) -> None:
        """Check the conservation laws: every usable block is free or in use, and every reference is counted.

        Args:
            live_rows: rows that hold a sequence; every other row must hold nothing.
        """
        held = np.zeros_like(self.held)
        held[live_rows] = self.held[live_rows]
        assert (held == self.held).all(), "a free row holds blocks"
        tables = [self.block_table[row, : self.held[row]] for row in live_rows.tolist()]
        entries = np.concatenate(tables) if tables else np.zeros(0, dtype=np.int32)
        references = np.bincount(entries, minlength=self.refcount.size)
        assert (references == self.refcount).all(), "refcounts differ from the entries of the block tables"
        self.check_pool()
        self._holders.check_invariants(live_rows, self.held, self.block_table, self.refcount)
        assert not self._shared, "the executor was not told what a row shares"
        for row, first, ids in self._ahead:
            assert self.held[row] >= first + ids.size, "the executor would be told of blocks that a row had"
            told = self.block_table[row, first : first + ids.size]
            assert (told == ids).all(), "the executor would be told of other blocks"
        assert not self._copies, "the executor was not told to copy a block"

    def check_writable(self, row: int, num_computed: int) -> None:
        """Check that a row is the only one to refer to the blocks that it still writes, and that they have no name."""
        ids = self.block_table[row, num_computed // self.block_size : self.held[row]]
        is_own = self.refcount[ids] == 1
        assert (is_own | self._fill_two(ids)).all(), f"row {row} would write into a block that others refer to"
        assert not self.index.is_named[ids].any(), f"row {row} would write into a block that has a name"

    def _fill_two(self, ids: I32) -> Bool:
        """Return [n] which blocks two rows fill from both ends."""
        return np.zeros(ids.size, dtype=np.bool_)
