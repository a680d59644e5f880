"""Typed access to the parameters of a request: no number from a text, no integer from `true`; null is "not given"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from services.dispatcher.http.errors import ApiError, invalid


class Fields:
    """The parameters of one JSON object.

    Args:
        values: as parsed.
        prefix: path of the object itself, such as `qoe.`; empty at the top.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values = values
        self._prefix = prefix

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Return the whole number, or None if it is not given."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(name, "an integer", value)
        return int(self._in_range(name, "integer", value, low, high))

    def number(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
        """Return the number, or None if it is not given.

        Args:
            name: of the parameter.
            low: smallest value; not itself allowed if `above`.
            high: largest value.
            above: see `low`.
        """
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong_type(name, "a number", value)
        if isinstance(value, float) and not math.isfinite(value):  # 1e999 is written like a number
            code = "decimal_above_max_value" if value > 0 else "decimal_below_min_value"
            raise invalid(code, self._prefix + name, f"'{self._prefix}{name}' must be a finite number.")
        if above and value <= low:
            raise self._out_of_range(name, "decimal", f"above {_plain(low)}", is_above=False)
        return float(self._in_range(name, "decimal", value, low, high))

    def boolean(self, name: str, *, default: bool = False) -> bool:
        """Return the truth value, or the default if it is not given."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong_type(name, "true or false", value)
        return value

    def text(self, name: str) -> str | None:
        """Return the text, or None if it is not given."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong_type(name, "a string", value)
        return value

    def tokens(self, name: str, max_length: int, vocab_size: int) -> tuple[int, ...]:
        """Return the token ids; none if they are not given."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self._wrong_type(name, "an array of token ids", value)
        if len(value) > max_length:
            path = self._prefix + name
            raise invalid("array_above_max_length", path, f"'{path}' takes at most {max_length} ids.")
        return tuple(check_token_ids(value, self._prefix + name, vocab_size))

    def mapping(self, name: str) -> Fields | None:
        """Return the parameters of an inner object, or None if it is not given."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong_type(name, "an object", value)
        return Fields(value, f"{self._prefix}{name}.")

    def _wrong_type(self, name: str, wanted: str, value: object) -> ApiError:
        path = self._prefix + name
        return invalid("invalid_type", path, f"'{path}' must be {wanted}, not {type_name(value)}.")

    def _in_range(self, name: str, kind: str, value: float, low: float, high: float) -> float:
        if value < low:
            raise self._out_of_range(name, kind, f"at least {_plain(low)}", is_above=False)
        if value > high:
            raise self._out_of_range(name, kind, f"at most {_plain(high)}", is_above=True)
        return value

    def _out_of_range(self, name: str, kind: str, allowed: str, *, is_above: bool) -> ApiError:
        path = self._prefix + name
        code = f"{kind}_{'above_max' if is_above else 'below_min'}_value"
        return invalid(code, path, f"'{path}' must be {allowed}.")


def _plain(number: float) -> str:
    """Return the number as a person writes it: whole ones with every digit."""
    return str(number) if isinstance(number, int) else f"{number:g}"


_TYPE_NAMES = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def type_name(value: object) -> str:
    """Return what JSON calls the type of a value."""
    return _TYPE_NAMES.get(type(value), "another type")


def check_token_ids(values: list[Any], param: str, vocab_size: int) -> list[int]:
    """Return the ids if each is an integer of the vocabulary.

    Raises:
        ApiError: one is not.
    """
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid("invalid_type", param, f"'{param}' must have integers only, not {type_name(value)}.")
        if not 0 <= value < vocab_size:
            code = "integer_below_min_value" if value < 0 else "integer_above_max_value"
            raise invalid(code, param, f"'{param}' has a token id outside of the vocabulary (0 to {vocab_size - 1}).")
    return values
