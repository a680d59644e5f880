"""Blocks of host memory: which rows keep KV in them, which copies still need them, which are free."""

from __future__ import annotations

import numpy as np

from services.worker.blocks.free_blocks import FreeBlocks
from services.worker.contract.arrays import I32


class HostBlocks:
    """A bounded pool. A block is free when no row keeps it and no copy is under way that reads or fills it."""

    def __init__(self, num_blocks: int) -> None:
        """Begin with ids 0 to num_blocks - 1 free; the smallest is handed out first."""
        self.num_blocks = num_blocks
        self._free = FreeBlocks(num_blocks)
        self._uses: I32 = np.zeros(num_blocks, dtype=np.int32)
        self._kept: dict[int, I32] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free)

    @property
    def rows(self) -> list[int]:
        """Rows that keep blocks."""
        return list(self._kept)

    def blocks_of(self, row: int) -> I32:
        """Return [n]: the blocks that a row keeps, in sequence order."""
        return self._kept[row]

    def keep(self, row: int, count: int) -> I32:
        """Give a row that keeps nothing `count` free blocks, which the caller knows to be there; return them."""
        assert row not in self._kept, f"row {row} keeps host blocks already"
        assert count <= self.num_free, f"{count} host blocks are wanted, {self.num_free} are free"
        ids, _ = self._free.take(count)
        self._kept[row] = ids
        self._uses[ids] += 1
        return ids

    def forget(self, row: int) -> None:
        """Take the blocks from a row, if it keeps any; those that no copy needs become free."""
        ids = self._kept.pop(row, None)
        if ids is not None:
            self._let_go(ids)

    def hold(self, ids: I32) -> None:
        """Begin a copy that needs blocks which a row keeps."""
        assert (self._uses[ids] == 1).all(), "a host block is in one copy at a time, and some row keeps it"
        self._uses[ids] += 1

    def unhold(self, ids: I32) -> None:
        """End a copy."""
        self._let_go(ids)

    def _let_go(self, ids: I32) -> None:
        self._uses[ids] -= 1
        self._free.put_blank(ids[self._uses[ids] == 0][::-1])

    def check_invariants(self, held: list[I32]) -> None:
        """Check that every block is free or in use, and every use is counted.

        Args:
            held: blocks of each copy that is under way.
        """
        uses = np.zeros(self.num_blocks, dtype=np.int32)
        for ids in (*self._kept.values(), *held):
            uses[ids] += 1
        assert (uses == self._uses).all(), "uses of host blocks differ from what rows and copies need"
        kept = np.concatenate([np.zeros(0, dtype=np.int32), *self._kept.values()])
        assert np.unique(kept).size == kept.size, "two rows keep one host block"
        free = np.bincount(self._free.blank_ids, minlength=self.num_blocks)
        assert (free + (uses > 0) == 1).all(), "a host block must be free xor in use"
