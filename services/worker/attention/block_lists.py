"""Rows of a step as lists of their blocks, one behind the other, as FlashInfer reads them. On the host, and pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.worker.attention.base import RaggedRows
from services.worker.attention.torch_paged import first_keys
from services.worker.contract.arrays import I32, I64, Bool
from services.worker.contract.table_entries import blocks_of, slots_of


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
    block_size: int
    """Token slots of a block. 1: what is called a block here is a slot"""


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
        block_size=block_size,
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
        block_size=block_size,
    )


def rows_from_right(rows: RaggedRows, block_size: int) -> Bool:
    """Return [n] which rows have a block that is filled from the right."""
    if rows.tables.min(initial=0) >= 0:
        return np.zeros(len(rows.start), dtype=np.bool_)
    columns = np.arange(rows.tables.shape[1], dtype=np.int32) * block_size
    is_read = columns < rows.num_keys[:, None]
    return np.asarray(((rows.tables < 0) & is_read).any(axis=1), dtype=np.bool_)


def chosen_rows(rows: RaggedRows, place: I64) -> tuple[RaggedRows, I64]:
    """Return some rows by themselves, and the indices in the batch of all of their tokens, row by row."""
    counts = rows.num_tokens[place].astype(np.int64)
    before = rows.first_token[place] - (np.cumsum(counts) - counts)
    tokens = np.repeat(before, counts) + np.arange(counts.sum())
    return RaggedRows(rows.num_tokens[place], rows.start[place], rows.tables[place]), tokens


def full_block_lists(rows: RaggedRows, block_size: int) -> BlockLists:
    """Return rows with the blocks that were full before their first queries, whichever way they were filled.

    Every query of a row sees all keys of these blocks, and attention does not depend on their order.

    Args:
        rows: of a step, each with such a block.
        block_size: token slots of a block.
    """
    named = RaggedRows(rows.num_tokens, rows.start, blocks_of(rows.tables))
    end = np.asarray(rows.start // block_size * block_size, dtype=np.int32)
    return range_lists(named, np.zeros_like(end), end, block_size)


def slot_lists(rows: RaggedRows, first: I32, block_size: int) -> BlockLists:
    """Return rows with the slots of their keys from some position on, in the order of the positions.

    Args:
        rows: of a step.
        first: [n] positions, none behind the row's first query.
        block_size: token slots of a block of the tables; those of the lists have one.
    """
    counts = np.asarray(rows.num_keys - first, dtype=np.int32)
    starts = starts_of(counts)
    row = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(starts[-1], dtype=np.int64) + (first - starts[:-1])[row]
    slots = slots_of(rows.tables[row, positions // block_size], positions, block_size)
    return BlockLists(
        query_starts=starts_of(rows.num_tokens),
        block_starts=starts,
        blocks=slots.astype(np.int32),
        last_block_tokens=np.ones(len(counts), dtype=np.int32),
        block_size=1,
    )


def starts_of(counts: I32) -> I32:
    """Return [n + 1] where each of n consecutive lists begins, then the end of the last."""
    return np.concatenate((np.zeros(1, dtype=np.int32), np.cumsum(counts, dtype=np.int32)))
