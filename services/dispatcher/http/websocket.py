"""GET /v1/ws: answers over one WebSocket, several at a time, with the checks, limits and events of HTTP.

The handler of the connection reads; each answer is a task that writes its frames straight to the transport. A client
that breaks the rules is told why in the close frame, and its requests are cancelled; no other client notices.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Final

from aiohttp import WSCloseCode, WSMsgType, web

from services.dispatcher.answers.generate import generate
from services.dispatcher.endpoints.call import CheckedCall
from services.dispatcher.endpoints.chat import chat_call
from services.dispatcher.endpoints.completions import completion_call
from services.dispatcher.endpoints.guide_check import ONE_OF_HEADER
from services.dispatcher.http.arrival import Caller, at_length, note_arrival
from services.dispatcher.http.errors import ApiError, failure_error
from services.dispatcher.http.front import Front
from services.dispatcher.http.guard import authorise, grant_of
from services.dispatcher.http.socket_messages import (
    BadMessageError,
    Cancellation,
    MessageBudget,
    MessageWriter,
    Request,
    parse_message,
    text_frame,
)
from services.dispatcher.http.sockets import CLOSE_LIMIT_S, MAX_UNSENT_BYTES, UNREAD, CloseReason
from services.dispatcher.http.sse import Outgoing, Stream
from services.dispatcher.session.request import FailureCode
from shared.api_keys import Tier
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner

_log = get_logger()

MAX_IN_FLIGHT: Final = 16
"""Answers at a time over one connection."""
HEARTBEAT_S: Final = 15.0
"""Silence after which a ping is sent; half as long later without an answer, the connection is closed."""
LINGER_S: Final = 1.0
"""Seconds for which the rest of a message that is too long is thrown away."""
_POLL_S: Final = 0.02
ENVELOPE_BYTES: Final = 4096
"""What a message may hold besides a body of the size that HTTP allows."""
_CALLS: Final = {"chat": chat_call, "completions": completion_call}
_TOO_MANY_MESSAGES: Final = CloseReason(WSCloseCode.POLICY_VIOLATION, "too many messages at once")
_BINARY: Final = CloseReason(WSCloseCode.UNSUPPORTED_DATA, "send JSON as text messages")
_NAME_IN_USE: Final = CloseReason(WSCloseCode.POLICY_VIOLATION, "the id is in use")
_UNREAD: Final = CloseReason(WSCloseCode.POLICY_VIOLATION, "too much was left unread")


async def open_socket(front: Front, request: web.BaseRequest, public_id: str) -> web.StreamResponse:
    """Serve one WebSocket until it ends.

    Raises:
        ApiError: it is no handshake, or the server is shutting down.
    """
    if not wants_socket(request):
        raise ApiError(426, "upgrade_required", "Speak WebSocket here.", headers={"Upgrade": "websocket"})
    socket = _Socket(
        timeout=CLOSE_LIMIT_S / 2,
        heartbeat=HEARTBEAT_S,
        max_msg_size=front.settings.body_limit + ENVELOPE_BYTES,
        decode_text=False,
    )
    if not socket.is_asked(request):
        headers = {"Sec-WebSocket-Version": "13"}
        raise ApiError(400, "bad_request", "This is not a valid WebSocket handshake.", headers=headers)
    if front.sessions.draining:
        raise failure_error(FailureCode.DRAINING)
    socket.headers["x-request-id"] = public_id
    socket.headers["Server"] = "sluice"
    await socket.prepare(request)
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client is gone")
    connection = WebSocketConnection(front, socket, transport, request)
    front.sockets.add(connection)
    try:
        await connection.run()
    finally:
        front.sockets.remove(connection)
    return socket


def wants_socket(request: web.BaseRequest) -> bool:
    """Return whether a request asks to speak WebSocket."""
    return request.headers.get("Upgrade", "").strip().lower() == "websocket"


class _Socket(web.WebSocketResponse):
    """aiohttp's WebSocket, which at first only stops sending: a client that is still sending gets the reason."""

    def is_asked(self, request: web.BaseRequest) -> bool:
        """Return whether this is a handshake; aiohttp trips over headers that are not ASCII."""
        try:
            return bool(self.can_prepare(request))
        except ValueError:
            return False

    def _close_transport(self) -> None:
        transport = self._req.transport if self._req is not None else None
        if transport is not None and not transport.is_closing():
            transport.write_eof()


class WebSocketConnection:
    """One client's WebSocket.

    Args:
        front: the parts to work with.
        socket: prepared.
        transport: of the connection.
        handshake: let in; its key is looked at anew for every answer, since keys come and go.
    """

    def __init__(
        self,
        front: Front,
        socket: web.WebSocketResponse,
        transport: asyncio.Transport,
        handshake: web.BaseRequest,
    ) -> None:
        self._front = front
        self._socket = socket
        self._transport = transport
        self._outgoing = Outgoing(transport, front.now())
        self._handshake = handshake
        self._calls: dict[str, CheckedCall] = {}
        self._tasks = TaskOwner(max_tasks=2 * MAX_IN_FLIGHT)
        self._budget = MessageBudget(front.now())
        self._verdict: CloseReason | None = None
        self._reading: asyncio.Timeout | None = None
        self._is_broken = False  # the client broke the protocol, and has been told

    @property
    def is_idle(self) -> bool:
        """Whether no answer is under way."""
        return not self._calls

    @property
    def is_closing(self) -> bool:
        """Whether it has been closed; the client may still have to take what it was sent."""
        return self._verdict is not None

    @property
    def was_cut(self) -> bool:
        """Whether it was closed because its client did not read."""
        return self._verdict in (UNREAD, _UNREAD)

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that the client has not taken yet."""
        return self._outgoing.num_unsent_bytes

    def is_stalled(self, now_s: float, stall_s: float) -> bool:
        """Return whether the client has taken nothing for so long, although something waits for it."""
        return self._outgoing.is_stalled(now_s, stall_s)

    def close(self, verdict: CloseReason) -> None:
        """Cancel the answers, send the verdict, and break the connection if the client does not end it."""
        if self._verdict is None:
            self._verdict = verdict
            if self._reading is not None:
                self._reading.reschedule(self._front.now())

    async def run(self) -> None:
        """Read messages until the connection ends; then nothing of its requests is left."""
        try:
            while self._verdict is None and await self._read_one():
                pass
            await self._tasks.close()
            if self._verdict is not None:
                _log.info("socket_closed", code=int(self._verdict.code), reason=self._verdict.reason)
                await self._socket.close(code=self._verdict.code, message=self._verdict.reason.encode(), drain=False)
            elif self._is_broken:
                await self._linger()
        finally:
            await self._tasks.close()
            # closing in an orderly way waits for a client that may never read: then this is what ends it
            asyncio.get_running_loop().call_later(CLOSE_LIMIT_S, self._transport.abort)

    async def _read_one(self) -> bool:
        """Take the next message; return whether there may be another one."""
        try:
            async with asyncio.timeout(None) as self._reading:
                message = await self._socket.receive()
        except TimeoutError:
            return False  # there is a verdict
        finally:
            self._reading = None
        if message.type is WSMsgType.BINARY:
            self.close(_BINARY)
        elif message.type is not WSMsgType.TEXT:
            self._is_broken = message.type is WSMsgType.ERROR
            return False
        elif not self._budget.take(self._front.now()):
            self.close(_TOO_MANY_MESSAGES)
        else:
            await self._take(message.data)
        return True

    async def _linger(self) -> None:
        """Throw away what still comes; a connection that is closed before loses its client the reason."""
        until_s = self._front.now() + LINGER_S
        while not self._transport.is_closing() and self._front.now() < until_s:
            await asyncio.sleep(_POLL_S)

    @property
    def _max_tier(self) -> Tier:
        return grant_of(self._handshake).tenant.max_tier

    async def _take(self, data: bytes) -> None:
        try:
            message = await at_length(self._front, data, partial(parse_message, data), max_tier=self._max_tier)
        except ApiError as error:  # no thread is left for a long one
            self._refuse(None, error)
            return
        except BadMessageError as bad:
            if bad.name in self._calls:
                self.close(_NAME_IN_USE)
            else:
                self._refuse(bad.name, bad.error)
            return
        if isinstance(message, Cancellation):
            self._cancel(message.name)
        elif message.name in self._calls:
            self.close(_NAME_IN_USE)
        else:
            await self._start(message, data)

    async def _start(self, message: Request, data: bytes) -> None:
        if len(self._calls) >= MAX_IN_FLIGHT:
            text = f"This connection has {MAX_IN_FLIGHT} answers under way, which is its limit."
            self._refuse(message.name, ApiError(429, "too_many_in_flight", text, retry_after_s=1.0))
            return
        try:
            authorise(self._front, self._handshake)
            sender = Caller(message.headers, f"req_{uuid.uuid4().hex}", grant_of(self._handshake))
            check = partial(_CALLS[message.endpoint], note_arrival(self._front), sender, message.body)
            call = await at_length(self._front, data, check, max_tier=self._max_tier)
        except ApiError as error:
            self._refuse(message.name, error)
            return
        self._calls[message.name] = call
        self._tasks.start(self._answer(message.name, call), name=f"socket-{call.request_id}")

    async def _answer(self, name: str, call: CheckedCall) -> None:
        writer = MessageWriter(name)
        try:
            await generate(self._front, call, SocketOutlet(self, writer, call.public_id).open)
        except ApiError as error:
            _log.info("refused", rid=call.public_id, path="/v1/ws", status=error.status, code=error.code)
            self.send(writer.error(error))
        except Exception:  # the edge of the process, as in `server.py`
            _log.exception("internal_error", rid=call.public_id)
            self.send(writer.error(failure_error(FailureCode.INTERNAL)))
        finally:
            del self._calls[name]
        self.send(writer.done())

    def _refuse(self, name: str | None, error: ApiError) -> None:
        writer = MessageWriter(name)
        self.send(writer.error(error))
        if name is not None:
            self.send(writer.done())

    def _cancel(self, name: str) -> None:
        """Stop an answer, which then ends with an error; of one that has ended there is nothing to say."""
        call = self._calls.get(name)
        if call is not None and self._front.live.cancel(call.caller, call.public_id) is None:
            call.stopper.stop(FailureCode.CANCELLED)  # its task has not begun

    def send(self, payload: bytes) -> None:
        """Send one message now, unless the connection is ending."""
        if self._verdict is not None or self._transport.is_closing():
            return
        self._outgoing.send(text_frame(payload))
        if self.num_unsent_bytes > MAX_UNSENT_BYTES:
            self.close(_UNREAD)

    async def drain(self) -> None:
        """Return when others have had their turn, and the client has taken most of what it was sent."""
        await asyncio.sleep(0)
        await self._handshake.writer.drain()


class SocketOutlet:
    """One answer over a WebSocket.

    Args:
        connection: its own.
        writer: of its messages.
        request_id: what `x-request-id` would say.
    """

    def __init__(self, connection: WebSocketConnection, writer: MessageWriter, request_id: str) -> None:
        self._connection = connection
        self._writer = writer
        self._request_id = request_id

    async def open(self, headers: Mapping[str, str], *, has_ids: bool) -> Stream:
        """Say that a worker has the request; see `Open`."""
        one_of = headers.get(ONE_OF_HEADER)
        self._connection.send(self._writer.start(self._request_id, is_resumable=has_ids, one_of=one_of))
        return self

    def write(self, data: bytes, now_s: float) -> None:
        """Send one or more whole events now."""
        for message in self._writer.events(data):
            self._connection.send(message)

    async def drain(self) -> None:
        """Return when others have had their turn, and the client has taken most of what it was sent."""
        await self._connection.drain()

    @property
    def response(self) -> None:
        """None: it does not go over HTTP."""

    @property
    def was_cut(self) -> bool:
        """Whether the connection was closed because its client did not read."""
        return self._connection.was_cut

    async def end(self) -> None:
        """Do nothing: the connection says `done`, also after an error."""

    def close(self) -> None:
        """Do nothing: the connection goes on."""
