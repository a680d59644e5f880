"""What happened, for people: JSON on `sluice.<cluster>.event.<service>.<id>`.

`nats sub 'sluice.default.event.>'` reads them like a log.
"""

from __future__ import annotations

from typing import Literal

from shared.messages.base import ControlMessage, Reason


class Event(ControlMessage):
    """One thing that an operator wants to read. Nothing depends on its arrival."""

    kind: Literal["event"] = "event"
    name: str
    """What happened, for example `worker_dead`; a fixed set per service."""
    service: str
    """Who says so: `monitor`, `planner`, `worker`."""
    instance_id: str
    """Which process of that service."""
    about: str = ""
    """Id of what it happened to, for example a worker id; empty when it is the service itself."""
    reason: Reason
    """Why, in words, with the figures that led to it."""
