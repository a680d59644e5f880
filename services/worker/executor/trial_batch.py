"""Batches of which what is computed does not matter, or what it is computed with: for trials before serving."""

from __future__ import annotations

import numpy as np

from services.worker.contract.arrays import I32
from services.worker.contract.batch import Batch, RowInit, TableDelta


def trial_batch(
    start: I32,
    num_tokens: I32,
    num_blocks: int,
    *,
    tokens: I32 | None = None,
    first_block: I32 | None = None,
    admits: tuple[RowInit, ...] = (),
) -> Batch:
    """Return a batch of rows from 0 on, all of which are sampled.

    Args:
        start: [n] position of the first token.
        num_tokens: [n]
        num_blocks: of each row, side by side.
        tokens: of all rows; None: zeros.
        first_block: [n] first entry of each row's table; below 0, ~id: its blocks are filled from the right. None: all
            rows share the first blocks.
        admits: rows that are new.
    """
    num_rows = len(start)
    rows, index = np.arange(num_rows, dtype=np.int32), np.tile(np.arange(num_blocks, dtype=np.int32), num_rows)
    entries = index
    if first_block is not None:
        entries = np.repeat(first_block, num_blocks) + index * np.repeat(np.where(first_block < 0, -1, 1), num_blocks)
    return Batch(
        step_id=0,
        rows=rows,
        num_tokens=num_tokens,
        start=start,
        tokens=np.zeros(int(num_tokens.sum()), dtype=np.int32) if tokens is None else tokens,
        sample=np.ones(num_rows, dtype=np.bool_),
        table_delta=TableDelta(np.repeat(rows, num_blocks), index, entries.astype(np.int32)),
        admits=admits,
    )
