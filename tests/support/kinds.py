"""Values that must be of one kind, said where they are made."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def of_kind(kind: type[T], value: object) -> T:
    """Return the value, which is of this kind."""
    assert isinstance(value, kind), value
    return value


def some(value: T | None) -> T:
    """Return the value, of which there is one."""
    assert value is not None, "there is none"
    return value
