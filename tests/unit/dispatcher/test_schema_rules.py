"""Schemas before they become grammars: what is refused, for it would not be held, and how answers are written."""

from __future__ import annotations

import json
import random
import time
from calendar import monthrange
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

import demo_model
from services.dispatcher.endpoints.schema_rules import (
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    SchemaRefusedError,
    grammar_of_schema,
    prepare_schema,
)
from shared.grammars import GrammarCompiler, open_compiler
from tests.support.bounded_schemas import BOUNDED
from tests.support.schema_suite import tokens_of

MODEL = Path(demo_model.__file__).parent / "model"
END = 4
"""Of the demo model."""
MAX_TOKENS = 512


@cache
def compiler() -> GrammarCompiler:
    return open_compiler(MODEL, 2048, [END])


def is_held_to(schema: dict[str, Any], text: str) -> bool:
    """Whether a text is a whole answer."""
    matcher, ids = compiler().compile(grammar_of_schema(schema)), tokens_of(compiler(), text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (deep(MAX_SCHEMA_DEPTH + 1), "is more than 32 deep"),
        ({"const": "é" * (MAX_SCHEMA_BYTES // 2)}, "is larger than 64 KiB"),
        ({"enum": [[]] * MAX_SCHEMA_BYTES}, "is larger than 64 KiB"),
        ({"x-guidance": {"lenient": True}}, "'x-guidance'"),
        ({"$schema": "https://example.com/mine"}, "'$schema'"),
        ({"$ref": "http://example.com/x"}, "'$ref' 'http://example.com/x'"),
        ({"$ref": "#/$defs/b", "$defs": {"a": {}}}, "leads to no schema"),
        ({"$ref": "#/examples/0", "examples": [{"type": "string"}]}, "leads to no schema"),
        ({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}, "leads to no schema"),
        ({"properties": {"a": {"$id": "http://example.com/a"}}}, "has '$id' at #/properties/a"),
        ({"items": {"$schema": "http://json-schema.org/draft-07/schema#"}}, "has '$schema' at #/items"),
        ({"allOf": [{"prefixItems": [{}], "additionalItems": False}]}, "'prefixItems' beside 'additionalItems'"),
        ({"minProperties": 2}, "'minProperties'"),
        ({"minProperties": 3, "required": ["a"]}, "'minProperties'"),
        ({"const": 2**53 + 1}, "not held exactly"),
        ({"enum": [1, {"a": [-(2**60)]}]}, "not held exactly"),
        ({"maximum": 1e300}, "not held exactly"),
        ({"const": -0.0}, "not held exactly"),
        ({"const": "a\u0000"}, "control character"),
        ({"enum": [{"a": ["\u007f"]}]}, "control character"),
        ({"pattern": "^a\\x01b$"}, "control character"),
        ({"pattern": "^a\u0001b$"}, "control character"),
        ({"pattern": "^a[\\x01]b$"}, "control character"),
        ({"pattern": "\\cA"}, "control character"),
        ({"patternProperties": {"^\\u0001": {}}}, "control character"),
        ({"properties": {"a": {"foo": "bar"}}}, "says nothing at #/properties/a"),
        ({"format": "unknown"}, "unknown format"),
    ],
)
def test_what_would_not_be_held_is_refused(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(SchemaRefusedError) as refusal:
        grammar_of_schema(schema)
    assert reason in refusal.value.reason


@pytest.mark.parametrize(
    "schema",
    [
        deep(MAX_SCHEMA_DEPTH),
        {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "http://example.com/a", "type": "object"},
        {"$ref": "#/$defs/a~1b%20~0", "$defs": {"a/b ~": {"type": "string"}}},
        {"$ref": "#/allOf/0/properties/x", "allOf": [{"properties": {"x": {"type": "string"}}}]},
        {"properties": {"not": {"type": "string"}, "$ref": {"type": "string"}, "$id": {"title": "Id"}}},
        {"const": {"$ref": "#/nothing", "$id": 1, "foo": {"format": "unknown"}}},
        {"minProperties": 1},
        {"minProperties": 2, "required": ["a"]},
        {"pattern": "^[^\\x00-\\x1f]*$"},
        {"enum": [2**53, -(2**53), 0.0, "\b\f\n\r\t"]},
        {"type": "string", "nullable": True, "x-order": 3},
        {"pattern": 5, "properties": [], "allOf": {}, "$ref": 3, "required": 1, "minProperties": "a"},
    ],
)
def test_what_is_held_passes_and_what_is_malformed_is_left_to_the_library(schema: dict[str, Any]) -> None:
    before = deepcopy(schema)
    assert grammar_of_schema(schema)
    assert schema == before


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object"}, '{ "a" : [1 , 2] }', '{"a":  1}'),
        ({"type": "object"}, "{}", '{"a":\n1}'),
        ({"type": "object"}, "{}", " {}"),
        ({"type": "object"}, "{}", "{} "),
        ({"properties": {"a": {"type": "integer"}}}, '{"a":1}', '{"\\u0061":"x"}'),
        ({"type": "string"}, '"\\n\\"é🦊"', '"\\u0000"'),
        ({"type": "string", "pattern": "^\\s$"}, '"\u2003"', '"a"'),
        ({"type": "string", "pattern": "^[\\S-]$"}, '"-"', '"\ufeff"'),
        ({"type": "string", "pattern": "^.$"}, '"x"', '"\u2028"'),
        ({"type": "string", "pattern": "^[.\\]]$"}, '"]"', '"x"'),
        ({"type": "string", "pattern": "^\\.$"}, '"."', '"x"'),
        ({"type": "string", "format": "date", "pattern": "^2"}, '"2024-02-29"', '"1999-01-01"'),
        ({"type": "string", "format": "date-time"}, '"2024-02-29T23:59:60Z"', '"2024-02-29T22:59:60Z"'),
        ({"type": "string", "format": "time"}, '"12:00:00.5+01:00"', '"24:00:00Z"'),
    ],
)
def test_how_answers_are_written(schema: dict[str, Any], good: str, bad: str) -> None:
    assert is_held_to(schema, good)
    assert not is_held_to(schema, bad)


@pytest.mark.slow
def test_a_date_is_a_day_of_the_calendar() -> None:
    schema = {"type": "string", "format": "date"}
    for year in (1900, 1999, 2000, 2023, 2024, 2100, 2400):
        for month in range(14):
            for day in (0, 1, 28, 29, 30, 31, 32):
                is_day = 1 <= month <= 12 and 1 <= day <= monthrange(year, month)[1]
                text = f'"{year}-{month:02}-{day:02}"'
                assert is_held_to(schema, text) == is_day, text


def test_one_of_is_any_of_only_where_it_is_said() -> None:
    assert prepare_schema({"oneOf": []})["x-guidance"]["coerce_one_of"] is False
    assert prepare_schema({"oneOf": []}, coerce_one_of=True)["x-guidance"]["coerce_one_of"] is True


def kind(*names: Any, **more: Any) -> dict[str, Any]:
    member = {"const": names[0]} if len(names) == 1 else {"enum": list(names)}
    return {"type": "object", "properties": {"kind": member, "x": {}}, "required": ["x", "kind"], **more}


def is_one_of(*options: Any, **more: Any) -> bool:
    return "oneOf" in prepare_schema({"oneOf": list(options), **more})


def test_one_of_is_any_of_where_a_member_tells_its_schemas_apart() -> None:
    defs = {"a": kind("a"), "b": {"$ref": "#/$defs/c"}, "c": kind("b", "c")}
    referring = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b", "title": "B"}
    assert not is_one_of(*referring, **{"$defs": defs})
    assert list(prepare_schema({"type": "object", "oneOf": [kind("a"), kind("b")], "title": "T"}))[:3] == [
        *("type", "anyOf", "title"),
    ]
    schema = {"$defs": defs, "oneOf": list(referring)}
    assert is_held_to(schema, '{"kind":"c","x":1}')
    assert not is_held_to(schema, '{"kind":"d","x":1}')


@pytest.mark.parametrize(
    "options",
    [
        (kind("a"), kind("a", "b")),
        (kind("a"), kind("b", required=["x"])),
        (kind("a"), kind("b", type=["object", "null"])),
        (kind(1), kind(1.0)),
        (kind("a"), {"type": "string"}),
        (kind("a"), kind("b"), {}),
        (kind("a"), True),
        (kind("a"), {"$ref": "#"}),
        ({"type": "object", "properties": {"kind": {"const": "a"}}, "required": "kind"}, kind("b")),
        ({"type": "object", "properties": {"a": {"const": "a"}}, "required": ["a"]}, kind("b")),
    ],
)
def test_one_of_stays_where_its_schemas_may_overlap(options: tuple[Any, ...]) -> None:
    assert is_one_of(*options)


def test_one_of_stays_beside_any_of() -> None:
    assert is_one_of(kind("a"), kind("b"), anyOf=[{}])


def test_what_generators_write_and_asks_for_nothing_is_left_out() -> None:
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}
    assert is_held_to({**record, "uniqueItems": False}, '{"a":1}')
    assert "propertyNames" in prepare_schema({**record, "propertyNames": {"type": "string", "minLength": 1}})
    assert "uniqueItems" in prepare_schema({"uniqueItems": True})


@pytest.mark.parametrize("pattern", ["[" * 60_000, "[\\x01" * 10_000, "\\" * 60_000, "[-" * 30_000, "." * 60_000])
def test_a_long_pattern_is_looked_through_once(pattern: str) -> None:
    """Looking for each class anew would take half a minute."""
    began_s = time.thread_time()
    with suppress(SchemaRefusedError):
        grammar_of_schema({"pattern": pattern})
    assert time.thread_time() - began_s < 1


def drawn(schema: dict[str, Any], draw: Callable[[Sequence[int]], int]) -> tuple[list[int], bool]:
    """Return an answer whose tokens are drawn from what is allowed, and whether it ended by itself."""
    matcher = compiler().compile(grammar_of_schema(schema))
    ids: list[int] = []
    while len(ids) < MAX_TOKENS:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        ids.append(draw(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()))
        if ids[-1] == END:
            return ids, True
        assert matcher.consume_token(ids[-1])
    return ids, False


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDED)
def test_a_bounded_schema_ends_whatever_is_drawn(name: str) -> None:
    """Also by who loves blanks, or never ends while something else is allowed."""
    generator = random.Random(name)
    blanks = set(tokens_of(compiler(), " "))
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))

    def stubborn(allowed: Sequence[int]) -> int:
        others = [token_id for token_id in allowed if token_id != END]
        blank = [token_id for token_id in others if token_id in blanks]
        return generator.choice(blank or others or list(allowed))

    for draw in [generator.choice] * 20 + [stubborn] * 5:
        ids, has_ended = drawn(BOUNDED[name], draw)
        assert has_ended, ids
        jsonschema.validate(json.loads(tokenizer.decode(ids[:-1])), BOUNDED[name])
