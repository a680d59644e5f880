"""Distinct types for look-alike identifiers; all of them are plain strings or integers on the wire."""

from __future__ import annotations

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
"""What a client asked for; unique in the cluster, given by the dispatcher."""

WorkerId = NewType("WorkerId", str)
"""A process that owns one device; also a token of a bus subject, so `[A-Za-z0-9_-]+`."""

DispatcherId = NewType("DispatcherId", str)
"""A dispatcher process; also a token of a bus subject, so `[A-Za-z0-9_-]+`."""

Incarnation = NewType("Incarnation", int)
"""One process among all that ever go by the same name: a random number below 2**48; 0 where nobody tells them apart."""

StreamId = NewType("StreamId", int)
"""A dispatcher's short handle (u32) for one running request; what token batches carry instead of the request id."""


NOBODY = Incarnation(0)
"""A process that is not told apart from others of its name."""


def new_incarnation() -> Incarnation:
    """Return a number that no other process of the same name has."""
    return Incarnation(secrets.randbits(48))
