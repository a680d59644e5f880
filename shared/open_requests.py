"""The requests that one dispatcher serves now, as `GET /v1/requests` says it: names, counts and times, never text."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from shared.ids import DispatcherId
from shared.messages.base import MessagePart
from shared.messages.report import WaitingRequests

_Count = Annotated[int, Field(ge=0)]


class RequestState(StrEnum):
    """How far the answer of a choice has come."""

    QUEUED = "queued"
    """No worker computes anything for it: it waits in the dispatcher, at a worker, or between two."""
    PREFILL = "prefill"
    """A worker computes its prompt, or, after it went on elsewhere, what was there before."""
    STREAMING = "streaming"
    PAUSED = "paused"
    """It has given tokens, and none for a second: it gave way, sits out steps, or steps are slow."""


class OpenRequest(MessagePart):
    """One choice of a request."""

    id: str
    """Of the answer, as its client is told; it can be cancelled by that."""
    choice: _Count = 0
    """Its index in the request."""
    tier: str
    """Name of a `shared.api_keys.Tier`."""
    tenant: str = ""
    """Whose it is; empty where no key is asked for."""
    worker_id: str = ""
    """Where it is; empty while it is nowhere."""
    state: RequestState
    age_s: Annotated[float, Field(ge=0)]
    num_prompt_tokens: _Count = 0
    num_output_tokens: _Count = 0
    num_preemptions: _Count = 0
    qoe: Annotated[float | None, Field(ge=0, le=1)] = None
    """What its reader has experienced by now; None: nobody reads as it comes."""
    slack_s: float | None = None
    """Seconds for which its reader has text; below 0: for how long the reader has waited. None like `qoe`."""


class OpenCounts(MessagePart):
    """Choices of one tier, by their state."""

    tier: str
    queued: _Count = 0
    prefill: _Count = 0
    streaming: _Count = 0
    paused: _Count = 0


class OpenRequests(MessagePart):
    """What one dispatcher serves."""

    dispatcher_id: DispatcherId
    counts: tuple[OpenCounts, ...] = ()
    """Of every tier, the most urgent first; of all choices, listed or not."""
    num_late: _Count = 0
    """Of all choices, those whose readers are out of text."""
    waiting: tuple[WaitingRequests, ...] = ()
    """For which no worker has a place, by tier; part of the queued ones."""
    num_left_out: _Count = 0
    """Choices that are not listed."""
    requests: tuple[OpenRequest, ...] = ()
    """Those whose readers have the least text; then those without a reader, the oldest first."""
