"""HTTP below the SDK: one session, bounded retries before the first token, errors translated once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from sluice_client.errors import (
    APIConnectionError,
    APIStatusError,
    ConnectionLostError,
    IncompleteStreamError,
    ProtocolError,
    SluiceClientError,
)
from sluice_client.pacer import Piece
from sluice_client.protocol import DONE, AnswerRecord, parse_error, parse_object
from sluice_client.retry import RetryPolicy, may_retry, parse_retry_after
from sluice_client.sse import SseDecoder


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
    """Before the first token only."""


class Transport:
    """Requests to one server; arguments as `SluiceClient`."""

    def __init__(self, base_url: str, api_key: str | None, limits: ClientLimits, rng: random.Random) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"base_url must look like http://host:8000, not {base_url!r}")
        path = parts.path.rstrip("/") or "/v1"
        self._base_url = f"{parts.scheme}://{parts.netloc}{path}"
        self._headers = {"Accept-Encoding": "identity"}  # compression would hold tokens back
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._limits = limits
        self._rng = rng
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the session; needs a running loop."""
        limits = self._limits
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=limits.max_connections),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=limits.connect_timeout_s, sock_read=limits.idle_timeout_s
            ),
            headers=self._headers,
        )

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> aiohttp.ClientResponse:
        """The response to a request, status 200, body not read; retried within bounds."""
        attempt = 0
        while True:
            outcome = await self._try_request(method, path, body)
            if isinstance(outcome, aiohttp.ClientResponse):
                return outcome
            delay_s = None
            if outcome.may_retry:
                delay_s = self._limits.retry.delay_s(attempt, outcome.retry_after_s, self._rng)
            if delay_s is None:
                raise outcome.error from outcome.cause
            attempt += 1
            await asyncio.sleep(delay_s)

    async def _try_request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> aiohttp.ClientResponse | _Failure:
        if self._session is None or self._session.closed:
            raise RuntimeError("the client is not open; use `async with SluiceClient(...) as client`")
        url = f"{self._base_url}/{path}"
        try:
            response = await self._session.request(method, url, json=body, allow_redirects=False)
            if response.status == 200:
                return response
            return await self._status_failure(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            failure = APIConnectionError(f"no answer from {self._base_url}: {_describe(error)}")
            # a server that took the request and is silent may still be at work: asking again would double it
            is_retried = isinstance(error, aiohttp.ClientConnectionError) and not isinstance(
                error, aiohttp.SocketTimeoutError
            )
            return _Failure(failure, may_retry=is_retried, cause=error)

    async def _status_failure(self, response: aiohttp.ClientResponse) -> _Failure:
        try:
            raw = await _read_limited(response, self._limits.max_body_bytes)
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
            request_id=response.headers.get("x-request-id"),
            retry_after_s=retry_after_s,
            kind=kind,
        )
        return _Failure(error, may_retry=may_retry(response.status, response.headers), retry_after_s=retry_after_s)

    async def fetch(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[dict[str, Any], str | None]:
        """The JSON object that answers a request, and the x-request-id.

        Raises:
            APIConnectionError, APIStatusError, ConnectionLostError, ProtocolError: see `errors.py`.
        """
        response = await self._request(method, path, body)
        try:
            raw = await _read_limited(response, self._limits.max_body_bytes)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConnectionLostError(f"the answer broke off: {_describe(error)}") from error
        finally:
            response.close()
        return parse_object(raw), response.headers.get("x-request-id")

    async def stream(self, path: str, body: dict[str, Any], record: AnswerRecord) -> AsyncGenerator[Piece, None]:
        """The pieces of a streamed answer; closing the generator closes the connection.

        Raises:
            SluiceClientError: any of `errors.py`; every piece that came before it was yielded.
        """
        response = await self._request("POST", path, body)
        record.request_id = response.headers.get("x-request-id")
        try:
            if response.content_type == "application/json":
                raise ProtocolError("the server answered a streamed request with JSON instead of an event stream")
            async with aclosing(self._events(response)) as events:
                async for data in events:
                    piece = record.take(data)
                    if piece is not None:
                        yield piece
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if record.finish_reason is None:
                raise ConnectionLostError(f"the stream broke off: {_describe(error)}") from error
        finally:
            response.close()  # one that was read to its end has gone back to the pool by itself
        if record.finish_reason is None:
            raise IncompleteStreamError("the stream ended without a finish reason; the text is not the whole answer")

    async def _await_end(self, response: aiohttp.ClientResponse) -> None:
        try:
            async with asyncio.timeout(self._limits.end_timeout_s):
                async for _ in response.content.iter_any():
                    pass  # nothing of the answer follows [DONE]
        except TimeoutError:
            return  # the connection is closed instead

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncGenerator[str, None]:
        """Data of each event up to [DONE] or the end."""
        decoder = SseDecoder(self._limits.max_event_bytes)
        async for chunk in response.content.iter_any():
            for event in decoder.feed(chunk):
                if event.data == DONE:
                    await self._await_end(response)
                    return
                yield event.data
        for event in decoder.close():
            if event.data == DONE:
                return
            yield event.data


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failed attempt."""

    error: SluiceClientError
    may_retry: bool
    retry_after_s: float | None = None
    cause: BaseException | None = None


async def _read_limited(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            raise ProtocolError(f"the server's answer is larger than {max_bytes} bytes")
    return bytes(body)


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__
