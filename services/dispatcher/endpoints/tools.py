"""The tools of a chat request: `tools`, `tool_choice` and `parallel_tool_calls`, checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from services.dispatcher.endpoints.fields import Fields, type_name
from services.dispatcher.http.errors import invalid, unsupported
from services.dispatcher.text.template import ChatTemplate
from services.dispatcher.text.tool_forms import ModelCalls
from services.dispatcher.text.tools import Tool, ToolUse

NAMES: Final = ("tools", "tool_choice", "parallel_tool_calls")
"""Parameters that are read here."""
MAX_TOOLS: Final = 128
MAX_NAME_CHARS: Final = 64
MAX_SCHEMA_BYTES: Final = 64 * 1024
"""Of the parameters of one tool, as JSON."""
MAX_SCHEMA_DEPTH: Final = 32
"""Arrays and objects within each other."""
MAX_TOOLS_BYTES: Final = 512 * 1024
"""Of all tools together, as JSON."""
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]+")
_NO_PARAMETERS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}}


def parse_tool_use(fields: Fields) -> ToolUse | None:
    """Return what may be called; None if there is nothing, or it is forbidden (`tool_choice` is none).

    Raises:
        ApiError: the first thing that is not allowed.
    """
    tools = parse_tools(fields.values.get("tools"))
    is_parallel = fields.boolean("parallel_tool_calls", default=True)
    choice = fields.values.get("tool_choice")
    choice = "auto" if choice in (None, "") else choice
    if choice in ("none", "auto"):
        return ToolUse(tools, is_parallel=is_parallel) if tools and choice == "auto" else None
    named = None if choice == "required" else _named(choice)
    if not tools:
        raise invalid("invalid_value", "tool_choice", "'tool_choice' asks for a call, and there are no 'tools'.")
    if named is not None and all(tool.name != named for tool in tools):
        raise invalid("invalid_value", "tool_choice", "'tool_choice' names a function that is not among the 'tools'.")
    return ToolUse(tools, is_required=True, named=named, is_parallel=is_parallel)


def parse_tools(value: Any) -> list[Tool]:
    """Return the tools; none if the parameter is not given.

    Raises:
        ApiError: the first thing that is not allowed.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid("invalid_type", "tools", f"'tools' must be an array, not {type_name(value)}.")
    if len(value) > MAX_TOOLS:
        raise invalid("array_above_max_length", "tools", f"'tools' has at most {MAX_TOOLS} tools.")
    tools = [_tool(tool, f"tools.{index}") for index, tool in enumerate(value)]
    if sum(_num_bytes(tool.definition) for tool in tools) > MAX_TOOLS_BYTES:
        message = f"All tools together have at most {MAX_TOOLS_BYTES} bytes as JSON."
        raise invalid("object_above_max_length", "tools", message)
    return tools


def known_calls(template: ChatTemplate | None, calls: ModelCalls | None) -> ModelCalls:
    """Return how the model calls tools.

    Raises:
        ApiError: 400: it reads none, or it is not known.
    """
    check_reads_tools(template)
    if calls is None:
        raise unsupported("tools", "This server does not know how its model calls tools ('--tool-parser' says it).")
    return calls


def check_reads_tools(template: ChatTemplate | None) -> None:
    """Raise the 400 unless the model's chat template writes the tools that it is given."""
    if template is not None and not template.tool_forms.reads_tools:
        raise unsupported("tools", "This model's chat template reads no tools.")


def count_tool_chars(tool_use: ToolUse | None) -> int:
    """Return the characters that tools bring to the tokenizer, nearly."""
    return 0 if tool_use is None else sum(_num_bytes(tool.definition) for tool in tool_use.tools)


def _named(choice: Any) -> str:
    """Return the name of the function that is to be called."""
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        raise unsupported("tool_choice", "'allowed_tools' is not supported: give only the 'tools' that are allowed.")
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        what = '{"type": "function", "function": {"name": …}}'
        raise invalid("invalid_value", "tool_choice", f"'tool_choice' must be none, auto, required, or {what}.")
    return name


def _tool(value: Any, path: str) -> Tool:
    if not isinstance(value, dict):
        raise invalid("invalid_type", path, f"'{path}' must be an object, not {type_name(value)}.")
    if value.get("type") != "function":
        raise unsupported(f"{path}.type", "Only tools of type 'function' are supported.")
    function = value.get("function")
    path = f"{path}.function"
    if not isinstance(function, dict):
        raise invalid("invalid_type", path, f"'{path}' must be an object, not {type_name(function)}.")
    fields = Fields(function, f"{path}.")
    name = _name(fields.text("name"), f"{path}.name")
    fields.text("description")
    parameters = fields.mapping("parameters")
    known = {"name": name, "description": function.get("description"), "parameters": _NO_PARAMETERS}
    if parameters is not None:
        _check_schema(parameters.values, f"{path}.parameters")
        known["parameters"] = parameters.values
    order = [member for member in function if member in known]  # the client's, which templates keep
    shown = {member: known[member] for member in [*order, *known] if known[member] is not None}
    return Tool(name, {"type": "function", "function": shown}, fields.boolean("strict"))


def _name(name: str | None, path: str) -> str:
    if name is None:
        raise invalid("missing_required_parameter", path, f"Missing required parameter: '{path}'.")
    if len(name) > MAX_NAME_CHARS:
        raise invalid("string_above_max_length", path, f"'{path}' has at most {MAX_NAME_CHARS} characters.")
    if not _NAME.fullmatch(name):
        raise invalid("invalid_value", path, f"'{path}' must be of the letters a to z and A to Z, digits, _ and -.")
    return name


def _check_schema(schema: Mapping[str, Any], path: str) -> None:
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise invalid("invalid_value", f"{path}.type", f"'{path}.type' must be 'object'.")
    if _num_bytes(schema) > MAX_SCHEMA_BYTES:
        message = f"'{path}' has at most {MAX_SCHEMA_BYTES} bytes as JSON."
        raise invalid("object_above_max_length", path, message)
    if _is_deeper(schema, MAX_SCHEMA_DEPTH):
        message = f"'{path}' has at most {MAX_SCHEMA_DEPTH} arrays and objects within each other."
        raise invalid("object_above_max_length", path, message)


def _num_bytes(value: Mapping[str, Any]) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


def _is_deeper(value: Any, depth: int) -> bool:
    """Return whether more arrays and objects than that are within each other."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_is_deeper(each, depth - 1) for each in inner)
