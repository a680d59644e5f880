"""The sequence table: hot state of all sequences in columns, row = sequence. Only the engine writes it."""

from __future__ import annotations

from dataclasses import fields, replace
from enum import IntEnum
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from services.worker.scheduling.view import Columns
from services.worker.sequences.config import NewSequence
from services.worker.sequences.reading import NO_TAG, first_reading
from services.worker.sequences.rows import RowQueue
from services.worker.sequences.sequence import Sequence
from shared.types import LatencyLimits

NO_LIMITS: Final = LatencyLimits()
C = TypeVar("C", bound=NDArray[np.generic])


class Status(IntEnum):
    """Where a row is; a row is in exactly one queue, or free."""

    FREE = 0
    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3


class Hold:
    """Why a row may not be scheduled. A feature that must keep a sequence from running adds a bit, nothing else."""

    IN_FLIGHT: Final = np.uint16(1)  # in a batch that the executor has not answered
    CANCELLED: Final = np.uint16(2)  # ends when its batch comes back
    RETRY: Final = np.uint16(4)  # was in a failed batch and waits for its turn to be tried in a smaller one
    NO_ROOM: Final = np.uint16(8)  # the KV memory has shrunk below what the whole sequence needs
    FORK: Final = np.uint16(16)  # waits for the prompt of the sequence that it forks
    PAUSED: Final = np.uint16(32)  # its dispatcher has not been heard for too long
    SWAPPING: Final = np.uint16(64)  # its KV is being copied to host memory, or back
    ENDED: Final = np.uint16(128)  # has ended and said so; a batch that went ahead still writes its KV
    LEAVING: Final = np.uint16(256)  # goes on at another worker once it is in no batch and no copy
    PULLING: Final = np.uint16(512)  # waits for KV of its prompt that comes from another worker


class SequenceTable:
    """Columns, free rows and the three queues.

    `rows` arguments are [n] arrays of row numbers; columns are indexed by row.
    """

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.num_rows = num_rows
        self.num_parked_blocks = 0
        """KV blocks that waiting and preempted rows need for the tokens known so far, as if they held none."""
        self.block_size = block_size
        self.status = np.zeros(num_rows, dtype=np.uint8)
        self.hold = np.zeros(num_rows, dtype=np.uint16)
        self.num_prompt = np.zeros(num_rows, dtype=np.int32)
        self.num_output = np.zeros(num_rows, dtype=np.int32)
        self.num_known = np.zeros(num_rows, dtype=np.int32)  # num_prompt + num_output
        self.num_computed = np.zeros(num_rows, dtype=np.int32)
        self.held_blocks = np.zeros(num_rows, dtype=np.int32)  # written by the block manager
        self.host_tokens = np.zeros(num_rows, dtype=np.int32)  # of a preempted row: see `Columns`
        self.max_output = np.zeros(num_rows, dtype=np.int32)
        self.last_token = np.zeros(num_rows, dtype=np.int32)  # the last known token: a decode's input
        self.order = np.full(num_rows, -1, dtype=np.int64)  # order of `add`: breaks ties of arrival; -1: a free row
        self.last_step = np.full(num_rows, -1, dtype=np.int64)  # the newest step with the row
        self.paused_after = np.full(num_rows, -1, dtype=np.int64)  # who was in no step since then takes no new pause
        self.arrival_s = np.zeros(num_rows, dtype=np.float64)
        self.expires_s = np.full(num_rows, np.inf)
        self.last_token_s = np.zeros(num_rows, dtype=np.float64)
        self.num_preemptions = np.zeros(num_rows, dtype=np.int32)
        self.tier = np.zeros(num_rows, dtype=np.uint8)
        self.slo_ttft_s = np.full(num_rows, np.inf)
        self.slo_tpot_s = np.full(num_rows, np.inf)
        self.qoe_ttft_s = np.zeros(num_rows, dtype=np.float64)
        self.qoe_speed = np.zeros(num_rows, dtype=np.float64)
        self.qoe_gap_s = np.zeros(num_rows, dtype=np.float64)
        self.qoe_last_s = np.zeros(num_rows, dtype=np.float64)
        self.qoe_delay_sum_s = np.zeros(num_rows, dtype=np.float64)
        self.thinks = np.zeros(num_rows, dtype=np.bool_)
        self.may_think = np.zeros(num_rows, dtype=np.bool_)  # its first token decides
        self.num_thought = np.zeros(num_rows, dtype=np.int32)
        self.closing_id = np.full(num_rows, NO_TAG, dtype=np.int32)  # the token that ends its thinking
        self.thinking_gap_s = np.zeros(num_rows, dtype=np.float64)  # between two tokens of it
        self.channel = np.zeros(num_rows, dtype=np.int32)
        self.stream = np.zeros(num_rows, dtype=np.uint32)
        self.attempt = np.zeros(num_rows, dtype=np.uint16)
        self.has_started = np.zeros(num_rows, dtype=np.bool_)  # it has run before
        self.at_executor = np.zeros(num_rows, dtype=np.bool_)  # the executor knows the row
        self.cold: list[Sequence | None] = [None] * num_rows
        self.waiting = RowQueue(num_rows)
        self.running = RowQueue(num_rows)
        self.preempted = RowQueue(num_rows)
        self.num_readers = 0  # live rows that a reader follows
        self.num_thinkers = 0  # of these, rows that think, may, or have
        self._free = list(range(num_rows - 1, -1, -1))
        self._num_added = 0
        self.columns = Columns(**{field.name: _read_only(getattr(self, field.name)) for field in fields(Columns)})

    @property
    def num_sequences(self) -> int:
        """Rows that hold a sequence."""
        return self.num_rows - len(self._free)

    def sequence(self, row: int) -> Sequence:
        """Return the cold data of a live row."""
        sequence = self.cold[row]
        assert sequence is not None, f"row {row} is free"
        return sequence

    def add(self, new: NewSequence, max_output: int) -> int | None:
        """Take a free row for the sequence and put it into `waiting`; None if all rows are taken."""
        if not self._free:
            return None
        row = self._free.pop()
        prompt, generated = new.prompt.astype(np.int32), int(new.generated.size)
        key, first_choice = (new.request_id, new.attempt), new.fork_of or new.request_id
        self.cold[row] = Sequence(key, prompt, new.sampling, new.cache_salt, first_choice)
        self.status[row], self.hold[row] = Status.WAITING, 0
        self.num_prompt[row], self.num_output[row] = prompt.size, generated
        self.num_known[row], self.num_computed[row] = prompt.size + generated, 0
        self.max_output[row] = max_output
        self.last_token[row] = new.generated[-1] if generated else prompt[-1]
        self.order[row] = self._num_added
        self.last_step[row] = -1
        self.arrival_s[row], self.expires_s[row] = new.arrival_s, new.expires_s
        self.last_token_s[row] = new.arrival_s if new.last_token_s is None else new.last_token_s
        self.num_preemptions[row] = new.num_preemptions
        self.tier[row] = new.tier
        slo = new.slo or NO_LIMITS
        self.slo_ttft_s[row], self.slo_tpot_s[row] = slo.ttft_s or np.inf, slo.tpot_s or np.inf
        self.channel[row], self.stream[row], self.attempt[row] = new.channel, new.stream, new.attempt
        self._set_qoe(row, new)
        self._num_added += 1
        self.waiting.insert(row, self.arrival_s, self.order)
        self.num_parked_blocks += self._num_blocks(row)
        return row

    def admit(self, row: int) -> None:
        """Move a waiting or preempted row to the end of `running`."""
        queue = self.waiting if self.status[row] == Status.WAITING else self.preempted
        queue.remove(np.array([row]))
        self.num_parked_blocks -= self._num_blocks(row)
        self.status[row] = Status.RUNNING
        self.running.append(row)

    def preempt(self, row: int) -> None:
        """Move a running row to its place in `preempted`."""
        self.running.remove(np.array([row]))
        self.status[row] = Status.PREEMPTED
        self.num_preemptions[row] += 1
        self.paused_after[row] = self.last_step[row]
        self.preempted.insert(row, self.arrival_s, self.order)
        self.num_parked_blocks += self._num_blocks(row)

    def rename(self, row: int, new: NewSequence) -> None:
        """Give a live row to a newer attempt of its request: another name, channel, handle and time limit.

        What else is known of the request stays as it is here, where it ran all the time.
        """
        self.cold[row] = replace(self.sequence(row), key=(new.request_id, new.attempt))
        self.channel[row], self.stream[row], self.attempt[row] = new.channel, new.stream, new.attempt
        self.expires_s[row] = new.expires_s
        self.num_preemptions[row] = max(int(self.num_preemptions[row]), new.num_preemptions)

    def free(self, row: int) -> None:
        """Forget a row, whatever its queue."""
        queue = (self.waiting, self.running, self.preempted)[self.status[row] - 1]
        queue.remove(np.array([row]))
        if self.status[row] != Status.RUNNING:
            self.num_parked_blocks -= self._num_blocks(row)
        self.num_readers -= int(not np.isnan(self.qoe_speed[row]))
        self.num_thinkers -= int(self.is_thinker(row))
        self.thinks[row] = self.may_think[row] = False
        self.num_thought[row] = 0
        self.status[row], self.hold[row] = Status.FREE, 0
        self.order[row], self.num_computed[row] = -1, 0
        self.expires_s[row] = np.inf
        self.has_started[row] = self.at_executor[row] = False
        self.cold[row] = None
        self._free.append(row)

    @property
    def num_head_blocks(self) -> int:
        """Blocks that the next parked row lacks for the tokens known so far; 0 without one."""
        queue = self.preempted if len(self.preempted) else self.waiting
        if not len(queue):
            return 0
        row = int(queue.view[0])
        return self._num_blocks(row) - int(self.held_blocks[row])

    @property
    def num_lent_blocks(self) -> int:
        """Blocks that preempted rows hold."""
        return int(self.held_blocks[self.preempted.view].sum()) if len(self.preempted) else 0

    def _num_blocks(self, row: int) -> int:
        return -(-int(self.num_known[row]) // self.block_size)

    def is_thinker(self, row: int) -> bool:
        """Return whether a row thinks, may, or has."""
        return bool(self.thinks[row] or self.may_think[row] or self.num_thought[row])

    def _set_qoe(self, row: int, new: NewSequence) -> None:
        """Begin the O(1) QoE form, or go on with it where an earlier attempt has left it."""
        reading = first_reading(new)
        self.qoe_ttft_s[row], self.qoe_speed[row], self.qoe_gap_s[row] = reading.ttft_s, reading.speed, reading.gap_s
        self.qoe_last_s[row], self.qoe_delay_sum_s[row] = reading.last_s, reading.delay_sum_s
        self.thinks[row], self.may_think[row] = reading.thinks, reading.may_think
        self.num_thought[row], self.closing_id[row] = reading.num_thought, reading.closing_id
        self.thinking_gap_s[row] = reading.thinking_gap_s
        self.num_readers += int(not np.isnan(reading.speed))
        self.num_thinkers += int(self.is_thinker(row))


def _read_only(column: C) -> C:
    view = column.view()
    view.flags.writeable = False
    return view
