"""One client's connection, on top of aiohttp's: its head under limits of size and time, its errors in our format.

    made ──► head due in head_limit_s ──► request ──► idle for idle_limit_s ──► first byte of the next head ──► …
              │ late: 408, or closed if nothing came   │ closed
              │ too large: 431                         ▼
              ▼ not HTTP: 400

A head is the request line and the headers. aiohttp alone has no limit for the time of a head, and for its size only one
per line. No answer of aiohttp's own, which would be plain text, reaches a client.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from services.dispatcher.http.doorway import Doorway, address_of
from services.dispatcher.http.errors import ApiError, error_bytes, error_response, failure_error
from services.dispatcher.session.request import FailureCode
from shared.process.log import get_logger

_log = get_logger()

RAW_HEADS: Final = 2
"""So many times the limit of a head is held of one that is not complete yet, and of any one line: `x-request-id`, which
is only looked at and replaced (see `server.py`), does not count."""
LINGER_S: Final = 1.0
"""Seconds for which what a client still sends is thrown away before its connection is closed: closing with unread
input would reset the connection, and with it destroy the answer."""
_LOG_PERIOD_S: Final = 10.0
"""Connections that are turned away are logged together, once in this time."""


def head_too_large(head_limit: int) -> ApiError:
    """Return the 431."""
    message = f"The request line and the headers together are longer than {head_limit} bytes."
    return ApiError(431, "header_too_large", message, close=True)


class Connection(RequestHandler):
    """One connection.

    Args:
        server: it belongs to.
    """

    __slots__ = ("_address", "_head_limit_s", "_num_head_bytes", "_refused", "_server", "_timer")

    def __init__(self, server: ConnectionServer) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=server.idle_limit_s,
            access_log=None,  # type: ignore[arg-type]  # aiohttp's own way to have none
            lingering_time=LINGER_S,
            auto_decompress=False,
            max_line_size=RAW_HEADS * server.head_limit,
            max_field_size=RAW_HEADS * server.head_limit,
        )
        self._server = server
        self._head_limit_s = server.head_limit_s
        self._address: str | None = None  # as it was counted; None: it was not
        self._num_head_bytes = 0  # of a head that is not complete
        self._refused = False  # nothing that still comes is looked at
        self._timer: asyncio.TimerHandle | None = None  # of the head; after a refusal, of the close

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a new connection, or turn it away."""
        connected = cast("asyncio.Transport", transport)  # uvloop's own class, which is none by inheritance
        address = address_of(connected.get_extra_info("peername"))
        refusal = self._server.doorway.enter(address)
        if refusal is not None:
            self._refused = True
            self._server.log_refused(refusal)
            connected.write(error_bytes(refusal, _new_id()))
            connected.close()
            return
        self._address = address
        super().connection_made(transport)
        self._timer = self._loop.call_later(self._head_limit_s, self._on_head_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection; a request in it is cancelled."""
        if self._address is None:
            return
        self._server.doorway.leave(self._address)
        self._address = None
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what the client sent."""
        if self._refused:
            return
        num_requests, is_head = self._request_count, self._awaits_head()
        super().data_received(data)
        if not is_head:
            return
        if self._request_count != num_requests:
            self._num_head_bytes = 0
            self._stop_timer()
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > RAW_HEADS * self._server.head_limit:
            self._refuse(head_too_large(self._server.head_limit))
        elif self._timer is None and data:
            self._timer = self._loop.call_later(self._head_limit_s, self._on_head_late)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what the parser refused, or what no handler could."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun; only closing the connection is left")
        if status < HTTPStatus.INTERNAL_SERVER_ERROR:
            self._refused = True
            return self._last_answer(_parser_error(status, exc, self._server.head_limit))
        _log.error("http_failed", status=status, message=message, exc_info=exc)
        error = failure_error(FailureCode.INTERNAL)
        error.close = True
        return error_response(error, _new_id())

    def _awaits_head(self) -> bool:
        """Return whether what comes next belongs to a head, and no request is in hand."""
        waiter = self._waiter
        return not self._request_count or (waiter is not None and not waiter.done())

    def _on_head_late(self) -> None:
        self._timer = None
        if self._num_head_bytes:
            message = f"The request's headers did not arrive within {self._head_limit_s:g} s."
            self._refuse(ApiError(408, "request_timeout", message, close=True))
        elif self.transport is not None:
            self.transport.close()  # a connection that was opened ahead and not used: there is nothing to answer

    def _refuse(self, error: ApiError) -> None:
        """Answer without a request: there is no whole one."""
        request_id = _new_id()
        _log.info("refused", rid=request_id, path="", status=error.status, code=error.code)
        self._refused = True
        self._stop_timer()
        if self.transport is not None:
            self.transport.write(error_bytes(error, request_id))
            _end_output(self.transport)
            self._timer = self._loop.call_later(LINGER_S, self.transport.close)

    def _last_answer(self, error: ApiError) -> web.StreamResponse:
        request_id = _new_id()
        _log.info("refused", rid=request_id, path="", status=error.status, code=error.code)
        return _LastAnswer(error, request_id, self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _LastAnswer(web.Response):
    """An answer after which the connection stays until the client has closed it, or for `LINGER_S`."""

    def __init__(self, error: ApiError, request_id: str, connection: Connection) -> None:
        answer = error_response(error, request_id)
        super().__init__(status=answer.status, body=answer.body, headers=answer.headers)
        self.headers["Server"] = "sluice"
        self.force_close()
        self._connection = connection

    async def write_eof(self, data: bytes = b"") -> None:
        """Send the end; cancelled when the client closes."""
        await super().write_eof(data)
        if self._connection.transport is not None:
            _end_output(self._connection.transport)
            await asyncio.sleep(LINGER_S)


def _end_output(transport: asyncio.Transport) -> None:
    """Tell the client that nothing more will come."""
    if transport.can_write_eof():
        transport.write_eof()


def _parser_error(status: int, exc: BaseException | None, head_limit: int) -> ApiError:
    if isinstance(exc, LineTooLong) or (exc is not None and "Too many headers" in str(exc)):
        return head_too_large(head_limit)
    return ApiError(status, "bad_request", "This is not a valid HTTP request.", close=True)


def _new_id() -> str:
    return f"req_{uuid.uuid4().hex}"


class ConnectionServer(web.Server):
    """aiohttp's server, making our connections. A request is cancelled when its connection closes.

    Args:
        handler: answers a request.
        doorway: counts connections.
        head_limit: see `DispatcherSettings`.
        head_limit_s: see there too.
        idle_limit_s: see there too.
    """

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        doorway: Doorway,
        *,
        head_limit: int,
        head_limit_s: float,
        idle_limit_s: float,
    ) -> None:
        super().__init__(handler, handler_cancellation=True)
        self.doorway = doorway
        self.head_limit = head_limit
        self.head_limit_s = head_limit_s
        self.idle_limit_s = idle_limit_s
        self._logged_s = -_LOG_PERIOD_S

    def __call__(self) -> Connection:
        """Return the handler of a new connection."""
        return Connection(self)

    def log_refused(self, error: ApiError) -> None:
        """Say that connections are turned away."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s >= _LOG_PERIOD_S:
            self._logged_s = now_s
            _log.warning(
                "connections_refused",
                status=error.status,
                reason=error.message,
                num_open=self.doorway.num_open,
                num_refused=self.doorway.num_refused,
            )
