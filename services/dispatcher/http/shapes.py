"""How an answer looks on the wire: the JSON of chat and of completions, whole and in chunks.

A chunk's parts before and after the text are bytes that are made once per request, so that a token costs three joins.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

from shared.types import FinishReason

FINISH_NAMES: Final = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
FINGERPRINT: Final = "sluice"
_MARK: Final = "\ue000 the text stands here \ue000"
_UNFINISHED: Final = {"logprobs": None, "finish_reason": None}


@dataclass(frozen=True, slots=True)
class Usage:
    """What is billed, in tokens."""

    num_prompt_tokens: int
    num_output_tokens: int

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


@dataclass(frozen=True, slots=True)
class Shape:
    """The fields that every part of one answer shares.

    Args:
        is_chat: chat or completions.
        answer_id: `chatcmpl-…` or `cmpl-…`.
        created_unix_s: when the request came.
        model: the name under which the model is served.
        service_tier: the tier that is really used.
        include_usage: whether a stream ends with a chunk of usage.
    """

    is_chat: bool
    answer_id: str
    created_unix_s: int
    model: str
    service_tier: str
    include_usage: bool
    head: bytes = field(init=False)
    """Of a chunk with text: everything before the JSON string."""
    tail: bytes = field(init=False)
    """Everything after it, when the chunk holds one token."""
    tail_with_count: bytes = field(init=False)
    """Same, with a `%d` for the number of tokens."""

    def __post_init__(self) -> None:
        text = "delta" if self.is_chat else "text"
        choice = {"index": 0, text: {"content": _MARK} if self.is_chat else _MARK, **_UNFINISHED}
        usage = {"usage": None} if self.include_usage else {}
        head, tail = self._event([choice], usage).split(_json(_MARK))
        object.__setattr__(self, "head", head)
        object.__setattr__(self, "tail", tail)
        object.__setattr__(self, "tail_with_count", tail.removesuffix(b"}\n\n") + b',"sluice":{"n":%d}}\n\n')

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

    def chunk(self, text: bytes, num_tokens: int) -> bytes:
        """Return the event with some text.

        Args:
            text: as a JSON string (`json_text`).
            num_tokens: tokens that it holds.
        """
        if num_tokens == 1:
            return self.head + text + self.tail
        return self.head + text + self.tail_with_count % num_tokens

    def role_chunk(self) -> bytes:
        """Return the first event of a chat: whose turn it is; b"" for completions."""
        if not self.is_chat:
            return b""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, **_UNFINISHED}
        return self._event([choice], {"usage": None} if self.include_usage else {})

    def last_chunks(self, finish: FinishReason, usage: Usage, extra: dict[str, Any]) -> bytes:
        """Return the events that end a stream: the finish reason, usage if asked for, and `[DONE]`."""
        choice: dict[str, Any] = {"index": 0, "delta": {}} if self.is_chat else {"index": 0, "text": ""}
        choice |= {"logprobs": None, "finish_reason": FINISH_NAMES[finish]}
        if not self.include_usage:
            return self._event([choice], {"sluice": extra}) + b"data: [DONE]\n\n"
        last = self._event([], {"usage": usage.as_json(), "sluice": extra})
        return self._event([choice], {"usage": None}) + last + b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        content = {**self._common(in_stream=True), "choices": choices, **more}
        return b"data: " + _json(content) + b"\n\n"

    def whole(self, text: str, finish: FinishReason, usage: Usage) -> bytes:
        """Return the body of an answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": FINISH_NAMES[finish]}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        content = {**self._common(in_stream=False), "choices": [choice], "usage": usage.as_json()}
        return _json(content)


def _json(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
