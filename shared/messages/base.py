"""What every control message has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

PROTOCOL_VERSION = 2
"""Major version of the control protocol; a message of another major version is refused."""


class MessagePart(BaseModel):
    """A frozen part of a control message. Unknown fields are ignored, as in the message."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class ControlMessage(BaseModel):
    """A frozen control message.

    Unknown fields are ignored, so that a newer minor version may add some; `version` is checked by `shared.wire`.
    Times are durations in seconds: an instant means nothing in another process.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    version: int = PROTOCOL_VERSION
    """Major version of the sender's protocol."""
