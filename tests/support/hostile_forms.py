"""Forms of answers that were made to cost much, and what comes of them: a code, or "" where the request is served.

Each comes with the parameters that ask for it. What is larger than a body may be stands here too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from string import ascii_lowercase
from typing import Any, Final

SCHEMA: Final = "invalid_json_schema"
COSTLY: Final = "grammar_too_costly"


def _deep(depth: int, wrap: Callable[[Any], Any], core: Any) -> Any:
    return reduce(lambda inner, _: wrap(inner), range(depth), core)


def _schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


_CIRCLE: Final = {"$defs": {"a": _ref("b"), "b": {"allOf": [_ref("a")]}}, **_ref("a")}
_TREE: Final = {"type": "object", "properties": {"sub": {"type": "array", "items": {"$ref": "#"}}}}
_DOUBLING: Final = {
    "$defs": {f"d{i}": {"allOf": [_ref(f"d{i + 1}"), _ref(f"d{i + 1}")]} for i in range(25)}
    | {"d25": {"type": "object", "properties": {"a": {"type": "string"}}}},
    **_ref("d0"),
}
_CHOICES: Final = [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(30)]
_PATTERNS: Final = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(5, 60)]
_NAMES: Final = [f"{a}{b}{c}" for a in "abcdefghij" for b in ascii_lowercase for c in ascii_lowercase]
_CHAIN: Final = "".join(f"{one}::={other}\n" for one, other in pairwise(_NAMES[:6500]))

HOSTILE: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "nested 10 000": (_schema(_deep(10_000, lambda inner: {"items": inner}, {})), SCHEMA),
    "nested 10 000 in a text": ({"guided_json": '{"items":' * 5000 + "{}" + "}" * 5000}, SCHEMA),
    "arrays in a const": (_schema({"const": _deep(10_000, lambda inner: [inner], 1)}), SCHEMA),
    "anyOf, deep": (
        _schema(_deep(30, lambda inner: {"anyOf": [inner, {"type": "null"}]}, {"type": "string"})),
        SCHEMA,
    ),
    "anyOf, doubling": (
        _schema(_deep(12, lambda inner: {"anyOf": [inner, {"type": "array", "items": inner}]}, {"type": "string"})),
        SCHEMA,
    ),
    "allOf of anyOf": (_schema({"allOf": _CHOICES}), SCHEMA),
    "allOf, doubling": (_schema(_DOUBLING), ""),
    "enum of 20 000": (_schema({"enum": [str(i) for i in range(20_000)]}), SCHEMA),
    "enum of 9 000": (_schema({"enum": [str(i) for i in range(9000)]}), ""),
    "10 MB": (_schema({"const": "a" * 10_000_000}), SCHEMA),
    "10 MB of entries": (_schema({"enum": [1] * 5_000_000}), SCHEMA),
    "3 000 properties": (_schema({"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}), SCHEMA),
    "minItems 10^8": (_schema({"type": "array", "minItems": 10**8}), ""),
    "maxItems 10^8 nested": (
        _schema(_deep(8, lambda inner: {"type": "array", "maxItems": 10**8, "items": inner}, {"type": "string"})),
        "",
    ),
    "minLength 10^8": (_schema({"type": "string", "minLength": 10**8, "pattern": "^(ab|c){1,100000000}$"}), SCHEMA),
    "maximum": (_schema({"type": "integer", "maximum": 2 * 10**10}), ""),
    "circle without content": (_schema(_CIRCLE), SCHEMA),
    "itself and nothing else": (_schema({"$ref": "#"}), SCHEMA),
    "recursion": (_schema(_TREE), ""),
    "recursion of a definition": (_schema({"$defs": {"a": {"items": _ref("a")}}, **_ref("a")}), ""),
    "reference to a page": (_schema({"$ref": "http://127.0.0.1:9/schema.json"}), SCHEMA),
    "reference to a file": (_schema({"$ref": "file:///etc/passwd"}), SCHEMA),
    "look-ahead": (_schema({"type": "string", "pattern": "^(?=.*a)b"}), SCHEMA),
    "patterns at once": (_schema({"allOf": _PATTERNS}), COSTLY),
    "counts": ({"guided_regex": "(a{1,1000}){1,1000}"}, ""),
    "counts of counts": ({"guided_regex": "((((a{1,100}){1,100}){1,100}){1,100})"}, ""),
    "much to remember": ({"guided_regex": "(a|b)*a(a|b){60}"}, ""),
    "letters of all scripts": ({"guided_regex": r"(\p{L}{1,100}\p{Lu}{1,100}){1,100}"}, ""),
    "marks": (_schema({"enum": ["\u0301" * 20_000, "🦊" * 4000]}), ""),
    "no brackets": ({"guided_regex": "[" * 60_000}, "invalid_regex"),
    "classes and controls": (_schema({"type": "string", "pattern": "[\\x01" * 10_000}), SCHEMA),
    "brackets in Lark": ({"guided_grammar": f'start: {"(" * 30_000}"a"{")" * 30_000}'}, "invalid_grammar"),
    "brackets in GBNF": ({"guided_grammar": f'root ::= {"(" * 30_000}"a"{")" * 30_000}'}, "invalid_grammar"),
    "a chain of rules in GBNF": ({"guided_grammar": f'{_CHAIN}{_NAMES[6499]}::="a"\nroot::=aaa\n'}, COSTLY),
    "many meanings": ({"guided_grammar": 'start: e\ne: e e | "a" | ""'}, ""),
    "regexes at once in Lark": (
        {"guided_grammar": "start: A\nA: " + " & ".join(f"/(a|b)*a(a|b){{{i}}}/" for i in range(5, 40))},
        COSTLY,
    ),
    "rules that begin alike": (
        {"guided_grammar": "start: " + " | ".join(f'"c{i}"' for i in range(5000))},
        "invalid_grammar",
    ),
    "9 000 choices": ({"guided_choice": [f"c{i}" for i in range(9000)]}, ""),
}

HUGE: Final = ("nested 10 000", "arrays in a const", "10 MB", "10 MB of entries")
"""Of them, what no body can hold."""
