"""Whose requests wait at which worker: they were sent there, and have not begun. One writer: `Placing`."""

from __future__ import annotations

from collections import Counter

from shared.api_keys import Tier
from shared.ids import StreamId, WorkerId

Group = tuple[Tier, str]
"""Tier and tenant, which share a worker's places with others."""


class WorkerLines:
    """This dispatcher's part of what waits at workers."""

    def __init__(self) -> None:
        self._places: dict[StreamId, tuple[WorkerId, Group]] = {}
        self._num_of: Counter[tuple[WorkerId, Group]] = Counter()

    def num_of(self, worker_id: WorkerId, group: Group) -> int:
        """Return how many of a group wait at a worker."""
        return self._num_of[worker_id, group]

    def join(self, stream: StreamId, worker_id: WorkerId, group: Group) -> None:
        """A request waits there from now on, and nowhere else."""
        self.leave(stream)
        self._places[stream] = worker_id, group
        self._num_of[worker_id, group] += 1

    def leave(self, stream: StreamId) -> bool:
        """It has begun, or is gone; return whether it waited."""
        place = self._places.pop(stream, None)
        if place is None:
            return False
        self._num_of[place] -= 1
        if not self._num_of[place]:
            del self._num_of[place]
        return True
