"""Rows of a step as lists of their blocks, one behind the other, as FlashInfer reads them. On the host, and pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.worker.attention.base import RaggedRows
from services.worker.attention.torch_paged import first_keys
from services.worker.contract.arrays import I32


@dataclass(frozen=True, slots=True)
class BlockLists:
    """Rows as FlashInfer reads them: lists one behind the other, and where each begins; all on the host."""

    query_starts: I32
    """[n + 1] first query of each row, then the number of all"""
    block_starts: I32
    """[n + 1] the same of `blocks`"""
    blocks: I32
    """[block_starts[n]] of the rows' keys, in order"""
    last_block_tokens: I32
    """[n] keys in each row's last block, 1 to block_size"""


def leading_decodes(rows: RaggedRows) -> int:
    """Return how many rows of one token stand at the head of the batch."""
    longer = np.flatnonzero(rows.num_tokens > 1)
    return int(longer[0]) if len(longer) else len(rows.num_tokens)


def block_lists(rows: RaggedRows, part: slice, window: int | None, block_size: int) -> BlockLists:
    """Return consecutive rows with the blocks that some query of theirs sees.

    Args:
        rows: of a step.
        part: the rows that are wanted.
        window: keys that a query sees at most, itself included; None: all before it.
        block_size: token slots of a block.
    """
    num_keys = rows.num_keys[part]
    first = first_keys(rows, window)[part] // block_size
    end = -(-num_keys // block_size)
    columns = np.arange(rows.tables.shape[1], dtype=np.int32)
    seen = (columns >= first[:, None]) & (columns < end[:, None])
    return BlockLists(
        query_starts=starts_of(rows.num_tokens[part]),
        block_starts=starts_of(end - first),
        blocks=np.ascontiguousarray(rows.tables[part][seen], dtype=np.int32),
        last_block_tokens=np.asarray((num_keys - 1) % block_size + 1, dtype=np.int32),
    )


def range_lists(rows: RaggedRows, first: I32, end: I32, block_size: int) -> BlockLists:
    """Return rows with the blocks of positions [first, end).

    Args:
        rows: of a step.
        first: [n] multiples of the block size.
        end: [n] above `first`.
        block_size: token slots of a block.
    """
    columns = np.arange(rows.tables.shape[1], dtype=np.int32) * block_size
    wanted = (columns >= first[:, None]) & (columns < end[:, None])
    return BlockLists(
        query_starts=starts_of(rows.num_tokens),
        block_starts=starts_of(np.asarray(wanted.sum(axis=1), dtype=np.int32)),
        blocks=np.ascontiguousarray(rows.tables[wanted], dtype=np.int32),
        last_block_tokens=np.asarray((end - 1) % block_size + 1, dtype=np.int32),
    )


def starts_of(counts: I32) -> I32:
    """Return [n + 1] where each of n consecutive lists begins, then the end of the last."""
    return np.concatenate((np.zeros(1, dtype=np.int32), np.cumsum(counts, dtype=np.int32)))
