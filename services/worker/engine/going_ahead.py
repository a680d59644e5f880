"""Decodes for which the scheduler is not asked: those that go on as before, and those launched ahead of their tokens.

    executor   ── step 7 ──┬── step 8 ──┬── step 9 ──       step 8 holds -1 for each row: "your own last sample"
    engine          make 8 ┘     absorb 7, make 9 ┘         and is made while step 7 runs

A decision may hold for more than its step (`SchedulerOutput.holds`): then the same rows decode on, until the policy
wants to look again, or something happens. Where steps overlap they go ahead; they do so too where there is nothing to
decide, since all who run decode and nobody waits who could run. Else the engine waits until nothing is in flight.

Nobody knows yet who ends with step 7. Whoever does has computed a token too many in step 8, which nobody hears of; its
blocks and its row stay until step 8 is back. Who ends with step 7 because of its length is known, and left out.
"""

from __future__ import annotations

import numpy as np

from services.worker.blocks.manager import BlockManager
from services.worker.contract.arrays import I32, Rows
from services.worker.engine.flights import Flights
from services.worker.scheduling.plain import MAX_BLOCKS_PER_ROW
from services.worker.scheduling.view import Limits, SchedulerOutput
from services.worker.sequences.table import Hold, SequenceTable

# arrays without a dimension: an operation of a short array with one takes half as long as with a scalar
_IN_FLIGHT = np.array(Hold.IN_FLIGHT, dtype=np.uint16)
_LEAVING = np.array(Hold.CANCELLED | Hold.ENDED | Hold.LEAVING, dtype=np.uint16)
_HELD_BACK = np.array(~Hold.IN_FLIGHT, dtype=np.uint16)
_ONE = np.array(1, dtype=np.int32)


class GoingAhead:
    """The newest decision of the scheduler, for as long as it need not be asked again."""

    def __init__(self, table: SequenceTable, blocks: BlockManager, flights: Flights) -> None:
        self._table = table
        self._blocks = blocks
        self._flights = flights
        self._rows: Rows | None = None  # of a decision that holds
        self._seen = (0, 0)
        self._num_free = 0
        self.next_look_s = np.inf
        """When the scheduler wants to be asked again although nothing has happened."""

    def decided(self, output: SchedulerOutput) -> None:
        """Take note of a decision that is carried out; beside a batch in flight it is not about all who run."""
        self.next_look_s, self._rows = output.next_look_s, None
        if output.holds and not self._flights:
            self._rows, self._seen = output.rows.astype(np.intp), self._look()
            self._num_free = self._blocks.num_free

    def rows_again(self, now_s: float) -> Rows | None:
        """Return [n] who decodes on; None: the scheduler is to be asked. Nothing is in flight."""
        rows = self._rows if now_s < self.next_look_s else None
        if rows is not None and self._is_as_before() and self._suffices(rows, self._table.num_computed[rows]):
            return rows
        self.next_look_s, self._rows = np.inf, None
        return None

    def rows_ahead(self, now_s: float, limits: Limits) -> Rows | None:
        """Return [n] who decodes behind the batches in flight; None: the next step has to wait until they are back.

        Args:
            now_s: on this worker's clock.
            limits: of one step.
        """
        table, flights = self._table, self._flights
        if now_s >= self.next_look_s:
            return None
        if self._rows is not None and self._is_as_before():
            running = self._rows
        elif self._anybody_free(table.waiting.view) or self._anybody_free(table.preempted.view):
            return None
        else:
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
        return rows if self._suffices(rows, flights.ends(rows)) else None

    def _is_as_before(self) -> bool:
        """Return whether nothing has happened since the decision; that blocks become fewer is none."""
        num_free = self._blocks.num_free
        if num_free > self._num_free or self._look() != self._seen:
            self._rows = None
            return False
        self._num_free = num_free
        return True

    def _look(self) -> tuple[int, int]:
        """Return what changes when rows come, go, or may run again."""
        table = self._table
        num_changes = table.waiting.num_changes + table.running.num_changes + table.preempted.num_changes
        return num_changes, int(np.count_nonzero(table.hold & _HELD_BACK))

    def _anybody_free(self, rows: I32) -> bool:
        """Return whether some of the rows are held by nothing."""
        return bool(rows.size and np.count_nonzero(self._table.hold[rows]) < rows.size)

    def _suffices(self, rows: Rows, begins: I32) -> bool:
        """Return whether blocks are there for two tokens more of each row: policies that copy KV look so far ahead."""
        num_free = self._blocks.num_free
        if MAX_BLOCKS_PER_ROW * rows.size <= num_free:
            return True
        missing = -(-(begins + MAX_BLOCKS_PER_ROW) // self._blocks.block_size) - self._table.held_blocks[rows]
        return int(np.maximum(missing, 0).sum()) + len(self._blocks.near(MAX_BLOCKS_PER_ROW, rows)) <= num_free
