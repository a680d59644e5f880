"""Ranges of a model's layers: what an instance holds, a stage runs, a transfer moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """Layers [first, end), numbered in the whole model; never empty."""

    first: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end:
            raise ValueError(f"layers {self.first} to {self.end} are no range")

    def __len__(self) -> int:
        return self.end - self.first

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.end))

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.first <= layer < self.end

    def __str__(self) -> str:
        return f"[{self.first}, {self.end})"

    def overlap(self, other: LayerRange) -> LayerRange | None:
        """Return the layers that both have; None if there are none."""
        first, end = max(self.first, other.first), min(self.end, other.end)
        return LayerRange(first, end) if first < end else None
