"""Ranges of a model's layers: what an instance holds, what a stage of a pipeline serves, what a transfer moves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """Contiguous layers, half-open, numbered in the whole model; never empty.

    Raises:
        ValueError: it is empty, or begins below 0.
    """

    first: int
    end: int
    """One past the last layer."""

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end:
            raise ValueError(f"layers [{self.first}, {self.end}) are no range")

    def __len__(self) -> int:
        return self.end - self.first

    def __contains__(self, layer: int) -> bool:
        return self.first <= layer < self.end

    def __str__(self) -> str:
        return f"[{self.first}, {self.end})"

    def covers(self, other: LayerRange) -> bool:
        """Whether every layer of the other range is in this one."""
        return self.first <= other.first and other.end <= self.end
