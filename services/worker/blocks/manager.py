"""Block tables: which KV blocks each row holds, and what the executor has yet to hear of it. No tensor, no tokens.

A row writes only into blocks that it alone refers to, or fills from one end (`both_ends.py`), and that have no name:
full blocks are shared by reference, and of a block that is not full a row that shares it gets a copy when it is
admitted, before it writes.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from services.worker.blocks.block_pool import BlockPool
from services.worker.blocks.both_ends import NOBODY, BothEnds, SharedBlock
from services.worker.blocks.sole_holders import SoleHolders
from services.worker.contract.arrays import EMPTY_I32, I32, AnyRows, Bool, Rows
from services.worker.contract.batch import NO_COPIES, NO_TABLE_DELTA, CopyOps, TableDelta

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
        self.both_ends = BothEnds(held.size, block_size)
        """Who fills from which end; with nobody from the right, nobody shares what he writes."""
        # since the last `extend`, (row, index of the first in its table, blocks): those that it has come to share, ...
        self._shared: list[tuple[int, int, I32]] = []
        self._ahead: list[tuple[int, int, I32]] = []  # ... and those that `take_for` gave it
        self._copies: list[tuple[int, int, int]] = []  # (row, index in its table, source) since the last `take_copies`
        self._tell: list[tuple[int, int]] = []  # (row, index in its table) of blocks that are others now
        self._opens = False  # somebody fills from the right

    def begin(self, row: int, *, from_right: bool) -> None:
        """Note from which end a new row fills its blocks."""
        self.both_ends.from_right[row] = from_right
        self._opens |= from_right

    def extend(self, rows: Rows, ends: I32, owner: Hashable = None, decoding: AnyRows = EMPTY_I32) -> TableDelta:
        """Give rows the blocks that they lack for tokens [0, end); the scheduler has seen to it that they are free.

        Where they are not, rows that lack one for one token open the other end of somebody's (`sides`).

        Args:
            rows: [n], each once.
            ends: [n] tokens that each row must have slots for.
            owner: pins blocks that are left until their copy is made.
            decoding: rows that may open blocks, and of which others may.
        """
        held = self.held[rows]
        if self._opens:
            self.both_ends.ends[rows] = np.maximum(self.both_ends.ends[rows], np.minimum(ends, held * self._block_size))
            self._make_way(owner)
        short = ends > held * self._block_size
        if self._opens:
            if np.count_nonzero(short):
                self._open_sides(rows, held, ends, short, decoding)
            self.both_ends.ends[rows] = np.maximum(self.both_ends.ends[rows], ends)
        delta = self._extend(rows[short], held[short], ends[short]) if np.count_nonzero(short) else NO_TABLE_DELTA
        if self._tell:
            delta = self._with_told(delta)
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
        """Return so many free blocks, which are to be those of rows [count], each filled from its row's end."""
        ids = self._take(count)
        self._holders.take(rows, ids)
        if self._opens:
            self.from_right[ids] = self.both_ends.from_right[rows]
        return ids

    def _entries(self, ids: I32) -> I32:
        """Return [n] blocks as executors know them (`contract/table_entries.py`); those of two as the first does."""
        return np.where(self.from_right[ids], ~ids, ids) if self._opens else ids

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

    def sides(self, rows: AnyRows) -> tuple[I32, I32]:
        """Return whose last blocks rows that fill from the left can open, and from the right.

        Args:
            rows: that hold blocks and decode.
        """
        if not self._opens:
            return EMPTY_I32, EMPTY_I32
        for_left, for_right = self._openable(rows, 2)  # one is for who has it, if it is in the same step
        return np.array(for_left, dtype=np.int32), np.array(for_right, dtype=np.int32)

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

    def _open_sides(self, rows: Rows, held: I32, ends: I32, short: Bool, decoding: AnyRows) -> None:
        """Have rows open other ends if there are too few free blocks: they are short of none any more."""
        lacking = self._num_lacking(held[short], ends[short])
        if lacking <= 0:
            return
        openable = self._openable(decoding, 1)
        wants = short & (ends == held * self._block_size + 1) & np.isin(rows, decoding)
        for place in wants.nonzero()[0].tolist():
            holders = openable[int(self.both_ends.from_right[rows[place]])]
            if lacking > 0 and holders:
                self._open(int(rows[place]), holders.pop(0))
                short[place] = False
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
        self.both_ends.rename(source, target)
        entries = self._entries(ids)
        for i, row in enumerate(rows[place].tolist() if len(self.both_ends) else ()):
            entries[i] = ~ids[i] if self.from_right_of(row, ids[i : i + 1])[0] else ids[i]
        return TableDelta(rows[place], index.astype(np.int32), entries)

    def release(self, row: int, num_kept: int = 0) -> None:
        """Take all but its first blocks from a row; those that nobody else refers to or pins become free."""
        ids = self.block_table[row, num_kept : self.held[row]]
        if self._opens and ids.size:
            self._leave_last(row, int(ids[-1]))
            self.both_ends.ends[row] = min(int(self.both_ends.ends[row]), num_kept * self.block_size)
        self.held[row] = num_kept
        self._holders.release(row, num_kept)
        self._let_go(ids)
        if self._ahead:
            kept = [(of, i, ids[: max(num_kept - i, 0)] if of == row else ids) for of, i, ids in self._ahead]
            self._ahead = [entry for entry in kept if entry[2].size]

    def _leave_last(self, row: int, block: int) -> None:
        """Note that a row gives up its last block."""
        left = self.both_ends.leave(row, int(self.held[row]), is_read=bool(self.pins[block]))
        if left is not None:
            self.from_right[left[0]] = left[1]

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
        assert not self._tell, "the executor was not told of a block"
        self.both_ends.check_invariants(self.held, self.block_table, self.refcount, self.index.is_named)

    def check_writable(self, row: int, num_computed: int) -> None:
        """Check that a row is the only one to refer to the blocks that it still writes, and that they have no name."""
        ids = self.block_table[row, num_computed // self.block_size : self.held[row]]
        is_own = np.array([self.both_ends.of_block(block) is not None for block in ids.tolist()], dtype=np.bool_)
        assert (is_own | (self.refcount[ids] == 1)).all(), f"row {row} would write into a block that others refer to"
        assert not self.index.is_named[ids].any(), f"row {row} would write into a block that has a name"
