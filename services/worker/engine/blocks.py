"""Bookkeeping of KV block ids: who holds which block, which are free. No tensor, no tokens.

A block is *usable* while there is memory behind it. A usable block is free when nothing refers to it (refcount 0) and
nothing pins it (pins 0); it is then on the free stack, exactly once. Ids are handed out in a fixed order, the one freed
last first, so equal runs use equal ids.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.types import I32, NO_TABLE_DELTA, TableDelta

Rows = NDArray[np.intp]


class BlockManager:
    """Block tables of all rows, reference counts, pins, and the free blocks."""

    def __init__(self, num_blocks: int, block_size: int, held: I32, max_blocks_per_row: int) -> None:
        """Begin with blocks 0 to num_blocks - 1 usable and free.

        Args:
            num_blocks: usable blocks.
            block_size: token slots of a block.
            held: [num_rows] the table's column `held_blocks`, written here only.
            max_blocks_per_row: of a sequence as long as the model's context.
        """
        self.block_size = block_size
        self.held = held
        self.block_table: I32 = np.zeros((held.size, max_blocks_per_row), dtype=np.int32)
        self.refcount: I32 = np.zeros(num_blocks, dtype=np.int32)
        self.pins: I32 = np.zeros(num_blocks, dtype=np.int32)
        self.usable: NDArray[np.bool_] = np.ones(num_blocks, dtype=np.bool_)
        self.on_free: Callable[[I32], None] | None = None
        """Called with ids that become free; the shadow KV poisons them."""
        self._stack: I32 = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        self._num_usable = num_blocks
        self._pinned: dict[Hashable, list[I32]] = {}

    @property
    def num_free(self) -> int:
        """Usable blocks that nobody holds or pins."""
        return self._num_free

    @property
    def num_usable(self) -> int:
        """Blocks with memory behind them."""
        return self._num_usable

    @property
    def free_ids(self) -> I32:
        """Copy of the free ids; the last one is handed out next."""
        return self._stack[: self._num_free].copy()

    def extend(self, rows: Rows, ends: I32) -> TableDelta:
        """Give rows the blocks that they lack for tokens [0, end); the scheduler has seen to it that they are free.

        Args:
            rows: [n], each once.
            ends: [n] tokens that each row must have slots for.
        """
        held = self.held[rows]
        short = ends > held * self.block_size
        if not np.count_nonzero(short):
            return NO_TABLE_DELTA
        rows, held = rows[short], held[short]
        more = -(-ends[short] // self.block_size) - held
        total = int(more.sum())
        row = rows if total == rows.size else np.repeat(rows, more)
        index = held
        if total != rows.size:
            first = np.cumsum(more) - more
            index = np.repeat(held - first, more) + np.arange(total, dtype=np.int32)
        ids = self._take(total)
        self.block_table[row, index] = ids
        self.held[rows] += more
        return TableDelta(row.astype(np.int32), index.astype(np.int32), ids)

    def release(self, row: int) -> None:
        """Take all blocks from a row; those that nobody else refers to or pins become free."""
        ids = self.block_table[row, : self.held[row]]
        self.held[row] = 0
        self.refcount[ids] -= 1
        self._free(ids[::-1])

    @property
    def has_pins(self) -> bool:
        """Somebody has pinned blocks."""
        return bool(self._pinned)

    def freeable(self, rows: I32) -> I32:
        """Return how many blocks become free if a row is released, per row of the table; 0 for rows not asked for."""
        alone = (self.refcount == 1) & (self.pins == 0)
        counts = np.zeros_like(self.held)
        for row in rows.tolist():
            counts[row] = np.count_nonzero(alone[self.block_table[row, : self.held[row]]])
        return counts

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

    def unpin(self, owner: Hashable) -> None:
        """Drop all pins of an owner. Idempotent."""
        for ids in self._pinned.pop(owner, ()):
            np.subtract.at(self.pins, ids, 1)
            self._free(np.unique(ids))

    def grow(self, num_blocks: int) -> None:
        """Make ids up to num_blocks - 1 known and those that are new usable."""
        known = self.refcount.size
        assert num_blocks >= known, f"{num_blocks} blocks are fewer than the {known} known; take them away by id"
        more = num_blocks - known
        self.refcount = np.concatenate([self.refcount, np.zeros(more, dtype=np.int32)])
        self.pins = np.concatenate([self.pins, np.zeros(more, dtype=np.int32)])
        self.usable = np.concatenate([self.usable, np.zeros(more, dtype=np.bool_)])
        self._stack = np.concatenate([self._stack, np.zeros(more, dtype=np.int32)])
        self.set_usable(np.arange(known, num_blocks, dtype=np.int32), usable=True)

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
        free = self._stack[: self._num_free]
        kept = free[self.usable[free]]
        self._stack[: kept.size] = kept
        self._num_free = int(kept.size)
        self._num_usable -= ids.size
        if self.on_free is not None:
            self.on_free(ids)

    def _take(self, count: int) -> I32:
        assert count <= self._num_free, f"the scheduler chose rows that need {count} blocks of {self._num_free} free"
        self._num_free -= count
        ids: I32 = self._stack[self._num_free : self._num_free + count][::-1].copy()
        self.refcount[ids] = 1
        return ids

    def _free(self, ids: I32) -> None:
        """Put those of the ids on the free stack that nobody refers to or pins."""
        freed = ids[(self.refcount[ids] == 0) & (self.pins[ids] == 0)]
        self._stack[self._num_free : self._num_free + freed.size] = freed
        self._num_free += int(freed.size)
        if self.on_free is not None:
            self.on_free(freed)

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
        free = np.bincount(self._stack[: self._num_free], minlength=self.refcount.size)
        in_use = (self.refcount > 0) | (self.pins > 0)
        assert (free + in_use == self.usable).all(), "a usable block must be free xor in use, any other neither"
        assert self._num_usable == int(self.usable.sum()), "the number of usable blocks is wrong"
