"""What every control message has in common."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

PROTOCOL_VERSION = 3
"""Major version of the control protocol; a message of another major version is refused."""
MAX_EPOCH: Final = 2**63 - 1
"""Largest number of a planner's epoch that a message carries. By steps of `MAX_EPOCH_STEP` it takes 2^43 orders to
reach it: a thousand a second for 278 years."""
MAX_EPOCH_STEP: Final = 2**20
"""Nobody takes an epoch that is further above the newest one that it knows."""
Epoch = Annotated[int, Field(ge=1, le=MAX_EPOCH)]
MAX_REASON_CHARS: Final = 4096
"""Of what a message says in words; of a longer text the end is missing, and how much that is stands in its place."""
_REMARK_CHARS: Final = 40


def cut_reason(text: str) -> str:
    """Return the text, or as much of it as `MAX_REASON_CHARS` hold, with a remark."""
    if len(text) <= MAX_REASON_CHARS:
        return text
    kept = MAX_REASON_CHARS - _REMARK_CHARS
    return f"{text[:kept]}… ({len(text) - kept} more characters)"


Reason = Annotated[str, AfterValidator(cut_reason)]
"""Why, in words, however many are concerned: `MAX_REASON_CHARS` of them."""


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
