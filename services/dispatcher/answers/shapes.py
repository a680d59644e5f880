"""How an answer looks on the wire: the JSON of chat and of completions, whole and in chunks.

A chunk's parts before and after the text are bytes that are made once per choice, so that a token costs three joins.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from services.dispatcher.answers.answer_text import escape_line_ends, json_text, json_text_parts
from services.dispatcher.endpoints.call import Choice
from services.dispatcher.text.tool_calls import CallPiece
from shared.types import FinishReason

_FINISH_NAMES: Final = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
FINGERPRINT: Final = "sluice"
DONE: Final = b"data: [DONE]\n\n"
NO_LOGPROBS: Final = b"null"
_EMPTY: Final = b'""'
_LOGPROBS: Final = b'"logprobs":%b'
_CONTENT: Final = b'"content":'
_MARK: Final = "\ue000 this is replaced \ue000"
_THOUGHTS: Final = ("reasoning", "reasoning_content")
"""Names of what a model thinks: clients read either."""
_UNFINISHED: Final = {"logprobs": None, "finish_reason": None}


@dataclass(frozen=True, slots=True)
class Usage:
    """What is billed, in tokens: the prompt once, the outputs of all choices."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    """Of the prompt's: those whose KV was there already."""
    num_thinking_tokens: int = 0
    """Of the outputs."""

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_thinking_tokens},
        }


def usage_of(choices: Sequence[Choice]) -> Usage:
    """Return what a request costs; one that was not admitted costs nothing."""
    firsts = [choice.session for choice in choices if choice.parent is None and choice.session is not None]
    return Usage(
        num_prompt_tokens=sum(session.request.num_prompt_tokens for session in firsts),
        num_output_tokens=sum(choice.text.num_tokens for choice in choices),
        num_cached_tokens=sum(session.cached_tokens or 0 for session in firsts),
        num_thinking_tokens=sum(choice.text.num_thinking_tokens for choice in choices),
    )


def finish_name(choice: Choice) -> str:
    """Return how a choice has ended, in OpenAI's words: with a whole call, if its model stopped by itself."""
    finish = choice.opened.finish
    return "tool_calls" if finish is FinishReason.STOP and choice.text.has_called else _FINISH_NAMES[finish]


def thoughts_json(thought: str) -> bytes:
    """Return the members of a `delta` that hold a part of the thinking, each with a comma behind it."""
    text = json_text(thought) if thought else b""
    return b"".join([b'"%b":%b,' % (name.encode(), text) for name in _THOUGHTS]) if thought else b""


def calls_json(pieces: Sequence[CallPiece]) -> bytes:
    """Return the member of a `delta` that holds parts of calls, with a comma behind it."""
    return b'"tool_calls":[%b],' % b",".join([_piece_json(piece) for piece in pieces]) if pieces else b""


def _piece_json(piece: CallPiece) -> bytes:
    arguments = json_text(piece.arguments)
    if not piece.call_id:
        return b'{"index":%d,"function":{"arguments":%b}}' % (piece.index, arguments)
    named = b'"id":%b,"type":"function"' % json_text(piece.call_id)
    function = b'{"name":%b,"arguments":%b}' % (json_text(piece.name), arguments)
    return b'{"index":%d,%b,"function":%b}' % (piece.index, named, function)


class JoinedCalls:
    """The calls of a choice that is not streamed."""

    def __init__(self) -> None:
        self._firsts: list[CallPiece] = []
        self._arguments: list[list[str]] = []

    def add(self, pieces: Sequence[CallPiece]) -> None:
        """Take what came."""
        for piece in pieces:
            if piece.call_id:
                self._firsts.append(piece)
                self._arguments.append([])
            self._arguments[piece.index].append(piece.arguments)

    def __len__(self) -> int:
        return len(self._firsts)

    def parts(self) -> Iterator[bytes]:
        """Return them as JSON, piece by piece."""
        before = b"["
        for first, arguments in zip(self._firsts, self._arguments, strict=True):
            function = {"name": first.name, "arguments": _MARK}
            call = {"id": first.call_id, "type": "function", "function": function}
            head, tail = _json(call).split(_json(_MARK))
            yield before + head
            yield from json_text_parts("".join(arguments))
            yield tail
            before = b","
        yield b"]"


@dataclass(frozen=True, slots=True)
class WholeText:
    """What a choice says that is not streamed."""

    said: str
    thought: str | None
    """None if thinking is not told apart."""
    calls: JoinedCalls


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """The fields that every part of one answer shares.

    Args:
        is_chat: chat or completions.
        answer_id: `chatcmpl-…` or `cmpl-…`.
        created_unix_s: when the request came.
        model: the name under which the model answers.
        service_tier: the tier that is really used.
        include_usage: whether a stream ends with a chunk of usage.
    """

    is_chat: bool
    answer_id: str
    created_unix_s: int
    model: str
    service_tier: str
    include_usage: bool

    def _common(self, *, in_stream: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if in_stream else "chat.completion"
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created_unix_s,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "service_tier": self.service_tier,
        }

    def event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        """Return an event; one that is not the last carries `usage: null` if the last one has usage."""
        usage = {"usage": None} if self.include_usage else {}
        content = {**self._common(in_stream=True), "choices": choices, **usage, **more}
        return b"data: " + _json(content) + b"\n\n"

    def usage_chunk(self, usage: Usage, extra: dict[str, Any]) -> bytes:
        """Return the event after all choices; b"" if nobody asked for it."""
        return self.event([], {"usage": usage.as_json(), "sluice": extra}) if self.include_usage else b""

    def whole(self, choices: Iterable[Iterator[bytes]], usage: Usage) -> Iterator[bytes]:
        """Return the body of an answer that is not streamed, piece by piece; `choices` are from `whole_choice`."""
        content = {**self._common(in_stream=False), "choices": _MARK, "usage": usage.as_json()}
        head, tail = _json(content).split(_json(_MARK))
        yield head
        before = b"["
        for choice in choices:
            yield before
            yield from choice
            before = b","
        yield b"]" + tail

    def whole_choice(
        self,
        index: int,
        text: WholeText,
        finish_reason: str | None,
        logprobs: Iterator[bytes],
        error: dict[str, Any] | None,
    ) -> Iterator[bytes]:
        """Return one choice of such a body, piece by piece; `logprobs` is JSON."""
        choice: dict[str, Any] = {"index": index, "logprobs": _MARK, "finish_reason": finish_reason}
        has_other = bool(text.thought) or len(text.calls) > 0
        said = iter((b"null",)) if has_other and not text.said else json_text_parts(text.said)
        values = [logprobs, said]
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": _MARK, "refusal": None}
            if text.thought is not None:
                choice["message"] |= dict.fromkeys(_THOUGHTS, _MARK if text.thought else None)
                values += [json_text_parts(text.thought) for _ in _THOUGHTS if text.thought]
            if text.calls:
                choice["message"]["tool_calls"] = _MARK
                values.append(text.calls.parts())
        else:
            choice["text"] = _MARK
        if error is not None:
            choice["error"] = error
        head, *between = _json(choice).split(_json(_MARK))
        yield head
        for value, after in zip(values, between, strict=True):
            yield from value
            yield after


@dataclass(frozen=True, slots=True)
class ChoiceShape:
    """The events of one choice of a stream.

    Args:
        shape: of the whole answer.
        index: of the choice.
    """

    shape: AnswerShape
    index: int
    head: bytes = field(init=False)
    """Of an event with text: everything before the JSON string."""
    head_of_delta: bytes = field(init=False)
    """Of a chat's event: everything before the first member of `delta`."""
    tail: bytes = field(init=False)
    """Everything after it, when the event holds one token."""
    tail_with_count: bytes = field(init=False)
    """Same, with a `%d` for the number of tokens."""

    def __post_init__(self) -> None:
        head, tail = self.shape.event([self._choice(_MARK)], {}).split(_json(_MARK))
        object.__setattr__(self, "head", head)
        object.__setattr__(self, "head_of_delta", head.removesuffix(_CONTENT))
        object.__setattr__(self, "tail", tail)
        object.__setattr__(self, "tail_with_count", tail.removesuffix(b"}\n\n") + b',"sluice":{"n":%d}}\n\n')

    def _choice(self, text: str) -> dict[str, Any]:
        shown = {"delta": {"content": text}} if self.shape.is_chat else {"text": text}
        return {"index": self.index, **shown, **_UNFINISHED}

    def chunk(self, text: bytes, num_tokens: int, logprobs: bytes | None = None, more: bytes = b"") -> bytes:
        """Return the event with some text.

        Args:
            text: as a JSON string (`json_text`).
            num_tokens: tokens that it holds.
            logprobs: of these tokens, as JSON; None if nobody asked.
            more: thinking and calls (`thoughts_json`, `calls_json`). With it, a text that is empty is left out.
        """
        head = self.head
        if more:
            head, text = self.head_of_delta, more[:-1] if text == _EMPTY else more + _CONTENT + text
        if num_tokens == 1 and logprobs is None:  # nearly always
            return head + text + self.tail
        tail = self.tail if num_tokens == 1 else self.tail_with_count % num_tokens
        if logprobs is not None:
            tail = tail.replace(_LOGPROBS % NO_LOGPROBS, _LOGPROBS % logprobs, 1)
        return head + text + tail

    def role_chunk(self) -> bytes:
        """Return the first event of a chat: whose turn it is; b"" for completions."""
        if not self.shape.is_chat:
            return b""
        choice = {"index": self.index, "delta": {"role": "assistant", "content": ""}, **_UNFINISHED}
        return self.shape.event([choice], {})

    def finish_chunk(self, finish_reason: str, extra: dict[str, Any]) -> bytes:
        """Return the event with the finish reason; `extra` stands in it unless an event with usage follows."""
        choice: dict[str, Any] = {"index": self.index, **({"delta": {}} if self.shape.is_chat else {"text": ""})}
        choice |= {"logprobs": None, "finish_reason": finish_reason}
        return self.shape.event([choice], {} if self.shape.include_usage else {"sluice": extra})


def _json(content: object) -> bytes:
    return escape_line_ends(json.dumps(content, ensure_ascii=False, separators=(",", ":"))).encode()
