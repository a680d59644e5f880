"""Batches that the executor has not answered, and how far each row will be once they are back.

    batch      4            5            6                  a prompt's chunks may be in neighbouring batches, since
    row 7      [0, 300) ──► [300, 600) ► [600, 700)         stages work first in, first out: what a chunk reads has
    row 9      decode       ·            ·                  been written when its stage comes to it

A row is *extensible* while all that it has in flight leaves some of its known tokens to compute. Where steps overlap, a
decode may also go ahead of the token that it begins with (`going_ahead.py`). If a chunk fails, those behind it have
computed with garbage: they are *stale*. One that is sound begins where the row's KV ends at the moment when it lands; a
stale one does not, and changes nothing. Behind what is tried again nothing is launched, so whoever is given up is in no
other batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from services.worker.contract.arrays import EMPTY_I32, I32, Bool, Rows
from services.worker.contract.batch import Batch
from services.worker.sequences.table import Hold, SequenceTable
from shared.hot import hot_dataclass

# without a dimension: an operation of a short array with one takes half as long as with a scalar
_LANDED = np.array(~Hold.IN_FLIGHT, dtype=np.uint16)
_IN_FLIGHT = np.array(Hold.IN_FLIGHT, dtype=np.uint16)
_ONE = np.array(1, dtype=np.uint8)


@hot_dataclass(frozen=True, slots=True)
class Flight:
    """A batch that the executor has not answered."""

    batch: Batch
    rows: NDArray[np.intp]
    """[n] as `batch.rows`."""
    end: I32
    """[n] tokens of each row whose KV exists once the batch is done."""


class Flights:
    """The batches in flight, oldest first; the only writer of `Hold.IN_FLIGHT`. The engine owns it."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._queue: deque[Flight] = deque()
        self._num_flights = np.zeros(table.num_rows, dtype=np.uint8)
        self._end = np.zeros(table.num_rows, dtype=np.int32)
        """Of rows in flight: tokens whose KV exists once all their batches are back."""
        self._goes_ahead = np.zeros(table.num_rows, dtype=np.bool_)
        """Of rows in flight: nothing of theirs has failed, or is tried again."""

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._queue)

    @property
    def rows(self) -> I32:
        """Rows in flight, each once."""
        if len(self._queue) <= 1:
            return self._queue[0].batch.rows if self._queue else EMPTY_I32
        rows = np.concatenate([flight.batch.rows for flight in self._queue])
        if int(self._num_flights[rows].max()) == 1:
            return rows
        _, first = np.unique(rows, return_index=True)
        once: I32 = rows[np.sort(first)]
        return once

    def ends(self, rows: I32 | Rows) -> I32:
        """Return of rows in flight the tokens whose KV exists once all their batches are back."""
        ends: I32 = self._end[rows]
        return ends

    @property
    def extensible(self) -> I32:
        """Rows in flight that may be in the next batch as well, in order of admission."""
        if not self._queue:
            return EMPTY_I32
        table, running = self._table, self._table.running.view
        free = (table.hold[running] == _IN_FLIGHT) & self._goes_ahead[running]
        rows = running[free]
        extensible: I32 = rows[self._end[rows] < table.num_known[rows]]
        return extensible

    def are_sampled(self, rows: Rows, num_known: I32) -> Bool:
        """Return [n] whether the newest batch of each row in flight samples its first token that is not known.

        Args:
            rows: [n]
            num_known: [n] tokens of each row.
        """
        sampled: Bool = self._goes_ahead[rows] & (self._end[rows] == num_known)
        return sampled

    def begins(self, rows: Rows) -> I32:
        """Return where the next chunk of each row begins, in flight or not."""
        begins: I32 = self._table.num_computed[rows]
        if self._queue:
            away = self._num_flights[rows] > 0
            assert not np.count_nonzero(away & ~self._goes_ahead[rows]), "nothing goes ahead of what has failed"
            begins = np.where(away, self._end[rows], begins)
        return begins

    def launch(self, batch: Batch, rows: Rows, end: I32, *, is_retry: bool) -> None:
        """Take note of a batch that goes to the executor.

        Args:
            batch: the newest one.
            rows: [n] as `batch.rows`.
            end: [n] tokens of each row whose KV exists once the batch is done.
            is_retry: its rows failed before; they begin where their KV ends.
        """
        self._table.hold[rows] |= _IN_FLIGHT
        self._num_flights[rows] += _ONE
        self._end[rows] = end
        self._goes_ahead[rows] = not is_retry
        self._queue.append(Flight(batch, rows, end))

    def land(self, batch: Batch) -> tuple[Flight, Bool]:
        """Take the oldest batch back.

        Returns:
            It, and [n] whether each of its rows is sound: what its chunk attended to is there.
        """
        flight = self._queue.popleft()
        assert flight.batch is batch, "batches come back in the order in which they were made"
        rows, hold = flight.rows, self._table.hold
        self._num_flights[rows] -= _ONE
        if self._queue:
            landed = rows[self._num_flights[rows] == 0]
            hold[landed] &= _LANDED
        else:
            hold[rows] &= _LANDED
        return flight, self._table.num_computed[rows] == batch.start

    def fail(self, rows: Rows) -> None:
        """Launch nothing behind these rows' chunks: what they were to compute is missing."""
        self._goes_ahead[rows] = False

    def check_invariants(self) -> None:
        """Check who is in flight and where it begins; raises AssertionError naming the law that is broken."""
        table = self._table
        count = np.zeros(table.num_rows, dtype=np.int64)
        due, known = table.num_computed.copy(), table.num_known.copy()
        for flight in self._queue:
            rows, start = flight.rows, flight.batch.start
            assert np.unique(rows).size == rows.size, "a row is at most once in a batch"
            count[rows] += 1
            sound = start == due[rows]
            assert (start[~sound] > due[rows[~sound]]).all(), "a stale chunk lies behind what is missing"
            assert not self._goes_ahead[rows[~sound]].any(), "nothing goes ahead of what is missing"
            due[rows[sound]] = flight.end[sound]
            begun, end = rows[sound], flight.end[sound]
            assert (end <= known[begun]).all(), "only what is known, or is sampled by a batch before, is computed"
            known[begun[end == known[begun]]] += 1
        assert (count == self._num_flights).all(), "the batches in flight are counted by row"
        marked = (table.hold & Hold.IN_FLIGHT) != 0
        assert (marked == (count > 0)).all(), "the bit IN_FLIGHT and the batches in flight differ"
        ahead = marked & self._goes_ahead
        assert (self._end[ahead] == due[ahead]).all(), "where a row in flight will be is known"
