"""A run of neighbouring layers: what a stage serves, what a copy of parameters covers, what a transfer carries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """Layers `start` to `stop` - 1, numbered in the whole model; never empty."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"no range of layers: from {self.start} up to, without, {self.stop}")

    @property
    def num_layers(self) -> int:
        """How many layers."""
        return self.stop - self.start

    def covers(self, other: LayerRange) -> bool:
        """Whether every layer of the other range is in this one."""
        return self.start <= other.start and other.stop <= self.stop

    def __str__(self) -> str:
        return f"{self.start}-{self.stop - 1}" if self.num_layers > 1 else f"{self.start}"
