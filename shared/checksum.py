"""A checksum behind every binary message: TCP's own misses one damaged segment in some ten thousand.

sealed = body · crc32(body) as u32, little-endian
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

from shared.errors import WireError

SEAL_BYTES: Final = 4
_SEAL: Final = struct.Struct("<I")


def seal(body: bytes) -> bytes:
    """Return the body with its checksum behind it."""
    return body + _SEAL.pack(zlib.crc32(body))


def check_seal(data: bytes, what: str) -> memoryview:
    """Return the body, not copied.

    Raises:
        WireError: the bytes are not those that were sent.
    """
    view = memoryview(data)
    body = view[:-SEAL_BYTES]
    if len(data) < SEAL_BYTES or _SEAL.unpack(view[-SEAL_BYTES:])[0] != zlib.crc32(body):
        raise WireError(f"{what}: the checksum is wrong")
    return body
