"""Sequences on their way in and out: names, refusals, cancels, expiry, ends, and what is kept of those that ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from services.worker.blocks.manager import BlockManager
from services.worker.blocks.sharing import Sharing
from services.worker.contract.arrays import I32, Bool, Rows
from services.worker.engine.leaving import LeavingRows
from services.worker.sequences.config import AddRefusal, EngineConfig, NewSequence, check_new, max_outputs
from services.worker.sequences.events import NO_EVENTS, RowExtra, StepEvents
from services.worker.sequences.sequence import FinishedStore, SequenceKey
from services.worker.sequences.stops import StopRules
from services.worker.sequences.table import Hold, SequenceTable, Status
from services.worker.sequences.token_log import TokenLog
from shared.ids import RequestId
from shared.types import MAX_PREEMPTIONS, FinishReason

_CANCELLED_IN_FLIGHT = Hold.CANCELLED | Hold.IN_FLIGHT


class SequenceRegistry:
    """Which sequences are here. The engine owns it; nobody else changes it."""

    def __init__(
        self, config: EngineConfig, table: SequenceTable, sharing: Sharing, blocks: BlockManager, log: TokenLog
    ) -> None:
        self.row_of: dict[SequenceKey, int] = {}
        """By request and attempt."""
        self.stops = StopRules(config.max_sequences, config.vocab_size, config.eos_token_ids)
        self.next_expiry_s = float("inf")
        """Nobody expires before."""
        self.num_cancelled = 0
        """Rows in flight that end when their last batch comes back."""
        self.num_ended = 0
        """Rows in flight that have ended, and are forgotten when their last batch comes back."""
        self.before_add: Callable[[NewSequence], None] = lambda new: None
        """Called with each sequence that is to be taken in."""
        self.on_end: Callable[[int, bool], None] = lambda _row, _is_sound: None
        """Called with each row that ends, just before it is free."""
        self._config = config
        self._table = table
        self._sharing = sharing
        self._blocks = blocks
        self._log = log
        self._finished = FinishedStore(config.finished_kept)
        self._events: list[StepEvents] = []
        self._newest: dict[RequestId, int] = {}
        """Row of a request's newest attempt."""
        self.leaving = LeavingRows(table, lambda row, moved_to: self.release([row], moved_to))

    def add(self, new: NewSequence) -> int | AddRefusal:
        """Take a sequence in; it waits for its turn.

        Returns:
            Its row (the same one again if it is repeated while it runs), or why it is not taken.
        """
        self.before_add(new)
        key = (new.request_id, new.attempt)
        known = self.row_of.get(key)
        if known is not None and self._table.stream[known] == new.stream:
            return known
        if known is not None or key in self._finished:
            return AddRefusal.DUPLICATE
        refusal = check_new(new, self._config, self._blocks.num_usable)
        if refusal is not None:
            return refusal
        parent = self._newest.get(new.fork_of) if new.fork_of is not None else None
        if parent is not None and not _has_equal_prompt(self._table, parent, new):
            return AddRefusal.INVALID
        max_output = max_outputs(int(new.prompt.size), new.sampling.max_tokens, self._config.max_model_len)
        row = self._table.add(new, max_output)
        if row is None:
            return AddRefusal.FULL
        self.row_of[key] = self._newest[new.request_id] = row
        self.stops.set(row, new.sampling)
        self.next_expiry_s = min(self.next_expiry_s, new.expires_s)
        generated = new.generated.astype(np.int32)
        self._log.extend(row, generated)
        self._blocks.begin(row, from_right=self._config.shares_blocks and new.tier.is_best_effort)
        self._sharing.add(row, new.cache_salt, parent)
        if generated.size:
            self._take_over(row, generated)
        return row

    def hand_over(self, new: NewSequence) -> int | None:
        """Let a newer attempt of a request that is here go on where the older one is; return its row.

        The older attempt ends: with SUPERSEDED if the newer one has its row, else as cancelled, and then the newer one
        begins anew (None): its prompt, sampling or tokens so far are others.
        """
        row = self._newest.get(new.request_id)
        if row is None or self._table.sequence(row).key[1] >= new.attempt:
            return None
        if self._table.hold[row] & Hold.CANCELLED or not self._continues(row, new):
            self._cancel(row)
            return None
        table, key = self._table, (new.request_id, new.attempt)
        self._events.append(self._ends([row], FinishReason.SUPERSEDED))
        del self.row_of[table.sequence(row).key]
        table.rename(row, new)
        table.hold[row] &= ~Hold.PAUSED
        self.leaving.stay(row)
        self.row_of[key] = row
        self.next_expiry_s = min(self.next_expiry_s, new.expires_s)
        return row

    def _continues(self, row: int, new: NewSequence) -> bool:
        """Return whether the row's sequence is the new one, at its tokens so far or later."""
        sequence, num_known = self._table.sequence(row), int(new.generated.size)
        if num_known > self._table.num_output[row] or sequence.sampling != new.sampling:
            return False
        if sequence.cache_salt != new.cache_salt or not np.array_equal(sequence.prompt, new.prompt):
            return False
        return np.array_equal(self._log.read(row, 0, num_known), new.generated)

    def newest_row(self, request_id: RequestId) -> int | None:
        """Return the row of a request's newest attempt; None: none is here."""
        return self._newest.get(request_id)

    def num_outputs(self, request_id: RequestId, attempt: int) -> int:
        """Return how many output tokens a sequence has that is here, 0 if it is not."""
        row = self.row_of.get((request_id, attempt))
        return 0 if row is None else int(self._table.num_output[row])

    def rows_of(self, channel: int) -> list[int]:
        """Return the rows of a channel."""
        table = self._table
        here = (table.status != Status.FREE) & ((table.hold & Hold.ENDED) == 0)
        return np.flatnonzero(here & (table.channel == channel)).tolist()

    def cancel(self, request_id: RequestId, attempt: int) -> bool:
        """End a sequence: at once, or when the batch that holds it comes back. False if it is not here."""
        row = self.row_of.get((request_id, attempt))
        if row is None:
            return False
        self._cancel(row)
        return True

    def replay(self, request_id: RequestId, attempt: int, first_index: int) -> tuple[I32, FinishReason] | None:
        """Return outputs from an index on, of a sequence that runs or ended not long ago; None if it is not known."""
        key = (request_id, attempt)
        row = self.row_of.get(key)
        if row is None:
            return self._finished.find(key, first_index)
        return self._log.read(row, first_index, int(self._table.num_output[row])), FinishReason.NONE

    def take_events(self) -> StepEvents:
        """Return what happened outside the steps since the last call: ends, beginnings, preemptions."""
        if not self._events:
            return NO_EVENTS
        events = StepEvents.concatenate(self._events)
        self._events.clear()
        return events

    def expire(self, now_s: float) -> None:
        """End the sequences whose time is over, or mark those in flight."""
        expires_s = self._table.expires_s
        for row in np.flatnonzero(expires_s <= now_s).tolist():
            self._cancel(row)
        self.next_expiry_s = float(expires_s.min())

    def after_batch(self, rows: Rows) -> StepEvents:
        """Let rows of a landed batch go that were only waited for: those that have ended, leave, or were cancelled."""
        if self.num_ended:
            self._forget_ended(rows)
        self.leaving.go_on()
        return self._end_cancelled(rows)

    def _end_cancelled(self, rows: Rows) -> StepEvents:
        """End those rows of a landed batch that were cancelled meanwhile and are in no other one."""
        if not self.num_cancelled:
            return NO_EVENTS
        cancelled = rows[(self._table.hold[rows] & (Hold.CANCELLED | Hold.IN_FLIGHT)) == Hold.CANCELLED].tolist()
        self.num_cancelled -= len(cancelled)
        return self.end(cancelled, FinishReason.CANCELLED)

    def are_waited_for(self, rows: Rows) -> Bool:
        """Return [n] which rows of a landed batch do not advance: they have ended, or end with a later one."""
        hold = self._table.hold[rows]
        waited_for: Bool = ((hold & Hold.ENDED) != 0) | ((hold & _CANCELLED_IN_FLIGHT) == _CANCELLED_IN_FLIGHT)
        return waited_for

    def _forget_ended(self, rows: Rows) -> None:
        """Forget those rows of a landed batch that have ended already and are in no other one."""
        ended = rows[(self._table.hold[rows] & (Hold.ENDED | Hold.IN_FLIGHT)) == Hold.ENDED].tolist()
        self.num_ended -= len(ended)
        for row in ended:
            self._free(row, is_sound=True)

    def end(self, rows: Sequence[int], finish: FinishReason) -> StepEvents:
        """Forget rows that end without a token and say so."""
        if not rows:
            return NO_EVENTS
        events = self._ends(rows, finish)
        for row in rows:
            self.forget(row, finish)
        return events

    def release(self, rows: Sequence[int], moved_to: str) -> None:
        """End rows with RELEASED, which are in no batch in flight, to go on at another worker."""
        assert not (self._table.hold[rows] & Hold.IN_FLIGHT).any(), "a sequence is released between its steps"
        events = self.end(rows, FinishReason.RELEASED)
        extras = tuple(RowExtra(i, moved_to=moved_to) for i in range(len(events)) if moved_to)
        self._events.append(replace(events, extras=extras))

    def note_started(self, rows: Sequence[int]) -> None:
        """Say that rows are in a step for the first time: events without a token and without an end."""
        if rows:
            self._events.append(self._ends(rows, FinishReason.NONE))

    def note_preempted(self, row: int) -> None:
        """Say how often a row has been preempted by now, so that another worker goes on counting."""
        said = RowExtra(0, num_preemptions=min(int(self._table.num_preemptions[row]), MAX_PREEMPTIONS))
        self._events.append(replace(self._ends([row], FinishReason.NONE), extras=(said,)))

    def _ends(self, rows: Sequence[int], finish: FinishReason) -> StepEvents:
        table, where = self._table, np.array(rows, dtype=np.intp)
        return StepEvents(
            channel=table.channel[where],
            stream=table.stream[where],
            attempt=table.attempt[where],
            first_index=table.num_output[where].astype(np.uint32),
            tokens=np.full(where.size, -1, dtype=np.int32),
            finish=np.full(where.size, finish, dtype=np.uint8),
        )

    def forget(self, row: int, finish: FinishReason) -> None:
        """Free everything that a row holds and keep its outputs for replays.

        Of a row that is in a batch which went ahead, only the name goes at once: that batch still writes its blocks.
        """
        table = self._table
        key, num_output = table.sequence(row).key, int(table.num_output[row])
        self._finished.add(key, self._log.read(row, 0, num_output), finish)
        del self.row_of[key]
        self.leaving.stay(row)
        if self._newest.get(key[0]) == row:
            del self._newest[key[0]]
        if table.hold[row] & Hold.IN_FLIGHT:
            table.hold[row] |= Hold.ENDED
            table.expires_s[row] = np.inf
            self.num_ended += 1
        else:
            self._free(row, is_sound=finish is not FinishReason.ERROR)

    def _free(self, row: int, *, is_sound: bool) -> None:
        table, num_output = self._table, int(self._table.num_output[row])
        self._sharing.release(row, is_sound=is_sound)
        self.on_end(row, is_sound)
        self._sharing.forget(row)
        self._log.clear(row, num_output)
        self.stops.clear(row)
        table.free(row)

    def _take_over(self, row: int, generated: I32) -> None:
        """End what an earlier attempt began if it turns out to have been complete."""
        where = np.array([row])
        num_output = self._table.num_output[where]
        finish = self.stops.check(where, generated[-1:], num_output, self._table.max_output[where])
        if finish[0]:
            self._events.append(self.end([row], FinishReason(int(finish[0]))))

    def _cancel(self, row: int) -> None:
        hold = self._table.hold
        if not hold[row] & Hold.IN_FLIGHT:
            self._events.append(self.end([row], FinishReason.CANCELLED))
        elif not hold[row] & Hold.CANCELLED:
            hold[row] |= Hold.CANCELLED
            self._table.expires_s[row] = np.inf
            self.num_cancelled += 1


def _has_equal_prompt(table: SequenceTable, row: int, new: NewSequence) -> bool:
    """Return whether a new sequence may fork a row."""
    sequence = table.sequence(row)
    return sequence.cache_salt == new.cache_salt and np.array_equal(sequence.prompt, new.prompt)
