"""Blocks that two rows fill from both ends: real time from the left, best effort from the right.

    block 7     │ A0 A1 A2 A3 │ .  .  .  .  .  .  .  .  .  . │ b1 b0 │        A may write until it meets b
    they meet   ──► b's part is copied to a block of its own before the step, and b goes on there

Only blocks that are not full have two holders, each of whom has it as its last one: whoever decodes opens the free end
of one where no block is free. A row's part that is being copied to the host stays until the copy is made, whoever has
left. Of a full block it is known from which end it was filled: that goes with its name, on the host too.

Source: BROS, section 5 (bidirectional layout, block preemption, lazy checkpointing). Deviations: blocks are opened by
rows that need one slot, not by prompts; when two meet, best effort yields whoever writes, with its part of this block
alone; where no block is free for that the policy has somebody give way a step before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from services.worker.contract.arrays import I32, AnyRows, Bool

NOBODY: Final = -1


@dataclass(slots=True)
class SharedBlock:
    """One block and its two holders."""

    block: int
    first: int
    """Row that had it; the block's own direction is that of this row."""
    second: int
    """Row that opened its other end; `NOBODY`: one has left, whose part is being copied."""
    num_left: int = 0
    """Slots of that one."""


class BothEnds:
    """Which rows fill from the right, how far each has come, and who shares a block.

    Args:
        num_rows: of the tables.
        block_size: token slots of a block.
    """

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.from_right: Bool = np.zeros(num_rows, dtype=np.bool_)
        """[num_rows] from which end each row fills blocks."""
        self.ends: I32 = np.zeros(num_rows, dtype=np.int32)
        """[num_rows] tokens for which each row has had slots."""
        self.num_opened = 0
        """Blocks whose other end was opened, in all."""
        self.num_met = 0
        """Of these, those in which the two met."""
        self._block_size = block_size
        self._of_row: dict[int, SharedBlock] = {}
        self._of_block: dict[int, SharedBlock] = {}

    def __len__(self) -> int:
        return len(self._of_block)

    def __iter__(self) -> Iterator[SharedBlock]:
        return iter(self._of_block.values())

    def of_row(self, row: int) -> SharedBlock | None:
        """Return the block that a row shares; None: none."""
        return self._of_row.get(row)

    def of_block(self, block: int) -> SharedBlock | None:
        """Return who shares a block; None: nobody does."""
        return self._of_block.get(block)

    def num_slots(self, row: int, held: int) -> int:
        """Return how many slots of its last block a row has."""
        return int(self.ends[row]) - (held - 1) * self._block_size

    def num_taken(self, shared: SharedBlock, held: I32) -> int:
        """Return how many slots of a block are taken from both ends.

        Args:
            shared: the block.
            held: [num_rows] blocks of each row.
        """
        rows = [row for row in (shared.first, shared.second) if row != NOBODY]
        return sum(self.num_slots(row, int(held[row])) for row in rows) + shared.num_left

    def near(self, held: I32, num_tokens: int, decoding: AnyRows) -> list[int]:
        """Return the rows that may meet somebody within so many tokens of each.

        Args:
            held: [num_rows] blocks of each row.
            num_tokens: at least one.
            decoding: rows that get one token in a step; others, which have come to know more, may get many.
        """
        found, one_each = list[int](), set(decoding.tolist())
        for shared in self:
            rows = [row for row in (shared.first, shared.second) if row != NOBODY]
            is_full = self.num_taken(shared, held) + num_tokens * len(rows) > self._block_size
            if is_full or not one_each.issuperset(rows):
                found += rows
        return found

    def add(self, block: int, first: int, second: int) -> None:
        """Note that a row has opened the other end of another one's block."""
        shared = SharedBlock(block, first, second)
        self._of_block[block] = self._of_row[first] = self._of_row[second] = shared
        self.num_opened += 1

    def leave(self, row: int, held: int, *, is_read: bool) -> tuple[int, bool] | None:
        """Note that a row gives up its last block, if it shares it.

        Args:
            row: the one.
            held: its blocks so far.
            is_read: what it has there is being copied, so nobody may write into it.

        Returns:
            The block, and whether the one who stays fills it from the right; None: nobody stays.
        """
        shared = self._of_row.pop(row, None)
        if shared is None:
            return None
        stays = shared.second if shared.first == row else shared.first
        if stays == NOBODY:
            del self._of_block[shared.block]
            return None
        if is_read:
            shared.first, shared.second, shared.num_left = stays, NOBODY, self.num_slots(row, held)
        else:
            del self._of_block[shared.block], self._of_row[stays]
        return shared.block, bool(self.from_right[stays])

    def part(self, shared: SharedBlock) -> None:
        """Note that a block has one holder, or none."""
        del self._of_block[shared.block]
        for row in (shared.first, shared.second):
            self._of_row.pop(row, None)

    def rename(self, source: I32, target: I32) -> None:
        """Note that blocks [n] are now others [n]."""
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            if (shared := self._of_block.pop(old, None)) is not None:
                shared.block = new
                self._of_block[new] = shared

    def openable(self, rows: AnyRows, held: I32, is_open: Bool, num_left: int) -> I32:
        """Return the places of rows whose last block another one may open, those with the most empty slots first.

        Args:
            rows: [n] that decode.
            held: [n] blocks of each, at least one.
            is_open: [n] whose last block has no other holder, name or pin.
            num_left: empty slots that are there at least.
        """
        taken = self.ends[rows] - (held - 1) * self._block_size
        places = (is_open & (taken > 0) & (taken <= self._block_size - num_left)).nonzero()[0]
        order: I32 = places[taken[places].argsort(kind="stable")].astype(np.int32)
        return order

    def check_invariants(self, held: I32, table: I32, refcount: I32, is_named: Bool) -> None:
        """Check that a slot has one owner, and who shares what.

        Args:
            held: [num_rows] blocks of each row.
            table: [num_rows, num_indices] of blocks.
            refcount: [num_blocks] rows that hold each.
            is_named: [num_blocks]
        """
        for block, shared in self._of_block.items():
            rows = [row for row in (shared.first, shared.second) if row != NOBODY]
            assert shared.block == block, "a shared block is filed under another one"
            assert all(self._of_row.get(row) is shared for row in rows), "a row shares a block that it does not know"
            assert all(table[row, held[row] - 1] == block for row in rows), "it is the last block of each holder"
            assert refcount[block] == len(rows), "a third row holds a block that two fill"
            assert not is_named[block], "a block that two fill has a name"
            assert len(rows) == 1 or self.from_right[rows[0]] != self.from_right[rows[1]], "they fill from one end"
            assert all(self.num_slots(row, int(held[row])) > 0 for row in rows), "a holder has no slot there"
            assert self.num_taken(shared, held) <= self._block_size, f"a slot of block {block} has two owners"
        assert len(self._of_row) == sum(1 + (shared.second != NOBODY) for shared in self), "a row shares nothing"
