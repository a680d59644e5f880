"""What OpenAI's streamed chunks say, and Sluice's additions to them. Pure: strings in, a record out.

Everything of Sluice's is optional: `sluice.n` (tokens of this chunk; 1 if absent) on any chunk; `sluice.qoe`,
`sluice.ttft_s` and `sluice.tokens` on the last one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice_client.errors import APIStreamError, ProtocolError
from sluice_client.pacer import Piece

DONE = "[DONE]"
MAX_CHUNK_TOKENS = 1_000_000
"""A larger `sluice.n` is not believed."""


@dataclass(slots=True)
class AnswerRecord:
    """What one answer has said so far; written by the reader of the stream, read by its `AnswerFacts`."""

    parts: list[str] = field(default_factory=list)
    reasoning_parts: list[str] = field(default_factory=list)
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    request_id: str | None = None
    model: str | None = None
    server_stats: dict[str, Any] = field(default_factory=dict)
    _thinks: bool = False  # and no text has come since

    def take_chunk(self, chunk: dict[str, Any]) -> Piece | None:
        """Take the object of one event; returns the text it brings, if any.

        Raises:
            APIStreamError: it is an error event.
            ProtocolError: it is not a chunk.
        """
        if chunk.get("error") is not None:
            message, code, kind = parse_error(chunk)
            raise APIStreamError(message, code=code, kind=kind, request_id=self.request_id)
        self.request_id = self.request_id or _string(chunk, "id")
        self.model = _string(chunk, "model") or self.model
        if isinstance(chunk.get("usage"), dict):
            self.usage = chunk["usage"]
        extension = chunk.get("sluice")
        extension = extension if isinstance(extension, dict) else {}
        self.server_stats |= {k: v for k, v in extension.items() if k != "n"}
        num_thoughts = len(self.reasoning_parts)
        text = "".join(self._take_choice(choice) for choice in _first_choice(chunk))
        has_thought, has_calls = any(self.reasoning_parts[num_thoughts:]), _has_calls(chunk)
        num_tokens = 0 if has_calls and not text else _num_tokens(extension, text)  # nobody reads calls word by word
        thinks = has_thought or (self._thinks and num_tokens > 0 and not text)  # a tag has no text
        self._thinks = (self._thinks or has_thought) and not text and not has_calls
        if thinks and not text:
            num_tokens = 0
        return Piece(text, num_tokens, thinks=thinks) if text or num_tokens or thinks else None

    def _take_choice(self, choice: dict[str, Any]) -> str:
        self.finish_reason = _string(choice, "finish_reason") or self.finish_reason
        self._take_logprobs(choice.get("logprobs"))
        delta = choice.get("delta")
        if not isinstance(delta, dict):  # /v1/completions
            return self._take_text(_string(choice, "text"))
        self.reasoning_parts.append(_string(delta, "reasoning_content") or _string(delta, "reasoning") or "")
        for call in delta.get("tool_calls") or ():
            self._take_tool_call(call)
        return self._take_text(_string(delta, "content"))

    def _take_logprobs(self, part: object) -> None:
        """Keep chat's entries one by one, and completions' objects as they come."""
        if not isinstance(part, dict):
            return
        if "tokens" in part:
            self.logprobs.append(part)
        elif isinstance(part.get("content"), list):
            self.logprobs += [entry for entry in part["content"] if isinstance(entry, dict)]

    def _take_text(self, text: str | None) -> str:
        if text:
            self.parts.append(text)
        return text or ""

    def _take_tool_call(self, part: object) -> None:
        if not isinstance(part, dict) or not isinstance(part.get("index", 0), int):
            raise ProtocolError("a tool call of the stream has no shape that OpenAI's protocol knows")
        empty: dict[str, Any] = {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        call = self.tool_calls.setdefault(part.get("index", 0), empty)
        call["id"] = _string(part, "id") or call["id"]
        function = part.get("function")
        if isinstance(function, dict):
            call["function"]["name"] += _string(function, "name") or ""
            call["function"]["arguments"] += _string(function, "arguments") or ""


def to_json(value: object) -> str:
    """The value as JSON; mappings and sequences may be of any kind.

    Raises:
        TypeError: something in it cannot be written.
    """
    return json.dumps(value, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"a request cannot have a {type(value).__name__} in it")


def parse_object(data: str | bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ProtocolError: it is none.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the server sent something that is not JSON: {data[:80]!r}") from error
    if not isinstance(value, dict):
        raise ProtocolError(f"the server sent JSON that is not an object: {data[:80]!r}")
    return value


def parse_error(body: dict[str, Any]) -> tuple[str, str | None, str | None]:
    """Message, code and type of an error in OpenAI's format (or nearly: `{"error": "text"}`, `{"message": "text"}`)."""
    error = body.get("error", body)
    if not isinstance(error, dict):
        return str(error), None, None
    code = error.get("code")
    message = _loose_string(error.get("message")) or json.dumps(error)
    return message, None if code is None else str(code), _loose_string(error.get("type"))


def _first_choice(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    choices = chunk.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ProtocolError("the choices of a chunk are not a list of objects")
    return [choice for choice in choices if choice.get("index", 0) == 0]


def _has_calls(chunk: dict[str, Any]) -> bool:
    deltas = [choice.get("delta") for choice in _first_choice(chunk)]
    return any(isinstance(delta, dict) and delta.get("tool_calls") for delta in deltas)


def _num_tokens(extension: dict[str, Any], text: str) -> int:
    value = extension.get("n")
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_CHUNK_TOKENS:
        return value
    return 1 if text else 0


def _string(source: dict[str, Any], name: str) -> str | None:
    value = source.get(name)
    if value is not None and not isinstance(value, str):
        raise ProtocolError(f"{name} is not a string but {type(value).__name__}")
    return value


def _loose_string(value: object) -> str | None:
    return value if isinstance(value, str) else None
