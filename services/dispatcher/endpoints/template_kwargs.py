"""What a request says of its prompt: values for variables of the chat template, and where it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from services.dispatcher.endpoints.fields import Fields, type_name
from services.dispatcher.http.errors import invalid, unsupported
from services.dispatcher.text.template import ChatTemplate, TemplateKwargs
from services.dispatcher.text.thinking import SWITCHES

_CONTINUE: Final = "continue_final_message"
_BEGIN: Final = "add_generation_prompt"
NAMES: Final = ("chat_template_kwargs", "reasoning_effort", _CONTINUE, _BEGIN)
"""Parameters that are read here."""
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_NUMBER: Final = 1_000_000
"""A template may repeat a text or a loop so many times."""
MAX_CHARS: Final = 256
_EFFORT: Final = "reasoning_effort"


def parse_template_kwargs(fields: Fields, template: ChatTemplate | None) -> TemplateKwargs:
    """Return the variables that are given; what `chat_template_kwargs` names goes before `reasoning_effort`.

    Raises:
        ApiError: the first one that is not allowed.
    """
    variables = template.variables if template is not None else frozenset[str]()
    return {**_of_effort(fields, variables), **_of_names(fields, variables)}


class PromptEnd(NamedTuple):
    """Where the prompt of a conversation ends; neither: behind the last message."""

    begins_answer: bool
    """Where the template begins a message of the assistant's."""
    continues_last: bool
    """Where the text of the last message ends, the assistant's own: the answer goes on with it."""


def parse_prompt_end(fields: Fields, messages: Sequence[Mapping[str, Any]]) -> PromptEnd:
    """Return where the prompt is to end.

    Raises:
        ApiError: at two places, or in a message that is not the assistant's.
    """
    continues_last = fields.boolean(_CONTINUE)
    begins_answer = fields.boolean(_BEGIN, default=not continues_last)
    if not continues_last:
        return PromptEnd(begins_answer, continues_last)
    if begins_answer:
        what = f"'{_CONTINUE}' and '{_BEGIN}' exclude each other: the answer is a part of a message, or its own."
        raise invalid("invalid_value", _CONTINUE, what)
    if messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
        what = f"'{_CONTINUE}' needs a last message of role 'assistant' that calls no tools."
        raise invalid("invalid_value", _CONTINUE, what)
    return PromptEnd(begins_answer, continues_last)


def _of_effort(fields: Fields, variables: frozenset[str]) -> dict[str, bool | str]:
    word = fields.text(_EFFORT)
    if word is None:
        return {}
    if word not in EFFORTS:
        raise invalid("invalid_value", _EFFORT, f"'{_EFFORT}' must be one of {', '.join(EFFORTS)}.")
    given: dict[str, bool | str] = {name: word != "none" for name in SWITCHES if name in variables}
    if _EFFORT in variables:
        given[_EFFORT] = word
    if not given:
        raise unsupported(_EFFORT, "This model's chat template has no switch for thinking, and no effort.")
    return given


def _of_names(fields: Fields, variables: frozenset[str]) -> dict[str, bool | int | float | str]:
    given = fields.mapping("chat_template_kwargs")
    values = {} if given is None else {name: value for name, value in given.values.items() if value is not None}
    for name, value in values.items():
        _check(name, value, variables)
    return values


def _check(name: str, value: Any, variables: frozenset[str]) -> None:
    path = f"chat_template_kwargs.{name[:64]}"
    if name not in variables:
        known = ", ".join(sorted(variables))
        known = f"has the variables {known}" if known else "has no variables"
        raise unsupported(path, f"This model's chat template {known}.")
    if not isinstance(value, bool | int | float | str):
        what = f"'{path}' must be a boolean, a number or a string, not {type_name(value)}."
        raise invalid("invalid_type", path, what)
    if isinstance(value, str) and len(value) > MAX_CHARS:
        raise invalid("string_above_max_length", path, f"'{path}' has at most {MAX_CHARS} characters.")
    if isinstance(value, int | float) and not -MAX_NUMBER <= value <= MAX_NUMBER:
        code = "decimal_below_min_value" if value < 0 else "decimal_above_max_value"
        raise invalid(code, path, f"'{path}' must be from -{MAX_NUMBER} to {MAX_NUMBER}.")
