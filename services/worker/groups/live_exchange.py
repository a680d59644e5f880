"""One live stage's part in an exchange of KV: agree on what moves, keep it aside, move it when the layers are there.

    stages                     the leader              stages
    agree   KvOffer ─────────► decides ── KvTable ───► every stage: which of its blocks go where
    read    KV ──► BlockCopies, before its layers and blocks change
    move    each to each at the same time, a thread for each direction:   copies ──chunks──► socket ──► KV

Whatever goes wrong ends all of this stage's connections, so that the others hear of it; nobody waits for KV that does
not come. Then the stage has blocks that hold anything, and `is_complete` is false: the caller goes on without KV.

Source: KunServe v2, section 4.2. Deviation: KV goes through host memory of a limited size, before the group's first
step and not beside it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from services.worker.engine.types import NOTHING_KEPT, KeptKv
from services.worker.groups.kv_messages import pack_offer, pack_table, unpack_offer, unpack_table
from services.worker.groups.kv_table import KvOffer, KvTable, check_table
from services.worker.groups.kv_wire import KvSocket, chunks_between
from services.worker.groups.threads import in_thread
from services.worker.memory.block_copies import BlockCopies, copy_blocks, settle, write_block_bytes
from services.worker.memory.kv_cache import KVCache
from shared.layers import LayerRange
from shared.log import get_logger

Decide = Callable[[Sequence[KvOffer]], KvTable]
_log = get_logger()


class LiveExchange:
    """See the module. `agree`, `read` and `move` are called in this order, each once, none at the same time.

    Args:
        stage: this one; 0 leads.
        socks: connections by stage, to all others; owned from now on.
        wanted: by stage: layers after the change.
        block_bytes: of a block's keys in one layer.
        limit_s: after so many seconds `agree`, and again `move`, is given up.
    """

    def __init__(
        self,
        stage: int,
        socks: Mapping[int, socket.socket],
        wanted: Sequence[LayerRange],
        *,
        block_bytes: int,
        limit_s: float,
    ) -> None:
        self._stage = stage
        self._wanted = tuple(wanted)
        self._block_bytes = block_bytes
        self._limit_s = limit_s
        self._table: KvTable | None = None
        self._copies: dict[int, BlockCopies] = {}
        """By lot."""
        self._has_moved = False
        self.failure: str | None = None
        """Why KV does not move, once that is so."""
        self._sockets = {peer: KvSocket(socks[peer]) for peer in sorted(socks)}

    @property
    def is_complete(self) -> bool:
        """All KV that was to come here is here."""
        return self._has_moved

    @property
    def kept(self) -> KeptKv:
        """What the blocks here hold; nothing unless it is complete."""
        return self._table.kept_at(self._stage) if self._table is not None and self.is_complete else NOTHING_KEPT

    async def agree(self, offer: KvOffer, num_blocks: int, decide: Decide) -> None:
        """Learn what moves.

        Args:
            offer: of this stage.
            num_blocks: that it has before the change.
            decide: makes the leader's table of all offers; the others do not call it.
        """

        def work() -> None:
            table = self._decide(offer, decide) if self._stage == 0 else self._ask(offer)
            check_table(table, self._stage, offer, num_blocks, self._wanted)
            self._table = table

        await self._attempt(work)

    def read(self, cache: KVCache) -> None:
        """Keep aside what goes from here. Blocks; afterwards the cache may change.

        Args:
            cache: of the layers and blocks before the change.
        """
        if self._table is None or self.failure is not None:
            return
        try:
            for index, lot in enumerate(self._table.lots):
                if self._stage in lot.sources:
                    self._copies[index] = copy_blocks(cache, lot.ids)
        except Exception as error:  # no memory, whatever torch calls it: KV can be computed again
            self._copies.clear()
            self._give_up(f"{type(error).__name__}: {error}")

    async def move(self, cache: KVCache) -> None:
        """Give the others what is theirs, and write what is this stage's. All connections are closed then.

        Args:
            cache: of the layers and blocks after the change.
        """

        def work() -> None:
            self._move(cache)
            self._has_moved = True

        began_s = time.monotonic()
        await self._attempt(work)
        if self.kept.names:
            took_s = round(time.monotonic() - began_s, 4)
            _log.info("kv_exchanged", stage=self._stage, num_blocks=len(self.kept), took_s=took_s)
        self.close()

    def close(self) -> None:
        """Give back connections and memory; nothing is under way. Idempotent."""
        self._copies.clear()
        for sock in self._sockets.values():
            sock.close()

    async def _attempt(self, work: Callable[[], None]) -> None:
        """Do a part of the exchange in a thread, unless an earlier one has failed."""
        if self.failure is not None:
            return
        said = f"it took longer than {self._limit_s:g} s"
        timer = asyncio.get_running_loop().call_later(self._limit_s, self._give_up, said)
        try:
            await in_thread(work, "KV exchange", interrupt=self._shut)
        except Exception as error:  # whatever network, peers and torch come up with: the group goes on without KV
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            timer.cancel()

    def _give_up(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            _log.warning("kv_not_exchanged", stage=self._stage, reason=reason)
        self._shut()

    def _shut(self) -> None:
        for sock in self._sockets.values():
            sock.shut()

    def _decide(self, own: KvOffer, decide: Decide) -> KvTable:
        offers = [own, *(unpack_offer(self._sockets[peer].receive_message()) for peer in sorted(self._sockets))]
        table = decide(offers)
        packed = pack_table(table)
        for sock in self._sockets.values():
            sock.send_message(packed)
        return table

    def _ask(self, own: KvOffer) -> KvTable:
        leader = self._sockets[0]
        leader.send_message(pack_offer(own))
        return unpack_table(leader.receive_message())

    def _move(self, cache: KVCache) -> None:
        table, errors = self._table, list[Exception]()
        assert table is not None, "nothing was agreed upon"

        def attempt(part: Callable[[], None]) -> None:
            try:
                part()
            except Exception as error:  # raised below, when nothing is under way any more
                errors.append(error)
                self._shut()

        parts: list[Callable[[], None]] = []
        for peer, sock in self._sockets.items():
            parts += [partial(self._send, table, peer, sock), partial(self._receive, table, peer, sock, cache)]
        threads = [threading.Thread(target=attempt, args=(part,), name="KV of a peer", daemon=True) for part in parts]
        for thread in threads:
            thread.start()
        attempt(lambda: self._write_own(table, cache))
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        settle(cache)

    def _send(self, table: KvTable, peer: int, sock: KvSocket) -> None:
        for chunk in chunks_between(table, self._stage, peer, self._wanted[peer], self._block_bytes):
            sock.send_chunk(self._copies[chunk.lot].bytes_of(chunk.layer, chunk.side, chunk.first, chunk.end))

    def _receive(self, table: KvTable, peer: int, sock: KvSocket, cache: KVCache) -> None:
        buffer = memoryview(b"")
        for chunk in chunks_between(table, peer, self._stage, self._wanted[self._stage], self._block_bytes):
            size = (chunk.end - chunk.first) * self._block_bytes
            if len(buffer) < size:
                buffer = memoryview(bytearray(size))
            sock.receive_chunk(buffer[:size])
            first = table.lots[chunk.lot].first + chunk.first
            write_block_bytes(cache, chunk.layer, chunk.side, first, buffer[:size])

    def _write_own(self, table: KvTable, cache: KVCache) -> None:
        for chunk in chunks_between(table, self._stage, self._stage, self._wanted[self._stage], self._block_bytes):
            data = self._copies[chunk.lot].bytes_of(chunk.layer, chunk.side, chunk.first, chunk.end)
            write_block_bytes(cache, chunk.layer, chunk.side, table.lots[chunk.lot].first + chunk.first, data)
