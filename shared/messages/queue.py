"""Requests that wait at one worker and find room at another: the planner asks, the worker lets them go. Errands, JSON.

    planner                                   worker, whose memory is full
       ├── ListQueued ───────────────────────────►│
       │◄──────────────────────────── QueueList ──┤ who waits and has not begun, first in line first
       ├── MoveQueued (request ─► worker) ───────►│
       │◄──────────────────────────── QueueMoved ─┤ these are released; their dispatchers submit them there

A request that has begun meanwhile stays where it is.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from shared.api_keys import Tier
from shared.ids import RequestId, WorkerId
from shared.messages.base import ControlMessage, MessagePart
from shared.messages.errand import Errand

MAX_LISTED: Final = 512
"""Requests of one answer."""


class ListQueued(Errand):
    """Who waits?"""

    kind: Literal["list_queued"] = "list_queued"
    limit: Annotated[int, Field(ge=1, le=MAX_LISTED)] = MAX_LISTED


class QueuedPart(MessagePart):
    """A request that waits and has not begun."""

    request_id: RequestId
    attempt: int
    tier: Tier = Tier.DEFAULT
    age_s: float
    """Seconds since it came."""
    num_blocks: int
    """KV blocks that it needs before it can run."""


class QueueList(ControlMessage):
    """The worker's answer."""

    kind: Literal["queue_list"] = "queue_list"
    requests: Annotated[tuple[QueuedPart, ...], Field(max_length=MAX_LISTED)] = ()


class QueueMove(MessagePart):
    """One request goes elsewhere."""

    request_id: RequestId
    attempt: int
    target: WorkerId


class MoveQueued(Errand):
    """Let these go, as far as they still wait."""

    kind: Literal["move_queued"] = "move_queued"
    moves: Annotated[tuple[QueueMove, ...], Field(max_length=MAX_LISTED)]


class QueueMoved(ControlMessage):
    """The worker's answer."""

    kind: Literal["queue_moved"] = "queue_moved"
    num_moved: int = 0
