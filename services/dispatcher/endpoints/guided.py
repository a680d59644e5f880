"""Answers that are held to a form: `response_format`, and vLLM's `structured_outputs` and `guided_…`. Pure.

Whatever names the form, it becomes one grammar for the whole answer, in the words of llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Final

from llguidance import LLMatcher

from services.dispatcher.endpoints.fields import Fields, type_name
from services.dispatcher.endpoints.schema_rules import SchemaRefusedError, grammar_of_schema
from services.dispatcher.http.errors import ApiError, invalid, unsupported
from services.dispatcher.text.tool_forms import ModelCalls
from services.dispatcher.text.tool_grammar import tool_grammar
from services.dispatcher.text.tools import ToolUse
from shared.reading import parse_json
from shared.types import MAX_GRAMMAR_BYTES

MAX_GUIDE_BYTES: Final = 64 * 1024
"""Of a regex, a grammar, or all choices together, UTF-8."""
MAX_NAME_CHARS: Final = 64
"""Of a schema; OpenAI's limit."""
GUIDES: Final = (
    "response_format",
    "structured_outputs",
    *(f"guided_{name}" for name in ("json", "regex", "choice", "grammar")),
)
"""Parameters that are read here."""
_ANY_OBJECT: Final = grammar_of_schema({"type": "object"})
_SETTINGS: Final = (
    *("disable_any_whitespace", "disable_additional_properties", "disable_fallback", "whitespace_pattern"),
    "structural_tag",
)
"""Members of `structured_outputs` that say how, and are refused."""


class GuideCode(StrEnum):
    """Code of the error of a form that is none, or is not served."""

    SCHEMA = "invalid_json_schema"
    REGEX = "invalid_regex"
    GRAMMAR = "invalid_grammar"


@dataclass(frozen=True, slots=True)
class Guide:
    """What an answer is held to."""

    param: str
    """Which parameter asks for it."""
    grammar: bytes
    """As llguidance takes it, or GBNF, which the trial puts into its words. Nobody has compiled it yet."""
    code: GuideCode
    """Of the error if it does not compile."""


def parse_guide(fields: Fields) -> Guide | None:
    """Return what the answer is held to; None: it is free.

    Args:
        fields: of the request.

    Raises:
        ApiError: it is none, is not served, or there are several.
    """
    found = [*_of_response_format(fields), *_of_structured_outputs(fields), *_of_older_names(fields)]
    if len(found) > 1:
        raise invalid(
            "invalid_value", found[1][0], f"'{found[1][0]}' comes beside '{found[0][0]}'; an answer has one form."
        )
    if not found:
        return None
    param, make = found[0]
    guide = make()
    if len(guide.grammar) > MAX_GRAMMAR_BYTES:
        raise invalid(guide.code.value, param, f"'{param}' becomes a grammar of more than {MAX_GRAMMAR_BYTES} bytes.")
    return guide


_Found = list[tuple[str, Callable[[], Guide]]]
"""Parameters that are given, and what makes their guides."""


def _of_response_format(fields: Fields) -> _Found:
    form = fields.mapping("response_format")
    kind = None if form is None else form.text("type")
    if form is None or (kind is None and all(value is None for value in form.values.values())) or kind == "text":
        return []
    param = "response_format"
    if kind == "json_object":
        return [(param, lambda: Guide(param, _ANY_OBJECT, GuideCode.SCHEMA))]
    if kind != "json_schema":
        message = "'response_format.type' must be 'text', 'json_object' or 'json_schema'."
        raise invalid("invalid_value", "response_format.type", message)
    return [(param, partial(_of_named_schema, form))]


def _of_named_schema(form: Fields) -> Guide:
    named, path = form.mapping("json_schema"), "response_format.json_schema"
    if named is None:
        raise invalid("missing_required_parameter", path, f"Missing required parameter: '{path}'.")
    name = named.text("name")
    if name is not None and len(name) > MAX_NAME_CHARS:
        raise invalid(
            "string_above_max_length", f"{path}.name", f"'{path}.name' has at most {MAX_NAME_CHARS} characters."
        )
    named.text("description")
    is_strict = named.boolean("strict", default=True)
    schema = named.mapping("schema")
    if schema is None:
        raise invalid("missing_required_parameter", f"{path}.schema", f"Missing required parameter: '{path}.schema'.")
    return schema_guide(f"{path}.schema", schema.values, is_strict=is_strict)


def _of_structured_outputs(fields: Fields) -> _Found:
    given = fields.mapping("structured_outputs")
    if given is None:
        return []
    for name in _SETTINGS:
        if given.values.get(name) not in (None, False):
            raise unsupported(f"structured_outputs.{name}")
    found = _of_names(given, "structured_outputs.", "")
    if given.boolean("json_object"):
        param = "structured_outputs.json_object"
        found.append((param, lambda: Guide(param, _ANY_OBJECT, GuideCode.SCHEMA)))
    return found


def _of_older_names(fields: Fields) -> _Found:
    return _of_names(fields, "", "guided_")


def _of_names(fields: Fields, above: str, before: str) -> _Found:
    """Return what these fields name; texts and lists that are empty ask for nothing."""
    found: _Found = []
    for name, make in (("json", _of_json), ("regex", _of_regex), ("choice", _of_choice), ("grammar", _of_grammar)):
        value = fields.values.get(before + name)
        if value is not None and value not in ("", []):
            found.append((f"{above}{before}{name}", partial(make, f"{above}{before}{name}", value)))
    return found


def _of_json(param: str, value: Any) -> Guide:
    if isinstance(value, str):
        _check_size(param, value)
        try:
            value = parse_json(value)
        except ValueError:
            raise invalid(GuideCode.SCHEMA.value, param, f"'{param}' is a string that is not JSON.") from None
    if not isinstance(value, dict):
        raise invalid("invalid_type", param, f"'{param}' must be an object, not {type_name(value)}.")
    return schema_guide(param, value, is_strict=True)


def schema_guide(param: str, schema: Mapping[str, Any], *, is_strict: bool) -> Guide:
    """Return what holds an answer to a schema.

    Args:
        param: which parameter has it.
        schema: as parsed.
        is_strict: it is held exactly, or refused; else `oneOf` may be taken as `anyOf`.

    Raises:
        ApiError: it is not served.
    """
    try:
        return Guide(param, grammar_of_schema(schema, coerce_one_of=not is_strict), GuideCode.SCHEMA)
    except SchemaRefusedError as error:
        raise invalid(GuideCode.SCHEMA.value, param, f"The schema {error.reason}.") from None


def _of_regex(param: str, value: Any) -> Guide:
    text = _text(param, value)
    return Guide(param, LLMatcher.grammar_from_regex(text).encode(), GuideCode.REGEX)


def _of_choice(param: str, value: Any) -> Guide:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise invalid("invalid_type", param, f"'{param}' must be an array of strings.")
    if "" in value:
        raise invalid("string_below_min_length", param, f"'{param}' has an empty string, which is no answer.")
    _check_size(param, *value)
    choices = " | ".join(map(json.dumps, dict.fromkeys(value)))
    # as one terminal: of rules that begin alike the library follows 2 000
    return Guide(param, f"start: CHOICE\nCHOICE: {choices}".encode(), GuideCode.GRAMMAR)


def _of_grammar(param: str, value: Any) -> Guide:
    text = _text(param, value)
    if text.lstrip().startswith("{"):
        raise invalid(GuideCode.GRAMMAR.value, param, f"'{param}' must be a grammar in Lark or GBNF, not JSON.")
    return Guide(param, text.encode(), GuideCode.GRAMMAR)


def _text(param: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid("invalid_type", param, f"'{param}' must be a string, not {type_name(value)}.")
    _check_size(param, value)
    return value


def _check_size(param: str, *texts: str) -> None:
    if (
        sum(len(text) for text in texts) > MAX_GUIDE_BYTES
        or sum(len(text.encode()) for text in texts) > MAX_GUIDE_BYTES
    ):
        message = f"'{param}' has more than {MAX_GUIDE_BYTES // 1024} KiB."
        raise invalid("string_above_max_length", param, message)


def refuse_stops(guide: Guide) -> ApiError:
    """Return the 400 for stop strings beside a form."""
    message = f"'stop' cannot be combined with '{guide.param}': the answer ends where its form is complete."
    return invalid("invalid_value", "stop", message)


def tool_guide(calls: ModelCalls, use: ToolUse, said: Guide | None) -> Guide | None:
    """Return what an answer is held to that may call tools; None: it is free.

    Args:
        calls: of the model.
        use: what the request says of tools.
        said: what it is held to if it calls none.

    Raises:
        ApiError: a strict tool's schema is not served; it is held to a form that is not JSON, or its model's calls look
            like JSON: which is it?
    """
    for index, tool in enumerate(use.tools):
        if tool.is_strict:
            schema_guide(f"tools.{index}.function.parameters", tool.schema, is_strict=True)
    if said is None or use.is_required:
        grammar = tool_grammar(calls, use)
    elif said.code is GuideCode.SCHEMA and calls.written.before:
        (form,) = json.loads(said.grammar)["grammars"]
        grammar = tool_grammar(calls, use, form["json_schema"])
    else:
        message = f"'{said.param}' does not go with tools that may be called, for this model or of this kind."
        raise invalid("invalid_value", said.param, message)
    return Guide("tools", grammar, GuideCode.SCHEMA) if grammar else None
