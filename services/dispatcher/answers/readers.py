"""Who takes the tokens of a choice: the writer of a stream, or the collector of an answer that is sent whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from services.dispatcher.answers.answer_text import MAX_LOGPROB_TOKENS, json_text
from services.dispatcher.answers.logprobs import KeptLogprobs, LogprobWriter
from services.dispatcher.answers.shapes import (
    NO_LOGPROBS,
    AnswerShape,
    ChoiceShape,
    JoinedCalls,
    WholeText,
    calls_json,
    finish_name,
    thoughts_json,
)
from services.dispatcher.endpoints.call import Choice
from services.dispatcher.http.sse import EventWriter
from services.dispatcher.session.request import Reader
from shared.types import FinishReason


class ChoiceReader(Reader, Protocol):
    """Takes the tokens of one choice, and makes its part of the answer of them."""

    async def pause(self) -> None:
        """Return when others have had their turn, and a client has taken most of what it was sent."""

    def end(self, estimate: dict[str, Any], now_s: float) -> None:
        """The choice has its whole answer; `estimate` is the server's own account of it."""


class Streamer:
    """Writes the tokens of one choice at once.

    Args:
        choice: its own.
        shape: of the choice's events.
        stream: open.
        logprobs: None if nobody asked for them.
    """

    __slots__ = ("_choice", "_logprobs", "_num_pending", "_shape", "_stream", "_text")

    def __init__(self, choice: Choice, shape: ChoiceShape, stream: EventWriter, logprobs: LogprobWriter | None) -> None:
        self._choice = choice
        self._text = choice.text
        self._shape = shape
        self._stream = stream
        self._logprobs = logprobs
        self._num_pending = 0  # tokens since the last event: their text was not decided yet

    def begin(self, now_s: float) -> None:
        """Write what comes before the first token."""
        echo = self._choice.echo
        data = self._shape.role_chunk() + (self._shape.chunk(json_text(echo), 0) if echo else b"")
        if data:
            self._send(data, now_s)

    def on_tokens(self, token_ids: Sequence[int], finish: FinishReason, now_s: float) -> bool:
        """Take the next tokens (the session's `Reader`)."""
        if self._logprobs is not None:
            self._write_with_logprobs(self._logprobs, token_ids, finish, now_s)
        else:
            self._write(self._push(token_ids, finish), now_s)
        return not self._text.was_cut

    def _push(self, token_ids: Sequence[int], finish: FinishReason) -> str:
        """Return the text that becomes visible, and count the tokens."""
        num_before = self._text.num_tokens
        text = self._text.push(token_ids, finish)
        self._num_pending += self._text.num_tokens - num_before
        return text

    def _write(self, text: str, now_s: float, logprobs: bytes | None = None) -> None:
        """Write an event, if there is anything to say."""
        thought, calls = self._text.take_thoughts(), self._text.take_calls()
        if text or thought or calls or logprobs is not None:
            more = thoughts_json(thought) + calls_json(calls)
            self._send(self._shape.chunk(json_text(text), self._num_pending, logprobs, more), now_s)
            self._num_pending = 0

    def _send(self, data: bytes, now_s: float) -> None:
        self._stream.write(data, now_s)

    def _write_with_logprobs(
        self, writer: LogprobWriter, token_ids: Sequence[int], finish: FinishReason, now_s: float
    ) -> None:
        """Write tokens in events that stay short, however many come at once, as if they had come in as many parts."""
        is_over = False
        while not is_over:
            size = max(MAX_LOGPROB_TOKENS - self._text.num_waiting, 1)
            part, token_ids = token_ids[:size], token_ids[size:]
            text = self._push(part, FinishReason.NONE if token_ids else finish)
            shown = self._text.take_shown()
            self._write(text, now_s, writer.join(self._choice, shown) if text or shown else None)
            is_over = not token_ids or self._text.was_cut

    async def pause(self) -> None:
        """Let others have their turn, and the client take most of what it was sent."""
        await self._stream.drain()

    def end(self, estimate: dict[str, Any], now_s: float) -> None:
        """Write the finish reason of a choice that has one."""
        self._send(self._shape.finish_chunk(finish_name(self._choice), estimate), now_s)


class Collector:
    """Keeps the text of one choice.

    Args:
        choice: its own.
        logprobs: None if nobody asked for them.
    """

    __slots__ = ("_calls", "_choice", "_kept", "_logprobs", "_texts", "_thoughts")

    def __init__(self, choice: Choice, logprobs: LogprobWriter | None) -> None:
        self._choice = choice
        self._texts = [choice.echo]
        self._thoughts: list[str] = []
        self._calls = JoinedCalls()
        self._logprobs = logprobs
        self._kept = KeptLogprobs()

    def on_tokens(self, token_ids: Sequence[int], finish: FinishReason, now_s: float) -> bool:
        """Take the next tokens (the session's `Reader`)."""
        self._texts.append(self._choice.text.push(token_ids, finish))
        self._thoughts.append(self._choice.text.take_thoughts())
        self._calls.add(self._choice.text.take_calls())
        if self._logprobs is not None:
            self._kept.add(self._choice, self._choice.text.take_shown())
        return not self._choice.text.was_cut

    async def pause(self) -> None:
        """Let others have their turn."""
        await asyncio.sleep(0)

    def end(self, estimate: dict[str, Any], now_s: float) -> None:
        """Do nothing: such an answer has no account of how it was sent."""

    def parts(self, shape: AnswerShape, error: dict[str, Any] | None) -> Iterator[bytes]:
        """Return the choice as JSON, piece by piece; one that failed has what came of it, and its error.

        Args:
            shape: of the answer.
            error: None if the choice is whole.
        """
        choice = self._choice
        reason = finish_name(choice) if error is None else None
        logprobs = self._logprobs.parts(self._kept) if self._logprobs is not None else iter((NO_LOGPROBS,))
        thought = "".join(self._thoughts) if choice.text.tells_thinking else None
        said = WholeText("".join(self._texts), thought, self._calls)
        return shape.whole_choice(choice.index, said, reason, logprobs, error)
