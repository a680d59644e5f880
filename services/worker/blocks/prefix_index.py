"""Which block holds which token run, by name (`shared.prefix_names`)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from services.worker.contract.arrays import I32
from shared.prefix_names import RunName, mark_of


class PrefixIndex:
    """Blocks whose contents are complete and named; at most one block per name, and one name per block."""

    def __init__(self, num_blocks: int) -> None:
        self.is_named: NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        """[num_blocks]"""
        self._marks: NDArray[np.uint32] = np.zeros(num_blocks, dtype=np.uint32)
        """[num_blocks] of the names (`mark_of`)."""
        self._block_of: dict[RunName, int] = {}
        self._name_of: dict[int, RunName] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def grow(self, num_blocks: int) -> None:
        """Take note of ids up to num_blocks - 1."""
        more = np.zeros(num_blocks - self.is_named.size, dtype=np.bool_)
        self.is_named = np.concatenate([self.is_named, more])
        self._marks = np.concatenate([self._marks, np.zeros(more.size, dtype=np.uint32)])

    def find(self, names: Iterable[RunName]) -> list[int]:
        """Return the blocks of the first names, as far as every one has a block."""
        found: list[int] = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def get(self, name: RunName) -> int | None:
        """Return the block of a name, if it has one."""
        return self._block_of.get(name)

    def name_of(self, block: int) -> RunName:
        """Return the name of a block that has one."""
        return self._name_of[block]

    def add(self, name: RunName, block: int) -> None:
        """Name a block whose KV is complete; nothing happens if another block has that name already."""
        if name in self._block_of:
            return
        assert block not in self._name_of, f"block {block} has another name"
        self._block_of[name] = block
        self._name_of[block] = name
        self.is_named[block] = True
        self._marks[block] = mark_of(name)

    def forget(self, ids: I32) -> None:
        """Forget the names of some blocks, as far as they have any."""
        for block in ids[self.is_named[ids]].tolist():
            del self._block_of[self._name_of.pop(block)]
        self.is_named[ids] = False

    def move(self, source: I32, target: I32) -> None:
        """Let the names of blocks [n], as far as they have any, be those of blocks [n] that have none."""
        assert not self.is_named[target].any(), "a block has one name"
        named = self.is_named[source]
        for old, new in zip(source[named].tolist(), target[named].tolist(), strict=True):
            self._name_of[new] = name = self._name_of.pop(old)
            self._block_of[name] = new
        self.is_named[target], self.is_named[source] = named, False
        self._marks[target] = self._marks[source]

    def marks(self) -> NDArray[np.uint32]:
        """Return a copy of the marks of all names, in no order."""
        return self._marks[self.is_named]

    def check_invariants(self) -> None:
        """Check that names and blocks are in one-to-one correspondence."""
        assert {block: name for name, block in self._block_of.items()} == self._name_of, "names and blocks differ"
        assert sorted(self._name_of) == np.flatnonzero(self.is_named).tolist(), "the marks of named blocks differ"
        assert sorted(map(mark_of, self._block_of)) == sorted(self.marks().tolist()), "marks and names differ"
