"""The `messages` of a chat request: checked, and reduced to what a chat template reads. Text only.

An assistant's message may have calls of tools, and messages of role `tool` answer them, before anybody else speaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from services.dispatcher.endpoints.fields import type_name
from services.dispatcher.http.errors import invalid, unsupported
from services.dispatcher.text.template import MAX_MESSAGES

MAX_PARTS: Final = 10_000
MAX_CALLS: Final = 128
"""Of one message."""
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages: `role`, `content` as a string or as parts of type `text`, `name` if given.

    The role `developer` becomes `system`, which is what templates know. An assistant's may have `tool_calls`, whose
    arguments are texts; one of role `tool` has its `tool_call_id`.

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
    messages = [_message(message, f"messages.{index}") for index, message in enumerate(value)]
    _check_calls(messages)
    return messages


def count_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the characters that a conversation brings to the tokenizer, apart from the template's own."""
    return sum(_count_value(value) for message in messages for value in message.values())


def text_of(message: Mapping[str, Any]) -> str:
    """Return what a message says, its parts as lines."""
    content: str | Sequence[Mapping[str, str]] | None = message["content"]
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join([part["text"] for part in content])


def _count_value(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_count_value(inner) for name, inner in value.items() if name != "type")
    return sum(map(_count_value, value))


def _message(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid("invalid_type", path, f"'{path}' must be an object, not {type_name(value)}.")
    role = value.get("role")
    if role not in _ROLES:
        raise invalid("invalid_value", f"{path}.role", f"'{path}.role' must be one of {', '.join(_ROLES)}.")
    for field in ("function_call", "audio"):
        if value.get(field):
            raise unsupported(f"{path}.{field}")
    calls = value.get("tool_calls")
    if calls and role != "assistant":
        raise invalid("invalid_value", f"{path}.tool_calls", "Only messages of the assistant have 'tool_calls'.")
    name = value.get("name")
    if name is not None and not isinstance(name, str):
        raise invalid("invalid_type", f"{path}.name", f"'{path}.name' must be a string, not {type_name(name)}.")
    message = {"role": "system" if role == "developer" else role, "content": _said(value, path)}
    if name:
        message["name"] = name
    if role == "tool":
        message["tool_call_id"] = _text(value.get("tool_call_id"), f"{path}.tool_call_id")
    return {**message, "tool_calls": _calls(calls, f"{path}.tool_calls")} if calls else message


def _said(value: Mapping[str, Any], path: str) -> str | list[dict[str, str]]:
    """Return the content; of an assistant without one, what it said instead."""
    said = value.get("content")
    if value["role"] != "assistant":
        return _content(said, f"{path}.content")
    refusal = value.get("refusal")
    if refusal is not None and not isinstance(refusal, str):
        what = f"'{path}.refusal' must be a string, not {type_name(refusal)}."
        raise invalid("invalid_type", f"{path}.refusal", what)
    return _content((refusal or "") if said is None else said, f"{path}.content")


def _calls(value: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise invalid("invalid_type", path, f"'{path}' must be an array, not {type_name(value)}.")
    if len(value) > MAX_CALLS:
        raise invalid("array_above_max_length", path, f"'{path}' has more than {MAX_CALLS} calls.")
    return [_call(call, f"{path}.{index}") for index, call in enumerate(value)]


def _call(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid("invalid_type", path, f"'{path}' must be an object, not {type_name(value)}.")
    call_id = _text(value.get("id"), f"{path}.id")
    if value.get("type", "function") != "function":
        raise unsupported(f"{path}.type", "Only calls of type 'function' are supported.")
    function, path = value.get("function"), f"{path}.function"
    if not isinstance(function, dict):
        raise invalid("invalid_type", path, f"'{path}' must be an object, not {type_name(function)}.")
    parts = {name: _text(function.get(name), f"{path}.{name}") for name in ("name", "arguments")}
    return {"id": call_id, "type": "function", "function": parts}


def _text(value: Any, path: str) -> str:
    if value is None:
        raise invalid("missing_required_parameter", path, f"Missing required parameter: '{path}'.")
    if not isinstance(value, str):
        raise invalid("invalid_type", path, f"'{path}' must be a string, not {type_name(value)}.")
    return value


def _check_calls(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless each call is answered before anybody else speaks, and each answer is one to a call."""
    called, unanswered, caller = frozenset[str](), set[str](), 0
    for index, message in enumerate([*messages, {"role": ""}]):
        if message["role"] == "tool":
            if message["tool_call_id"] not in called:
                path = f"messages.{index}.tool_call_id"
                raise invalid(
                    "invalid_value", path, f"'{path}' is the id of no call in the assistant's message before."
                )
            unanswered.discard(message["tool_call_id"])
            continue
        if unanswered:
            path = f"messages.{caller}.tool_calls"
            what = f"'{path}' has calls that no message of role 'tool' answers right behind it."
            raise invalid("invalid_value", path, what)
        called = frozenset(call["id"] for call in message.get("tool_calls", ()))
        unanswered, caller = set(called), index


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
