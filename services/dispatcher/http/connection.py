"""One client's connection, on top of aiohttp's: its head under limits of size and time, its errors in our format.

    made ──► head due in head_limit_s ──► request ──► idle for idle_limit_s ──► first byte of the next head ──► …
              │ late: 408, or closed if nothing came   │ closed
              │ too large: 431                         ▼
              ▼ not HTTP: 400

A head is the request line and the headers. aiohttp alone has no limit for the time of a head, and for its size only one
per line. No answer of aiohttp's own, which would be plain text, reaches a client.

A closed connection cancels its request, so its end must be seen while the request runs: reading never stops for what
stands behind a request. If that is too much, it is thrown away, and the connection ends.

One for which there is no place (`doorway.py`) is a visitor: it may ask a probe, once; anything else is refused.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Container
from http import HTTPStatus
from typing import Final, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import RequestHandler, _ErrInfo

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
VISIT_S: Final = 1.0
"""Seconds in which a visitor must have asked for something."""
MAX_BEHIND: Final = 8
"""Requests that may stand behind the one that is being answered."""
_BAD_CODINGS: Final = (
    "Request has invalid `Transfer-Encoding`",
    "Invalid `Transfer-Encoding` header value",
    "Duplicate 'Transfer-Encoding' header",
)
"""How the parser's errors about a transfer coding begin; what follows may hold what the client sent."""
_LOG_PERIOD_S: Final = 10.0
"""Connections that are turned away are logged together, once in this time."""


def head_too_large(head_limit: int) -> ApiError:
    """Return the 431."""
    message = f"The request line and the headers together are longer than {head_limit} bytes."
    return ApiError(431, "header_too_large", message, close=True)


def too_many_behind() -> ApiError:
    """Return the 429."""
    message = f"More than {MAX_BEHIND} requests, or too large ones, wait behind the one that is being answered."
    return ApiError(429, "too_many_in_flight", message, retry_after_s=1.0, close=True)


class Connection(RequestHandler):
    """One connection.

    Args:
        server: it belongs to.
    """

    __slots__ = ("_address", "_no_place", "_num_head_bytes", "_refused", "_server", "_timer")

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
        self._request_handler = self._answer
        self._address = ""  # as it is counted
        self._no_place: ApiError | None = None  # what a visitor is told
        self._num_head_bytes = 0  # of a head that is not complete
        self._refused = False  # nothing that still comes is looked at
        self._timer: asyncio.TimerHandle | None = None  # of the head; after a refusal, of the close

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a new connection, or turn it away."""
        connected = cast("asyncio.Transport", transport)  # uvloop's own class, which is none by inheritance
        self._address = address_of(connected.get_extra_info("peername"))
        self._no_place = self._server.doorway.enter(self._address)
        if self._no_place is not None:
            self._server.doorway.visit(self)
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection; a request in it is cancelled."""
        if self._no_place is None:
            self._server.doorway.leave(self._address)
        else:
            self._server.doorway.end_visit(self)
        self._stop_timer()
        super().connection_lost(exc)

    def send_away(self) -> None:
        """End a visit: another one has come. Nothing waits for a client that does not read."""
        transport = self.transport
        if transport is None:
            return
        if self._no_place is not None and not self._request_count and not self._refused:
            transport.write(error_bytes(self._no_place, self._note_refused(self._no_place)))
            transport.close()
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take what the client sent."""
        if self._refused:
            return
        num_requests, is_head = self._request_count, self._awaits_head()
        super().data_received(data)
        if self._look_behind() or not is_head:
            return
        if self._request_count != num_requests:
            self._num_head_bytes = 0
            self._stop_timer()
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > RAW_HEADS * self._server.head_limit:
            self._refuse(head_too_large(self._server.head_limit))
        elif self._timer is None and data:
            self._await_head()

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
            return self._last_answer(_parser_error(status, exc, self._server.head_limit))
        _log.error("http_failed", status=status, message=message, exc_info=exc)
        error = failure_error(FailureCode.INTERNAL)
        error.close = True
        return error_response(error, _new_id())

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; a visitor's only if it asks a probe, and then nothing more."""
        self._look_behind()
        if self._no_place is None:
            return await self._server.answer(request)
        if request.path not in self._server.probes:
            return self._last_answer(self._no_place)
        response = await self._server.answer(request)
        response.force_close()
        return response

    def _look_behind(self) -> bool:
        """If too much stands behind a request that is whole, end the connection soon, and return True.

        What is quick is still answered, in order; then the client is told why.
        """
        if self._refused:
            return False
        in_hand = self._current_request
        stopped = self._reading_paused or self._buffer_paused
        is_own = in_hand is None or not in_hand.content.is_eof() or self._payload_parser is not None
        num_first = 0 if self._request_in_progress else 1
        if len(self._messages) <= MAX_BEHIND + num_first and (is_own or not stopped):
            return False
        while len(self._messages) > MAX_BEHIND + num_first:
            self._messages.pop()
        error = too_many_behind()
        self._messages.append((_ErrInfo(error.status, error, error.message), EMPTY_PAYLOAD))
        self._message_tail = b""
        self._refused = True
        self._resume_reading_for_buffer()
        self.resume_reading(resume_parser=False)
        self._stop_timer()
        if self.transport is not None:
            self._timer = self._loop.call_later(LINGER_S, self.transport.abort)
        return True

    def _await_head(self) -> None:
        limit_s = self._server.head_limit_s if self._no_place is None else VISIT_S
        self._timer = self._loop.call_later(limit_s, self._on_head_late)

    def _awaits_head(self) -> bool:
        """Return whether what comes next belongs to a head, and no request is in hand."""
        waiter = self._waiter
        return not self._request_count or (waiter is not None and not waiter.done())

    def _on_head_late(self) -> None:
        self._timer = None
        if self._no_place is not None:
            self._refuse(self._no_place)
        elif self._num_head_bytes:
            message = f"The request's headers did not arrive within {self._server.head_limit_s:g} s."
            self._refuse(ApiError(408, "request_timeout", message, close=True))
        elif self.transport is not None:
            self.transport.close()  # a connection that was opened ahead and not used: there is nothing to answer

    def _refuse(self, error: ApiError) -> None:
        """Answer without a request: there is no whole one."""
        request_id = self._note_refused(error)
        self._stop_timer()
        if self.transport is not None:
            self.transport.write(error_bytes(error, request_id))
            _end_output(self.transport)
            self._timer = self._loop.call_later(LINGER_S, self.transport.close)

    def _last_answer(self, error: ApiError) -> web.StreamResponse:
        return _LastAnswer(error, self._note_refused(error), self)

    def _note_refused(self, error: ApiError) -> str:
        """Look at nothing that still comes; return the id of what is refused."""
        self._refused = True
        request_id = _new_id()
        if error is self._no_place:
            self._server.note_turned_away(error)
        else:
            _log.info("refused", rid=request_id, path="", status=error.status, code=error.code)
        return request_id

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


def bad_http(status: int = 400) -> ApiError:
    """Return the error for what is not HTTP, or can be read in two ways."""
    return ApiError(status, "bad_request", "This is not a valid HTTP request.", close=True)


def unsupported_coding() -> ApiError:
    """Return the 501."""
    message = "Of transfer codings only 'chunked' is supported, alone and once."
    headers = {"x-should-retry": "false"}
    return ApiError(501, "unsupported_transfer_encoding", message, headers=headers, close=True)


def _parser_error(status: int, exc: BaseException | None, head_limit: int) -> ApiError:
    if isinstance(exc, ApiError):
        return exc
    if exc is not None and str(next(iter(exc.args), "")).startswith(_BAD_CODINGS):
        return unsupported_coding()
    if isinstance(exc, LineTooLong) or (exc is not None and "Too many headers" in str(exc)):
        return head_too_large(head_limit)
    return bad_http(status)


def _new_id() -> str:
    return f"req_{uuid.uuid4().hex}"


class ConnectionServer(web.Server):
    """aiohttp's server, making our connections. A request is cancelled when its connection closes.

    Args:
        answer: answers a request.
        doorway: counts connections.
        probes: paths at which visitors are answered.
        head_limit: see `DispatcherSettings`.
        head_limit_s: see there too.
        idle_limit_s: see there too.
    """

    def __init__(
        self,
        answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        doorway: Doorway,
        probes: Container[str],
        *,
        head_limit: int,
        head_limit_s: float,
        idle_limit_s: float,
    ) -> None:
        super().__init__(answer, handler_cancellation=True)
        self.answer = answer
        self.doorway = doorway
        self.probes = probes
        self.head_limit = head_limit
        self.head_limit_s = head_limit_s
        self.idle_limit_s = idle_limit_s
        self._logged_s = -_LOG_PERIOD_S

    def __call__(self) -> Connection:
        """Return the handler of a new connection."""
        return Connection(self)

    def note_turned_away(self, error: ApiError) -> None:
        """Count a connection that found no place, and say now and then that there are such."""
        self.doorway.count_refused()
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
