"""The `messages` of a chat request: checked, and reduced to what a chat template reads. Text only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from services.dispatcher.endpoints.fields import type_name
from services.dispatcher.http.errors import invalid, unsupported
from services.dispatcher.text.template import MAX_MESSAGES

MAX_PARTS: Final = 10_000
_ROLES: Final = ("system", "developer", "user", "assistant")


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages: `role`, `content` as a string or as parts of type `text`, `name` if given.

    The role `developer` becomes `system`, which is what templates know.

    Raises:
        ApiError: the first thing that is not allowed.
    """
    if value is None:
        raise invalid("missing_required_parameter", "messages", "Missing required parameter: 'messages'.")
    if not isinstance(value, list):
        raise invalid("invalid_type", "messages", f"'messages' must be an array, not {type_name(value)}.")
    if not value:
        raise invalid("array_below_min_length", "messages", "'messages' must have at least one message.")
    if len(value) > MAX_MESSAGES:
        raise invalid("array_above_max_length", "messages", f"'messages' has more than {MAX_MESSAGES} messages.")
    return [_message(message, f"messages.{index}") for index, message in enumerate(value)]


def count_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the characters that a conversation brings to the tokenizer, apart from the template's own."""
    return sum(_count_value(value) for message in messages for value in message.values())


def text_of(message: Mapping[str, Any]) -> str:
    """Return what a message says, its parts as lines."""
    content: str | Sequence[Mapping[str, str]] = message["content"]
    return content if isinstance(content, str) else "\n".join([part["text"] for part in content])


def _count_value(value: str | Sequence[Mapping[str, str]]) -> int:
    return len(value) if isinstance(value, str) else sum([len(part["text"]) for part in value])


def _message(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid("invalid_type", path, f"'{path}' must be an object, not {type_name(value)}.")
    role = value.get("role")
    if role == "tool":
        raise unsupported(f"{path}.tool_call_id", "Tool calls are not supported, so no message can answer one.")
    if role not in _ROLES:
        raise invalid("invalid_value", f"{path}.role", f"'{path}.role' must be one of {', '.join(_ROLES)}.")
    for field in ("tool_calls", "function_call", "audio"):
        if value.get(field):
            raise unsupported(f"{path}.{field}")
    name = value.get("name")
    if name is not None and not isinstance(name, str):
        raise invalid("invalid_type", f"{path}.name", f"'{path}.name' must be a string, not {type_name(name)}.")
    refusal = value.get("refusal") if role == "assistant" else None
    if refusal is not None and not isinstance(refusal, str):
        what = f"'{path}.refusal' must be a string, not {type_name(refusal)}."
        raise invalid("invalid_type", f"{path}.refusal", what)
    said = value.get("content")
    if said is None and role == "assistant":
        said = refusal or ""  # what it said instead
    content = _content(said, f"{path}.content")
    message = {"role": "system" if role == "developer" else role, "content": content}
    return {**message, "name": name} if name else message


def _content(value: Any, path: str) -> str | list[dict[str, str]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid("invalid_type", path, f"'{path}' must be a string or an array of parts, not {type_name(value)}.")
    if len(value) > MAX_PARTS:
        raise invalid("array_above_max_length", path, f"'{path}' has more than {MAX_PARTS} parts.")
    return [_part(part, f"{path}.{index}") for index, part in enumerate(value)] or ""


def _part(value: Any, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise invalid("invalid_type", path, f"'{path}' must be an object, not {type_name(value)}.")
    if value.get("type") != "text":
        message = "Only parts of type 'text' are supported; nothing was fetched."
        raise invalid("unsupported_content_type", path, message)
    text = value.get("text")
    if not isinstance(text, str):
        raise invalid("invalid_type", f"{path}.text", f"'{path}.text' must be a string, not {type_name(text)}.")
    return {"type": "text", "text": text}
