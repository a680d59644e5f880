"""How far parameters have come that are loaded beside serving. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParameterLoad:
    """One load, from its beginning on."""

    num_bytes: int
    """That were lacking when it began."""
    num_loaded_bytes: int
    """Of these, what is there; what turns out to be wrong is taken off again."""
    given: tuple[tuple[str, int], ...]
    """Bytes that were found right, by the name of the source that gave them."""
    is_over: bool
    """No more comes, whole or not."""
