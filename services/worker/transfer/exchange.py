"""Exchange of KV after layers were dropped: who moves first, in what pieces, and what may be admitted meanwhile. Pure.

After a drop each request has the KV of all layers where it ran, and needs that of each stage's layers at that stage.
Requests stall until theirs has moved, so the reader who can do without for the shortest time comes first.

Both sides may be full. A stage's room is what the drop freed, and what its own requests free as their KV leaves:

    room(A) ──chunk from B──► less; B's blocks are free when it is acknowledged: room(B) more, by the same amount

So between two stages the sum of both rooms does not change, and while it is larger than what pieces need there is
always one that can take a chunk (`max_chunk_blocks`), provided that nobody else takes that room (`may_admit`). Between
more stages, or where memory comes back only in pages of several blocks, all may be stuck; then one request has to be
computed again (`choose_victim`), which frees its blocks everywhere.

Source: KunServe v2, section 4.2 (chunks of about one stage's execution time, activations first); v1, section 4.2 (the
granularity from the interval between activations). Deviations: order by slack; the rules against deadlock, on which
both papers are silent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shared.ids import RequestId


@dataclass(frozen=True, slots=True)
class Ongoing:
    """A request whose KV has to move."""

    request_id: RequestId
    slack_s: float
    """How long its reader can read what has been sent; the duration until the stall is seen. May be negative."""
    num_bytes: int
    """KV to be moved."""


@dataclass(frozen=True, slots=True)
class StageRoom:
    """One stage of a group during an exchange."""

    free_blocks: int
    """Backed and held by nobody."""
    arriving_blocks: int
    """Blocks of KV that still have to come and for which nothing is reserved yet."""

    def __post_init__(self) -> None:
        if self.free_blocks < 0 or self.arriving_blocks < 0:
            raise ValueError(f"counts of blocks: {self}")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A move that waits for room at its target."""

    slack_s: float
    num_wanted: int
    """Blocks without room yet."""
    num_held: int
    """Blocks with room."""
    chunk_blocks: int


def exchange_order(requests: Sequence[Ongoing]) -> list[Ongoing]:
    """Return the requests in the order in which their KV should move: the thinnest slack first.

    Of equal ones the smaller goes first, since it is done sooner; then by id.
    """
    for request in requests:
        if math.isnan(request.slack_s) or request.num_bytes < 0:
            raise ValueError(f"a request without slack or size: {request}")
    return sorted(requests, key=lambda request: (request.slack_s, request.num_bytes, request.request_id))


def chunk_blocks(interval_s: float, rate_bytes_per_s: float, block_bytes: int, *, multiple: int = 1) -> int:
    """Return how many blocks take about `interval_s` on the wire, at least one.

    Args:
        interval_s: coordinated: the time that a stage executes; live: the time between two activations.
        rate_bytes_per_s: of the link.
        block_bytes: bytes of a block, in all layers that are moved.
        multiple: a chunk is a multiple of so many blocks (where attention is split at fixed borders).
    """
    if not (interval_s > 0 and rate_bytes_per_s > 0 and block_bytes > 0 and multiple >= 1):
        raise ValueError("a chunk needs a time, a rate, the size of a block and a multiple")
    count = int(interval_s * rate_bytes_per_s) // block_bytes
    return max(count // multiple, 1) * multiple


def max_chunk_blocks(total_free_blocks: int, num_stages: int) -> int:
    """Return the largest chunk that one of the stages can take, however what is free lies between them; at least one.

    If every stage had less than a chunk of c blocks free, all together would have at most n·(c - 1).
    """
    if num_stages < 1 or total_free_blocks < 0:
        raise ValueError(f"{total_free_blocks} free blocks of {num_stages} stages")
    return max((total_free_blocks - 1) // num_stages + 1, 1)


def may_admit(rooms: Sequence[StageRoom], num_blocks: int) -> bool:
    """Return whether blocks for something new (a request, or the growth of one) leave what has to arrive its room.

    A new request takes the same blocks on every stage.
    """
    return all(room.free_blocks - num_blocks >= room.arriving_blocks for room in rooms)


def grants(free_blocks: int, waiting: Sequence[Waiting]) -> list[int]:
    """Share a stage's free blocks among the moves that wait for them, in whole chunks: the thinnest slack first.

    A chunk that has room is sent at once and needs nothing else, so whoever gets room makes progress with it.

    Returns:
        [len(waiting)] blocks for each.
    """
    shares = [0] * len(waiting)
    for index in sorted(range(len(waiting)), key=lambda i: (waiting[i].slack_s, i)):
        move = waiting[index]
        fits = min(move.num_wanted, free_blocks)
        if fits < move.num_wanted:  # up to the end of the last whole chunk
            fits = max((move.num_held + fits) // move.chunk_blocks * move.chunk_blocks - move.num_held, 0)
        shares[index] = fits
        free_blocks -= fits
    return shares


def choose_victim(unmoved: Sequence[Ongoing]) -> Ongoing | None:
    """Return the request to compute again when no stage can take a chunk: the one that can wait the longest.

    Args:
        unmoved: requests of which nothing is on its way.
    """
    return max(unmoved, key=lambda request: (request.slack_s, -request.num_bytes, request.request_id), default=None)
