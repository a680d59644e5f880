"""Entries of block tables, each of which names a block and the end at which its row began to fill it.

    entry     id >= 0                            ~id < 0
    filled    from the left                      from the right
    slot      id * size + p % size               id * size + size - 1 - p % size
                                                 = ~(~id * size + p % size)

p is a position of the row, size the token slots of a block. So two rows can write one block from both ends. A block
that is full is named as it was filled.

The sign is no message: it goes with the entry wherever that goes, and kernels read tables as they are.

Source: BROS, bidirectional KV blocks. Deviations: none.
"""

from __future__ import annotations

import numpy as np

from services.worker.contract.arrays import I32, I64


def blocks_of(entries: I32) -> I32:
    """Return the ids of the blocks that entries [..] name."""
    return np.asarray(entries ^ (entries >> 31), dtype=np.int32)


def slots_of(entries: I32, positions: I64 | I32, block_size: int) -> I64:
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
