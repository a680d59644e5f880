"""The step's tokens on their way out: one packed message per dispatcher and step.

`emit` is called by the step loop and only queues; one task publishes in order, so that a slow bus never delays a step.
What a full queue drops is not lost: the dispatcher sees the gap in the indices and asks for a replay.
"""

from __future__ import annotations

import asyncio
from collections import deque

import numpy as np
from numpy.typing import NDArray

from services.worker.sequences.events import StepEvents
from shared.ids import NOBODY, DispatcherId, Incarnation, WorkerId
from shared.process.log import get_logger
from shared.stream_extras import StreamExtra, pack_extras
from shared.subjects import Subjects
from shared.token_batch import TokenBatch
from shared.transport.bus import Bus, BusError

MAX_QUEUED_MESSAGES = 4096
"""Messages that may wait for the bus; older ones are dropped first."""

_log = get_logger()


class Emitter:
    """Owns the channels to the dispatchers and their message counters."""

    def __init__(self, worker_id: WorkerId, subjects: Subjects, bus: Bus) -> None:
        self.worker_id = worker_id
        self._subjects = subjects
        self._bus = bus
        self._channels: dict[tuple[DispatcherId, Incarnation], int] = {}
        self._names: list[DispatcherId] = []
        self._counters: list[int] = []
        self._unused: list[int] = []
        self._queue: deque[tuple[str, bytes]] = deque()
        self._wake = asyncio.Event()
        self._sending = False

    def channel(self, dispatcher_id: DispatcherId, incarnation: Incarnation = NOBODY) -> int:
        """Return the number of the channel to this dispatcher process; a new one on the first call."""
        channel = self._channels.get((dispatcher_id, incarnation))
        if channel is None:
            if not self._unused:
                self._unused.append(len(self._names))
                self._names.append(dispatcher_id)
                self._counters.append(0)
            channel = self._channels[dispatcher_id, incarnation] = self._unused.pop()
            self._names[channel], self._counters[channel] = dispatcher_id, 0
        return channel

    def find_channel(self, dispatcher_id: DispatcherId, incarnation: Incarnation) -> int | None:
        """Return the number of a channel that is in use, or None."""
        return self._channels.get((dispatcher_id, incarnation))

    def counter(self, channel: int) -> int:
        """Return the number of the next message of a channel."""
        return self._counters[channel]

    def close_channel(self, channel: int) -> None:
        """Forget a channel of which no sequence is left; its number may be used again."""
        self._channels = {name: other for name, other in self._channels.items() if other != channel}
        self._unused.append(channel)

    def emit(self, events: StepEvents) -> None:
        """Queue the events of a step, one message per dispatcher."""
        if not len(events.channel):
            return
        first = events.channel[0]
        if not np.count_nonzero(events.channel != first):
            self._queue_batch(int(first), events, slice(None))
            return
        for channel in np.unique(events.channel):
            self._queue_batch(int(channel), events, events.channel == channel)

    def _queue_batch(self, channel: int, events: StepEvents, chosen: slice | NDArray[np.bool_]) -> None:
        tokens = events.tokens[chosen]
        has_token = tokens >= 0
        batch = TokenBatch(
            worker_id=self.worker_id,
            counter=self._counters[channel],
            stream=events.stream[chosen],
            attempt=events.attempt[chosen],
            first_index=events.first_index[chosen],
            count=has_token.view(np.uint8),
            finish=events.finish[chosen],
            tokens=tokens[has_token].astype(np.uint32),
            extras=_pack_extras(events, chosen) if events.extras else b"",
        )
        subject = self._subjects.tokens(self._names[channel])
        for part in batch.split(self.max_payload_bytes):
            self._counters[channel] = part.counter + 1
            self._queue.append((subject, part.pack()))
        while len(self._queue) > MAX_QUEUED_MESSAGES:
            self._queue.popleft()
        self._wake.set()

    @property
    def max_payload_bytes(self) -> int:
        """Largest message that the bus carries."""
        return self._bus.max_payload_bytes

    @property
    def idle(self) -> bool:
        """Whether everything emitted has been handed to the bus."""
        return not self._queue and not self._sending

    async def run(self) -> None:
        """Publish what is queued, in order, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._sending = True
            while self._queue:
                subject, data = self._queue.popleft()
                try:
                    await self._bus.publish(subject, data)
                except BusError as error:
                    _log.warning("tokens_not_sent", subject=subject, error=str(error))
            self._sending = False


def _pack_extras(events: StepEvents, chosen: slice | NDArray[np.bool_]) -> bytes:
    """Return the extras of the chosen events, by their rows in the message."""
    row_of = np.full(len(events), -1)
    row_of[chosen] = np.arange(row_of[chosen].size)
    return pack_extras(
        [
            StreamExtra(
                int(row_of[extra.index]), extra.cached_tokens, extra.logprobs, extra.moved_to, extra.num_preemptions
            )
            for extra in events.extras
            if row_of[extra.index] >= 0
        ]
    )
