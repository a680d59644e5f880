"""The SDK for code without an event loop: the asynchronous client in a thread of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Literal, Self, Unpack

from sluice_client.answer import Answer
from sluice_client.answer_facts import Reply
from sluice_client.async_client import AsyncSluiceClient, Messages, Prompt, Prompts
from sluice_client.loop_thread import LoopThread
from sluice_client.pacer import PaceMode
from sluice_client.params import ChatParams, CompletionParams
from sluice_client.qoe import QoeTarget
from sluice_client.transport import ClientLimits


class SluiceClient:
    """A client of one server, or of several that serve the same; use it as a context manager, or `close` it.

    For any number of threads, and answers at a time; also where an event loop runs, which waits meanwhile. Its own
    thread begins with the first request: a process that forks later makes a client of its own in each child.

    Args:
        base_url: see `AsyncSluiceClient`, as for all of these.
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
        self._client = AsyncSluiceClient(base_url, api_key, model=model, limits=limits, rng=rng, transport=transport)
        self._loop_thread = LoopThread(self._client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection; what is under way raises RuntimeError, as every later use does."""
        self._loop_thread.close()

    def chat(
        self,
        messages: Messages,
        model: str | None = None,
        *,
        pace: PaceMode = "smooth",
        qoe: QoeTarget | None = None,
        idempotency_key: str | None = None,
        **params: Unpack[ChatParams],
    ) -> Answer:
        """Stream the answer to a conversation; arguments and errors as of `AsyncSluiceClient.chat`."""
        answer = self._client.chat(messages, model, pace=pace, qoe=qoe, idempotency_key=idempotency_key, **params)
        return Answer(answer, self._loop_thread)

    def complete(
        self,
        prompt: Prompt,
        model: str | None = None,
        *,
        pace: PaceMode = "smooth",
        qoe: QoeTarget | None = None,
        idempotency_key: str | None = None,
        **params: Unpack[CompletionParams],
    ) -> Answer:
        """Stream the continuation of a prompt (text or token ids); arguments as in `chat`."""
        answer = self._client.complete(prompt, model, pace=pace, qoe=qoe, idempotency_key=idempotency_key, **params)
        return Answer(answer, self._loop_thread)

    def chat_once(self, messages: Messages, model: str | None = None, **params: Unpack[ChatParams]) -> Reply:
        """The answer to a conversation in one piece, not streamed and not paced; with `n`, all choices."""
        return self._loop_thread.run(partial(self._client.chat_once, messages, model, **params))

    def complete_once(self, prompt: Prompts, model: str | None = None, **params: Unpack[CompletionParams]) -> Reply:
        """The continuation of a prompt, or of several, in one piece, not streamed and not paced; with all choices."""
        return self._loop_thread.run(partial(self._client.complete_once, prompt, model, **params))

    def models(self) -> list[str]:
        """Ids of the models that the server lists."""
        return self._loop_thread.run(self._client.models)
