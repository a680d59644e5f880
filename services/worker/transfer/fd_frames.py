"""What stands behind the headers of a link between two ends on one machine. Pure; the headers are `frames`'.

    0           4      8
    │ num_bytes │ CRC  │ body …

    PLACES   page u32 · offset u32 · length u32, for each piece of the share, in order
    LEND     page_bytes u64 · offset u64 · num_pages u32 · page u32        (beside it, a descriptor)
    REVOKE   page u32, for each page

The header's `length` and `checksum` of PLACES are those of the bytes that lie there, not of the list. Little-endian.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from services.worker.memory.ranges import PageId
from services.worker.transfer.frames import FrameError
from services.worker.transfer.link import MAX_FRAME_BYTES, Buffer

MIN_PLACE_BYTES: Final = 512
"""A share goes by places only if they have so many bytes on average: to list smaller ones costs more than to copy."""
MAX_REVOKED: Final = 4096
"""Most pages in one frame."""
PREFIX: Final = struct.Struct("<II")
_LOAN: Final = struct.Struct("<QQII")
_U32: Final = np.dtype("<u4")
_PLACE_BYTES: Final = 3 * _U32.itemsize
MAX_BODY_BYTES: Final = _PLACE_BYTES * (MAX_FRAME_BYTES // MIN_PLACE_BYTES)


class Place(NamedTuple):
    """Consecutive bytes within a page."""

    page: PageId
    """As the page's owner counts."""
    offset: int
    length: int


class Loan(NamedTuple):
    """A page that the peer may read from now on."""

    page_bytes: int
    offset: int
    """Where the page begins in what the descriptor stands for."""
    num_pages: int
    """Of the owner's memory; all loans of a link say the same."""
    page: PageId


def encode_places(places: Sequence[Place]) -> bytes:
    """Return what stands behind a header of PLACES."""
    return _sealed(np.array(places, dtype=_U32).tobytes())


def decode_places(body: Buffer, num_bytes: int) -> list[Place]:
    """Return the places of a share.

    Args:
        body: as `check_body` accepts it.
        num_bytes: of the share, as the header says.

    Raises:
        FrameError: they are not of as many bytes, or too small.
    """
    if not body or len(body) % _PLACE_BYTES:
        raise FrameError(f"a list of places of {len(body)} bytes")
    rows = np.frombuffer(body, dtype=_U32).reshape(-1, 3)
    if int(rows[:, 2].sum(dtype=np.uint64)) != num_bytes or len(rows) * MIN_PLACE_BYTES > num_bytes:
        raise FrameError(f"{len(rows)} places are not those of a share of {num_bytes} bytes")
    return [Place(PageId(page), offset, length) for page, offset, length in rows.tolist()]


def encode_loan(loan: Loan) -> bytes:
    """Return what stands behind a header of LEND."""
    return _sealed(_LOAN.pack(*loan))


def decode_loan(body: Buffer) -> Loan:
    """Return what a frame of LEND says.

    Raises:
        FrameError: it says nothing that makes sense.
    """
    if len(body) != _LOAN.size:
        raise FrameError(f"a loan of {len(body)} bytes")
    page_bytes, offset, num_pages, page = _LOAN.unpack(body)
    if not 0 < page_bytes < 2**32 or page >= num_pages:
        raise FrameError(f"page {page} of {num_pages}, of {page_bytes} bytes each")
    return Loan(page_bytes, offset, num_pages, PageId(page))


def encode_pages(pages: Iterable[PageId]) -> bytes:
    """Return what stands behind a header of REVOKE; at most `MAX_REVOKED` pages."""
    return _sealed(np.array(list(pages), dtype=_U32).tobytes())


def decode_pages(body: Buffer) -> list[PageId]:
    """Return the pages that a frame of REVOKE names.

    Raises:
        FrameError: it names none.
    """
    if not 0 < len(body) <= MAX_REVOKED * _U32.itemsize or len(body) % _U32.itemsize:
        raise FrameError(f"a list of pages of {len(body)} bytes")
    return [PageId(page) for page in np.frombuffer(body, dtype=_U32).tolist()]


def body_bytes(prefix: Buffer) -> int:
    """Return how many bytes follow.

    Raises:
        FrameError: more than any body has.
    """
    num_bytes: int = PREFIX.unpack(prefix)[0]
    if num_bytes > MAX_BODY_BYTES:
        raise FrameError(f"a list of {num_bytes} bytes behind a header")
    return num_bytes


def check_body(prefix: Buffer, body: Buffer) -> None:
    """Return if the body is what was sent.

    Raises:
        FrameError: it is not.
    """
    if PREFIX.unpack(prefix) != (len(body), zlib.crc32(body)):
        raise FrameError("a list behind a header arrived damaged")


def _sealed(body: bytes) -> bytes:
    return PREFIX.pack(len(body), zlib.crc32(body)) + body
