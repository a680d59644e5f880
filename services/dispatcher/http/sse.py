"""Server-sent events, written straight to the transport: no queue, no task and no wake-up per token.

The transport buffers what the client does not read; a sweep (once a second) sends keep-alive comments to silent streams
and cuts a client that does not read (`unsent`); one for which too much waits is cut at once. Only that client notices.
An answer that is sent whole waits for its reader instead: it is made piece by piece, as the reader takes it.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import termios
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Final, Protocol

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion11

from services.dispatcher.http.unsent import ReaderLimits, Reading
from shared.process.log import get_logger

_log = get_logger()

SWEEP_PERIOD_S = 1.0
SEND_BUFFER_BYTES = 128 * 1024
"""Asked of the kernel for a stream's socket: left to itself it hides some 2.8 MB that nobody has read."""
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_LINE = b": keep-alive\n"
"""Where events have ids: some SDKs take a blank line after a comment for an event once they have seen an id."""
PIECE_BYTES: Final = 64 * 1024
"""Of a whole answer, written at a time."""
RESET: Final = struct.pack("ii", 1, 0)
FINISH: Final = struct.pack("ii", 0, 0)


class EventWriter(Protocol):
    """Takes the events of an answer."""

    def write(self, data: bytes, now_s: float) -> None:
        """Send one or more whole events now, as server-sent events have them."""

    async def drain(self) -> None:
        """Return when others have had their turn, and the client has taken most of what it was sent."""


class Stream(EventWriter, Protocol):
    """A streamed answer on its way. Whoever opened it must close it."""

    @property
    def response(self) -> web.StreamResponse | None:
        """What an HTTP handler returns; None if the answer does not go over HTTP."""

    @property
    def was_cut(self) -> bool:
        """Whether the connection was broken because its client did not read."""

    async def end(self) -> None:
        """Finish the answer in an orderly way."""

    def close(self) -> None:
        """Forget the answer, finished or not; idempotent."""


class Open(Protocol):
    """Begins a streamed answer."""

    async def __call__(self, headers: Mapping[str, str], *, has_ids: bool) -> Stream:
        """Begin the answer.

        Args:
            headers: what is said of it before the first event.
            has_ids: events say how far the answer has come.

        Raises:
            ConnectionError: the client is gone.
        """


class Outgoing:
    """What is being sent over one connection, and how its reader takes it.

    Args:
        transport: of the connection.
        now_s: the event loop's clock.
    """

    __slots__ = ("_reading", "_transport", "num_written", "was_cut")

    def __init__(self, transport: asyncio.Transport, now_s: float) -> None:
        self._transport = transport
        self._reading = Reading(now_s)
        self.num_written = 0
        self.was_cut = False

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that the client has not taken yet, but for those that the kernels hold."""
        return int(self._transport.get_write_buffer_size())

    def send(self, data: bytes) -> None:
        """Write to the connection now."""
        self.num_written += len(data)
        self._transport.write(data)

    def is_stalled(self, now_s: float, stall_s: float) -> bool:
        """Return whether the reader has taken nothing for so long; to be asked again and again."""
        num_unsent = self.num_unsent_bytes
        num_taken = self.num_written - num_unsent - (self._num_in_kernel() if num_unsent else 0)
        return self._reading.is_stalled(num_taken, num_unsent, now_s, stall_s)

    def _num_in_kernel(self) -> int:
        """Return what this side's kernel holds: of a slow reader it takes the next bytes in large portions only."""
        sock = self._transport.get_extra_info("socket")
        if sock is None or self._transport.is_closing():
            return 0
        return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)

    def cut(self) -> None:
        """Break the connection; the handler is cancelled, and with it the request."""
        self.was_cut = True
        self._transport.abort()

    def set_linger(self, linger: bytes) -> None:
        """Say how the system closes the connection if this process does not: `RESET`, or `FINISH` in an orderly way.

        An answer without chunks or length (HTTP/1.0, as some proxies speak it) ends with its connection: if the process
        is killed, only a reset tells the client that the answer is not whole.
        """
        sock = self._transport.get_extra_info("socket")
        if sock is not None and not self._transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


class EventStream(Outgoing):
    """One client's stream. Made by `EventStreams.open`."""

    __slots__ = ("_is_chunked", "_max_bytes", "_response", "_streams", "_writer", "keep_alive", "last_write_s")

    def __init__(
        self,
        response: web.StreamResponse,
        writer: AbstractStreamWriter,
        transport: asyncio.Transport,
        streams: EventStreams,
        *,
        is_chunked: bool,
        has_ids: bool,
    ) -> None:
        super().__init__(transport, streams.now())
        self._response = response
        self._writer = writer
        self._streams = streams
        self._is_chunked = is_chunked
        self._max_bytes = streams.limits.max_bytes
        self.keep_alive = KEEP_ALIVE_LINE if has_ids else KEEP_ALIVE
        self.last_write_s = streams.now()
        self.set_linger(RESET)

    @property
    def response(self) -> web.StreamResponse:
        """What the handler returns."""
        return self._response

    def write(self, data: bytes, now_s: float) -> None:
        """Send one or more whole events now."""
        transport = self._transport
        if transport.is_closing():
            return  # the handler is cancelled at the same time
        self.last_write_s = now_s
        framed = b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data
        self.send(framed)
        if transport.get_write_buffer_size() > self._max_bytes:
            self._streams.cut(self)

    async def drain(self) -> None:
        """Return when others have had their turn, and the client has taken most of what it was sent."""
        await asyncio.sleep(0)
        await self._writer.drain()

    async def end(self) -> None:
        """Finish the response in an orderly way."""
        await self._response.write_eof()
        self.set_linger(FINISH)

    def close(self) -> None:
        """Forget the stream; idempotent."""
        self._streams.close(self)


class EventStreams:
    """The open streams of this process, and whole answers that are on their way.

    Args:
        keep_alive_s: silence after which a comment is sent.
        limits: of readers that do not read.
        now: the event loop's clock.
    """

    def __init__(self, keep_alive_s: float, limits: ReaderLimits, now: Callable[[], float]) -> None:
        self.limits = limits
        self.now = now
        self.num_cut = 0
        """Readers that were cut since the start."""
        self._keep_alive_s = keep_alive_s
        self._open: dict[Outgoing, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def open(self, request: web.BaseRequest, headers: Mapping[str, str], *, has_ids: bool) -> EventStream:
        """Send the headers and return the stream; see `Open`.

        Raises:
            ConnectionError: the client is gone.
        """
        response = web.StreamResponse(headers={**HEADERS, **headers})
        is_chunked = request.version >= HttpVersion11
        if not is_chunked:
            response.force_close()
        writer = await response.prepare(request)
        transport = request.transport
        if writer is None or transport is None:
            raise ConnectionResetError("the client is gone")
        writer.send_headers()
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        stream = EventStream(response, writer, transport, self, is_chunked=is_chunked, has_ids=has_ids)
        self._open[stream] = None
        return stream

    def watch(self, transport: asyncio.Transport) -> Outgoing:
        """Look after a connection over which one whole answer goes; the caller must `close` what it gets."""
        outgoing = Outgoing(transport, self.now())
        self._open[outgoing] = None
        return outgoing

    def close(self, outgoing: Outgoing) -> None:
        """Forget it; idempotent."""
        self._open.pop(outgoing, None)

    def cut(self, outgoing: Outgoing) -> None:
        """Break the connection of a reader that does not read."""
        self.num_cut += 1
        _log.warning("slow_reader_cut", unsent_bytes=outgoing.num_unsent_bytes)
        outgoing.cut()
        self.close(outgoing)

    async def sweep_forever(self) -> None:
        """Look after the streams until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            self.sweep()

    def sweep(self) -> None:
        """Send keep-alive comments, and cut clients that do not read."""
        now_s = self.now()
        for outgoing in list(self._open):
            if outgoing.is_stalled(now_s, self.limits.stall_s):
                self.cut(outgoing)
            elif isinstance(outgoing, EventStream) and now_s - outgoing.last_write_s >= self._keep_alive_s:
                outgoing.write(outgoing.keep_alive, now_s)


class WholeAnswer(web.StreamResponse):
    """An answer that is not streamed. Its pieces are made as its reader takes them, and its reader is looked after.

    Args:
        streams: looks after it.
        parts: of the JSON, in order; making one must not take long.
        headers: besides the usual ones.
    """

    def __init__(self, streams: EventStreams, parts: Iterable[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(headers={"Content-Type": "application/json", **headers})
        self._streams = streams
        self._pieces = in_pieces(parts)
        self._transport: asyncio.Transport | None = None

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Send the headers: with the length of an answer of one piece, else in chunks."""
        first = list(islice(self._pieces, 2))
        if len(first) == 1:
            self.content_length = len(first[0])
        elif request.version < HttpVersion11:
            self.force_close()  # only the end of the connection says that it is whole, also to one that is kept
        self._pieces = chain(first, self._pieces)
        self._transport = request.transport
        return await super().prepare(request)

    async def write_eof(self, data: bytes = b"") -> None:
        """Send the body; return when the connection has taken nearly all of it."""
        if self._transport is None:
            return  # the client is gone
        outgoing = self._streams.watch(self._transport)
        outgoing.set_linger(RESET)
        try:
            for piece in self._pieces:
                outgoing.num_written += len(piece)
                await self.write(piece)
                await asyncio.sleep(0)  # one that reads fast holds nobody up either
            await super().write_eof(data)
            outgoing.set_linger(FINISH)
        finally:
            self._streams.close(outgoing)


def in_pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Return the parts joined, and cut into pieces of `PIECE_BYTES`; the last one is shorter."""
    waiting = bytearray()
    for part in parts:
        waiting += part
        while len(waiting) >= PIECE_BYTES:
            yield bytes(waiting[:PIECE_BYTES])
            del waiting[:PIECE_BYTES]
    if waiting:
        yield bytes(waiting)
