"""The KV of a request over a socket between two live workers: frames, a thread for each connection.

    target                                                  source
    ListKv, FindKv, LetGo ──────────────────────────────►   a `Departure` answers, on the event loop
    GetKv (names) ──────────────────────────────────────►   blocks are copied aside piece by piece, beside the steps
    blocks of the cache ◄──── KV_CHUNK, … ────────────────  each piece with all layers, keys and values apart

Both ends know how many chunks come, and how long they are; each has its number and a checksum (`kv_wire.py`). Nobody
but these two touches the blocks: here they are kept, and full; there they are reserved. A connection over which nothing
comes for `SILENCE_S` is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future as ThreadFuture
from typing import Annotated, Final, TypeVar

from pydantic import Field, TypeAdapter

from services.worker.contract.arrays import I32
from services.worker.contract.kept_kv import KeptKv
from services.worker.kv_moves.kv_wire import CHUNK_BYTES, PIECE_BYTES, KvSocket
from services.worker.memory.block_copies import NUM_SIDES, block_bytes, copy_blocks, scatter_block_bytes, settle
from services.worker.memory.host_kv import HostKV
from services.worker.memory.kv_cache import KVCache
from services.worker.migration.departures import Departure, Departures
from services.worker.migration.kv_link import SILENCE_S
from services.worker.migration.kv_messages import (
    MAX_LIST_BYTES,
    FindKv,
    GetKv,
    HasLeft,
    KvListed,
    LetGo,
    ListKv,
    NotHere,
    pack_names,
)
from services.worker.peers.connect import Peers
from services.worker.peers.frames import FrameKind, PeerLostError
from services.worker.peers.greeting import PeerHello, PeerRefusedError, PeerWelcome, Purpose
from services.worker.peers.threads import in_thread
from shared.errors import WireError
from shared.ids import WorkerId
from shared.process.log import get_logger
from shared.wire import decode_union, encode

_Asked = ListKv | FindKv | GetKv | LetGo
_Said = KvListed | HasLeft | NotHere
_ASKED: Final[TypeAdapter[_Asked]] = TypeAdapter(Annotated[_Asked, Field(discriminator="kind")])
_SAID: Final[TypeAdapter[_Said]] = TypeAdapter(Annotated[_Said, Field(discriminator="kind")])
_log = get_logger()
T = TypeVar("T")


class SocketKvNetwork:
    """See `KvNetwork`. Lives on the running event loop.

    Args:
        peers: this worker among the others; owned.
        cache: returns its keys and values, of all layers; they stay where they are until `disconnect` has returned.
        host: returns its memory for KV on the host; None: there is none.
    """

    def __init__(
        self, peers: Peers, cache: Callable[[], KVCache], host: Callable[[], HostKV | None] = lambda: None
    ) -> None:
        self._peers = peers
        self._cache = cache
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._departures: Departures | None = None
        self._served: set[_Served] = set()
        self._links: set[SocketKvLink] = set()

    @property
    def address(self) -> str:
        """Where others connect."""
        return self._peers.address

    def serve(self, departures: Departures) -> None:
        """See `KvNetwork`."""
        self._departures = departures
        self._peers.expect((Purpose.FETCH,), 0, self._take)

    async def connect(self, worker_id: WorkerId, address: str, silence_s: float = SILENCE_S) -> SocketKvLink:
        """See `KvNetwork`."""
        try:
            async with asyncio.timeout(silence_s):
                sock, _ = await self._peers.dial(worker_id, address, Purpose.FETCH)
        except TimeoutError as error:
            raise PeerLostError(f"{worker_id} does not greet within {silence_s:g} s") from error
        link = SocketKvLink(KvSocket(sock, silence_s=silence_s), self._cache(), self._links.discard)
        self._links.add(link)
        return link

    async def disconnect(self) -> None:
        """See `KvNetwork`."""
        served, links = list(self._served), list(self._links)
        for each in served:
            each.wire.shut()
        for link in links:
            await link.close()
        for each in served:
            await each.ended

    async def close(self) -> None:
        """See `KvNetwork`."""
        self._peers.forget(self._take)
        await self.disconnect()
        await self._peers.close()

    def _take(self, hello: PeerHello, sock: socket.socket) -> None:
        """Let a worker fetch one request."""
        assert self._departures is not None, "it serves"
        wire = KvSocket(sock, silence_s=SILENCE_S)
        departure = self._departures.open(hello.worker_id, wire.shut)
        if departure is None:
            raise PeerRefusedError("too many are fetched from here")
        served = _Served(wire, departure, self._cache(), self._host(), self._loop)
        self._served.add(served)
        served.ended.add_done_callback(lambda _: self._served.discard(served))
        served.start()


class SocketKvLink:
    """The target's end; see `KvLink`.

    Args:
        wire: welcomed; owned.
        cache: of this worker.
        on_close: called when it is closed.
    """

    def __init__(self, wire: KvSocket, cache: KVCache, on_close: Callable[[SocketKvLink], None]) -> None:
        self._wire = wire
        self._cache = cache
        self._on_close = on_close
        self._busy = asyncio.Lock()
        self._buffer = memoryview(b"")

    async def ask(self, message: ListKv | FindKv | LetGo) -> _Said:
        """See `KvLink`."""
        async with self._busy:
            return await in_thread(lambda: self._ask(message), "KV of a request", interrupt=self._wire.shut)

    async def get(self, coming: KeptKv) -> int:
        """See `KvLink`."""
        async with self._busy:
            return await in_thread(lambda: self._get(coming), "KV of a request", interrupt=self._wire.shut)

    async def close(self) -> None:
        """See `KvLink`."""
        self._wire.shut()
        async with self._busy:
            self._wire.close()
        self._on_close(self)

    def _ask(self, message: ListKv | FindKv | LetGo) -> _Said:
        self._wire.send(FrameKind.MIGRATION_ASK, encode(message, MAX_LIST_BYTES))
        frame = self._wire.receive(FrameKind.MIGRATION_ANSWER, max_bytes=MAX_LIST_BYTES)
        return decode_union(bytes(frame.payload), _SAID, MAX_LIST_BYTES)

    def _get(self, coming: KeptKv) -> int:
        self._wire.send(FrameKind.MIGRATION_ASK, encode(GetKv(names=pack_names(coming.names)), MAX_LIST_BYTES))
        num_bytes, size = 0, block_bytes(self._cache)
        for ids, layer, side in _chunks(coming.ids, self._cache):
            if len(self._buffer) < len(ids) * size:
                self._buffer = memoryview(bytearray(len(ids) * size))
            data = self._buffer[: len(ids) * size]
            if self._wire.receive_chunk(data) is not None:
                raise WireError("progress where a chunk was due")
            scatter_block_bytes(self._cache, layer, side, ids, data)
            num_bytes += len(data)
        settle(self._cache)
        return num_bytes


class _Served:
    """The source's end of one connection, and its thread."""

    def __init__(
        self,
        wire: KvSocket,
        departure: Departure,
        cache: KVCache,
        host: HostKV | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.wire = wire
        self.ended: asyncio.Future[None] = loop.create_future()
        """Nothing is read any more."""
        self._departure = departure
        self._cache = cache
        self._host = host
        self._loop = loop
        self._thread = threading.Thread(target=self._work, name="KV for another worker", daemon=True)

    def start(self) -> None:
        """Welcome it, and answer."""
        self._thread.start()

    def _work(self) -> None:
        try:
            capacity = PeerWelcome(num_blocks=self._cache.num_blocks, block_size=self._cache.block_size)
            self.wire.send(FrameKind.GREETING, encode(capacity))
            while True:
                frame = self.wire.receive(FrameKind.MIGRATION_ASK, max_bytes=MAX_LIST_BYTES)
                self._answer(decode_union(bytes(frame.payload), _ASKED, MAX_LIST_BYTES))
        except PeerLostError:
            pass  # it has all that it wants, or is gone
        except (WireError, FutureCancelledError) as error:
            _log.warning("kv_not_fetched", reason=str(error))
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear of it
                self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._thread.join()  # it has nothing left to do but end
        self._departure.close()
        self.wire.close()
        self.ended.set_result(None)

    def _answer(self, asked: _Asked) -> None:
        if isinstance(asked, GetKv):
            ids = self._on_loop(lambda: self._departure.ids_of(asked))
            for piece, layer, side, data in _copied(ids, self._cache, self._host):
                self.wire.send_chunk(data)
                if (layer, side) == (self._cache.layers[-1], NUM_SIDES - 1) and len(piece):
                    self._loop.call_soon_threadsafe(self._departure.renew)
            return
        answering = asyncio.run_coroutine_threadsafe(self._departure.answer(asked), self._loop)
        self.wire.send(FrameKind.MIGRATION_ANSWER, encode(answering.result(), MAX_LIST_BYTES))

    def _on_loop(self, look: Callable[[], T]) -> T:
        """Return what something on the loop returns, or raise what it raises."""
        found: ThreadFuture[T] = ThreadFuture()

        def run() -> None:
            try:
                found.set_result(look())
            except WireError as error:
                found.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return found.result()


def _pieces(ids: I32, cache: KVCache) -> Iterator[I32]:
    size = block_bytes(cache)
    step = max(min(PIECE_BYTES // (NUM_SIDES * len(cache.layers) * size), CHUNK_BYTES // size), 1)
    for first in range(0, len(ids), step):
        yield ids[first : first + step]


def _chunks(ids: I32, cache: KVCache) -> Iterator[tuple[I32, int, int]]:
    """Yield blocks, layer and side of each chunk, in the order in which they travel."""
    for piece in _pieces(ids, cache):
        for layer in cache.layers:
            for side in range(NUM_SIDES):
                yield piece, layer, side


def _copied(ids: I32, cache: KVCache, host: HostKV | None) -> Iterator[tuple[I32, int, int, memoryview]]:
    """Yield the same, and what the blocks hold."""
    for piece in _pieces(ids, cache):
        copies = copy_blocks(cache, piece, host)
        for layer in cache.layers:
            for side in range(NUM_SIDES):
                yield piece, layer, side, copies.bytes_of(layer, side, 0, len(piece))
