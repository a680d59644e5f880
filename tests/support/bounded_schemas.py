"""Schemas whose every answer ends, however it is drawn: what strings, numbers and arrays may have is counted."""

from __future__ import annotations

from typing import Any, Final


def _object(**properties: Any) -> dict[str, Any]:
    names = list(properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


_WORD: Final = {"type": "string", "minLength": 1, "maxLength": 12}
_SMALL: Final = {"type": "integer", "minimum": 0, "maximum": 99}
_POINT: Final = {"type": "array", "prefixItems": [_SMALL, _SMALL], "items": False, "minItems": 2}

BOUNDED: Final[dict[str, dict[str, Any]]] = {
    "story": _object(hero=_WORD, place=_WORD, wish={"type": "string", "maxLength": 30}),
    "numbers": _object(a=_SMALL, b={"type": "integer", "minimum": -5, "maximum": 5}, c={"type": "boolean"}),
    "choice": {"enum": ["yes", "no", "perhaps"]},
    "constants": _object(kind={"const": "sum"}, value={"enum": [1, 2.5, None, True, [], {}]}),
    "list": {"type": "array", "items": _WORD, "maxItems": 5},
    "pair": _POINT,
    "shape": _object(name={"enum": ["line", "area"]}, points={"type": "array", "items": _POINT, "maxItems": 4}),
    "either": {"anyOf": [_object(x=_SMALL), _object(y=_WORD), {"type": "null"}]},
    "one": {"oneOf": [_object(kind={"const": "a"}, n=_SMALL), _object(kind={"const": "b"}, s=_WORD)]},
    "optional": {"type": "object", "properties": {"a": _SMALL, "b": _WORD, "c": _SMALL}, "additionalProperties": False},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "day": _object(day={"type": "string", "format": "date"}, at={"enum": ["09:00:00Z", "17:30:00Z"]}),
    "definitions": {
        "$defs": {"person": _object(name=_WORD, age=_SMALL)},
        **_object(first={"$ref": "#/$defs/person"}, second={"$ref": "#/$defs/person"}),
    },
    "many": _object(**{f"field_{i}": {"type": "boolean"} for i in range(20)}),
}
