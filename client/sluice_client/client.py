"""The SDK: chat and completions, streamed or not, for Sluice and any OpenAI-compatible server."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from sluice_client.answer import Answer, Reply
from sluice_client.errors import ProtocolError
from sluice_client.pacer import PaceMode, Piece, make_pacer
from sluice_client.protocol import AnswerRecord
from sluice_client.qoe import QoeTarget
from sluice_client.transport import ClientLimits, Transport

Messages = str | Sequence[Mapping[str, Any]]


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
        rng = rng or random.Random()  # noqa: S311  jitter, not secrecy
        self._transport = Transport(base_url, api_key, limits or ClientLimits(), rng)
        self._model = model

    async def __aenter__(self) -> Self:
        await self._transport.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection; answers under way lose theirs."""
        await self._transport.close()

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
        """The answer to a conversation in one piece, not streamed and not paced; with `n`, all choices."""
        return await self._once("chat/completions", {"messages": _as_messages(messages), **params}, model)

    async def complete_once(self, prompt: str | Sequence[int], model: str | None = None, **params: Any) -> Reply:
        """The continuation of a prompt in one piece, not streamed and not paced."""
        return await self._once("completions", {"prompt": prompt, **params}, model)

    async def models(self) -> list[str]:
        """Ids of the models that the server lists."""
        body, _ = await self._transport.fetch("GET", "models", None)
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
        async with aclosing(self._transport.stream(path, await self._with_model(body, model), record)) as pieces:
            async for piece in pieces:
                yield piece

    async def _once(self, path: str, body: dict[str, Any], model: str | None) -> Reply:
        body = await self._with_model({**body, "stream": False}, model)
        reply, request_id = await self._transport.fetch("POST", path, body)
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


def _index(choice: dict[str, Any]) -> int:
    index = choice.get("index", 0)
    return index if isinstance(index, int) else 0


def _message(choice: dict[str, Any]) -> dict[str, Any]:
    """Return the message of a chat's choice; of a completion's, its text as one."""
    message = choice.get("message")
    return message if isinstance(message, dict) else {"content": choice.get("text")}


def _as_messages(messages: Messages) -> list[Mapping[str, Any]]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
