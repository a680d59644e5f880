"""A limit on block ids: which blocks may be handed out, and what is set aside for those beyond that are in use.

    below the limit    free, or in use    as ever
    beyond it          in use             *owed*: a free block below is set aside, so that its contents can move
                       vacated            they have moved; the batch in flight that copies them still reads here
                       else               idle: not free, without name or contents

So what can be handed out is what is free below, less what is owed. A block that is owed moves when nobody pins it
(`compaction.py`), or falls idle when nobody refers to it any more.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from services.worker.contract.arrays import I32, Bool

_NO_LIMIT: Final = 2**31 - 1


class IdLimit:
    """Where the ids end that may be handed out. The block manager owns it."""

    def __init__(self, num_blocks: int) -> None:
        self.end = _NO_LIMIT
        """Ids below may be handed out."""
        self.num_owed = 0
        """Blocks beyond that are in use, and not vacated."""
        self._vacated: Bool = np.zeros(num_blocks, dtype=np.bool_)

    @property
    def is_kept(self) -> bool:
        """Nothing beyond is in use, or read by a batch in flight."""
        return not self.num_owed and not self._vacated.any()

    def set(self, end: int | None, usable: Bool, in_use: Bool) -> None:
        """Let only ids below `end` be handed out; None: all.

        Args:
            end: the limit; what is beyond is owed from now on.
            usable: [num_blocks] there is memory behind it.
            in_use: [num_blocks] somebody refers to it or pins it.

        Raises:
            ValueError: more is in use than there are usable blocks below; nothing has changed.
        """
        end = _NO_LIMIT if end is None else end
        below = np.arange(usable.size) < end
        vacated = self._vacated & ~below  # below, such a block is one that is pinned, like others
        owed = in_use & ~below & ~vacated
        num_usable, num_owed = int(np.count_nonzero(usable & below)), int(np.count_nonzero(owed))
        num_needed = num_owed + int(np.count_nonzero(in_use & below))
        if num_needed > num_usable:
            raise ValueError(f"{num_needed} blocks are in use, more than the {num_usable} usable ones below {end}")
        self.end, self.num_owed, self._vacated = end, num_owed, vacated

    def let_go(self, ids: I32) -> tuple[I32, I32]:
        """Take note of blocks that nobody refers to or pins any more; return those below, and those that fall idle."""
        beyond = ids >= self.end
        idle = ids[beyond]
        self.num_owed -= int(np.count_nonzero(~self._vacated[idle]))
        self._vacated[idle] = False
        return ids[~beyond], idle

    def vacate(self, ids: I32) -> None:
        """Take note of blocks that were owed and whose contents have moved; a batch in flight has pinned them."""
        self._vacated[ids] = True
        self.num_owed -= int(ids.size)

    def grow(self, num_blocks: int) -> None:
        """Take note of ids up to num_blocks - 1."""
        more = np.zeros(num_blocks - self._vacated.size, dtype=np.bool_)
        self._vacated = np.concatenate([self._vacated, more])

    def check_invariants(self, refcount: I32, pins: I32) -> None:
        """Check what is owed and what is vacated.

        Args:
            refcount: [num_blocks]
            pins: [num_blocks]
        """
        beyond = np.arange(refcount.size) >= self.end
        owed = beyond & ((refcount > 0) | (pins > 0)) & ~self._vacated
        assert self.num_owed == np.count_nonzero(owed), "blocks beyond the limit that are in use are counted wrongly"
        vacated = pins[self._vacated & beyond]
        assert vacated.size == np.count_nonzero(self._vacated), "only a block beyond the limit is vacated"
        assert (vacated == 1).all(), "a vacated block is pinned by the batch that reads it, and by nobody else"
        assert not refcount[self._vacated].any(), "a row refers to a block that it has left"
