"""JSON schemas as they go to the library that makes grammars of them: small, flat, and held exactly. Pure.

What the library refuses is refused with its own sentence, in the trial. Refused here is what it would take and then
not hold: measured over the public suite (`tests/unit/dispatcher/test_schema_suite.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import copysign
from typing import Any, Final
from urllib.parse import unquote

MAX_SCHEMA_BYTES: Final = 64 * 1024
"""Of a schema as compact JSON, UTF-8."""
MAX_SCHEMA_DEPTH: Final = 32
"""Objects and arrays of a schema within each other."""
OPTIONS: Final[dict[str, Any]] = {
    # at most one space wherever JSON has blanks: a model cannot run away in them
    "whitespace_pattern": r"\x20",
    # without \u: the library lets `"\u0061"` be another name than "a"
    "json_allowed_escapes": 'nrbtf\\"',
}
"""How the library writes JSON (`x-guidance`); nothing of it is taken from a request."""

_DRAFTS: Final = frozenset(
    f"http{place}/schema"
    for place in (
        *("s://json-schema.org/draft/2020-12", "s://json-schema.org/draft/2019-09"),
        *("://json-schema.org/draft-07", "://json-schema.org/draft-06", "://json-schema.org/draft-04"),
    )
)
_SINGLE: Final = ("additionalItems", "additionalProperties", "items")
_LISTS: Final = ("prefixItems", "items", "allOf", "anyOf", "oneOf")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_WORDS: Final = frozenset(
    {
        *(*_SINGLE, *_LISTS, *_MAPS, "$ref", "$id", "id", "$anchor", "$comment", "$schema", "$vocabulary"),
        *("type", "const", "enum", "required", "minProperties", "maxProperties", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("multipleOf", "title", "description", "default", "example", "examples", "deprecated", "readOnly"),
        *("writeOnly", "contentEncoding", "contentMediaType", "contentSchema", "nullable", "discriminator"),
        # refused by the library
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
        *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    }
)
"""A schema with none of these, but others, is one by mistake."""
_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAX_SHOWN: Final = 80
"""Characters of a schema that an error repeats."""
_MAX_POINTER_CHARS: Final = 1024
"""Of a reference."""
_MAX_MEMBERS: Final = 64
"""Of an object, among which one is looked for that tells the schemas of a `oneOf` apart."""
_MAX_EXACT: Final = 2**53
"""Beyond it the library rounds."""
_DAY: Final = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME: Final = (
    r"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    r"|23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00))"
)
_FORMATS: Final = {"date": f"^{_DAY}$", "time": f"^{_TIME}$", "date-time": f"^{_DAY}[tT]{_TIME}$"}
"""Formats whose days and leap seconds the library does not count: written as patterns."""
_CONTROL: Final = r"[\x00-\x07\x0b\x0e-\x1f\x7f]|\\(?:x[01][0-9a-fA-F]|x7[fF]|u00[01][0-9a-fA-F]|u007[fF]|[av0]|c.)"
_PIECES: Final = re.compile(rf"(?P<control>{_CONTROL})|\\.|.", re.DOTALL)
"""Of a pattern: characters, escaped or not."""
_BLANK: Final = r"\t-\r \x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
_BLANKS: Final = {r"\s": f"[{_BLANK}]", r"\S": f"[^{_BLANK}]"}
_ANY: Final = r"[^\n\r\x{2028}\x{2029}]"
r"""What `\s`, `\S` and `.` are in ECMAScript."""
_UNWRITTEN: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


class SchemaRefusedError(ValueError):
    """A schema is too large, or cannot be held exactly.

    Args:
        reason: what it does, such as "is more than 32 deep".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def prepare_schema(schema: Mapping[str, Any], *, coerce_one_of: bool = False) -> dict[str, Any]:
    """Return a copy of the schema as the library gets it, options included.

    Args:
        schema: as parsed; every text of it is one that UTF-8 has.
        coerce_one_of: take `oneOf` as `anyOf` where its schemas may overlap.

    Raises:
        SchemaRefusedError: it is not served.
    """
    copy: dict[str, Any] = json.loads(_bounded_json(schema))
    if "x-guidance" in copy:
        raise SchemaRefusedError("has 'x-guidance', which is not taken from a request")
    draft = copy.pop("$schema", None)
    if draft is not None and str(draft).rstrip("#") not in _DRAFTS:
        raise SchemaRefusedError("has a '$schema' that is none of JSON Schema's drafts 4 to 2020-12")
    known: set[int] = set()
    references: list[str] = []
    for place, node in _schemas(copy):
        _check(place, node)
        if isinstance(node, dict):
            _leave_out_what_says_nothing(node)
            _say_one_of_exactly(node, copy)
            known.add(id(node))
            references += [node["$ref"]] if isinstance(node.get("$ref"), str) else []
    for reference in references:
        target = _target(reference, copy)
        if not isinstance(target, bool) and id(target) not in known:
            raise SchemaRefusedError(f"has the '$ref' '{_printable(reference)}', which leads to no schema within it")
    return {**copy, "x-guidance": {**OPTIONS, "coerce_one_of": coerce_one_of}}


def grammar_of_schema(schema: Mapping[str, Any], *, coerce_one_of: bool = False) -> bytes:
    """Return the grammar of all JSON texts that the schema allows; see `prepare_schema`."""
    prepared = prepare_schema(schema, coerce_one_of=coerce_one_of)
    return json.dumps({"grammars": [{"json_schema": prepared}]}, ensure_ascii=False, separators=(",", ":")).encode()


def _bounded_json(schema: Mapping[str, Any]) -> str:
    """Return the schema as JSON; by a walk that does not recurse, for `json` does."""
    num_bytes, level, depth = 0, [schema], 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise SchemaRefusedError(f"is more than {MAX_SCHEMA_DEPTH} deep")
        inner: list[Any] = []
        for node in level:
            num_bytes += 2 + len(node)
            if num_bytes > MAX_SCHEMA_BYTES:
                raise _too_large()
            num_bytes += sum(map(len, node)) if isinstance(node, dict) else 0
            for value in node.values() if isinstance(node, dict) else node:
                if isinstance(value, dict | list):
                    inner.append(value)
                else:
                    num_bytes += len(value) if isinstance(value, str) else 1
        level = inner
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    if len(text.encode()) > MAX_SCHEMA_BYTES:
        raise _too_large()
    return text


def _too_large() -> SchemaRefusedError:
    return SchemaRefusedError(f"is larger than {MAX_SCHEMA_BYTES // 1024} KiB")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a schema stands in another one."""

    parent: _Place | None
    step: str
    """From there."""

    def __str__(self) -> str:
        """A JSON pointer, cut where it becomes long."""
        steps: list[str] = []
        place: _Place | None = self
        while place is not None:
            steps.append(_printable(place.step))
            place = place.parent
        text = "/".join(reversed(steps))
        return text if len(text) <= _MAX_SHOWN else f"…{text[-_MAX_SHOWN:]}"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:_MAX_SHOWN])


def _schemas(root: dict[str, Any]) -> Iterator[tuple[_Place, Any]]:
    """Give every schema in a schema, itself first, and where it stands."""
    pending: list[tuple[_Place, Any]] = [(_Place(None, "#"), root)]
    while pending:
        place, node = pending.pop()
        yield place, node
        if not isinstance(node, dict):
            continue
        for name in _SINGLE:
            if name in node and not isinstance(node[name], list):
                pending.append((_Place(place, name), node[name]))
        for name in _LISTS:
            if isinstance(node.get(name), list):
                above = _Place(place, name)
                pending += [(_Place(above, str(index)), inner) for index, inner in enumerate(node[name])]
        for name in _MAPS:
            if isinstance(node.get(name), dict):
                above = _Place(place, name)
                pending += [(_Place(above, key), inner) for key, inner in node[name].items()]


def _target(reference: str, root: dict[str, Any]) -> Any:
    """Return what a JSON pointer leads to; None: nothing that could be a schema."""
    pointer = unquote(reference)
    if pointer in ("#", "#/"):
        return root
    if not pointer.startswith("#/") or len(pointer) > _MAX_POINTER_CHARS:
        return None
    node: Any = root
    for step in pointer.removeprefix("#/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdecimal() and len(name) <= 6 and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node


def _check(place: _Place, node: Any) -> None:
    """Raise for what would be taken and not held; `node` is written as it is held."""
    if not isinstance(node, dict):
        return
    if node and not _WORDS.intersection(node):
        raise SchemaRefusedError(f"says nothing at {place}: JSON Schema has no '{_printable(next(iter(node)))}'")
    for name in ("$id", "id", "$schema"):
        if name in node and place.parent is not None:
            raise SchemaRefusedError(f"has '{name}' at {place}: only its root can have one")
    if "prefixItems" in node and "additionalItems" in node:
        raise SchemaRefusedError(f"has 'prefixItems' beside 'additionalItems' at {place}")
    _check_values(place, node)
    _check_count(place, node)
    if isinstance(node.get("pattern"), str):
        node["pattern"] = _written_pattern(place, node["pattern"])
    if isinstance(node.get("patternProperties"), dict):
        patterns = node["patternProperties"].items()
        node["patternProperties"] = {_written_pattern(place, pattern): inner for pattern, inner in patterns}
    _write_format(place, node)


def _check_values(place: _Place, node: dict[str, Any]) -> None:
    """Raise for numbers and texts that the library changes."""
    values = [node[name] for name in _NUMBERS if name in node]
    literals = [node[name] for name in ("const", "enum") if name in node]
    while literals:
        value = literals.pop()
        if isinstance(value, dict):
            literals += value.values()
        elif isinstance(value, list):
            literals += value
        elif isinstance(value, str) and _UNWRITTEN.search(value):
            raise SchemaRefusedError(f"has a control character in a value at {place}, which is not written")
        else:
            values.append(value)
    for value in values:
        if isinstance(value, int | float) and not isinstance(value, bool) and not _is_exact(value):
            raise SchemaRefusedError(f"has a number at {place} that is not held exactly: beyond ±2^53, or -0.0")


def _is_exact(number: float) -> bool:
    return abs(number) <= _MAX_EXACT and (number != 0 or copysign(1, number) > 0)


def _check_count(place: _Place, node: dict[str, Any]) -> None:
    """Raise where members of one name would be counted as several."""
    wanted, required = node.get("minProperties"), node.get("required")
    num_required = len({str(name) for name in required}) if isinstance(required, list) else 0
    if isinstance(wanted, int | float) and wanted > num_required + 1:
        reason = "has 'minProperties' at {}, more than one above the number of its 'required': names may repeat"
        raise SchemaRefusedError(reason.format(place))


def _written_pattern(place: _Place, pattern: str) -> str:
    """Return a pattern of ECMAScript in the library's syntax, as far as they differ without saying so.

    Raises:
        SchemaRefusedError: it asks for one control character, which the library would leave out. It does not in a
            class of several characters: there it takes the others.
    """
    written: list[str] = []
    in_class = only_controls = False
    for piece in _PIECES.finditer(pattern):
        text, is_control = piece[0], piece["control"] is not None
        if (is_control and not in_class) or (only_controls and text == "]"):
            raise SchemaRefusedError(f"has a pattern at {place} for a control character, which is not written")
        if in_class:
            in_class = text != "]"
            only_controls = only_controls and (is_control or text == "-")
        else:
            in_class = only_controls = text == "["
            text = _ANY if text == "." else text
        written.append(_BLANKS.get(text, text))
    return "".join(written)


def _write_format(place: _Place, node: dict[str, Any]) -> None:
    """Put a pattern in place of a format that the library does not hold exactly."""
    name = node.get("format")
    if name == "unknown":
        raise SchemaRefusedError(f"has the unknown format 'unknown' at {place}")
    if not isinstance(name, str) or name not in _FORMATS:
        return
    if "pattern" not in node:
        node["pattern"] = _FORMATS[name]
    elif isinstance(node.get("allOf", []), list):
        node["allOf"] = [*node.get("allOf", []), {"pattern": _FORMATS[name]}]
    else:
        return
    del node["format"]


def _leave_out_what_says_nothing(node: dict[str, Any]) -> None:
    """Take out what the library would refuse although it asks for nothing, as generators of schemas write it."""
    if node.get("uniqueItems") is False:
        del node["uniqueItems"]
    if node.get("propertyNames") in ({}, {"type": "string"}) or node.get("propertyNames") is True:
        del node["propertyNames"]


def _say_one_of_exactly(node: dict[str, Any], root: dict[str, Any]) -> None:
    """Write `oneOf` as `anyOf` where a member tells its schemas apart; the library does not look behind a `$ref`."""
    options = node.get("oneOf")
    if isinstance(options, list) and "anyOf" not in node and _are_told_apart(options, root):
        members = list(node.items())
        node.clear()
        node.update(("anyOf" if name == "oneOf" else name, value) for name, value in members)


def _are_told_apart(options: list[Any], root: dict[str, Any]) -> bool:
    objects = [_object_of(option, root) for option in options]
    if not objects or any(found is None for found in objects):
        return False
    members = [found for found in objects if found is not None]
    return any(_differs(name, members) for name in members[0])


def _object_of(option: Any, root: dict[str, Any]) -> dict[str, set[str]] | None:
    """Return the required members of an object that are one of some texts, with these; None: it may be no object."""
    for _ in range(MAX_SCHEMA_DEPTH):
        if not isinstance(option, dict) or not isinstance(option.get("$ref"), str):
            break
        option = _target(option["$ref"], root)
    if not isinstance(option, dict) or option.get("type") != "object":
        return None
    required, properties = option.get("required"), option.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict):
        return None
    found: dict[str, set[str]] = {}
    for name in required[:_MAX_MEMBERS]:
        inner = properties.get(name) if isinstance(name, str) else None
        if isinstance(inner, dict):
            texts = [inner["const"]] if "const" in inner else inner.get("enum")
            if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
                found[name] = set(texts)
    return found


def _differs(name: str, members: list[dict[str, set[str]]]) -> bool:
    """Return whether no two of the objects can have the same text under a name."""
    sets = [found.get(name) for found in members]
    known = [texts for texts in sets if texts is not None]
    return len(known) == len(sets) and sum(map(len, known)) == len(set[str]().union(*known))
