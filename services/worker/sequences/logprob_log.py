"""Log-probabilities that were sent, kept for replays within a fixed size; the oldest are forgotten first."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from services.worker.contract.arrays import Bool
from services.worker.sequences.events import RowExtra
from services.worker.sequences.sequence import SequenceKey
from services.worker.sequences.table import SequenceTable
from shared.stream_extras import StreamExtra, TokenLogprob, pack_extras, unpack_extras

MAX_BYTES = 2**24
"""Packed log-probabilities of all sequences together: 70 000 tokens with 20 alternatives each."""
_OVERHEAD_BYTES = 64
"""What one entry takes beside its packed bytes."""


class LogprobLog:
    """The last log-probabilities of each sequence that asks for them, in the order of its tokens."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._order: deque[SequenceKey] = deque()
        self._entries: dict[SequenceKey, deque[bytes]] = {}

    def take_in(
        self, table: SequenceTable, rows: NDArray[np.intp], wanted: Bool, logprobs: dict[int, TokenLogprob]
    ) -> tuple[RowExtra, ...]:
        """Keep what a step says and return it for the step's events.

        Args:
            table: names the sequences.
            rows: [n] of the step's batch.
            wanted: [n] rows that get an event, in this order.
            logprobs: by place in the batch.
        """
        index = (np.cumsum(wanted) - 1).tolist()
        places = [place for place in sorted(logprobs) if wanted[place]]
        for place in places:
            self.append(table.sequence(int(rows[place])).key, logprobs[place])
        return tuple(RowExtra(index[place], logprobs=(logprobs[place],)) for place in places)

    def append(self, key: SequenceKey, logprob: TokenLogprob) -> None:
        """Keep the next token's."""
        packed = pack_extras([StreamExtra(0, logprobs=(logprob,))])
        self._order.append(key)
        self._entries.setdefault(key, deque()).append(packed)
        self._num_bytes += len(packed) + _OVERHEAD_BYTES
        while self._num_bytes > self._max_bytes:
            self._forget_oldest()

    def last(self, key: SequenceKey, count: int) -> list[TokenLogprob]:
        """Return those of the sequence's last tokens, `count` at most, in the order of the tokens."""
        entries = self._entries.get(key, deque())
        wanted = list(entries)[max(len(entries) - count, 0) :]
        return [unpack_extras(packed)[0].logprobs[0] for packed in wanted]

    def _forget_oldest(self) -> None:
        key = self._order.popleft()
        entries = self._entries[key]
        self._num_bytes -= len(entries.popleft()) + _OVERHEAD_BYTES
        if not entries:
            del self._entries[key]
