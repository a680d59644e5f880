"""KV on a socket between two stages: messages first, then chunks. Calls wait until `shut`, from this or another thread.

    message   length u32 · body (sealed by `shared.wire`)
    chunk     number u32 · length u32 · CRC-32 of the bytes u32 · checksum of these three · bytes
    progress  2³² - 1    · lot u32    · blocks of it that are here u32 · checksum of these three

Both ends know from the table which chunk comes when, so a chunk says nothing of what it is, only its number. A lot
travels piece by piece, each with all of its layers, so that sequences can go on before the whole lot is there.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from services.worker.kv_moves.kv_table import KvTable
from services.worker.memory.block_copies import NUM_SIDES
from shared.checksum import SEAL_BYTES, check_seal, seal
from shared.errors import WireError
from shared.layers import LayerRange
from shared.wire import MAX_MESSAGE_BYTES

CHUNK_BYTES: Final = 4 * 1024**2
"""A chunk is at most as large, unless a single block is larger."""
PIECE_BYTES: Final = 8 * 1024**2
"""Blocks that travel together are about so large in all layers: some milliseconds on a link, less than a step."""
_PROGRESS: Final = 2**32 - 1
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
    is_last: bool
    """Of its piece."""


@dataclass(frozen=True, slots=True)
class KvProgress:
    """What a stage says to the leader."""

    lot: int
    count: int
    """First blocks of the lot that are complete there."""


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
    if layers is None:
        return
    num_layers = table.num_layers
    step = min(max(PIECE_BYTES // (NUM_SIDES * num_layers * block_bytes), 1), max(CHUNK_BYTES // block_bytes, 1))
    for index, lot in enumerate(table.lots):
        if source not in lot.sources or target not in lot.targets:
            continue
        for first in range(0, len(lot.ids), step):
            end = min(first + step, len(lot.ids))
            for layer in layers:
                for side in range(NUM_SIDES):
                    is_last = layer == layers.end - 1 and side == NUM_SIDES - 1
                    yield KvChunk(index, layer, side, first, end, is_last)


class KvSocket:
    """See the module. One thread receives while others send.

    Args:
        sock: connected; owned from here on.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # noqa: FBT003  the library's own signature
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._sending = threading.Lock()
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
        header = seal(_HEADER.pack(self._num_sent, len(data), zlib.crc32(data)))
        with self._sending:
            self._sock.sendall(header)
            self._sock.sendall(data)
        self._num_sent += 1

    def send_progress(self, progress: KvProgress) -> None:
        """Send how far a lot has come.

        Raises:
            OSError: the connection has ended.
        """
        with self._sending:
            self._sock.sendall(seal(_HEADER.pack(_PROGRESS, progress.lot, progress.count)))

    def receive(self, into: memoryview) -> KvProgress | None:
        """Receive the next chunk, which must be as long as the view, and return None; or the progress that comes first.

        Args:
            into: empty: no chunk is due.

        Raises:
            WireError: what comes is another chunk, or damaged.
            OSError: the connection has ended.
        """
        header = check_seal(self._read(_HEADER.size + SEAL_BYTES), "the header of a chunk of KV")
        number, size, checksum = _HEADER.unpack(header)
        if number == _PROGRESS:
            return KvProgress(size, checksum)
        if (number, size) != (self._num_received, len(into)):
            raise WireError(f"chunk {number} of {size} bytes came instead of {self._num_received} of {len(into)}")
        self._fill(into)
        if zlib.crc32(into) != checksum:
            raise WireError(f"the checksum of chunk {number} of KV is wrong")
        self._num_received += 1
        return None

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
