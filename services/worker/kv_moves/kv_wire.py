"""KV between two stages: an offer and a table first (`kv_messages.py`), then chunks; frames with checksums.

    KV_CHUNK      number, 0                          the bytes of consecutive blocks
    KV_PROGRESS   lot, blocks of it that are here    nothing

Both ends know from the table which chunk comes when, so a chunk says nothing of what it is, only its number. A lot
travels piece by piece, each with all of its layers, so that sequences can go on before the whole lot is there.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from services.worker.kv_moves.kv_table import KvTable
from services.worker.memory.block_copies import NUM_SIDES
from services.worker.peers.frames import FrameKind, FrameSocket
from shared.errors import WireError
from shared.layers import LayerRange

CHUNK_BYTES: Final = 4 * 1024**2
"""A chunk is at most as large, unless a single block is larger."""
PIECE_BYTES: Final = 8 * 1024**2
"""Blocks that travel together are about so large in all layers: some milliseconds on a link, less than a step."""


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


class KvSocket(FrameSocket):
    """See the module.

    Args:
        sock: connected; owned from here on.
        silence_s: see `FrameSocket`.
    """

    def __init__(self, sock: socket.socket, *, silence_s: float | None = None) -> None:
        super().__init__(sock, is_checked=True, silence_s=silence_s)
        self._num_sent = 0
        self._num_received = 0

    def send_chunk(self, data: memoryview) -> None:
        """Send a chunk; raises `PeerLostError`."""
        self.send(FrameKind.KV_CHUNK, data, words=(self._num_sent, 0))
        self._num_sent += 1

    def send_progress(self, progress: KvProgress) -> None:
        """Send how far a lot has come; raises `PeerLostError`."""
        self.send(FrameKind.KV_PROGRESS, words=(progress.lot, progress.count))

    def receive_chunk(self, into: memoryview) -> KvProgress | None:
        """Receive the next chunk, which must be as long as the view, and return None; or the progress that comes first.

        Args:
            into: empty: no chunk is due.

        Raises:
            WireError: what comes is another chunk, or damaged.
            PeerLostError: the connection has ended.
        """
        head = self.receive_head(FrameKind.KV_CHUNK, FrameKind.KV_PROGRESS, max_bytes=len(into))
        if head.kind is FrameKind.KV_PROGRESS:
            return KvProgress(*head.words)
        if (head.words[0], head.num_bytes) != (self._num_received, len(into)):
            due = f"{self._num_received} of {len(into)}"
            raise WireError(f"chunk {head.words[0]} of {head.num_bytes} bytes came instead of {due}")
        self.receive_payload(head, into)
        self._num_received += 1
        return None
