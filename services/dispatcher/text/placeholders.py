"""Placeholders: what stands for texts of users, and for the end of one, while a chat template is rendered. Pure.

A placeholder is a number between two marks; the mark is a private-use character that nothing in the request contains.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from services.dispatcher.text.template import TemplateRefusalError

_OPEN_CANDIDATES: Final = range(0xF0000, 0xF0400)
"""Private-use characters that may mark a placeholder; one that no message contains is taken."""


def unused_mark(values: Sequence[Any]) -> str:
    """Return a mark for placeholders among these values.

    Raises:
        TemplateRefusalError: they have all characters that could be one.
    """
    used = "\n".join(strings_of(values))
    for code in _OPEN_CANDIDATES:
        if not any(spelling in used for spelling in spellings(chr(code))):
            return chr(code)
    raise TemplateRefusalError("the messages use too many private-use characters")


def spellings(mark: str) -> tuple[str, str, str]:
    """Return the mark as it stands in a prompt, also where a template writes a list as Python does, or ASCII JSON."""
    return mark, repr(mark)[1:-1], json.dumps(mark)[1:-1]


def place_text(mark: str, hidden: list[str], text: str) -> str:
    """Return a placeholder for the text, which is appended to `hidden`."""
    hidden.append(text)
    return f"{mark}{len(hidden) - 1}{mark}"


def strings_of(value: Any) -> Iterator[str]:
    """Return every string in a value of JSON, names of members too."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            pending += [*item, *item.values()]
        elif isinstance(item, Sequence):
            pending += item


def each_string(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of JSON with another string in place of each."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): each_string(inner, change) for name, inner in value.items()}
    return [each_string(inner, change) for inner in value] if isinstance(value, Sequence) else value


def with_end(message: Mapping[str, Any], end: str) -> dict[str, Any]:
    """Return the message with a mark behind its text, and a blank behind that: what trims the text takes it away."""
    text = f"{last_text(message)}{end} "
    content = message["content"]
    return {**message, "content": text if isinstance(content, str) else [*content[:-1], {**content[-1], "text": text}]}


def cut_at(rendered: str, end: str, text: str) -> str:
    """Return the prompt up to the mark of `with_end`, as transformers cuts it.

    Args:
        rendered: the whole prompt.
        end: the mark.
        text: of the last message, with mark and blank.

    Raises:
        TemplateRefusalError: the last message is not in the prompt as it is.
    """
    before, found, behind = rendered.rpartition(end)
    if not found or text.removesuffix(f"{end} ").strip() not in rendered:
        raise TemplateRefusalError("it changes what the last message says, which cannot be continued then")
    return before if behind.startswith(" ") else before.rstrip()


def last_text(message: Mapping[str, Any]) -> str:
    """Return what a message ends with: its text, or its last part's."""
    content: str | Sequence[Mapping[str, str]] = message["content"]
    return content if isinstance(content, str) else content[-1]["text"]
