"""What the two ends of a move say to each other. Delivery may lose, double and reorder; all of it is safe to repeat.

source                                     target
MoveOffer (what there is so far)     ─►
                                     ◄─    MoveReserved (room so far) or MoveRefused
chunk 0, 1, … (KV, not a message)    ─►
                                     ◄─    MoveAck (chunk, checksum)
MoveFinal (that was all)             ─►
                                     ◄─    MoveCommitted: the target holds the KV from now on
MoveClosed (heard it)                ─►
MoveAbort at any time, from either; a target that has committed answers it with MoveCommitted
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NewType

from pydantic import Field, TypeAdapter

from services.worker.transfer.link import Buffer
from shared.ids import RequestId, WorkerId
from shared.messages.base import ControlMessage
from shared.wire import decode_union, encode

SessionId = NewType("SessionId", str)
"""One move between two workers; unique among all that were ever begun."""

MAX_BLOCKS: Final = 2**24
_U32 = Annotated[int, Field(ge=0, lt=2**32)]
_Count = Annotated[int, Field(ge=0, le=MAX_BLOCKS)]


class _MoveMessage(ControlMessage):
    session_id: Annotated[SessionId, Field(min_length=1, max_length=200)]
    """Which move."""


class MoveOffer(_MoveMessage):
    """The source wants to move KV; said again whenever there is more, and while it waits."""

    kind: Literal["move_offer"] = "move_offer"
    source_id: WorkerId
    request_id: RequestId
    """Whose KV it is."""
    epoch: Annotated[int, Field(ge=0)]
    """Of the plan that it belongs to; a target with a newer one refuses."""
    stream: _U32
    """Of the chunks on the link."""
    first_layer: _Count
    end_layer: Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
    """Half-open, numbered in the whole model."""
    chunk_blocks: Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
    """Blocks of a chunk; the last one may have fewer."""
    num_blocks: _Count
    """Blocks to reserve, in sequence order."""
    is_whole: bool
    """There will be no more blocks than these."""
    by_chunk: bool
    """The target may reserve room chunk by chunk; the source gives its own blocks back as they arrive."""
    slack_s: float
    """How long the reader can do without: the least first. May be negative."""
    num_acked: _Count = 0
    """Chunks that the source knows to have arrived."""


class MoveReserved(_MoveMessage):
    """The target has room for the first blocks; none at all: wait."""

    kind: Literal["move_reserved"] = "move_reserved"
    num_blocks: _Count
    is_whole: bool
    """The target knows that there will be no more blocks than were offered."""


class MoveRefused(_MoveMessage):
    """The target does not take the move; nothing has been reserved."""

    kind: Literal["move_refused"] = "move_refused"
    reason: Annotated[str, Field(max_length=300)]


class MoveAck(_MoveMessage):
    """A chunk has arrived and is where it belongs."""

    kind: Literal["move_ack"] = "move_ack"
    chunk: _Count
    checksum: _U32
    """CRC-32 of what arrived."""


class MoveFinal(_MoveMessage):
    """Every chunk has been acknowledged and nothing will be added: commit."""

    kind: Literal["move_final"] = "move_final"
    num_blocks: _Count
    """Of the whole move; what was reserved beyond is not needed."""


class MoveCommitted(_MoveMessage):
    """The target holds the KV."""

    kind: Literal["move_committed"] = "move_committed"


class MoveClosed(_MoveMessage):
    """The source knows that the target has committed; the target may forget the move."""

    kind: Literal["move_closed"] = "move_closed"


class MoveAbort(_MoveMessage):
    """The move is off, unless the target has committed before it heard of it."""

    kind: Literal["move_abort"] = "move_abort"
    by_source: bool
    """Who says so."""
    reason: Annotated[str, Field(max_length=300)]


ToTarget = MoveOffer | MoveFinal | MoveClosed | MoveAbort
ToSource = MoveReserved | MoveRefused | MoveAck | MoveCommitted | MoveAbort
MoveMessage = MoveOffer | MoveReserved | MoveRefused | MoveAck | MoveFinal | MoveCommitted | MoveClosed | MoveAbort
_ADAPTER: Final[TypeAdapter[MoveMessage]] = TypeAdapter(Annotated[MoveMessage, Field(discriminator="kind")])


def encode_move(message: MoveMessage) -> bytes:
    """Return the message as bytes for the wire."""
    return encode(message)


def decode_move(data: Buffer) -> MoveMessage:
    """Return the message that the bytes hold.

    Raises:
        WireError: they hold anything else.
    """
    return decode_union(bytes(data), _ADAPTER)
