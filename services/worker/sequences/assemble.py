"""From a choice of rows to the arrays of a batch."""

from __future__ import annotations

import numpy as np

from services.worker.contract.arrays import EMPTY_I32, I32, Rows
from services.worker.contract.batch import OWN_SAMPLE, RowInit
from services.worker.sequences.table import SequenceTable
from services.worker.sequences.token_log import TokenLog

_ONE = np.array(1, dtype=np.int32)  # without a dimension: an operation with it takes half as long as with a scalar


def decodes_first(rows: Rows, num_tokens: I32, remaining: I32) -> tuple[Rows, I32]:
    """Return the choice with the rows that compute their last known token before all others, order kept."""
    chunk = remaining > _ONE
    if not np.count_nonzero(chunk) or not np.count_nonzero(chunk[:-1] & ~chunk[1:]):
        return rows, num_tokens
    order = np.argsort(chunk, kind="stable")
    return rows[order], num_tokens[order]


def input_tokens(table: SequenceTable, log: TokenLog, rows: Rows, start: I32, num_tokens: I32) -> I32:
    """Return the input ids of a batch, row after row; -1 for one that a batch in flight samples.

    Args:
        table: the sequence table.
        log: the output tokens of its rows.
        rows: [n], those with one token left to compute first.
        start: [n] position of the first token that each computes.
        num_tokens: [n] tokens that each computes.
    """
    last = table.last_token[rows]
    unknown = start >= table.num_known[rows]
    if np.count_nonzero(unknown):
        last[unknown] = OWN_SAMPLE
    chunks = (table.num_known[rows] - start > _ONE).nonzero()[0]
    if not chunks.size:
        return last
    parts = [last[: chunks[0]]]
    for i in chunks.tolist():
        row = int(rows[i])
        parts.append(known_tokens(table, log, row, int(start[i]), int(num_tokens[i])))
    return np.concatenate(parts)


def known_tokens(table: SequenceTable, log: TokenLog, row: int, start: int, count: int) -> I32:
    """Return [count] known tokens of a row from a position on: its prompt, then its outputs."""
    prompt = table.sequence(row).prompt
    stop = start + count
    if stop <= prompt.size:
        return prompt[start:stop]
    outputs = log.read(row, max(start - prompt.size, 0), stop - prompt.size)
    return np.concatenate([prompt[start:], outputs])


def row_init(table: SequenceTable, log: TokenLog, row: int) -> RowInit:
    """Return what the executor needs to know of a row that is new to it."""
    sampling = table.sequence(row).sampling
    tokens = known_tokens(table, log, row, 0, int(table.num_known[row])) if sampling.follows_tokens else EMPTY_I32
    return RowInit(row, sampling, int(table.num_prompt[row]), tokens)
