"""Bookkeeping of KV block ids: who holds which block, which are free. No tensor, no tokens.

A block is *usable* while there is memory behind it. A usable block is free when nothing refers to it (refcount 0) and
nothing pins it (pins 0); it is then among the free blocks, exactly once. A free block that is named (`prefix.py`) keeps
its contents until it is handed out, and can be shared again before. Ids are handed out in a fixed order
(`free_blocks.py`), so equal runs use equal ids.

A row writes only into blocks that it alone refers to and that have no name: full blocks are shared by reference, and of
a block that is not full a row that shares it gets a copy when it is admitted, before it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.free_blocks import FreeBlocks
from services.worker.engine.prefix import PrefixIndex
from services.worker.engine.types import I32, NO_COPIES, NO_TABLE_DELTA, CopyOps, TableDelta

Rows = NDArray[np.intp]
_ONE = np.array(1, dtype=np.int32)


class BlockManager:
    """Block tables of all rows, reference counts, pins, names, and the free blocks."""

    def __init__(self, num_blocks: int, block_size: int, held: I32, max_blocks_per_row: int) -> None:
        """Begin with blocks 0 to num_blocks - 1 usable and free.

        Args:
            num_blocks: usable blocks.
            block_size: token slots of a block.
            held: [num_rows] the table's column `held_blocks`, written here only.
            max_blocks_per_row: of a sequence as long as the model's context.
        """
        self.block_size = block_size
        self._block_size = np.array(block_size, dtype=np.int32)  # half as long as a scalar, in a short operation
        self.held = held
        self.block_table: I32 = np.zeros((held.size, max_blocks_per_row), dtype=np.int32)
        self.refcount: I32 = np.zeros(num_blocks, dtype=np.int32)
        self.pins: I32 = np.zeros(num_blocks, dtype=np.int32)
        self.usable: NDArray[np.bool_] = np.ones(num_blocks, dtype=np.bool_)
        self.index = PrefixIndex(num_blocks)
        self.on_lost: Callable[[I32], None] | None = None
        """Called with ids whose contents nobody may read any more; the shadow KV poisons them."""
        self._free_blocks = FreeBlocks(num_blocks)
        self._num_usable = num_blocks
        self._pinned: dict[Hashable, list[I32]] = {}
        self._shared: list[tuple[int, I32]] = []  # (row, blocks that it has come to share) since the last `extend`
        self._ahead: list[tuple[int, I32]] = []  # (row, blocks that `take_for` gave it) since the last `extend`
        self._copies: list[tuple[int, int, int]] = []  # (row, index in its table, source) since the last `take_copies`

    @property
    def num_free(self) -> int:
        """Usable blocks that nobody holds or pins; some of them may be named."""
        return len(self._free_blocks)

    @property
    def num_used(self) -> int:
        """Usable blocks that somebody holds or pins."""
        return self._num_usable - len(self._free_blocks)

    @property
    def num_usable(self) -> int:
        """Blocks with memory behind them."""
        return self._num_usable

    def extend(self, rows: Rows, ends: I32) -> TableDelta:
        """Give rows the blocks that they lack for tokens [0, end); the scheduler has seen to it that they are free.

        Args:
            rows: [n], each once.
            ends: [n] tokens that each row must have slots for.
        """
        held = self.held[rows]
        short = ends > held * self._block_size
        delta = self._extend(rows[short], held[short], ends[short]) if np.count_nonzero(short) else NO_TABLE_DELTA
        return self._with_first(delta) if self._shared or self._ahead else delta

    def _extend(self, rows: Rows, held: I32, ends: I32) -> TableDelta:
        next_held = held + _ONE
        if not np.count_nonzero(ends > next_held * self._block_size):  # decodes: one block for each row
            ids = self._take(rows.size)
            self.block_table[rows, held] = ids
            self.held[rows] = next_held
            return TableDelta(rows.astype(np.int32), held, ids)
        more = -(-ends // self._block_size) - held
        total = int(more.sum())
        first = np.cumsum(more) - more
        row, index = np.repeat(rows, more), np.repeat(held - first, more) + np.arange(total, dtype=np.int32)
        ids = self._take(total)
        self.block_table[row, index] = ids
        self.held[rows] += more
        return TableDelta(row.astype(np.int32), index.astype(np.int32), ids)

    def _with_first(self, delta: TableDelta) -> TableDelta:
        first, self._shared, self._ahead = [*self._shared, *self._ahead], [], []
        return TableDelta(
            np.concatenate([*(np.full(ids.size, row, dtype=np.int32) for row, ids in first), delta.row]),
            np.concatenate([*(np.arange(ids.size, dtype=np.int32) for _, ids in first), delta.index]),
            np.concatenate([*(ids for _, ids in first), delta.block_id]),
        )

    def take_for(self, row: int, count: int) -> I32:
        """Give a row that holds nothing `count` free blocks ahead of its next step, and return them."""
        assert not self.held[row], f"row {row} holds blocks already"
        ids = self._take(count)
        self.block_table[row, :count] = ids
        self.held[row] = count
        self._ahead.append((row, ids))
        return ids

    def share(self, row: int, ids: I32, partial: int | None, owner: Hashable) -> None:
        """Let a row that holds nothing refer to full blocks, and copy one more that is not full.

        Args:
            row: is in the next batch, so that its executor learns of them.
            ids: in sequence order; held by somebody, pinned, or free and named.
            partial: held by somebody; the block that the row is given next becomes its copy.
            owner: pins the source of the copy, which must stay as it is until the copy is made.
        """
        assert not self.held[row], f"row {row} holds blocks already"
        free = ids[(self.refcount[ids] == 0) & (self.pins[ids] == 0)]
        if free.size:
            self._free_blocks.take_out(free)
        self.refcount[ids] += 1
        self.block_table[row, : ids.size] = ids
        self.held[row] = ids.size
        if ids.size:
            self._shared.append((row, ids))
        if partial is not None:
            self.pin(np.array([partial], dtype=np.int32), owner)
            self._copies.append((row, int(ids.size), partial))

    def take_copies(self) -> CopyOps:
        """Return the copies that rows asked for since the last call; they have been extended since."""
        if not self._copies:
            return NO_COPIES
        rows, indices, sources = np.array(self._copies, dtype=np.int32).T
        self._copies.clear()
        return CopyOps(sources, self.block_table[rows, indices])

    def in_use(self, ids: I32) -> int:
        """Return how many of the blocks are not free."""
        return int(np.count_nonzero((self.refcount[ids] > 0) | (self.pins[ids] > 0)))

    def release(self, row: int) -> None:
        """Take all blocks from a row; those that nobody else refers to or pins become free."""
        ids = self.block_table[row, : self.held[row]]
        self.held[row] = 0
        self.refcount[ids] -= 1
        self._free(ids[::-1])
        if self._ahead:
            self._ahead = [entry for entry in self._ahead if entry[0] != row]

    def freeable(self, rows: I32) -> I32:
        """Return [n]: how many blocks become free when rows[i:] are released, beyond those that rows[i + 1:] free.

        So the sum is what all of them free together, and the sum of an end is what that end frees.
        """
        held = self.held[rows]
        if not self._pinned and int(self.held.sum()) == self._num_usable - self.num_free:
            return held  # nothing is shared or pinned
        table = self.block_table[rows, : int(held.max(initial=0))]
        ids = table[np.arange(table.shape[1]) < held[:, None]]
        first = np.full(self.refcount.size, rows.size)
        np.minimum.at(first, ids, np.repeat(np.arange(rows.size), held))
        alone = (np.bincount(ids, minlength=self.refcount.size) == self.refcount) & (self.pins == 0)
        counts = np.bincount(first[alone & (first < rows.size)], minlength=rows.size)
        return counts.astype(np.int32)

    def holders(self, ids: I32, rows: I32) -> list[int]:
        """Return those of the rows that hold any of the blocks, in the given order."""
        wanted = np.zeros(self.refcount.size, dtype=np.bool_)
        wanted[ids] = True
        return [row for row in rows.tolist() if wanted[self.block_table[row, : self.held[row]]].any()]

    def pin(self, ids: I32, owner: Hashable) -> None:
        """Keep blocks from being reused until the owner unpins them, whatever happens to the rows that hold them."""
        assert self.usable[ids].all(), "only usable blocks can be pinned"
        assert bool(((self.refcount[ids] > 0) | (self.pins[ids] > 0)).all()), "a free block cannot be pinned"
        ids = np.array(ids, dtype=np.int32)
        np.add.at(self.pins, ids, 1)
        self._pinned.setdefault(owner, []).append(ids)

    def reserve(self, ids: I32, owner: Hashable) -> None:
        """Pin free blocks without contents, which somebody is about to fill."""
        assert self.usable[ids].all(), "only usable blocks can be reserved"
        assert not self.in_use(ids), "only free blocks can be reserved"
        assert not self.index.is_named[ids].any(), "a block with contents cannot be reserved"
        stays = np.ones(self.refcount.size, dtype=np.bool_)
        stays[ids] = False
        self._free_blocks.retain(stays)
        self.pins[ids] += 1
        self._pinned.setdefault(owner, []).append(np.array(ids, dtype=np.int32))

    def num_only_pinned(self, owner: Hashable) -> int:
        """Return how many of an owner's blocks no row refers to."""
        return sum(int(np.count_nonzero(self.refcount[ids] == 0)) for ids in self._pinned.get(owner, ()))

    def unpin(self, owner: Hashable) -> None:
        """Drop all pins of an owner. Idempotent."""
        for ids in self._pinned.pop(owner, ()):
            np.subtract.at(self.pins, ids, 1)
            self._free(np.unique(ids))

    def grow(self, first: int, end: int) -> None:
        """Make ids from `first` to `end` - 1 known and usable."""
        if end > self.refcount.size:
            self.learn(end)
        self.set_usable(np.arange(first, end, dtype=np.int32), usable=True)

    def learn(self, num_blocks: int) -> None:
        """Make ids up to num_blocks - 1 known; those that are new are not usable."""
        more = num_blocks - self.refcount.size
        self.refcount = np.concatenate([self.refcount, np.zeros(more, dtype=np.int32)])
        self.pins = np.concatenate([self.pins, np.zeros(more, dtype=np.int32)])
        self.usable = np.concatenate([self.usable, np.zeros(more, dtype=np.bool_)])
        self.index.grow(num_blocks)
        self._free_blocks.grow(num_blocks)

    def set_usable(self, ids: I32, *, usable: bool) -> None:
        """Add memory behind some ids, or take it away from ids that nobody holds or pins. Idempotent."""
        ids = np.unique(ids[self.usable[ids] != usable]).astype(np.int32)
        assert not self.refcount[ids].any(), "a block that a row holds cannot change its memory"
        assert not self.pins[ids].any(), "a pinned block cannot change its memory"
        self.usable[ids] = usable
        if usable:
            self._num_usable += ids.size
            self._free(ids[::-1])
            return
        self.index.forget(ids)
        self._free_blocks.retain(self.usable)
        self._num_usable -= ids.size
        if self.on_lost is not None:
            self.on_lost(ids)

    def _take(self, count: int) -> I32:
        assert count <= self.num_free, f"the scheduler chose rows that need {count} blocks of {self.num_free} free"
        ids, lost = self._free_blocks.take(count)
        if lost.size:
            self.index.forget(lost)
            if self.on_lost is not None:
                self.on_lost(lost)
        self.refcount[ids] = 1
        return ids

    def _free(self, ids: I32) -> None:
        """Count those of the ids as free that nobody refers to or pins."""
        freed = ids[(self.refcount[ids] == 0) & (self.pins[ids] == 0)]
        named = self.index.is_named[freed]
        if np.count_nonzero(named):
            self._free_blocks.put_kept(freed[named])
            freed = freed[~named]
        self._free_blocks.put_blank(freed)
        if self.on_lost is not None:
            self.on_lost(freed)

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
        pinned = [ids for owned in self._pinned.values() for ids in owned]
        pins = np.bincount(np.concatenate(pinned), minlength=self.pins.size) if pinned else np.zeros_like(self.pins)
        assert (pins == self.pins).all(), "pins differ from what their owners hold"
        blank, kept = self._free_blocks.blank_ids, self._free_blocks.kept_ids
        free = np.bincount(np.concatenate([blank, kept]), minlength=self.refcount.size)
        in_use = (self.refcount > 0) | (self.pins > 0)
        assert (free + in_use == self.usable).all(), "a usable block must be free xor in use, any other neither"
        assert blank.size + kept.size == self.num_free, "the number of free blocks is wrong"
        assert self.index.is_named[kept].all(), "a free block without a name keeps no contents"
        assert not self.index.is_named[blank].any(), "a free block with a name keeps its contents"
        assert not (self.index.is_named & ~self.usable).any(), "a block without memory has no contents"
        self.index.check_invariants()
        assert not self._shared, "the executor was not told what a row shares"
        for row, ids in self._ahead:
            assert self.held[row] == ids.size, "the executor would be told of blocks that a row had"
            assert (self.block_table[row, : ids.size] == ids).all(), "the executor would be told of other blocks"
        assert not self._copies, "the executor was not told to copy a block"
        assert self._num_usable == int(self.usable.sum()), "the number of usable blocks is wrong"

    def check_writable(self, row: int, num_computed: int) -> None:
        """Check that a row is the only one to refer to the blocks that it still writes, and that they have no name."""
        ids = self.block_table[row, num_computed // self.block_size : self.held[row]]
        assert (self.refcount[ids] == 1).all(), f"row {row} would write into a block that others refer to"
        assert not self.index.is_named[ids].any(), f"row {row} would write into a block that has a name"
