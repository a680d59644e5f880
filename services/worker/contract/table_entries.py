"""Entries of block tables, each of which names a block and the end at which its row began to fill it.

    entry     id >= 0                            ~id < 0
    filled    from the left                      from the right
    slot      id * size + p % size               id * size + size - 1 - p % size
                                                 = ~(~id * size + p % size)

p is a position of the row, size the token slots of a block. So two rows can share a block from both ends, and one that
is full can be named in either direction only as it was filled.

Source: BROS, bidirectional KV blocks. Deviation: the direction belongs to the entry, not to the slots.
"""

from __future__ import annotations

import numpy as np

from services.worker.contract.arrays import I32, I64


def blocks_of(entries: I32) -> I32:
    """Return the ids of the blocks that entries [..] name."""
    return np.asarray(entries ^ (entries >> 31), dtype=np.int32)


def slots_of(entries: I32, positions: I64, block_size: int) -> I64:
    """Return where the keys of positions lie, block_id * block_size + offset.

    Args:
        entries: [n] of their blocks.
        positions: [n]
        block_size: token slots of a block.
    """
    slots = entries * np.int64(block_size)
    slots += positions % block_size
    slots ^= slots >> 63
    return slots
