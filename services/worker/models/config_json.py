"""Typed access to the JSON files of a checkpoint's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from shared.errors import StartupError

Config = dict[str, Any]
T = TypeVar("T", int, float, bool, str)


def read_json(path: Path) -> Config:
    """Return the JSON object in a small file of the checkpoint.

    Raises:
        StartupError: it cannot be read, or holds no object.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}", "Copy the checkpoint again") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} holds no JSON object", "Copy the checkpoint again")
    return value


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
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(name, f"is {value!r}, not {kind.__name__}")
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        """Return a whole number of at least 1; as `get`."""
        value = self.get(name, int, default)
        if value < 1:
            raise self.error(name, f"is {value}, must be at least 1")
        return value

    def above_zero(self, name: str, default: float | None = None) -> float:
        """Return a number above 0; as `get`."""
        value = self.get(name, float, default)
        if not 0.0 < value < float("inf"):
            raise self.error(name, f"is {value}, must be above 0")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` numbers above 0; as `get`."""
        values = self.config.get(name)
        numeric = isinstance(values, list) and all(type(value) in (int, float) and value > 0 for value in values)
        if not isinstance(values, list) or not numeric or len(values) != count:
            raise self.error(name, f"is no list of {count} positive numbers")
        return tuple(float(value) for value in values)

    def error(self, name: str, what: str) -> StartupError:
        """Return the error that says what is wrong with a field."""
        return StartupError(f"config.json: {self._prefix}{name} {what}", "Copy the checkpoint again")
