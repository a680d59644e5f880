"""KV moves out of the blocks beyond a limit, some blocks with each batch, whoever is in it.

    row 3: 2 9 4, row 5: 9 7    limit 8    batch 17: copy 9 to 1, then tables[3, 1] = tables[5, 0] = 1, then the step

Batches before it in flight read and write the old block, batches behind it the new one: executors work in submit order,
and copy and change tables also in a step that fails. The old block is pinned until the batch is back. A block that
somebody pins, since it is read or filled beside the steps, moves once it is free of pins.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

import numpy as np

from services.worker.blocks.manager import BlockManager
from services.worker.contract.batch import CopyOps, TableDelta
from services.worker.contract.table_entries import blocks_of

MAX_MOVED_BLOCKS: Final = 256
"""Blocks that move with one batch at most; raising it makes way sooner and lengthens the steps meanwhile."""


def with_moves(blocks: BlockManager, owner: Hashable, delta: TableDelta, copies: CopyOps) -> tuple[TableDelta, CopyOps]:
    """Move what may move now; return what the executor has to be told of tables and copies, that included.

    Args:
        blocks: in which `delta` and `copies` have been made.
        owner: pins the old blocks until the batch is back.
        delta: of the batch.
        copies: of the batch; their sources are pinned.
    """
    source = blocks.movable(MAX_MOVED_BLOCKS)
    if not source.size:
        return delta, copies
    target = blocks.vacate(source, owner)
    renamed = blocks.rename(np.flatnonzero(blocks.held).astype(np.int32), source, target)
    stays = ~np.isin(blocks_of(delta.block_id), source)  # of a row that has come to share such a block just now
    return (
        TableDelta(
            np.concatenate([delta.row[stays], renamed.row]),
            np.concatenate([delta.index[stays], renamed.index]),
            np.concatenate([delta.block_id[stays], renamed.block_id]),
        ),
        CopyOps(np.concatenate([copies.source, source]), np.concatenate([copies.target, target])),
    )
