"""Live migration: a worker fetches a request that another one runs, with its KV. Request-reply, msgpack.

A planner that wants one to leave asks its worker first which could (`ListRunning`). A worker that all are to leave is
closing meanwhile (`Close`): who is placed there is refused, with the name of another worker, unless nobody else has
room.

    dispatcher                     target                                   source, which runs it
       ├── Fetch ───────────────────►├── connects, asks for its KV ───────────►│ goes on meanwhile
       │                             │◄──────────────── full blocks, by name ──┤
       │                             ├── has all but the newest ──────────────►│ no step holds it any more
       │◄───────────────── RELEASED, toward the target ────────────────────────┤
       │◄────────────────── Fetched ─┤
       ├── Submit, the next attempt ►│ finds its KV, and goes on

Who asks names the attempt, so a late message moves nothing. The target answers when it is over, one way or the other;
what it has of the KV when it fails stays with it as cached prefix. Source: Llumnix (OSDI'24, section 4.2: live
migration in rounds). Deviation: the target pulls, so that who has to have room decides, and blocks go by name.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import Field

from shared.api_keys import Tier
from shared.ids import RequestId, WorkerId
from shared.messages.base import ControlMessage, MessagePart

FETCH_LIMIT_S: Final = 40.0
"""Longest time in which a `Fetch` is answered."""


MAX_RUNNING, MAX_LISTED = 64, 1024
"""Requests of one list, and of one that is to be of all."""


class FetchReason(StrEnum):
    """Why a request is to go elsewhere."""

    DRAIN = "drain"
    """Its worker is about to stop."""
    BALANCE = "balance"
    """Another one has more room."""
    PACK = "pack"
    """Fewer workers would do, or its own is about to run short of KV memory."""
    PREFIX = "prefix"
    """It has just come, and another worker has KV of its prompt: nobody is asked to fetch for this reason."""
    RECOVERY = "recovery"
    """Its dispatcher has given up its worker, which may live: cut off from the broker, or with a step that hangs. It is
    asked for the KV alone, since whatever it goes on with is nobody's."""


class Fetch(ControlMessage):
    """Fetch this request."""

    kind: Literal["fetch"] = "fetch"
    request_id: RequestId
    attempt: Annotated[int, Field(ge=1, le=65_535)]
    """That runs at the source."""
    source: WorkerId
    source_address: Annotated[str, Field(max_length=256)]
    """`ProcessFacts.stage_address` of the source."""
    reason: FetchReason
    as_tokens: bool = False
    """Only make room for it, and have it released: its KV is computed again."""


class ListRunning(ControlMessage):
    """Which requests could leave this worker?"""

    kind: Literal["list_running"] = "list_running"
    most_blocks: Annotated[int, Field(ge=1, le=10**9)] = 10**9
    """That one of them holds, all of its choices together."""
    limit: Annotated[int, Field(ge=1, le=MAX_LISTED)] = MAX_RUNNING


class RunningPart(MessagePart):
    """A request that decodes, with all of its choices that are there: they share their prompt's KV, and go together."""

    choices: Annotated[tuple[tuple[RequestId, int], ...], Field(min_length=1)]
    """Each by its own id and attempt."""
    tier: Tier = Tier.DEFAULT
    num_tokens: Annotated[int, Field(ge=0)]
    """Prompt and output so far, of the longest choice."""
    num_blocks: Annotated[int, Field(ge=0)]
    """KV blocks that would be free if it left."""
    num_held_blocks: Annotated[int, Field(ge=0)]
    """KV blocks that it holds, also those that others hold: what it needs where none of them is."""
    prefix: Annotated[str, Field(max_length=64)] = ""
    """Name of the last block of the longest prefix that other requests here hold too (`SharedPrefix`); empty: none."""
    num_prefix_blocks: Annotated[int, Field(ge=0)] = 0
    """Blocks of that prefix, among those it holds."""


class RunningList(ControlMessage):
    """Those that decode, best effort first, then those with the fewest tokens; none while nothing may leave."""

    kind: Literal["running_list"] = "running_list"
    requests: Annotated[tuple[RunningPart, ...], Field(max_length=MAX_LISTED)] = ()


class Close(ControlMessage):
    """Take no new requests for a while: those that run are to leave. Who has a worker closed says so again in time."""

    kind: Literal["close"] = "close"
    begins: bool = False
    """If not: it goes on, unless the worker has been opened meanwhile."""
    for_s: Annotated[float, Field(ge=0, le=600)]
    """0: it is over."""
    open_worker: WorkerId
    """One that takes requests."""
    why: Annotated[str, Field(max_length=256)] = ""
    """In words."""


class Closed(ControlMessage):
    """Answer to `Close`."""

    kind: Literal["closed"] = "closed"
    is_closing: bool
    """It takes no new requests now. If not: it is open, because that was over, or somebody found no room elsewhere."""


class FetchOutcome(StrEnum):
    """What came of it."""

    MOVED = "moved"
    """The source has released it toward this worker, which keeps its KV and room for a while; nobody asks the source to
    release what is recovered."""
    GONE = "gone"
    """The source does not run that attempt, or no longer."""
    FULL = "full"
    """The target has no room for it."""
    BUSY = "busy"
    """Others came first at the target; it may be asked again."""
    REFUSED = "refused"
    """One of both takes part in no migration now; the detail says why."""
    LOST = "lost"
    """The source, or the connection to it, was lost."""
    LATE = "late"
    """It took too long."""


class Fetched(ControlMessage):
    """The target's answer."""

    kind: Literal["fetched"] = "fetched"
    outcome: FetchOutcome
    detail: Annotated[str, Field(max_length=256)] = ""
    num_blocks: Annotated[int, Field(ge=0)] = 0
    """That came over the connection."""
