"""KV on a socket between two stages: messages first, then chunks. Calls wait until `shut`, from this or another thread.

    message   length u32 · body (sealed by `shared.wire`)
    chunk     number u32 · length u32 · CRC-32 of the bytes u32 · checksum of these three · bytes

Both ends know from the table which chunk comes when, so a chunk says nothing of what it is, only its number.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from services.worker.groups.kv_table import KvTable
from services.worker.memory.block_copies import NUM_SIDES
from shared.checksum import SEAL_BYTES, check_seal, seal
from shared.errors import WireError
from shared.layers import LayerRange
from shared.wire import MAX_MESSAGE_BYTES

CHUNK_BYTES: Final = 4 * 1024**2
"""A chunk is about as large, unless a single block is larger."""
_HEADER: Final = struct.Struct("<III")


@dataclass(frozen=True, slots=True)
class KvChunk:
    """Consecutive blocks of a lot, keys or values, in one layer."""

    lot: int
    """Its place in the table."""
    layer: int
    """Numbered in the whole model."""
    side: int
    """0: keys, 1: values."""
    first: int
    """In the order of the lot."""
    end: int


def chunks_between(table: KvTable, source: int, target: int, wanted: LayerRange, block_bytes: int) -> Iterator[KvChunk]:
    """Yield what one stage has for another, in the order in which it travels.

    Args:
        table: what moves.
        source: stage that sends.
        target: stage that receives.
        wanted: layers of the target after the change.
        block_bytes: of a block's keys in one layer.
    """
    layers = table.held[source].overlap(wanted)
    step = max(CHUNK_BYTES // block_bytes, 1)
    for index, lot in enumerate(table.lots):
        if layers is None or source not in lot.sources or target not in lot.targets:
            continue
        for layer in layers:
            for side in range(NUM_SIDES):
                for first in range(0, len(lot.ids), step):
                    yield KvChunk(index, layer, side, first, min(first + step, len(lot.ids)))


class KvSocket:
    """See the module. One thread sends while another receives.

    Args:
        sock: connected; owned from here on.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # noqa: FBT003  the library's own signature
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._num_sent = 0
        self._num_received = 0

    def send_message(self, body: bytes) -> None:
        """Send a message.

        Raises:
            OSError: the connection has ended.
        """
        self._sock.sendall(len(body).to_bytes(4, "little") + body)

    def receive_message(self) -> bytes:
        """Return the next message.

        Raises:
            WireError: it is longer than any message.
            OSError: the connection has ended.
        """
        size = int.from_bytes(self._read(4), "little")
        if size > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {size} bytes")
        return self._read(size)

    def send_chunk(self, data: memoryview) -> None:
        """Send a chunk.

        Raises:
            OSError: the connection has ended.
        """
        self._sock.sendall(seal(_HEADER.pack(self._num_sent, len(data), zlib.crc32(data))))
        self._sock.sendall(data)
        self._num_sent += 1

    def receive_chunk(self, into: memoryview) -> None:
        """Receive the next chunk, which must be as long as the view.

        Raises:
            WireError: what comes is another chunk, or damaged.
            OSError: the connection has ended.
        """
        header = check_seal(self._read(_HEADER.size + SEAL_BYTES), "the header of a chunk of KV")
        number, size, checksum = _HEADER.unpack(header)
        if (number, size) != (self._num_received, len(into)):
            raise WireError(f"chunk {number} of {size} bytes came instead of {self._num_received} of {len(into)}")
        self._fill(into)
        if zlib.crc32(into) != checksum:
            raise WireError(f"the checksum of chunk {number} of KV is wrong")
        self._num_received += 1

    def shut(self) -> None:
        """End the connection: whoever waits at either end wakes. Idempotent; from any thread."""
        with contextlib.suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back; nobody uses it any more. What was sent still arrives. Idempotent."""
        self._sock.close()

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._sock.recv_into(view)
            if not count:
                raise ConnectionResetError("the connection has ended")
            view = view[count:]
