"""Which blocks must stay as they are, and at whose wish."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from services.worker.contract.arrays import EMPTY_I32, I32

_ONE = np.int32(1)  # adds up in a twentieth of the time of a Python number


class Pins:
    """Pins by block, and the blocks of each owner. A block may be pinned several times."""

    def __init__(self, num_blocks: int) -> None:
        self.counts: I32 = np.zeros(num_blocks, dtype=np.int32)
        """[num_blocks]"""
        self._owned: dict[Hashable, list[I32]] = {}

    def __len__(self) -> int:
        """Return how many owners there are."""
        return len(self._owned)

    @property
    def ids(self) -> I32:
        """What anybody has pinned, each block once."""
        owned = [ids for calls in self._owned.values() for ids in calls]
        return np.unique(np.concatenate(owned)) if owned else EMPTY_I32

    def of(self, owner: Hashable) -> list[I32]:
        """Return what an owner has pinned, call by call."""
        return self._owned.get(owner, [])

    def add(self, ids: I32, owner: Hashable) -> None:
        """Pin blocks, once for each time that one is named."""
        ids = np.array(ids, dtype=np.int32)
        np.add.at(self.counts, ids, _ONE)
        self._owned.setdefault(owner, []).append(ids)

    def drop(self, owner: Hashable) -> I32:
        """Drop all pins of an owner; return the blocks, each once."""
        if owner not in self._owned:
            return EMPTY_I32
        dropped = np.concatenate(self._owned.pop(owner))
        np.subtract.at(self.counts, dropped, _ONE)
        ids: I32 = np.unique(dropped)
        return ids

    def grow(self, num_blocks: int) -> None:
        """Take note of ids up to num_blocks - 1."""
        self.counts = np.concatenate([self.counts, np.zeros(num_blocks - self.counts.size, dtype=np.int32)])

    def check_invariants(self) -> None:
        """Check that every pin is an owner's."""
        pinned = [ids for owned in self._owned.values() for ids in owned]
        counts = np.bincount(np.concatenate(pinned), minlength=self.counts.size) if pinned else 0 * self.counts
        assert (counts == self.counts).all(), "pins differ from what their owners hold"
