"""Blocks of host memory: which rows refer to them, which copies still need them, what they hold, which are free.

Copies of the KV of full blocks have the names of these blocks (`prefix.py`), so a run of tokens lies there once: rows
that begin alike refer to the same blocks, and what comes to the host again finds what is there from before. A block
that no row refers to and no copy needs is free, and keeps its contents until it is handed out, the oldest first.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from services.worker.blocks.block_pool import BlockPool
from services.worker.contract.arrays import I32, Bool
from shared.prefix_names import RunName


class HostBlocks(BlockPool):
    """A bounded pool, and the blocks that rows keep in it."""

    def __init__(self, num_blocks: int) -> None:
        """Begin with ids 0 to num_blocks - 1 free; the smallest is handed out first."""
        super().__init__(num_blocks)
        self._kept: dict[int, I32] = {}

    @property
    def rows(self) -> list[int]:
        """Rows that keep blocks."""
        return list(self._kept)

    def blocks_of(self, row: int) -> I32:
        """Return [n]: the blocks that a row keeps, in sequence order."""
        return self._kept[row]

    def keep(self, row: int, names: Sequence[RunName], num_blocks: int) -> tuple[I32, Bool]:
        """Let a row refer to so many blocks more, which the caller knows to be free or to be there.

        Args:
            row: whose KV it is; what it keeps so far comes behind.
            names: of those that are full, the first ones.
            num_blocks: what goes beyond the names is not full.

        Returns:
            [num_blocks] the blocks, and whether each has yet to be filled.
        """
        found = [self.index.get(name) for name in names]
        is_new = np.array([block is None for block in found] + [True] * (num_blocks - len(found)), dtype=np.bool_)
        ids = np.zeros(num_blocks, dtype=np.int32)
        ids[~is_new] = [block for block in found if block is not None]
        self._refer(ids[~is_new])  # before others are handed out, which could be these
        ids[is_new] = self._take(int(np.count_nonzero(is_new)))
        self._kept[row] = np.concatenate([ids, self._kept[row]]) if row in self._kept else ids
        return ids, is_new

    def hand_out(self, owner: Hashable, from_right: Bool) -> I32:
        """Return [n] blocks, pinned, for contents [n] filled from these ends of no row; the caller knows them free."""
        ids = self.set_aside(int(from_right.size), owner)
        self.from_right[ids] = from_right
        return ids

    def name(self, names: Sequence[RunName], ids: I32, row: int | None) -> None:
        """Name blocks that a copy has filled, which pins them.

        Args:
            names: of the first of them; the others are not full.
            ids: [n]
            row: keeps them, or None if nobody does; of what is there twice it keeps the older one.
        """
        for name, block in zip(names, ids.tolist(), strict=False):
            older = self.index.get(name)
            if older is None:
                self.index.add(name, block)
            elif row is not None:
                self._refer(np.array([older], dtype=np.int32))
                self._let_go(np.array([block], dtype=np.int32))
                self._kept[row][self._kept[row] == block] = older

    def find(self, names: Sequence[RunName]) -> I32:
        """Return [n] the blocks of those of the names that have one."""
        found = (self.index.get(name) for name in names)
        return np.array([block for block in found if block is not None], dtype=np.int32)

    def forget(self, row: int) -> None:
        """Take the blocks from a row, if it keeps any; those that nobody else needs become free."""
        ids = self._kept.pop(row, None)
        if ids is not None:
            self._let_go(ids)

    def check_invariants(self) -> None:
        """Check that every block is free or in use, and every reference is counted."""
        kept = np.concatenate([np.zeros(0, dtype=np.int32), *self._kept.values()])
        references = np.bincount(kept, minlength=self.refcount.size)
        assert (references == self.refcount).all(), "references to host blocks differ from what rows keep"
        for row, ids in self._kept.items():
            assert np.unique(ids).size == ids.size, f"row {row} keeps a host block twice"
        self.check_pool()
