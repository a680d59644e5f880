"""What goes over the connections of an exchange of KV, at one stage: a thread for each direction, until all has moved.

    copies aside ──chunks──► socket of each other stage        sockets and own copies ──chunks──► blocks of the cache

What has landed is told as it comes; what other stages say of themselves comes on the same connections.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from services.worker.kv_moves.kv_progress import ArrivedKv
from services.worker.kv_moves.kv_table import KvLot, KvTable
from services.worker.kv_moves.kv_wire import KvChunk, KvProgress, KvSocket, chunks_between
from services.worker.kv_moves.write_fence import WriteFence
from services.worker.memory.block_copies import BlockCopies, scatter_block_bytes, settle, write_block_bytes
from services.worker.memory.kv_cache import KVCache
from shared.layers import LayerRange


@dataclass(frozen=True, slots=True)
class Ears:
    """Who hears of an exchange while it is under way. All are called in threads of it."""

    landed: Callable[[KvProgress], None] | None
    """Blocks are complete at this stage, and can be read there; None: nobody reads before all has moved."""
    heard: Callable[[int, KvProgress], None]
    """Another stage says this of itself; raises `WireError` if it may not."""
    is_due: Callable[[int], bool]
    """A stage has yet to say something."""


class KvTraffic:
    """The chunks of one stage. `run` once.

    Args:
        stage: this one.
        socks: by stage, to all others; not owned.
        wanted: by stage: layers after the change.
        block_bytes: of a block's keys in one layer.
    """

    def __init__(
        self, stage: int, socks: Mapping[int, KvSocket], wanted: Sequence[LayerRange], block_bytes: int
    ) -> None:
        self._stage = stage
        self._socks = socks
        self._wanted = wanted
        self._block_bytes = block_bytes
        self._fence = WriteFence()
        """Around every write to blocks."""

    def run(self, table: KvTable, copies: Mapping[int, BlockCopies], cache: KVCache, ears: Ears) -> None:
        """Give the others what is theirs, and write what is this stage's. Blocks until nothing is under way.

        Args:
            table: what moves.
            copies: what goes from here, by lot.
            cache: of the layers and blocks after the change.
            ears: hear of it.

        Raises:
            Exception: whatever went wrong first; all connections were shut then.
        """
        errors, landed = list[Exception](), ArrivedKv(table, self._stage, self._wanted[self._stage])

        def attempt(part: Callable[[], None]) -> None:
            try:
                part()
            except Exception as error:  # raised below, when nothing is under way any more
                errors.append(error)
                self.shut()

        def land(source: int, lot: int, count: int) -> None:
            progress = landed.note(lot, source, count)
            if progress is not None and ears.landed is not None:
                settle(cache)
                ears.landed(progress)

        parts: list[Callable[[], None]] = []
        for peer, sock in self._socks.items():
            receive = partial(self._receive, table, peer, sock, cache, partial(land, peer), ears)
            parts += [partial(self._send, table, peer, sock, copies), receive]
        threads = [threading.Thread(target=attempt, args=(part,), name="KV of a peer", daemon=True) for part in parts]
        for thread in threads:
            thread.start()
        attempt(lambda: self._write_own(table, copies, cache, partial(land, self._stage)))
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        settle(cache)

    def shut(self) -> None:
        """Let what is under way end soon, and the other stages hear of it. Idempotent; does not wait."""
        self._fence.shut()
        for sock in self._socks.values():
            sock.shut()

    def end_writes(self) -> None:
        """Let nothing be written from now on; return when no write is under way. Idempotent."""
        self._fence.shut()
        self._fence.wait()

    def _send(self, table: KvTable, peer: int, sock: KvSocket, copies: Mapping[int, BlockCopies]) -> None:
        for chunk in chunks_between(table, self._stage, peer, self._wanted[peer], self._block_bytes):
            sock.send_chunk(copies[chunk.lot].bytes_of(chunk.layer, chunk.side, chunk.first, chunk.end))

    def _receive(
        self,
        table: KvTable,
        peer: int,
        sock: KvSocket,
        cache: KVCache,
        land: Callable[[int, int], None],
        ears: Ears,
    ) -> None:
        buffer = memoryview(b"")
        for chunk in chunks_between(table, peer, self._stage, self._wanted[self._stage], self._block_bytes):
            size = (chunk.end - chunk.first) * self._block_bytes
            if len(buffer) < size:
                buffer = memoryview(bytearray(size))
            while (progress := sock.receive_chunk(buffer[:size])) is not None:
                ears.heard(peer, progress)
            self._write(cache, table.lots[chunk.lot], chunk, buffer[:size])
            if chunk.is_last:
                land(chunk.lot, chunk.end)
        while ears.is_due(peer):
            said = sock.receive_chunk(memoryview(b""))
            if said is not None:
                ears.heard(peer, said)

    def _write_own(
        self, table: KvTable, copies: Mapping[int, BlockCopies], cache: KVCache, land: Callable[[int, int], None]
    ) -> None:
        for chunk in chunks_between(table, self._stage, self._stage, self._wanted[self._stage], self._block_bytes):
            data = copies[chunk.lot].bytes_of(chunk.layer, chunk.side, chunk.first, chunk.end)
            self._write(cache, table.lots[chunk.lot], chunk, data)
            if chunk.is_last:
                land(chunk.lot, chunk.end)

    def _write(self, cache: KVCache, lot: KvLot, chunk: KvChunk, data: memoryview) -> None:
        """Let a part of a lot hold in one layer what the bytes say."""
        with self._fence.writing():
            if lot.places is None:
                write_block_bytes(cache, chunk.layer, chunk.side, lot.first + chunk.first, data)
            else:
                scatter_block_bytes(cache, chunk.layer, chunk.side, lot.places[chunk.first : chunk.end], data)
