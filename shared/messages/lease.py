"""The lease under which a worker runs the sequences of one dispatcher process; renewed by request-reply.

A worker that hears nothing for the lease's length stops generating these sequences but keeps them and their tokens:
either the dispatcher comes back and renews, or it is gone, or it has given them to another worker meanwhile.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.ids import DispatcherId, Incarnation, RequestId
from shared.messages.base import ControlMessage

MAX_DROPS = 1024
"""Sequences that one renewal gives up at most; more follow with the next one."""

_Count = Annotated[int, Field(ge=0)]


class Renew(ControlMessage):
    """The dispatcher is there and wants its sequences, except those that it names."""

    kind: Literal["renew"] = "renew"
    dispatcher_id: DispatcherId
    incarnation: Incarnation = Incarnation(0)
    """Of the dispatcher's process: another process of the same name has no claim to the sequences."""
    drop: Annotated[tuple[tuple[RequestId, int], ...], Field(max_length=MAX_DROPS)] = ()
    """(request, attempt) that are no longer wanted here: they go on elsewhere, or their reader has gone. Repeated until
    a renewal is answered."""


class Renewed(ControlMessage):
    """The worker's answer."""

    kind: Literal["renewed"] = "renewed"
    incarnation: Incarnation
    """Of the worker's process; another one than before has none of the sequences."""
    counter: _Count
    """Number of the next token message to this dispatcher: of those below, all have been sent."""
    num_sequences: _Count
    """Sequences of this dispatcher that are here."""
    step_age_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds since the step that is running was begun; 0 if none is."""
