"""KV block ids: which have memory, which somebody refers to or pins, which have names, which are free.

A block is *usable* while there is memory behind it. A usable block is free when nothing refers to it (refcount 0) and
nothing pins it (pins 0); it is then among the free blocks, exactly once. A free block that is named (`prefix.py`) keeps
its contents until it is handed out, and can be shared again before. Ids are handed out in a fixed order
(`free_blocks.py`), so equal runs use equal ids. Beyond a limit (`limit.py`) no block is free.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np

from services.worker.blocks.free_blocks import FreeBlocks
from services.worker.blocks.limit import IdLimit
from services.worker.blocks.pins import Pins
from services.worker.blocks.prefix_index import PrefixIndex
from services.worker.contract.arrays import EMPTY_I32, I32, Bool


class BlockPool:
    """Reference counts, pins and names of all blocks, and the free ones. Knows no row."""

    def __init__(self, num_blocks: int) -> None:
        """Begin with blocks 0 to num_blocks - 1 usable and free."""
        self.refcount: I32 = np.zeros(num_blocks, dtype=np.int32)
        self.usable: Bool = np.ones(num_blocks, dtype=np.bool_)
        self.index = PrefixIndex(num_blocks)
        self.from_right: Bool = np.zeros(num_blocks, dtype=np.bool_)
        """[num_blocks] from which end each was filled; of two that fill it, the first (`both_ends.py`)."""
        self.on_lost: Callable[[I32], None] | None = None
        """Called with ids whose contents nobody may read any more; the shadow KV poisons them."""
        self._free_blocks = FreeBlocks(num_blocks)
        self.num_usable = num_blocks
        """Blocks with memory behind them, below the limit."""
        self._limit = IdLimit(num_blocks)
        self._pins = Pins(num_blocks)

    @property
    def pins(self) -> I32:
        """[num_blocks] how often each block is pinned; read-only for others."""
        return self._pins.counts

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out; some of them may be named."""
        return len(self._free_blocks) - self._limit.num_owed

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds or pins, wherever they are."""
        return self.num_usable - self.num_free

    @property
    def is_within_limit(self) -> bool:
        """Nothing beyond the limit is held, pinned or named."""
        return self._limit.is_kept

    def in_use(self, ids: I32) -> int:
        """Return how many of the blocks are not free."""
        return int(np.count_nonzero((self.refcount[ids] > 0) | (self.pins[ids] > 0)))

    def pin(self, ids: I32, owner: Hashable) -> None:
        """Keep blocks from being reused until the owner unpins them, whatever happens to the rows that hold them."""
        assert self.usable[ids].all(), "only usable blocks can be pinned"
        assert bool(((self.refcount[ids] > 0) | (self.pins[ids] > 0)).all()), "a free block cannot be pinned"
        self._pins.add(ids, owner)

    @property
    def num_blank(self) -> int:
        """Blocks that can be handed out and hold nothing."""
        return self._free_blocks.num_blank

    def oldest_kept(self, most: int) -> I32:
        """Return at most so many of the free blocks that keep their contents: those that are handed out first."""
        return self._free_blocks.oldest_kept(most)

    def pin_kept(self, ids: I32, owner: Hashable) -> None:
        """Pin blocks whose contents are to be read, in use or free and named."""
        self._free_blocks.take_out(ids[(self.refcount[ids] == 0) & (self.pins[ids] == 0)])
        self._pins.add(ids, owner)

    def reserve(self, ids: I32, owner: Hashable) -> None:
        """Pin free blocks without contents, which somebody is about to fill."""
        assert self.usable[ids].all(), "only usable blocks can be reserved"
        assert not self.in_use(ids), "only free blocks can be reserved"
        assert not self.index.is_named[ids].any(), "a block with contents cannot be reserved"
        stays = np.ones(self.refcount.size, dtype=np.bool_)
        stays[ids] = False
        self._free_blocks.retain(stays)
        self._pins.add(ids, owner)

    def set_aside(self, count: int, owner: Hashable) -> I32:
        """Pin [count] free blocks, which somebody is about to fill or to need; the caller knows that there are so many.

        What they held is lost.
        """
        ids = self._hand_out(count)
        self._pins.add(ids, owner)
        return ids

    def num_only_pinned(self, owner: Hashable) -> int:
        """Return how many of an owner's blocks no row refers to."""
        return sum(int(np.count_nonzero(self.refcount[ids] == 0)) for ids in self._pins.of(owner))

    def unpin(self, owner: Hashable, *, first: bool = False) -> None:
        """Drop all pins of an owner; what is free and keeps its contents is handed out last, or first. Idempotent."""
        self._free(self._pins.drop(owner), first=first)

    def grow(self, first: int, end: int) -> None:
        """Make ids from `first` to `end` - 1 known and usable."""
        if end > self.refcount.size:
            self.learn(end)
        self.set_usable(np.arange(first, end, dtype=np.int32), usable=True)

    def learn(self, num_blocks: int) -> None:
        """Make ids up to num_blocks - 1 known; those that are new are not usable."""
        more = num_blocks - self.refcount.size
        self.refcount = np.concatenate([self.refcount, np.zeros(more, dtype=np.int32)])
        self._pins.grow(num_blocks)
        self.usable = np.concatenate([self.usable, np.zeros(more, dtype=np.bool_)])
        self._limit.grow(num_blocks)
        self.from_right = np.concatenate([self.from_right, np.zeros(more, dtype=np.bool_)])
        self.index.grow(num_blocks)
        self._free_blocks.grow(num_blocks)

    def set_usable(self, ids: I32, *, usable: bool) -> None:
        """Add memory behind some ids, or take it away from ids that nobody holds or pins. Idempotent."""
        ids = np.unique(ids[self.usable[ids] != usable]).astype(np.int32)
        assert not self.refcount[ids].any(), "a block that a row holds cannot change its memory"
        assert not self.pins[ids].any(), "a pinned block cannot change its memory"
        self.usable[ids] = usable
        below = ids[ids < self._limit.end]
        if usable:
            self.num_usable += below.size
            self._free(below[::-1])
            return
        self._free_blocks.retain(self.usable)
        self.num_usable -= below.size
        self._lose(ids)

    def limit(self, num_blocks: int | None) -> None:
        """Hand out only ids below `num_blocks` from now on; None: all. What is in use beyond can be `vacate`d.

        Raises:
            ValueError: more is in use than there is room for below; nothing has changed.
        """
        in_use = (self.refcount > 0) | (self.pins > 0)
        before = self._limit.end
        self._limit.set(num_blocks, self.usable, in_use)
        after, idle = self._limit.end, np.flatnonzero(self.usable & ~in_use).astype(np.int32)
        self.num_usable = int(np.count_nonzero(self.usable[:after]))
        self._free_blocks.retain(np.arange(in_use.size) < after)
        self._lose(idle[(idle >= after) & (idle < before)])
        self._free_blocks.put_blank(idle[(idle >= before) & (idle < after)][::-1])

    def movable(self, most: int) -> I32:
        """Return at most so many of the blocks beyond the limit that rows hold and nobody pins, the first ids first."""
        if not self._limit.num_owed:
            return EMPTY_I32
        end = self._limit.end
        is_movable = (self.refcount[end:] > 0) & (self.pins[end:] == 0)
        ids: I32 = (is_movable.nonzero()[0][:most] + end).astype(np.int32)
        return ids

    def vacate(self, source: I32, owner: Hashable) -> I32:
        """Let references and names of movable blocks [n] go over to free blocks [n] below, which are returned.

        Args:
            source: what they hold is copied before anybody reads or writes the others.
            owner: pins them until the copies are made.
        """
        target = self._hand_out(int(source.size))
        self.pin(source, owner)
        self._limit.vacate(source)
        self.refcount[target], self.refcount[source] = self.refcount[source], 0
        self.from_right[target] = self.from_right[source]
        self.index.move(source, target)
        return target

    def drop_contents(self, ids: I32) -> None:
        """Let nobody else find what some named blocks hold; who refers to them goes on doing so."""
        free = ids[(self.refcount[ids] == 0) & (self.pins[ids] == 0)]
        self._free_blocks.take_out(free)
        self.index.forget(ids)
        self._free(free)

    def check_pool(self) -> None:
        """Check the conservation laws: every usable block is free or in use, and every pin is counted."""
        self._pins.check_invariants()
        self._limit.check_invariants(self.refcount, self.pins)
        blank, kept = self._free_blocks.blank_ids, self._free_blocks.kept_ids
        free = np.bincount(np.concatenate([blank, kept]), minlength=self.refcount.size)
        in_use, below = (self.refcount > 0) | (self.pins > 0), np.arange(free.size) < self._limit.end
        assert (free + in_use == self.usable)[below].all(), "a usable block must be free xor in use, any other neither"
        assert not free[~below].any(), "a block beyond the limit is free"
        assert (in_use <= self.usable).all(), "a block without memory is in use"
        assert blank.size + kept.size == len(self._free_blocks), "the number of free blocks is wrong"
        assert self.num_free >= 0, "more blocks are owed than are free"
        assert self.index.is_named[kept].all(), "a free block without a name keeps no contents"
        assert not self.index.is_named[blank].any(), "a free block with a name keeps its contents"
        assert not (self.index.is_named & ~self.usable).any(), "a block without memory has no contents"
        assert not (self.index.is_named & ~in_use & ~below).any(), "an idle block beyond the limit has no contents"
        self.index.check_invariants()
        assert self.num_usable == int(self.usable[below].sum()), "the number of usable blocks is wrong"

    def _take(self, count: int) -> I32:
        assert count <= self.num_free, f"the scheduler chose rows that need {count} blocks of {self.num_free} free"
        ids = self._hand_out(count)
        self.refcount[ids] = 1
        return ids

    def _refer(self, ids: I32) -> None:
        """Let one more row refer to blocks that are held or pinned, or free and named."""
        free = ids[(self.refcount[ids] == 0) & (self.pins[ids] == 0)]
        if free.size:
            self._free_blocks.take_out(free)
        self.refcount[ids] += 1

    def _let_go(self, ids: I32) -> None:
        """Let one row less refer to blocks; those that become free do so last one first."""
        self.refcount[ids] -= 1
        self._free(ids[::-1])

    def _hand_out(self, count: int) -> I32:
        ids, lost = self._free_blocks.take(count)
        if lost.size:
            self._lose(lost)
        return ids

    def _lose(self, ids: I32) -> None:
        """Forget what free blocks hold."""
        self.index.forget(ids)
        if self.on_lost is not None:
            self.on_lost(ids)

    def _free(self, ids: I32, *, first: bool = False) -> None:
        """Count those of the ids as free that nobody refers to or pins; see `unpin`."""
        freed = ids[(self.refcount[ids] == 0) & (self.pins[ids] == 0)]
        if self._limit.end < self.refcount.size:
            freed, idle = self._limit.let_go(freed)
            self._lose(idle)
        named = self.index.is_named[freed]
        if np.count_nonzero(named):
            put = self._free_blocks.put_kept_first if first else self._free_blocks.put_kept
            put(freed[named])
            freed = freed[~named]
        self._free_blocks.put_blank(freed)
        if self.on_lost is not None:
            self.on_lost(freed)
