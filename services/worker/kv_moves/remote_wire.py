"""Attention over keys that lie elsewhere, on a socket between two stages. Calls wait until `shut`, from any thread.

    kind u8 · lot u32 · layer u32 · length u32 · CRC-32 of the body u32 · checksum of these · body

    STEP      rows of the asking stage's step: how many, then of each its tokens, start, first and end, then the places
              in the lot of the blocks that hold positions [first, end), row by row; all int32
    ASK       in one layer: queries as the model's type has them, then states, float32, unless all of them are
              still empty; of the rows of the lot's last STEP
    ANSWER    the states with the keys of that layer in them
    FAILED    why there is no answer
    DONE      nothing more is asked

Both directions are used at the same time: each end asks and answers.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from services.worker.contract.arrays import I32
from services.worker.pipeline.link_turns import URGENT_PRIORITY, LinkTurns, set_priority
from shared.checksum import SEAL_BYTES, check_seal, seal
from shared.errors import WireError

MAX_BODY_BYTES: Final = 2**30
_HEADER: Final = struct.Struct("<BIIII")
_I4: Final = np.dtype("<i4")


class RemoteKind(IntEnum):
    """What a frame is."""

    STEP = 1
    ASK = 2
    ANSWER = 3
    FAILED = 4
    DONE = 5


_KINDS: Final = frozenset(int(kind) for kind in RemoteKind)


@dataclass(frozen=True, slots=True)
class RemoteFrame:
    """One message."""

    kind: RemoteKind
    lot: int = 0
    layer: int = 0
    body: bytes | bytearray = b""


@dataclass(frozen=True, eq=False)
class StepRows:
    """Rows of a step whose keys lie in one lot."""

    num_tokens: I32
    """[n]"""
    start: I32
    """[n]"""
    first: I32
    """[n] positions [first, end) are wanted; multiples of SPLIT_KEYS."""
    end: I32
    """[n]"""
    places: I32
    """Blocks of these positions, row by row, in the order of the lot."""


class RemoteSocket:
    """See the module. One thread receives while any others send.

    Args:
        sock: connected; owned from here on.
        turns: of this worker's connections.
    """

    def __init__(self, sock: socket.socket, turns: LinkTurns) -> None:
        sock.setblocking(True)  # noqa: FBT003  the library's own signature
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        set_priority(sock, URGENT_PRIORITY)
        self._sock = sock
        self._turns = turns
        self._sending = threading.Lock()

    def send(self, kind: RemoteKind, lot: int = 0, layer: int = 0, *parts: memoryview | bytes) -> None:
        """Send a frame whose body is made of these parts, one behind the other.

        Raises:
            OSError: the connection has ended.
        """
        checksum, size = 0, 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
            size += len(part)
        header = seal(_HEADER.pack(kind, lot, layer, size, checksum))
        with self._turns.urgent(), self._sending:
            self._sock.sendall(b"".join((header, *parts)))

    def receive(self) -> RemoteFrame:
        """Return the next frame.

        Raises:
            WireError: it is damaged, or unheard of.
            OSError: the connection has ended.
        """
        header = check_seal(bytes(self._read(_HEADER.size + SEAL_BYTES)), "the header of a remote attention")
        kind, lot, layer, size, checksum = _HEADER.unpack(header)
        if kind not in _KINDS or size > MAX_BODY_BYTES:
            raise WireError(f"a frame of kind {kind} and {size} bytes")
        body = self._read(size)
        if zlib.crc32(body) != checksum:
            raise WireError("the checksum of a remote attention is wrong")
        return RemoteFrame(RemoteKind(kind), lot, layer, body)

    def shut(self) -> None:
        """End the connection: whoever waits at either end wakes. Idempotent; from any thread."""
        with contextlib.suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back; nobody uses it any more. Idempotent."""
        self._sock.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._sock.recv_into(view)
            if not count:
                raise ConnectionResetError("the connection has ended")
            view = view[count:]
        return data


def pack_rows(rows: StepRows) -> bytes:
    """Return the body of a STEP."""
    columns = (rows.num_tokens, rows.start, rows.first, rows.end, rows.places)
    packed = b"".join(np.ascontiguousarray(column, dtype=_I4).tobytes() for column in columns)
    return struct.pack("<I", len(rows.num_tokens)) + packed


def unpack_rows(body: bytes | bytearray, block_size: int, num_blocks: int) -> StepRows:
    """Return the rows that the body of a STEP holds.

    Args:
        body: as it came.
        block_size: tokens of a block.
        num_blocks: of the lot.

    Raises:
        WireError: it holds anything else.
    """
    if len(body) < 4 or len(body) % _I4.itemsize:
        raise WireError(f"{len(body)} bytes are no rows")
    (count,) = struct.unpack_from("<I", body)
    values = np.frombuffer(body, dtype=_I4, offset=4).astype(np.int32)
    if count * 4 > values.size:
        raise WireError(f"{count} rows in {len(body)} bytes")
    num_tokens, start, first, end = values[: 4 * count].reshape(4, count)
    places = values[4 * count :]
    ok = (num_tokens >= 1) & (first >= 0) & (first < end) & (end <= start)
    num_wanted = int((end - first).sum(dtype=np.int64)) // block_size
    if not ok.all() or num_wanted != places.size:
        raise WireError("rows that cannot be")
    if places.size and not 0 <= int(places.min()) <= int(places.max()) < num_blocks:
        raise WireError(f"blocks are asked for that are not among {num_blocks}")
    return StepRows(num_tokens, start, first, end, places)
