"""Server-sent events, written straight to the transport: no queue, no task and no wake-up per token.

The transport buffers what the client does not read; a sweep (once a second) sends keep-alive comments to silent streams
and cuts a client that has left a full buffer unread for too long. Only that client notices.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from aiohttp import web
from aiohttp.http import HttpVersion11

from shared.log import get_logger

_log = get_logger()

SWEEP_PERIOD_S = 1.0
FULL_BUFFER_BYTES = 64 * 1024
"""Unsent bytes from which a client counts as not reading."""
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_LINE = b": keep-alive\n"
"""Where events have ids: some SDKs take a blank line after a comment for an event once they have seen an id."""
_ABORT: Final = struct.pack("ii", 1, 0)
_FINISH: Final = struct.pack("ii", 0, 0)


class EventWriter(Protocol):
    """Takes the events of an answer."""

    def write(self, data: bytes, now_s: float) -> None:
        """Send one or more whole events now, as server-sent events have them."""
        ...


class Outlet(Protocol):
    """Where a streamed answer goes. Opened once; whoever opened it must close it."""

    async def open(self, headers: Mapping[str, str], *, has_ids: bool) -> EventWriter:
        """Begin the answer.

        Args:
            headers: what is said of it before the first event.
            has_ids: events say how far the answer has come.

        Raises:
            ConnectionError: the client is gone.
        """
        ...

    async def end(self) -> None:
        """Finish the answer in an orderly way."""
        ...

    def close(self) -> None:
        """Forget the answer, finished or not."""
        ...


class EventStream:
    """One client's stream. Made by `EventStreams.open`."""

    __slots__ = ("_is_chunked", "_response", "_transport", "full_since_s", "keep_alive", "last_write_s", "was_cut")

    def __init__(self, response: web.StreamResponse, transport: asyncio.Transport, *, is_chunked: bool) -> None:
        self._response = response
        self._transport = transport
        self._is_chunked = is_chunked
        self.keep_alive = KEEP_ALIVE
        self.last_write_s = 0.0
        self.full_since_s: float | None = None
        """Since when the buffer has been full; None while the client reads."""
        self.was_cut = False

    @property
    def response(self) -> web.StreamResponse:
        """What the handler returns."""
        return self._response

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that the client has not taken yet."""
        return int(self._transport.get_write_buffer_size())

    def write(self, data: bytes, now_s: float) -> None:
        """Send one or more whole events now."""
        transport = self._transport
        if transport.is_closing():
            return  # the handler is cancelled at the same time
        self.last_write_s = now_s
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def cut(self) -> None:
        """Break the connection; the handler is cancelled, and with it the request."""
        self.was_cut = True
        self._transport.abort()

    async def end(self) -> None:
        """Finish the response in an orderly way."""
        await self._response.write_eof()
        self.set_linger(_FINISH)

    def set_linger(self, linger: bytes) -> None:
        """Say how the system closes the connection if this process does not: reset, or an orderly end.

        An answer without chunks (HTTP/1.0, as some proxies speak it) ends with its connection: if the process is
        killed, only a reset tells the client that the answer is not whole.
        """
        sock = self._transport.get_extra_info("socket")
        if sock is not None and not self._transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


class HttpOutlet:
    """An answer as the body of an HTTP response.

    Args:
        streams: of this process.
        request: to be answered.
    """

    def __init__(self, streams: EventStreams, request: web.BaseRequest) -> None:
        self._streams = streams
        self._request = request
        self._stream: EventStream | None = None

    @property
    def response(self) -> web.StreamResponse:
        """What the handler returns, once the stream was opened."""
        assert self._stream is not None, "the stream was opened"
        return self._stream.response

    async def open(self, headers: Mapping[str, str], *, has_ids: bool) -> EventWriter:
        """Send the headers."""
        self._stream = await self._streams.open(self._request, headers)
        if has_ids:
            self._stream.keep_alive = KEEP_ALIVE_LINE
        self._stream.set_linger(_ABORT)
        return self._stream

    async def end(self) -> None:
        """Finish the response."""
        assert self._stream is not None, "the stream was opened"
        await self._stream.end()

    def close(self) -> None:
        """Forget the stream."""
        if self._stream is not None:
            self._streams.close(self._stream)


class EventStreams:
    """The open streams of this process.

    Args:
        keep_alive_s: silence after which a comment is sent.
        write_limit_s: time that a client may leave a full buffer unread.
        now: the event loop's clock.
    """

    def __init__(self, keep_alive_s: float, write_limit_s: float, now: Callable[[], float]) -> None:
        self._keep_alive_s = keep_alive_s
        self._write_limit_s = write_limit_s
        self._now = now
        self._open: dict[EventStream, None] = {}
        self.num_cut = 0

    def __len__(self) -> int:
        return len(self._open)

    async def open(self, request: web.BaseRequest, headers: Mapping[str, str]) -> EventStream:
        """Send the headers and return the stream; the caller must `close` it.

        Raises:
            ConnectionError: the client is gone.
        """
        response = web.StreamResponse(headers={**HEADERS, **headers})
        writer = await response.prepare(request)
        transport = request.transport
        if writer is None or transport is None:
            raise ConnectionResetError("the client is gone")
        writer.send_headers()
        stream = EventStream(response, transport, is_chunked=request.version >= HttpVersion11)
        stream.last_write_s = self._now()
        self._open[stream] = None
        return stream

    def close(self, stream: EventStream) -> None:
        """Forget the stream; idempotent."""
        self._open.pop(stream, None)

    async def sweep_forever(self) -> None:
        """Look after the streams until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            self.sweep()

    def sweep(self) -> None:
        """Send keep-alive comments, and cut clients that do not read."""
        now_s = self._now()
        for stream in list(self._open):
            if stream.num_unsent_bytes < FULL_BUFFER_BYTES:
                stream.full_since_s = None
                if now_s - stream.last_write_s >= self._keep_alive_s:
                    stream.write(stream.keep_alive, now_s)
            elif stream.full_since_s is None:
                stream.full_since_s = now_s
            elif now_s - stream.full_since_s >= self._write_limit_s:
                self.num_cut += 1
                _log.warning("slow_reader_cut", unsent_bytes=stream.num_unsent_bytes)
                stream.cut()
                self.close(stream)
