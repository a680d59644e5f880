"""The SDK: chat and completions, streamed or not, for Sluice and any OpenAI-compatible server."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Literal, Self, Unpack

from sluice_client.answer_facts import Reply
from sluice_client.answer_stream import EventSource, stream_pieces
from sluice_client.async_answer import AsyncAnswer
from sluice_client.cursor import Cursor, check_key
from sluice_client.errors import ProtocolError
from sluice_client.pacer import PaceMode, Pacer, Piece, make_pacer
from sluice_client.params import ChatMessage, ChatParams, CompletionParams, chat_fields, completion_fields
from sluice_client.protocol import AnswerRecord
from sluice_client.qoe import QoeTarget
from sluice_client.socket_transport import SocketTransport
from sluice_client.transport import ClientLimits, Transport

Messages = str | Sequence[ChatMessage]
Prompt = str | Sequence[int]
"""Text or token ids."""
Prompts = Prompt | Sequence[str] | Sequence[Sequence[int]]


class AsyncSluiceClient:
    """A client of one server, or of several that serve the same; use it as an asynchronous context manager.

    An answer whose connection is lost is resumed if the server can (Sluice): the reader sees a pause.

    Args:
        base_url: "http://host:8000"; /v1 is added unless the URL has a path of its own. Of several, the next one is
            asked when one cannot be reached or has no capacity.
        api_key: sent as a bearer token.
        model: default of the methods; None: the first model that the server lists.
        limits: timeouts, sizes and retries.
        rng: source of the jitter between retries.
        transport: of streamed answers; "websocket" (Sluice only) carries several over one connection.

    Raises:
        ValueError: base_url is not an http(s) URL, or there is no such transport.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        api_key: str | None = None,
        *,
        model: str | None = None,
        limits: ClientLimits | None = None,
        rng: random.Random | None = None,
        transport: Literal["http", "websocket"] = "http",
    ) -> None:
        if transport not in ("http", "websocket"):
            raise ValueError(f"transport must be 'http' or 'websocket', not {transport!r}")
        rng = rng or random.Random()  # noqa: S311  jitter, not secrecy
        self._transport = Transport(base_url, api_key, limits or ClientLimits(), rng)
        self._sockets = SocketTransport(self._transport) if transport == "websocket" else None
        self._model = model

    async def __aenter__(self) -> Self:
        await self._transport.open()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection; answers under way lose theirs."""
        try:
            if self._sockets is not None:
                await self._sockets.close()
        finally:
            await self._transport.close()

    def chat(
        self,
        messages: Messages,
        model: str | None = None,
        *,
        pace: PaceMode = "smooth",
        qoe: QoeTarget | None = None,
        idempotency_key: str | None = None,
        **params: Unpack[ChatParams],
    ) -> AsyncAnswer:
        """Stream the answer to a conversation.

        Args:
            messages: in OpenAI's format; a string is one message of the user.
            model: None takes the client's default.
            pace: "reading" shows the text at the speed that `qoe` says, "smooth" evenly as fast as it comes, "off" as
                it comes, for programs.
            qoe: the reader's expectation; sent to the server if given (only Sluice knows the field).
            idempotency_key: of requests that are one; None: a new one, so that it is one however often it is sent.
            **params: other fields of the request (`max_tokens`, `temperature`, …).

        Raises:
            TypeError: no parameter has this name.
            ValueError: unknown `pace`, `n` above 1, or a key that cannot be a header.
        """
        body = {"messages": _as_messages(messages), **chat_fields(params)}
        return self._stream("chat/completions", _with_qoe(body, qoe), model, make_pacer(pace, qoe), idempotency_key)

    def complete(
        self,
        prompt: Prompt,
        model: str | None = None,
        *,
        pace: PaceMode = "smooth",
        qoe: QoeTarget | None = None,
        idempotency_key: str | None = None,
        **params: Unpack[CompletionParams],
    ) -> AsyncAnswer:
        """Stream the continuation of a prompt (text or token ids); arguments as in `chat`."""
        body = {"prompt": prompt, **completion_fields(params)}
        return self._stream("completions", _with_qoe(body, qoe), model, make_pacer(pace, qoe), idempotency_key)

    async def chat_once(self, messages: Messages, model: str | None = None, **params: Unpack[ChatParams]) -> Reply:
        """The answer to a conversation in one piece, not streamed and not paced; with `n`, all choices."""
        return await self._once("chat/completions", {"messages": _as_messages(messages), **chat_fields(params)}, model)

    async def complete_once(
        self, prompt: Prompts, model: str | None = None, **params: Unpack[CompletionParams]
    ) -> Reply:
        """The continuation of a prompt, or of several, in one piece, not streamed and not paced; with all choices."""
        return await self._once("completions", {"prompt": prompt, **completion_fields(params)}, model)

    async def models(self) -> list[str]:
        """Ids of the models that the server lists."""
        body, _ = await self._transport.fetch("GET", "models", None)
        data = body.get("data")
        if not isinstance(data, list) or not all(isinstance(m, dict) and isinstance(m.get("id"), str) for m in data):
            raise ProtocolError("the server's list of models is not in OpenAI's format")
        return [model["id"] for model in data]

    def _stream(self, path: str, body: dict[str, Any], model: str | None, pacer: Pacer, key: str | None) -> AsyncAnswer:
        if body.get("n", 1) != 1:
            raise ValueError("an AsyncAnswer streams one choice; send n requests instead of n choices")
        body = {"stream_options": {"include_usage": True}, **body, "stream": True}
        source: EventSource = self._transport if self._sockets is None else self._sockets
        record, cursor = AnswerRecord(), Cursor(check_key(key))
        pieces = self._pieces(source, path, body, model, cursor, record)
        return AsyncAnswer(pieces, record, pacer, partial(source.cancel, cursor))

    async def _pieces(
        self,
        source: EventSource,
        path: str,
        body: dict[str, Any],
        model: str | None,
        cursor: Cursor,
        record: AnswerRecord,
    ) -> AsyncGenerator[Piece, None]:
        body = await self._with_model(body, model)
        async with aclosing(stream_pieces(source, path, body, cursor, record)) as pieces:
            async for piece in pieces:
                yield piece

    async def _once(self, path: str, body: dict[str, Any], model: str | None) -> Reply:
        body = await self._with_model({**body, "stream": False}, model)
        reply, request_id = await self._transport.fetch("POST", path, body, Cursor(check_key(None)))
        choices = reply.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise ProtocolError("the server's answer has no choice")
        choices = sorted((choice for choice in choices if isinstance(choice, dict)), key=_index)
        messages = [_message(choice) for choice in choices]
        message = messages[0]
        return Reply(
            text=message.get("content") or "",
            finish_reason=choices[0].get("finish_reason"),
            usage=reply.get("usage"),
            request_id=request_id or reply.get("id"),
            tool_calls=message.get("tool_calls") or [],
            texts=[each.get("content") or "" for each in messages],
            logprobs=choices[0].get("logprobs"),
        )

    async def _with_model(self, body: dict[str, Any], model: str | None) -> dict[str, Any]:
        model = model or self._model
        if model is None:
            models = await self.models()
            if not models:
                raise ProtocolError("the server lists no model; name one")
            model = self._model = models[0]
        return {"model": model, **body}


def _with_qoe(body: dict[str, Any], qoe: QoeTarget | None) -> dict[str, Any]:
    if qoe is None:
        return body
    return {**body, "qoe": {"ttft_s": qoe.ttft_s, "speed_tokens_per_s": qoe.speed_tokens_per_s}}


def _index(choice: dict[str, Any]) -> int:
    index = choice.get("index", 0)
    return index if isinstance(index, int) else 0


def _message(choice: dict[str, Any]) -> dict[str, Any]:
    """Return the message of a chat's choice; of a completion's, its text as one."""
    message = choice.get("message")
    return message if isinstance(message, dict) else {"content": choice.get("text")}


def _as_messages(messages: Messages) -> list[ChatMessage]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
