"""KV that sequences can go on with at another executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from services.worker.contract.arrays import EMPTY_I32, I32


@dataclass(frozen=True, slots=True)
class KeptKv:
    """Blocks whose KV sequences can go on with at another executor: full ones, by what they hold.

    An id below zero names a block of the executor's host memory: -1 is host block 0, -2 is host block 1.
    """

    names: tuple[bytes, ...] = ()
    """[n] of `shared.prefix_names`, each once."""
    ids: I32 = field(default_factory=lambda: EMPTY_I32)
    """[n] block ids."""
    tails: I32 = field(default_factory=lambda: EMPTY_I32)
    """[m] places, ascending, of those in the last split of their sequence, if it is not whole: the sequence needs them
    before it can go on while the others are attended where they lie."""
    ends: I32 = field(default_factory=lambda: EMPTY_I32)
    """[q] places, ascending, of the last block of each sequence."""

    def __len__(self) -> int:
        return len(self.names)

    def only(self, places: Sequence[int]) -> KeptKv:
        """Return the blocks at some places, in the order given; tails and ends are those that are among them."""
        at = np.array(places, dtype=np.int64)
        tails, ends = (np.flatnonzero(np.isin(at, marked)).astype(np.int32) for marked in (self.tails, self.ends))
        return KeptKv(tuple(self.names[place] for place in places), self.ids[at], tails, ends)


NOTHING_KEPT = KeptKv()


Ids = TypeVar("Ids", int, I32)


def as_host_id(block: Ids) -> Ids:
    """Return the id by which `KeptKv` names a host block, or the host block that it names so; one or an array."""
    return -1 - block
