"""The SDK: chat and completions, streamed or not, for Sluice and any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from sluice_client.answer import Answer, Reply
from sluice_client.errors import (
    APIConnectionError,
    APIStatusError,
    ConnectionLostError,
    IncompleteStreamError,
    ProtocolError,
    SluiceClientError,
)
from sluice_client.pacer import PaceMode, Piece, make_pacer
from sluice_client.protocol import DONE, AnswerRecord, parse_error, parse_object
from sluice_client.qoe import QoeTarget
from sluice_client.retry import RetryPolicy, may_retry, parse_retry_after
from sluice_client.sse import SseDecoder

Messages = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Every bound of a client."""

    connect_timeout_s: float = 5.0
    """Longest wait for a connection."""
    idle_timeout_s: float = 120.0
    """Longest silence of the server, before its headers or within a stream; a keep-alive comment ends a silence."""
    max_connections: int = 1000
    """Open at the same time; further requests wait."""
    max_event_bytes: int = 1 << 20
    """Largest event of a stream."""
    max_body_bytes: int = 16 << 20
    """Largest answer that is not streamed."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """Before the first token only."""


class SluiceClient:
    """A client of one server; use it as an asynchronous context manager.

    Args:
        base_url: "http://host:8000"; /v1 is added unless the URL has a path of its own.
        api_key: sent as a bearer token.
        model: default of the methods; None: the first model that the server lists.
        limits: timeouts and sizes.
        rng: source of the jitter between retries.

    Raises:
        ValueError: base_url is not an http(s) URL.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        model: str | None = None,
        limits: ClientLimits | None = None,
        rng: random.Random | None = None,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"base_url must look like http://host:8000, not {base_url!r}")
        path = parts.path.rstrip("/") or "/v1"
        self._base_url = f"{parts.scheme}://{parts.netloc}{path}"
        self._headers = {"Accept-Encoding": "identity"}  # compression would hold tokens back
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._model = model
        self._limits = limits or ClientLimits()
        self._rng = rng or random.Random()  # noqa: S311  jitter, not secrecy
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        limits = self._limits
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=limits.max_connections),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=limits.connect_timeout_s, sock_read=limits.idle_timeout_s
            ),
            headers=self._headers,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection; answers under way lose theirs."""
        if self._session is not None:
            await self._session.close()

    def chat(
        self,
        messages: Messages,
        model: str | None = None,
        *,
        pace: PaceMode | None = "human",
        qoe: QoeTarget | None = None,
        **params: Any,
    ) -> Answer:
        """Stream the answer to a conversation.

        Args:
            messages: in OpenAI's format; a string is one message of the user.
            model: None takes the client's default.
            pace: "human" for people, "strict" for the exact timeline of `qoe`, None for programs.
            qoe: the reader's expectation; sent to the server if given (only Sluice knows the field).
            **params: any other field of the request (`max_tokens`, `temperature`, …).

        Raises:
            ValueError: unknown `pace`, or `n` above 1.
        """
        return self._stream("chat/completions", {"messages": _as_messages(messages), **params}, model, pace, qoe)

    def complete(
        self,
        prompt: str | Sequence[int],
        model: str | None = None,
        *,
        pace: PaceMode | None = "human",
        qoe: QoeTarget | None = None,
        **params: Any,
    ) -> Answer:
        """Stream the continuation of a prompt (text or token ids); arguments as in `chat`."""
        return self._stream("completions", {"prompt": prompt, **params}, model, pace, qoe)

    async def chat_once(self, messages: Messages, model: str | None = None, **params: Any) -> Reply:
        """The answer to a conversation in one piece, not streamed and not paced."""
        return await self._once("chat/completions", {"messages": _as_messages(messages), **params}, model)

    async def complete_once(self, prompt: str | Sequence[int], model: str | None = None, **params: Any) -> Reply:
        """The continuation of a prompt in one piece, not streamed and not paced."""
        return await self._once("completions", {"prompt": prompt, **params}, model)

    async def models(self) -> list[str]:
        """Ids of the models that the server lists."""
        body = await self._read_object(await self._request("GET", "models", None))
        data = body.get("data")
        if not isinstance(data, list) or not all(isinstance(m, dict) and isinstance(m.get("id"), str) for m in data):
            raise ProtocolError("the server's list of models is not in OpenAI's format")
        return [model["id"] for model in data]

    def _stream(
        self, path: str, body: dict[str, Any], model: str | None, pace: PaceMode | None, qoe: QoeTarget | None
    ) -> Answer:
        if body.get("n", 1) != 1:
            raise ValueError("an Answer streams one choice; send n requests instead of n choices")
        pacer = make_pacer(pace, qoe)
        body = {"stream_options": {"include_usage": True}, **body, "stream": True}
        if qoe is not None:
            body["qoe"] = {"ttft_s": qoe.ttft_s, "speed_tokens_per_s": qoe.speed_tokens_per_s}
        record = AnswerRecord()
        return Answer(self._pieces(path, body, model, record), record, pacer)

    async def _pieces(
        self, path: str, body: dict[str, Any], model: str | None, record: AnswerRecord
    ) -> AsyncGenerator[Piece, None]:
        """Send the request and yield its text; holds the connection, and closes it when it is closed itself."""
        response = await self._request("POST", path, await self._with_model(body, model))
        record.request_id = response.headers.get("x-request-id")
        try:
            if response.content_type == "application/json":
                raise ProtocolError("the server answered a streamed request with JSON instead of an event stream")
            async with aclosing(self._events(response)) as events:
                async for data in events:
                    piece = record.take(data)
                    if piece is not None:
                        yield piece
            response.release()  # back to the pool if it was read to its end
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if record.finish_reason is None:
                raise ConnectionLostError(f"the stream broke off: {_describe(error)}") from error
        finally:
            response.close()
        if record.finish_reason is None:
            raise IncompleteStreamError("the stream ended without a finish reason; the text is not the whole answer")

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncGenerator[str, None]:
        """Data of each event up to [DONE] or the end."""
        decoder = SseDecoder(self._limits.max_event_bytes)
        async for chunk in response.content.iter_any():
            for event in decoder.feed(chunk):
                if event.data == DONE:
                    return
                yield event.data
        for event in decoder.close():
            if event.data == DONE:
                return
            yield event.data

    async def _once(self, path: str, body: dict[str, Any], model: str | None) -> Reply:
        response = await self._request("POST", path, await self._with_model({**body, "stream": False}, model))
        request_id = response.headers.get("x-request-id")
        reply = await self._read_object(response)
        choices = reply.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise ProtocolError("the server's answer has no choice")
        message = choices[0].get("message")
        message = message if isinstance(message, dict) else {"content": choices[0].get("text")}
        return Reply(
            text=message.get("content") or "",
            finish_reason=choices[0].get("finish_reason"),
            usage=reply.get("usage"),
            request_id=request_id or reply.get("id"),
            tool_calls=message.get("tool_calls") or [],
        )

    async def _with_model(self, body: dict[str, Any], model: str | None) -> dict[str, Any]:
        model = model or self._model
        if model is None:
            models = await self.models()
            if not models:
                raise ProtocolError("the server lists no model; name one")
            model = self._model = models[0]
        return {"model": model, **body}

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

    async def _read_object(self, response: aiohttp.ClientResponse) -> dict[str, Any]:
        try:
            raw = await _read_limited(response, self._limits.max_body_bytes)
            response.release()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConnectionLostError(f"the answer broke off: {_describe(error)}") from error
        finally:
            response.close()
        return parse_object(raw)


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


def _as_messages(messages: Messages) -> list[Mapping[str, Any]]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__
