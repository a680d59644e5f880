"""HTTP below the SDK: one session, bounded retries, errors translated once."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from sluice_client.cursor import KEY_HEADER, REQUEST_HEADER, Cursor, Servers
from sluice_client.errors import (
    APIConnectionError,
    APIStatusError,
    ConnectionLostError,
    ProtocolError,
    SluiceClientError,
)
from sluice_client.protocol import DONE, AnswerRecord, parse_error, parse_object, to_json
from sluice_client.retry import Attempts, Resumes, RetryBudget, RetryPolicy, Setback, may_retry, parse_retry_after
from sluice_client.sse import SseDecoder

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Every bound of a client."""

    connect_timeout_s: float = 5.0
    """Longest wait for a connection."""
    idle_timeout_s: float = 120.0
    """Longest silence of the server, before its headers or within a stream; a keep-alive comment ends a silence."""
    end_timeout_s: float = 0.1
    """Longest wait for the end of a response after its [DONE], so that its connection can serve another request."""
    max_connections: int = 1000
    """Open at the same time; further requests wait."""
    max_event_bytes: int = 1 << 20
    """Largest event of a stream."""
    max_body_bytes: int = 16 << 20
    """Largest answer that is not streamed."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """Of requests that failed before the first token, and of answers that lost their connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Setback):
    """A failed attempt."""

    error: SluiceClientError
    cause: BaseException | None = None


class Transport:
    """Requests to the servers; arguments as `AsyncSluiceClient`."""

    def __init__(
        self, base_url: str | Sequence[str], api_key: str | None, limits: ClientLimits, rng: random.Random
    ) -> None:
        self.limits = limits
        self._servers = Servers(base_url)
        self._headers = {"Accept-Encoding": "identity"}  # compression would hold tokens back
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._rng = rng
        self._budget = RetryBudget(limits.retry, time.monotonic())
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the session; needs a running loop."""
        limits = self.limits
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=limits.max_connections),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=limits.connect_timeout_s, sock_read=limits.idle_timeout_s
            ),
            headers=self._headers,
            json_serialize=to_json,
        )

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open session.

        Raises:
            RuntimeError: there is none.
        """
        if self._session is None or self._session.closed:
            raise RuntimeError("the client is not open; use `async with AsyncSluiceClient(...) as client`")
        return self._session

    def resumes(self) -> Resumes:
        """What may be done for an answer that loses its connections."""
        return Resumes(self.limits.retry, self._budget, self._rng)

    async def with_retries(self, attempt: Callable[[str], Awaitable[R | Failure]], *, is_resume: bool = False) -> R:
        """The result of the first attempt that does not fail.

        Args:
            attempt: made with the base URL of the server to ask.
            is_resume: of an answer that has begun.

        Raises:
            SluiceClientError: the last attempt's, when there may be no other.
        """
        attempts = Attempts(self.limits.retry, self._budget, self._rng, time.monotonic(), is_resume=is_resume)
        num_untried = len(self._servers.urls)
        while True:
            url = self._servers.current
            outcome = await attempt(url)
            if not isinstance(outcome, Failure):
                return outcome
            num_untried -= 1
            is_servers_own = outcome.may_retry and _status(outcome) in (None, 503)
            if is_servers_own:
                self._servers.leave(url)
            has_other_server = is_servers_own and num_untried > 0
            delay_s = attempts.next_delay_s(outcome, time.monotonic(), has_other_server=has_other_server)
            if delay_s is None:
                raise outcome.error from outcome.cause
            await asyncio.sleep(delay_s)

    async def _try_request(
        self, url: str, method: str, body: dict[str, Any] | None, headers: dict[str, str]
    ) -> aiohttp.ClientResponse | Failure:
        try:
            response = await self.session.request(method, url, json=body, headers=headers, allow_redirects=False)
            if response.status == 200:
                return response
            return await self._status_failure(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return unreachable(url, error)

    async def _status_failure(self, response: aiohttp.ClientResponse) -> Failure:
        try:
            raw = await _read_limited(response, self.limits.max_body_bytes)
            message, code, kind = parse_error(parse_object(raw))
        except ProtocolError:
            message, code, kind = response.reason or "no reason given", None, None
        finally:
            response.close()
        retry_after_s = parse_retry_after(response.headers, time.time())
        error = APIStatusError(
            status=response.status,
            code=code,
            message=message,
            request_id=response.headers.get(REQUEST_HEADER),
            retry_after_s=retry_after_s,
            kind=kind,
        )
        is_retried = may_retry(response.status, response.headers)
        return Failure(error=error, may_retry=is_retried, retry_after_s=retry_after_s)

    async def fetch(
        self, method: str, path: str, body: dict[str, Any] | None, cursor: Cursor | None = None
    ) -> tuple[dict[str, Any], str | None]:
        """The JSON object that answers a request, and the x-request-id.

        Args:
            method: GET or POST.
            path: after the base URL.
            body: JSON, or None.
            cursor: of a request that should be known as one, however often it is sent.

        Raises:
            APIConnectionError, APIStatusError, ConnectionLostError, ProtocolError: see `errors.py`.
        """
        headers = {} if cursor is None else cursor.headers()
        response = await self.with_retries(lambda base: self._try_request(f"{base}/{path}", method, body, headers))
        try:
            raw = await _read_limited(response, self.limits.max_body_bytes)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConnectionLostError(f"the answer broke off: {describe(error)}") from error
        finally:
            response.close()
        return parse_object(raw), response.headers.get(REQUEST_HEADER)

    async def cancel(self, cursor: Cursor) -> None:
        """Tell the server that has the request to stop it.

        Raises:
            APIConnectionError, APIStatusError: it could not be told, or knows no such request.
        """
        if not cursor.base_url:
            return
        url = f"{cursor.base_url}/requests/{cursor.request_id}/cancel"
        outcome = await self._try_request(url, "POST", None, {})
        if isinstance(outcome, Failure):
            raise outcome.error from outcome.cause
        outcome.close()

    async def events(
        self, path: str, body: dict[str, Any], cursor: Cursor, record: AnswerRecord
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed answer over one connection; closing the generator closes it.

        Raises:
            SluiceClientError: any of `errors.py`; every chunk that came before it was yielded.
        """

        async def attempt(base_url: str) -> aiohttp.ClientResponse | Failure:
            cursor.base_url = base_url
            return await self._try_request(f"{base_url}/{path}", "POST", body, cursor.headers())

        response = await self.with_retries(attempt, is_resume=cursor.has_begun)
        record.request_id = response.headers.get(REQUEST_HEADER)
        cursor.request_id = record.request_id or cursor.request_id
        try:
            if response.content_type == "application/json":
                raise ProtocolError("the server answered a streamed request with JSON instead of an event stream")
            cursor.is_resumable = response.headers.get(KEY_HEADER) == cursor.key
            if cursor.has_begun and not cursor.is_resumable:
                raise ConnectionLostError("the stream broke off, and the server cannot go on with it")
            async for chunk in self._chunks(response, cursor):
                yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConnectionLostError(f"the stream broke off: {describe(error)}") from error
        finally:
            response.close()  # one that was read to its end has gone back to the pool by itself

    async def _await_end(self, response: aiohttp.ClientResponse) -> None:
        try:
            async with asyncio.timeout(self.limits.end_timeout_s):
                async for _ in response.content.iter_any():
                    pass  # nothing of the answer follows [DONE]
        except TimeoutError:
            return  # the connection is closed instead

    async def _chunks(self, response: aiohttp.ClientResponse, cursor: Cursor) -> AsyncGenerator[dict[str, Any], None]:
        """The data of each event up to [DONE] or the end."""
        decoder = SseDecoder(self.limits.max_event_bytes)
        async for part in response.content.iter_any():
            for event in decoder.feed(part):
                if event.data == DONE:
                    await self._await_end(response)
                    return
                chunk = parse_object(event.data)
                cursor.last_event_id = event.id or cursor.last_event_id
                yield chunk
        for event in decoder.close():
            if event.data == DONE:
                return
            if cursor.is_resumable:  # such a server always says [DONE]: what is left here was cut
                break
            yield parse_object(event.data)
        if cursor.is_resumable:
            raise ConnectionLostError("the stream ended without [DONE]")


def unreachable(url: str, error: BaseException) -> Failure:
    """The failure of an attempt that got no answer at all."""
    failure = APIConnectionError(f"no answer from {url}: {describe(error)}")
    # a server that took the request and is silent may still be at work: asking again would double it
    is_retried = isinstance(error, aiohttp.ClientConnectionError) and not isinstance(error, aiohttp.SocketTimeoutError)
    is_unreachable = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    return Failure(error=failure, may_retry=is_retried, cause=error, is_unreachable=is_unreachable)


def describe(error: BaseException) -> str:
    """The system's words for an error, else its own, or its name."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno) if error.errno > 0 else error.strerror or type(error).__name__
    return str(error) or type(error).__name__


def _status(failure: Failure) -> int | None:
    return failure.error.status if isinstance(failure.error, APIStatusError) else None


async def _read_limited(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            raise ProtocolError(f"the server's answer is larger than {max_bytes} bytes")
    return bytes(body)
