"""Server-sent events, written straight to the transport: no queue, no task and no wake-up per token.

The transport buffers what the client does not read; a sweep (once a second) sends keep-alive comments to silent streams
and cuts a client that has left a full buffer unread for too long. Only that client notices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web
from aiohttp.http import HttpVersion11

from shared.log import get_logger

_log = get_logger()

SWEEP_PERIOD_S = 1.0
FULL_BUFFER_BYTES = 64 * 1024
"""Unsent bytes from which a client counts as not reading."""
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
KEEP_ALIVE = b": keep-alive\n\n"


class EventStream:
    """One client's stream. Made by `EventStreams.open`."""

    __slots__ = ("_is_chunked", "_response", "_transport", "full_since_s", "last_write_s", "was_cut")

    def __init__(self, response: web.StreamResponse, transport: asyncio.Transport, *, is_chunked: bool) -> None:
        self._response = response
        self._transport = transport
        self._is_chunked = is_chunked
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

    async def open(self, request: web.BaseRequest, headers: dict[str, str]) -> EventStream:
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
                    stream.write(KEEP_ALIVE, now_s)
            elif stream.full_since_s is None:
                stream.full_since_s = now_s
            elif now_s - stream.full_since_s >= self._write_limit_s:
                self.num_cut += 1
                _log.warning("slow_reader_cut", unsent_bytes=stream.num_unsent_bytes)
                stream.cut()
                self.close(stream)
