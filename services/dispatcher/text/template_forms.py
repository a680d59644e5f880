"""How a chat template reads what messages say, found by trying: in which form, and whether it leaves some out. Pure.

Most templates write `content` as a text, some go through it as parts (`[{"type": "text", "text": …}]`), some do so for
one role only. Given the other form they write nothing, without an error; and there are roles and places of which they
write nothing in any form. So a template is given conversations in which each text is a number of its own: what is not
in the prompt is lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, Final

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

Render = Callable[[Sequence[Mapping[str, Any]]], str | None]
"""Makes the prompt of a conversation; None if the template does not take it."""
Shape = tuple[tuple[str, bool, int], ...]
"""Of each message its role, whether it has a name, and how many parts its content has; 0: it is a text."""


@dataclass(frozen=True, slots=True)
class Forms:
    """What a template reads."""

    part_roles: frozenset[str]
    """Roles whose content it reads as parts; others' as a text."""
    lost_roles: frozenset[str]
    """Roles of whose messages it writes nothing in any form."""
    takes_some: bool
    """It made a prompt of one of the conversations that were tried."""


def in_form(message: Mapping[str, Any], part_roles: frozenset[str]) -> dict[str, Any]:
    """Return the message with its content as the template reads it: several parts make lines of one text."""
    content = message["content"]
    if message["role"] in part_roles:
        return {**message, "content": _parts([content]) if isinstance(content, str) else content}
    return {**message, "content": content if isinstance(content, str) else "\n".join(part["text"] for part in content)}


def shape_of(messages: Sequence[Mapping[str, Any]]) -> Shape:
    """Return what a conversation is apart from its texts."""
    return tuple(
        (message["role"], "name" in message, 0 if isinstance(message["content"], str) else len(message["content"]))
        for message in messages
    )


def find_left_out(render: Render, shape: Shape) -> frozenset[int]:
    """Return the messages that do not come into the prompt as a whole; none if the template refuses the trial."""
    found = _missing(render, shape)
    return frozenset() if found is None else found


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
    shapes = [tuple((role, False, int(role in part_roles)) for role in roles) for roles in TALKS]
    tried = [(roles, _missing(render, shape)) for roles, shape in zip(TALKS, shapes, strict=True)]
    return [(roles, missing) for roles, missing in tried if missing is not None]


def _missing(render: Render, shape: Shape) -> frozenset[int] | None:
    """Return the messages of which a mark is not in the prompt; None if the template does not take the conversation."""
    marks: list[list[str]] = []
    messages: list[dict[str, Any]] = []
    next_mark = _FIRST_MARK
    for role, has_name, num_parts in shape:
        own = [str(next_mark + index) for index in range(num_parts or 1)]
        next_mark += len(own)
        marks.append(own)
        content = _parts(own) if num_parts else own[0]
        messages.append({"role": role, "content": content, **({"name": "name"} if has_name else {})})
    prompt = render(messages)
    if prompt is None:
        return None
    left = {mark for own in marks for mark in own}
    for run in _DIGITS.finditer(prompt):  # a mark may stand between digits of the template's own
        digits = run.group()
        left.difference_update(digits[i : i + _MARK_DIGITS] for i in range(len(digits) - _MARK_DIGITS + 1))
    return frozenset(i for i, own in enumerate(marks) if not left.isdisjoint(own))


def _parts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]
