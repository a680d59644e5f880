"""What a link puts on the wire: a header of 32 bytes, and behind it the frame's share of a message. Pure.

    0       2    3     4        8        12         16      20       24         28             32
    │ magic │kind│class│ stream │ number │ sequence │ total │ length │ checksum │ header's CRC │ payload …

    total: bytes of the whole message    length: of this frame's share    checksum: CRC-32 of the message up to here

So the checksum of a message's last frame is that of the message. `sequence` counts the frames of one class in one
direction. Little-endian. A frame that is not as it should be raises, and the link that it came over breaks: behind
damage nothing can be found again.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from services.worker.transfer.link import MAX_FRAME_BYTES, Buffer, TrafficClass
from shared.errors import WireError

HEADER_BYTES: Final = 32
MAX_REASON_BYTES: Final = 256
"""Longest reason in a frame that ends the link."""
_MAGIC: Final = 0x534C
_BODY: Final = struct.Struct("<HBBIIIIII")
_SEAL: Final = struct.Struct("<I")
_U32: Final = 2**32


class FrameKind(IntEnum):
    """What a frame is for."""

    DATA = 0  # a share of a message
    CREDIT = 1  # `total` bytes of the class's window are free again
    PING = 2  # I am here
    END = 3  # I close the link; the payload says why
    # between two ends on one machine (`fd_frames`)
    PLACES = 4  # a share of a message, as DATA; behind the header stands where it lies
    LEND = 5  # a page may be read, by the descriptor that comes along
    REVOKE = 6  # pages may be read no more
    TAKEN = 7  # the frame of PLACES with this sequence was copied, in `total` microseconds


class FrameError(WireError):
    """What came over a link is not what its peer sent, or its peer does not keep the rules."""


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before a frame's payload; see the module."""

    kind: FrameKind
    traffic: TrafficClass = TrafficClass.CONTROL
    stream: int = 0
    number: int = 0
    sequence: int = 0
    total: int = 0
    length: int = 0
    checksum: int = 0


def encode_header(header: Header) -> bytes:
    """Return the 32 bytes of a header.

    Raises:
        ValueError: a field is not within what the format carries.
    """
    values = (header.stream, header.number, header.sequence, header.total, header.length, header.checksum)
    if not all(0 <= value < _U32 for value in values):
        raise ValueError(f"a header's fields are 32 bits wide: {header}")
    _check(header, MAX_FRAME_BYTES, ValueError)
    body = _BODY.pack(_MAGIC, header.kind, header.traffic, *values)
    return body + _SEAL.pack(zlib.crc32(body))


def decode_header(data: Buffer, max_frame_bytes: int = MAX_FRAME_BYTES) -> Header:
    """Return the header that the bytes hold.

    Args:
        data: exactly `HEADER_BYTES`.
        max_frame_bytes: longest payload that is accepted.

    Raises:
        FrameError: they hold anything else.
    """
    if len(data) != HEADER_BYTES:
        raise FrameError(f"a header of {len(data)} bytes")
    magic, kind, traffic, *values = _BODY.unpack_from(data)
    if magic != _MAGIC:
        raise FrameError("what came is no frame")
    if _SEAL.unpack_from(data, _BODY.size)[0] != zlib.crc32(memoryview(data)[: _BODY.size]):
        raise FrameError("a header's checksum is wrong")
    try:
        header = Header(FrameKind(kind), TrafficClass(traffic), *values)
    except ValueError:
        raise FrameError(f"a frame of kind {kind} and class {traffic}") from None
    _check(header, max_frame_bytes, FrameError)
    return header


def _check(header: Header, max_frame_bytes: int, error: type[ValueError]) -> None:
    """Raise unless the lengths fit the kind."""
    if header.kind in {FrameKind.DATA, FrameKind.PLACES}:
        if header.length > max_frame_bytes:
            raise error(f"a frame of {header.length} bytes is over the limit of {max_frame_bytes}")
        if header.length > header.total or (header.length == 0 and header.total > 0):
            raise error(f"a frame of {header.length} bytes in a message of {header.total}")
    elif header.length > (MAX_REASON_BYTES if header.kind is FrameKind.END else 0):
        raise error(f"a frame of kind {header.kind.name} with {header.length} bytes")
