"""Answers over WebSockets below the SDK: a few connections, each with several answers at a time. Sluice only.

Retries, resuming and errors are those of HTTP. What is not a streamed answer goes over HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import aiohttp

from sluice_client.cursor import Cursor
from sluice_client.errors import APIConnectionError, APIStatusError, ConnectionLostError, ProtocolError
from sluice_client.protocol import AnswerRecord, parse_error, parse_object, to_json
from sluice_client.retry import RETRIED_STATUSES, Resumes
from sluice_client.transport import Failure, Transport, describe, unreachable

MAX_IN_FLIGHT = 16
"""Answers at a time over one connection; the server takes no more."""
HEARTBEAT_S = 15.0
"""Silence after which the client asks whether the server is there; half as long later the connection counts as lost."""
MAX_WAITING_MESSAGES = 65_536
"""Messages that wait for the reader of one answer; with more, the answer is given up."""
_FORGET_S = 1.0
"""Longest time in which the server is told that an answer is not wanted any more."""
_ENDPOINTS = {"chat/completions": "chat", "completions": "completions"}
Message = dict[str, Any]


class SocketTransport:
    """Streamed answers over WebSockets.

    Args:
        http: open while this is used; everything else goes through it.
    """

    def __init__(self, http: Transport) -> None:
        self._http = http
        self._links: list[_Link] = []
        self._opening = asyncio.Lock()

    def resumes(self) -> Resumes:
        """What may be done for an answer that loses its connections."""
        return self._http.resumes()

    async def cancel(self, cursor: Cursor) -> None:
        """Do nothing: an answer that is closed is cancelled in its connection."""

    async def close(self) -> None:
        """Close every connection."""
        links, self._links = self._links, []
        for link in links:
            await link.close()

    async def events(
        self, path: str, body: dict[str, Any], cursor: Cursor, record: AnswerRecord
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed answer over one connection; closing the generator cancels it there.

        Raises:
            SluiceClientError: any of `errors.py`; every chunk that came before it was yielded.
        """

        async def attempt(base_url: str) -> _SocketAnswer | Failure:
            cursor.base_url = base_url
            return await self._try_start(base_url, path, body, cursor)

        answer = await self._http.with_retries(attempt, is_resume=cursor.has_begun)
        try:
            record.request_id = answer.request_id
            cursor.is_resumable = answer.is_resumable
            while (message := await answer.next()) is not None:
                cursor.last_event_id = message.get("event_id") or cursor.last_event_id
                yield message["data"] if message["type"] == "event" else {"error": message.get("error")}
        finally:
            await answer.close()

    async def _try_start(
        self, base_url: str, path: str, body: dict[str, Any], cursor: Cursor
    ) -> _SocketAnswer | Failure:
        """Send the request and wait until the server has taken or refused it."""
        try:
            link = await self._link(base_url)
            answer = await link.ask(
                {
                    "type": "request",
                    "endpoint": _ENDPOINTS[path],
                    "body": body,
                    "idempotency_key": cursor.key,
                    "last_event_id": cursor.last_event_id or None,
                }
            )
        except aiohttp.WSServerHandshakeError as error:
            message = f"the server refused the WebSocket at {base_url}/ws; transport='http' may still work"
            refusal = APIStatusError(
                status=error.status, code=None, message=message, request_id=None, retry_after_s=None
            )
            return Failure(error=refusal, may_retry=error.status in RETRIED_STATUSES, cause=error)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return unreachable(base_url, error)
        return await _started(answer)

    async def _link(self, base_url: str) -> _Link:
        """A connection with room for an answer."""
        async with self._opening:
            self._links = [link for link in self._links if not link.is_closed]
            for link in self._links:
                if link.base_url == base_url and link.num_answers < MAX_IN_FLIGHT:
                    return link
            limits = self._http.limits
            socket = await self._http.session.ws_connect(
                f"{base_url}/ws", heartbeat=HEARTBEAT_S, max_msg_size=limits.max_event_bytes, autoclose=True
            )
            self._links.append(_Link(base_url, socket))
            return self._links[-1]


async def _started(answer: _SocketAnswer) -> _SocketAnswer | Failure:
    try:
        message = await answer.next()
    except ConnectionLostError as error:
        await answer.close()
        return Failure(error=APIConnectionError(f"no answer: {error}"), may_retry=True, cause=error)
    except BaseException:
        await answer.close()
        raise
    if message is not None and message["type"] == "start":
        answer.request_id = message.get("request_id")
        answer.is_resumable = message.get("resumable") is True
        return answer
    await answer.close()
    if message is None or message["type"] != "error":
        odd = ProtocolError("the server's first message is neither 'start' nor 'error'")
        return Failure(error=odd, may_retry=False)
    return _refused(message)


def _refused(message: Message) -> Failure:
    text, code, kind = parse_error(message)
    status, delay_ms = message.get("status"), message.get("retry_after_ms")
    retry_after_s = delay_ms / 1000 if isinstance(delay_ms, int) else None
    error = APIStatusError(
        status=status if isinstance(status, int) else 500,
        code=code,
        message=text,
        request_id=None,
        retry_after_s=retry_after_s,
        kind=kind,
    )
    own_word = message.get("should_retry")
    may_retry = own_word if isinstance(own_word, bool) else error.status in RETRIED_STATUSES
    return Failure(error=error, may_retry=may_retry, retry_after_s=retry_after_s)


class _SocketAnswer:
    """One answer of a connection."""

    def __init__(self, link: _Link, name: str) -> None:
        self.request_id: str | None = None
        self.is_resumable = False
        self._link = link
        self._name = name
        self._waiting: asyncio.Queue[Message | None] = asyncio.Queue(MAX_WAITING_MESSAGES)
        self._is_done = False
        self._is_overrun = False

    def put(self, message: Message | None) -> None:
        """Take a message; None: the connection is lost."""
        try:
            self._waiting.put_nowait(message)
        except asyncio.QueueFull:
            self._is_overrun = True

    async def next(self) -> Message | None:
        """The next message; None after the last one.

        Raises:
            ConnectionLostError: the connection broke.
        """
        if self._is_overrun and self._waiting.empty():
            raise ProtocolError(f"more than {MAX_WAITING_MESSAGES} messages of the answer were not read")
        message = await self._waiting.get()
        if message is None:
            self._is_done = True
            raise ConnectionLostError(f"the WebSocket broke off: {self._link.reason}")
        if message["type"] == "done":
            self._is_done = True
            return None
        return message

    async def close(self) -> None:
        """Forget the answer; one that goes on is cancelled."""
        await self._link.forget(self._name, is_done=self._is_done)


class _Link:
    """One WebSocket, and the answers that come over it."""

    def __init__(self, base_url: str, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.base_url = base_url
        self.reason = "closed"
        self._socket = socket
        self._answers: dict[str, _SocketAnswer] = {}
        self._num_asked = 0
        self._is_closed = False
        self._reader = asyncio.create_task(self._read(), name="sluice-client-socket")

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more requests."""
        return self._is_closed or self._socket.closed

    @property
    def num_answers(self) -> int:
        """Answers under way."""
        return len(self._answers)

    async def ask(self, message: Message) -> _SocketAnswer:
        """Send a request under a new name."""
        self._num_asked += 1
        name = str(self._num_asked)
        answer = self._answers[name] = _SocketAnswer(self, name)
        try:
            await self._socket.send_str(to_json({**message, "id": name}))
        except BaseException:
            await self.forget(name, is_done=False)  # it may have been sent
            raise
        return answer

    async def forget(self, name: str, *, is_done: bool) -> None:
        """Take no more messages of an answer."""
        if self._answers.pop(name, None) is not None and not is_done and not self.is_closed:
            with suppress(aiohttp.ClientError, OSError):  # a time-out among them: what waits then has been written
                async with asyncio.timeout(_FORGET_S):
                    await self._socket.send_str(to_json({"type": "cancel", "id": name}))

    async def close(self) -> None:
        """End the connection; answers under way lose it."""
        self._reader.cancel()
        await asyncio.wait([self._reader])
        self._end()  # a reader that is cancelled before its first step has told nobody
        await self._socket.close()

    async def _read(self) -> None:
        try:
            async for message in self._socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    self._deliver(message.data)
        except (aiohttp.ClientError, OSError, ProtocolError) as error:
            self.reason = describe(error)
        finally:
            self._end()
        await self._socket.close()

    def _end(self) -> None:
        """Take no more requests, and tell those whose answers are under way. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._socket.close_code is not None:
            self.reason = f"closed with code {self._socket.close_code}"
        for answer in self._answers.values():
            answer.put(None)

    def _deliver(self, data: str) -> None:
        message = parse_object(data)
        kind = message.get("type")
        if kind not in ("start", "event", "error", "done") or (kind == "event" and "data" not in message):
            raise ProtocolError(f"the server sent a message that is none: {data[:80]!r}")
        answer = self._answers.get(str(message.get("id")))
        if answer is not None:  # else it was cancelled meanwhile
            answer.put(message)
