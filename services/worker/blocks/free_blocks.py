"""Free block ids, in the order in which they are handed out.

    blank, a stack:          the one freed last comes first
    kept, oldest first:      contents that a later sequence may still use; handed out when no blank one is left

The kept ones lie in an array that is read from its head and written at its tail. An id that is taken out of the middle
leaves its entry behind: `_place` tells which entry of an id counts. When the tail reaches the end, the entries that
count move to the front.
"""

from __future__ import annotations

import numpy as np

from services.worker.contract.arrays import EMPTY_I32, I32, I64, Bool

_NOWHERE = -1
_WINDOW = 64
"""Entries looked at together; only a matter of speed."""


class FreeBlocks:
    """Which blocks are free. Each id is in it at most once."""

    def __init__(self, num_blocks: int) -> None:
        """Begin with ids 0 to num_blocks - 1 blank; the smallest is handed out first."""
        self._stack: I32 = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_blank = num_blocks
        self._num_kept = 0
        self._queue: I32 = np.zeros(2 * num_blocks, dtype=np.int32)
        self._place: I64 = np.full(num_blocks, _NOWHERE, dtype=np.int64)
        self._head = self._tail = 0

    def __len__(self) -> int:
        return self._num_blank + self._num_kept

    @property
    def blank_ids(self) -> I32:
        """Copy of the ids without contents; the last one is handed out next."""
        return self._stack[: self._num_blank].copy()

    @property
    def kept_ids(self) -> I32:
        """Copy of the ids with contents; the first one is handed out first."""
        entries, counts = self._entries(self._head, self._tail)
        return entries[counts]

    @property
    def num_blank(self) -> int:
        """How many have no contents."""
        return self._num_blank

    def oldest_kept(self, most: int) -> I32:
        """Return at most so many of the ids with contents, in the order in which they are handed out."""
        entries, counts = self._entries(self._head, min(self._head + 2 * most, self._tail))
        return entries[counts][:most]

    def grow(self, num_blocks: int) -> None:
        """Take note of ids up to num_blocks - 1; none of the new ones is free."""
        more = num_blocks - self._place.size
        self._stack = np.concatenate([self._stack, np.zeros(more, dtype=np.int32)])
        self._queue = np.concatenate([self._queue, np.zeros(2 * more, dtype=np.int32)])
        self._place = np.concatenate([self._place, np.full(more, _NOWHERE, dtype=np.int64)])

    def put_blank(self, ids: I32) -> None:
        """Add ids without contents; the last one is handed out first."""
        self._stack[self._num_blank : self._num_blank + ids.size] = ids
        self._num_blank += int(ids.size)

    def put_kept(self, ids: I32) -> None:
        """Add ids with contents; they are handed out in this order, after those added before."""
        if self._tail + ids.size > self._queue.size:
            self._close_ranks()
        self._queue[self._tail : self._tail + ids.size] = ids
        self._place[ids] = np.arange(self._tail, self._tail + ids.size)
        self._tail += int(ids.size)
        self._num_kept += int(ids.size)

    def put_kept_first(self, ids: I32) -> None:
        """Add ids with contents; they are handed out in this order, before all others with contents."""
        if self._head < ids.size:
            self._close_ranks(ids.size)
        self._head -= int(ids.size)
        self._queue[self._head : self._head + ids.size] = ids
        self._place[ids] = np.arange(self._head, self._head + ids.size)
        self._num_kept += int(ids.size)

    def take(self, count: int) -> tuple[I32, I32]:
        """Take the next `count` ids out; the caller knows that there are so many.

        Returns:
            The ids, and those of them that had contents, which are lost now.
        """
        num_blank = min(count, self._num_blank)
        self._num_blank -= num_blank
        blank: I32 = self._stack[self._num_blank : self._num_blank + num_blank][::-1].copy()
        if num_blank == count:
            return blank, EMPTY_I32
        lost = self._take_oldest(count - num_blank)
        return np.concatenate([blank, lost]), lost

    def take_out(self, ids: I32) -> None:
        """Take certain ids with contents out."""
        assert bool((self._place[ids] != _NOWHERE).all()), "a block that is not free and kept cannot be taken out"
        self._place[ids] = _NOWHERE
        self._num_kept -= int(ids.size)

    def retain(self, usable: Bool) -> None:
        """Drop every id whose entry in `usable`, [num_blocks], is False."""
        blank = self._stack[: self._num_blank]
        blank = blank[usable[blank]]
        self._stack[: blank.size] = blank
        self._num_blank = int(blank.size)
        kept = self.kept_ids
        self.take_out(kept[~usable[kept]])

    def _take_oldest(self, count: int) -> I32:
        parts: list[I32] = []
        while count:
            assert self._head < self._tail, "more blocks are wanted than are free"
            end = min(self._head + max(count, _WINDOW), self._tail)
            entries, counts = self._entries(self._head, end)
            found = counts.nonzero()[0][:count]
            self._head = self._head + int(found[-1]) + 1 if found.size == count else end
            parts.append(entries[found])
            count -= int(found.size)
        ids: I32 = np.concatenate(parts)
        self.take_out(ids)
        return ids

    def _entries(self, start: int, end: int) -> tuple[I32, Bool]:
        """Return entries of the queue, and which of them count."""
        entries = self._queue[start:end]
        return entries, self._place[entries] == np.arange(start, end)

    def _close_ranks(self, head: int = 0) -> None:
        kept = self.kept_ids
        tail = head + int(kept.size)
        self._queue[head:tail] = kept
        self._place[kept] = np.arange(head, tail)
        self._head, self._tail = head, tail
