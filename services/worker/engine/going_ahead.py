"""Decodes that are launched before the tokens are known that they begin with.

    executor   ── step 7 ──┬── step 8 ──┬── step 9 ──       step 8 holds -1 for each row: "your own last sample"
    engine          make 8 ┘     absorb 7, make 9 ┘         and is made while step 7 runs

Nobody knows yet who ends with step 7. Whoever does has computed a token too many in step 8, which nobody hears of; its
blocks and its row stay until step 8 is back. Who ends with step 7 because of its length is known, and left out.

The scheduler is not asked: a step goes ahead only where there is nothing to decide, since all who run decode, nobody
waits who could run, and memory is no question. Else the engine waits until nothing is in flight.
"""

from __future__ import annotations

import numpy as np

from services.worker.contract.arrays import I32, Rows
from services.worker.engine.flights import Flights
from services.worker.scheduling.plain import MAX_BLOCKS_PER_ROW
from services.worker.scheduling.view import Limits
from services.worker.sequences.table import Hold, SequenceTable

# arrays without a dimension: an operation of a short array with one takes half as long as with a scalar
_IN_FLIGHT = np.array(Hold.IN_FLIGHT, dtype=np.uint8)
_LEAVING = np.array(Hold.CANCELLED | Hold.ENDED, dtype=np.uint8)
_ONE = np.array(1, dtype=np.int32)


def rows_ahead(table: SequenceTable, flights: Flights, limits: Limits, num_free_blocks: int) -> Rows | None:
    """Return [n] who decodes behind the batches in flight, in order of admission; None: the next step has to wait.

    Args:
        table: the sequence table.
        flights: at least one batch.
        limits: of one step.
        num_free_blocks: that nobody holds.
    """
    if _anybody_free(table, table.waiting.view) or _anybody_free(table, table.preempted.view):
        return None
    running = table.running.view.astype(np.intp)
    hold, num_known = table.hold[running], table.num_known[running]
    decodes = (hold == _IN_FLIGHT) & flights.are_sampled(running, num_known)
    is_last = table.num_output[running] + _ONE >= table.max_output[running]
    leaves = (hold & _LEAVING != 0) | (decodes & is_last)
    if np.count_nonzero(decodes | leaves) < running.size:
        return None
    rows: Rows = running[decodes & ~leaves]
    if not 0 < rows.size <= min(limits.max_batch_rows, limits.max_batch_tokens):
        return None
    return rows if MAX_BLOCKS_PER_ROW * rows.size <= num_free_blocks else None


def _anybody_free(table: SequenceTable, rows: I32) -> bool:
    """Return whether some of the rows are held by nothing."""
    return bool(rows.size and np.count_nonzero(table.hold[rows]) < rows.size)
