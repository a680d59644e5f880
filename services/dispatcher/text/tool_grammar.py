"""The grammar of an answer that has to call tools, or that may call strict ones: what llguidance holds it to. Pure.

    required, named   calls and nothing else: one, or several where they may be parallel
    auto, and a form  calls, or JSON that the form's schema allows
    auto, strict      any text; where a call begins it goes on as one, of a tool that there is
    else              none: nothing is enforced

The arguments match the tool's schema. That of a tool that is not strict is kept to as far as the library knows its
words, and `oneOf` as `anyOf`. A call is written as the model has learnt it, with one space where there may be blanks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from services.dispatcher.text.tool_forms import BLANKS, ModelCalls
from services.dispatcher.text.tools import Tool, ToolUse

_SPACED: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LENIENT: Final = {"lenient": True, "coerce_one_of": True}
_ANYTHING: Final = r"(.|\n)*"


def tool_grammar(calls: ModelCalls, use: ToolUse, said: Mapping[str, Any] | None = None) -> bytes:
    """Return the grammar that an answer is held to, in Lark; empty if it is free.

    Args:
        calls: of the model.
        use: what the request says of tools.
        said: schema of an answer that calls nothing, as the library gets it, for models that write something before
            their calls; None: any text.
    """
    if use.is_required or said is not None:
        is_one = use.named is not None or not use.is_parallel
        rules = [f'start: ("\\n" | "\\n\\n")? {"calls" if use.is_required else "(calls | said)"}']
        rules += _call_rules(calls, use.callable_tools, is_one=is_one)
        rules += [] if use.is_required else [f"said: %json {_compact(said)}"]
    elif any(tool.is_strict for tool in use.tools):
        rules = _free_rules(calls, use)
    else:
        return b""
    return "\n".join(["%llguidance {}", *rules, ""]).encode()


def _call_rules(calls: ModelCalls, tools: Sequence[Tool], *, is_one: bool, num_opened: int = 0) -> list[str]:
    """Return the rules of all calls.

    Args:
        calls: of the model.
        tools: that may be called.
        is_one: there is one call.
        num_opened: pieces before a call that stand there already.
    """
    written = calls.written
    before, between, after = (
        " ".join(_piece(calls, piece) for piece in pieces)
        for pieces in (written.before[num_opened:], written.between, written.after)
    )
    more = "" if is_one else f" ({between} call)*"
    names = " | ".join(f"tool_{index}" for index in range(len(tools)))
    return [f"calls: {before} call{more} {after}", f"call: {names}", *_tool_rules(calls, tools)]


def _tool_rules(calls: ModelCalls, tools: Sequence[Tool]) -> list[str]:
    name_end, member = calls.written.name_end, calls.form.arguments_name
    rules: list[str] = []
    for index, tool in enumerate(tools):
        arguments = f"%json {_compact(_schema_of(tool))}"
        if name_end:
            rules.append(f"tool_{index}: {json.dumps(tool.name)} {_piece(calls, name_end)} {arguments}")
        else:
            head = json.dumps(f'{{"name": "{tool.name}", "{member}": ')
            rules.append(f'tool_{index}: {head} {arguments} "}}"')
    return rules


def _free_rules(calls: ModelCalls, use: ToolUse) -> list[str]:
    """Return the rules of a text with calls in it, in which no opening stands but for those of calls."""
    opening, openings = calls.written.before[:1], calls.form.openings
    is_one = not use.is_parallel
    rules = _call_rules(calls, use.tools, is_one=is_one, num_opened=len(opening))
    if not opening:  # all of the answer is calls, or it begins with no bracket
        tags = [_piece(calls, tag) for tag in openings if tag in calls.tag_ids]
        starts = ["calls", "TEXT", *(f"TEXT {tag} calls" for tag in tags)]
        start = f"[{BLANKS}]*([^{{{BLANKS}]{_ANYTHING})?"
        return [f"start: {' | '.join(starts)}", *rules, f"TEXT: {_text(start, openings)}"]
    how_often = "?" if is_one else "*"
    text = f"TEXT: {_text(_ANYTHING, openings)}"
    if opening[0] in calls.tag_ids:
        return [f"start: (TEXT {_piece(calls, opening[0])} calls){how_often} TEXT", *rules, text]
    before = _text(_ANYTHING, [other for other in openings if other != opening[0]])
    opened = ["opened[lazy]: BEFORE " + json.dumps(opening[0]), f"BEFORE: {before}"]
    return [f"start: (opened calls){how_often} TEXT", *opened, *rules, text]


def _text(regex: str, without: Sequence[str]) -> str:
    """Return the terminal of a text in which none of these openings stands, spelled."""
    terminals = [f"/{regex}/"]
    for opening in without:
        ahead = rf"[{BLANKS}]*\[" if opening.isalpha() else ""  # a word, which is an opening in front of a list only
        terminals.append(f"~/{_ANYTHING}{re.escape(opening)}{ahead}{_ANYTHING}/")
    return " & ".join(terminals)


def _piece(calls: ModelCalls, piece: str) -> str:
    """Return a tag that is a token by its id, and any other text as it is."""
    token_id = calls.tag_ids.get(piece)
    return json.dumps(piece) if token_id is None else f"<[{token_id}]>"


def _schema_of(tool: Tool) -> Mapping[str, Any]:
    """Return the schema that arguments have to match: they are an object, as every call has it."""
    is_object = {} if "$ref" in tool.schema else {"type": "object"}
    return {**tool.schema, **is_object, "x-guidance": {**_SPACED, **({} if tool.is_strict else _LENIENT)}}


def _compact(schema: Mapping[str, Any] | None) -> str:
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
