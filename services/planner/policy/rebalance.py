"""After a drop: queued requests that their group cannot take into its next batch go to groups that can.

A group has room for KV then, but computes only so many requests at a time well; beyond that they would still queue.
What is over that limit, or over the group's free KV, *overflows*:

    A  max 4:  running 3 | queue: a b c        keeps a; b and c overflow
    B  max 8:  running 5 | queue: d            keeps d, and has 2 places left
    C  max 4:  running 4 | queue: e            e overflows      ─► B gets the two most urgent of b, c and e

A group keeps its most urgent requests; overflowing ones are placed by priority, then by age, each on the group that is
the least full then. No running request moves, and nobody is pushed out of a place.

Pure and deterministic. Source: KunServe v1, section 4.3 ("Online dispatcher"). Deviation: free KV limits a group
besides the batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from shared.ids import RequestId


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request that waits in a group."""

    request_id: RequestId
    priority: int
    """Larger goes first."""
    age_s: float
    """Seconds since it came; of equal priority the older goes first."""
    num_tokens: int
    """KV that it needs before it can run."""


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """What a group has to do."""

    group_id: str
    max_batch: int
    """Requests that it runs well at a time; at least one."""
    num_running: int
    free_tokens: int
    queued: tuple[QueuedRequest, ...]


@dataclass(frozen=True, slots=True)
class Requeue:
    """One request goes elsewhere."""

    request_id: RequestId
    source: str
    target: str


@dataclass(slots=True)
class _Room:
    """What a group can still take."""

    group_id: str
    max_batch: int
    num_taken: int
    free_tokens: int

    def take(self, request: QueuedRequest) -> bool:
        """Give the request a place if there is one."""
        if self.num_taken >= self.max_batch or request.num_tokens > self.free_tokens:
            return False
        self.num_taken += 1
        self.free_tokens -= request.num_tokens
        return True

    @property
    def key(self) -> tuple[float, str]:
        """Smaller is emptier."""
        return self.num_taken / self.max_batch, self.group_id


def rebalance(groups: Sequence[GroupLoad]) -> tuple[Requeue, ...]:
    """Return the moves that bring overflowing requests to groups with room, in order of placing.

    Args:
        groups: all of them, each once.
    """
    rooms: list[_Room] = []
    overflow: list[tuple[QueuedRequest, str]] = []
    for group in groups:
        room = _Room(group.group_id, group.max_batch, group.num_running, group.free_tokens)
        # what stands behind one that does not fit waits with it: it would take the room that the first one waits for
        queue = sorted(group.queued, key=_urgency)
        num_kept = next((number for number, request in enumerate(queue) if not room.take(request)), len(queue))
        overflow.extend((request, group.group_id) for request in queue[num_kept:])
        if num_kept == len(queue):
            rooms.append(room)
    return _place(rooms, sorted(overflow, key=lambda pair: _urgency(pair[0])))


def _urgency(request: QueuedRequest) -> tuple[int, float, RequestId]:
    return -request.priority, -request.age_s, request.request_id


def _place(rooms: Sequence[_Room], overflow: Sequence[tuple[QueuedRequest, str]]) -> tuple[Requeue, ...]:
    heap = [(room.key, room) for room in rooms if room.num_taken < room.max_batch]
    heapq.heapify(heap)
    moves = []
    for request, source in overflow:
        passed = []
        while heap:
            entry = heapq.heappop(heap)
            room = entry[1]
            if room.take(request):
                moves.append(Requeue(request.request_id, source, room.group_id))
                if room.num_taken < room.max_batch:
                    heapq.heappush(heap, (room.key, room))
                break
            passed.append(entry)  # too little KV for this one, perhaps enough for the next
        for entry in passed:
            heapq.heappush(heap, entry)
    return tuple(moves)
