"""How a chat template reads what messages say, found by trying: in which form, and whether it leaves some out. Pure.

Most templates write `content` as a text, some go through it as parts (`[{"type": "text", "text": …}]`), some do so for
one role only. Given the other form they write nothing, without an error; and there are roles and places of which they
write nothing in any form. So a template is given conversations in which each text is a number of its own: what is not
in the prompt is lost.

It is the same with tools: some templates write the arguments of an earlier call as the text that they are, others want
the value of that text, which they write as JSON or member by member.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from typing import Any, Final, NamedTuple

from shared.reading import parse_json

ROLES: Final = ("system", "user", "assistant")
TALKS: Final = tuple(
    (*first, *rest)
    for first in ((), ("system",))
    for rest in (("user",), ("user", "assistant"), ("user", "assistant", "user"))
)
"""Conversations that are tried, by their roles: not every template takes each of them."""
_FIRST_MARK: Final = 7_319_026_451_880_000_000
_MARK_DIGITS: Final = len(str(_FIRST_MARK))
_DIGITS: Final = re.compile(f"[0-9]{{{_MARK_DIGITS},}}")

MAX_ARGUMENT_PARTS: Final = 20_000
"""Arrays, objects and strings in the arguments of one call whose value a template is given."""

Render = Callable[[Sequence[Mapping[str, Any]]], str | None]
"""Makes the prompt of a conversation; None if the template does not take it."""
RenderTools = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], str | None]
"""The same, with tools or without."""


class MessageShape(NamedTuple):
    """What a message is apart from its texts."""

    role: str
    num_parts: int
    """Of its content; 0: it is a text, or none."""
    has_name: bool = False
    num_calls: int = 0
    is_silent: bool = False
    """It has calls and nothing else."""


Shape = tuple[MessageShape, ...]
"""Of each message of a conversation."""


@dataclass(frozen=True, slots=True)
class Forms:
    """What a template reads."""

    part_roles: frozenset[str]
    """Roles whose content it reads as parts; others' as a text."""
    lost_roles: frozenset[str]
    """Roles of whose messages it writes nothing in any form."""
    takes_some: bool
    """It made a prompt of one of the conversations that were tried."""


@dataclass(frozen=True, slots=True)
class ToolForms:
    """What a template reads of tools and their calls."""

    reads_tools: bool = False
    """It writes the tools that it is given."""
    has_text_arguments: bool = False
    """It writes the arguments of a call as the text that they are; else it is given their value."""
    has_null_content: bool = False
    """It writes calls only of a message whose content is none."""


def in_form(message: Mapping[str, Any], part_roles: frozenset[str], tools: ToolForms) -> dict[str, Any]:
    """Return the message as the template reads it: several parts of its content make lines of one text."""
    content = message["content"]
    formed = dict(message)
    if message["role"] in part_roles:
        formed["content"] = _parts([content]) if isinstance(content, str) else content
    elif not isinstance(content, str):
        formed["content"] = "\n".join(part["text"] for part in content)
    if "tool_calls" in message:
        if tools.has_null_content and not _text_of(content):
            formed["content"] = None
        if not tools.has_text_arguments:
            formed["tool_calls"] = [_with_value(call) for call in message["tool_calls"]]
    return formed


def _with_value(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the call with the value of its arguments in place of their text; with the text if they are no object."""
    function = call["function"]
    try:
        value = parse_json(function["arguments"] or "{}", max_parts=MAX_ARGUMENT_PARTS)
    except ValueError:
        return dict(call)
    return {**call, "function": {**function, "arguments": value}} if isinstance(value, dict) else dict(call)


def shape_of(messages: Sequence[Mapping[str, Any]]) -> Shape:
    """Return what a conversation is apart from its texts."""
    return tuple(
        MessageShape(
            message["role"],
            len(message["content"]) if isinstance(message["content"], list) else 0,
            "name" in message,
            len(message.get("tool_calls", ())),
            "tool_calls" in message and not _text_of(message["content"]),
        )
        for message in messages
    )


def find_left_out(render: Render, shape: Shape, tools: ToolForms) -> frozenset[int]:
    """Return the messages that do not come into the prompt as a whole; none if the template refuses the trial.

    Of a message with calls only these count: many templates write no content beside them.
    """
    found = _missing(render, shape, tools)
    return frozenset() if found is None else found


def find_tool_forms(render: RenderTools, part_roles: frozenset[str]) -> tuple[ToolForms, bool]:
    """Return how most of tools and calls comes into the prompt, and whether results of calls are read as parts."""
    reads_tools = any(_writes_tool(render, roles, part_roles) for roles in TALKS)
    given = [_trial_tool()] if reads_tools else None
    found = []
    for has_text, is_null, has_parts in product((True, False), (False, True), (False, True)):
        forms = ToolForms(reads_tools, has_text, is_null)
        found += [
            (
                _num_of_calls(lambda messages: render(messages, given), forms, part_roles, has_parts=has_parts),
                forms,
                has_parts,
            )
        ]
    _, forms, has_parts = max(found, key=lambda each: each[0])  # the first of several
    return forms, has_parts


def _trial_tool() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}, "required": ["a"]}
    function = {"name": f"f{_FIRST_MARK}", "description": "a", "parameters": parameters}
    return {"type": "function", "function": function}


def _writes_tool(render: RenderTools, roles: Sequence[str], part_roles: frozenset[str]) -> bool:
    none = ToolForms()
    messages = [in_form({"role": role, "content": "a"}, part_roles, none) for role in roles]
    return str(_FIRST_MARK) in (render(messages, [_trial_tool()]) or "")


def _num_of_calls(render: Render, forms: ToolForms, part_roles: frozenset[str], *, has_parts: bool) -> int:
    """Return how many of name, arguments and result of a call come into the prompt, at best."""
    most = 0
    for first, last in product(((), ("system",)), ((), ("user",))):
        roles = (*first, "user", "assistant", "tool", *last)
        is_part = {role: role in part_roles or (role == "tool" and has_parts) for role in roles}
        is_call = {role: role == "assistant" for role in roles}
        shape = tuple(
            MessageShape(role, int(is_part[role]), num_calls=int(is_call[role]), is_silent=is_call[role])
            for role in roles
        )
        messages, marks = _trial(shape, forms)
        prompt = render(messages)
        call = len(first) + 1
        name, value = marks[call]
        if forms.has_text_arguments:
            value = messages[call]["tool_calls"][0]["function"]["arguments"]
        wanted = (name, value, *marks[call + 1])
        most = max(most, sum(text in (prompt or "") for text in wanted))
    return most


def find_forms(render: Render) -> Forms:
    """Return the forms in which most of what is said comes into the prompt; texts where it makes no difference."""
    subsets = chain.from_iterable(combinations(ROLES, size) for size in range(len(ROLES) + 1))
    best = max(map(frozenset, subsets), key=lambda part_roles: _num_shown(render, part_roles))
    shown, missed, tried = set[str](), set[str](), _try_talks(render, best)
    for roles, missing in tried:
        for index, role in enumerate(roles):
            (missed if index in missing else shown).add(role)
    return Forms(best, frozenset(missed - shown), takes_some=bool(tried))


def _num_shown(render: Render, part_roles: frozenset[str]) -> int:
    return sum(len(roles) - len(missing) for roles, missing in _try_talks(render, part_roles))


def _try_talks(render: Render, part_roles: frozenset[str]) -> list[tuple[Sequence[str], frozenset[int]]]:
    """Return the conversations that the template takes, and what it leaves out of each."""
    shapes = [tuple(MessageShape(role, int(role in part_roles)) for role in roles) for roles in TALKS]
    tried = [(roles, _missing(render, shape, ToolForms())) for roles, shape in zip(TALKS, shapes, strict=True)]
    return [(roles, missing) for roles, missing in tried if missing is not None]


def _missing(render: Render, shape: Shape, tools: ToolForms) -> frozenset[int] | None:
    """Return the messages of which a mark is not in the prompt; None if the template does not take the conversation."""
    messages, marks = _trial(shape, tools)
    prompt = render(messages)
    if prompt is None:
        return None
    left = {mark for own in marks for mark in own}
    for run in _DIGITS.finditer(prompt):  # a mark may stand between digits of the template's own
        digits = run.group()
        left.difference_update(digits[i : i + _MARK_DIGITS] for i in range(len(digits) - _MARK_DIGITS + 1))
    return frozenset(i for i, own in enumerate(marks) if not left.isdisjoint(own))


def _trial(shape: Shape, tools: ToolForms) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Return a conversation of this shape, and the numbers that are the texts of each message."""
    marks: list[list[str]] = []
    messages: list[dict[str, Any]] = []
    next_mark = _FIRST_MARK
    num_called = num_answered = 0
    for role, num_parts, has_name, num_calls, is_silent in shape:
        own = [str(next_mark + index) for index in range(2 * num_calls or num_parts or 1)]
        next_mark += len(own)
        marks.append(own)
        said = [""] if is_silent else ["a"] if num_calls else own
        message: dict[str, Any] = {"role": role, "content": _parts(said) if num_parts else said[0]}
        if has_name:
            message["name"] = "name"
        if num_calls:
            message["tool_calls"] = [_trial_call(num_called + i, *own[2 * i : 2 * i + 2]) for i in range(num_calls)]
            num_called += num_calls
        elif role == "tool":
            message["tool_call_id"] = _trial_id(num_answered)
            num_answered += 1
        messages.append(in_form(message, frozenset({role} if num_parts else ()), tools))
    return messages, marks


def _trial_call(number: int, name: str, value: str) -> dict[str, Any]:
    function = {"name": f"f{name}", "arguments": f'{{"a": "{value}"}}'}
    return {"id": _trial_id(number), "type": "function", "function": function}


def _trial_id(number: int) -> str:
    """Return the id of a call: of 9 letters and digits, as Mistral's templates want it."""
    return f"call{number:05d}"


def _text_of(content: str | Sequence[Mapping[str, str]] | None) -> str:
    return (content or "") if content is None or isinstance(content, str) else "".join(part["text"] for part in content)


def _parts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]
