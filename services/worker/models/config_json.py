"""Typed access to a checkpoint's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from shared.errors import StartupError
from shared.model_files import COPY_AGAIN, MAX_COUNT
from shared.sizes import describe_number

Config = dict[str, Any]
T = TypeVar("T", int, float, bool, str)

_MAX_FLOAT: Final = 2**1023
"""Below it, an integer can become a float."""


class ConfigReader:
    """Access to config.json: a wrong type or range is a `StartupError` that names the field.

    Args:
        config: as read.
        defaults: of fields that are absent; one that is null counts as given.
        prefix: put before a field's name in errors.
    """

    def __init__(self, config: Config, defaults: Mapping[str, Any] | None = None, prefix: str = "") -> None:
        self.config = {**(defaults or {}), **config}
        self._prefix = prefix

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        """Return a field, or `default` if it is absent or null.

        Raises:
            StartupError: it is of another type, or absent without a default.
        """
        value = self.config.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "is missing")
            return default
        if kind is float and type(value) is int and abs(value) < _MAX_FLOAT:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(name, f"is {value!r}, not {kind.__name__}")
        if not _is_finite(value):
            raise self.error(name, f"is {value}, must be finite")
        return value

    def positive(self, name: str, default: int | None = None, most: int = MAX_COUNT) -> int:
        """Return a whole number from 1 to `most`; as `get`."""
        value = self.get(name, int, default)
        if not 1 <= value <= most:
            what = "must be at least 1" if value < 1 else f"must be at most {most}"
            raise self.error(name, f"is {describe_number(value)}, {what}")
        return value

    def above_zero(self, name: str, default: float | None = None) -> float:
        """Return a number above 0; as `get`."""
        value = self.get(name, float, default)
        if value <= 0.0:
            raise self.error(name, f"is {value}, must be above 0")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` numbers above 0; as `get`."""
        values = self.config.get(name)
        numeric = isinstance(values, list) and all(
            type(value) in (int, float) and 0 < value < _MAX_FLOAT for value in values
        )
        if not isinstance(values, list) or not numeric or len(values) != count:
            raise self.error(name, f"is no list of {count} positive numbers")
        return tuple(float(value) for value in values)

    def error(self, name: str, what: str) -> StartupError:
        """Return the error that says what is wrong with a field."""
        return StartupError(f"config.json: {self._prefix}{name} {what}", COPY_AGAIN)


def _is_finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
