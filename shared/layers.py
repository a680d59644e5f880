"""Ranges of a model's layers: what a stage of a pipeline computes, what an instance holds, what a transfer moves.

layers 0 … L - 1      [0, 16)  stage 0: embeds      [16, 32)  stage 1      [32, 48)  stage 2: samples
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.end))

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.first <= layer < self.end

    def __str__(self) -> str:
        return f"[{self.first}, {self.end})"

    def covers(self, other: LayerRange) -> bool:
        """Whether every layer of the other range is in this one."""
        return self.first <= other.first and other.end <= self.end

    def overlap(self, other: LayerRange) -> LayerRange | None:
        """Return the layers that both have; None if there are none."""
        first, end = max(self.first, other.first), min(self.end, other.end)
        return LayerRange(first, end) if first < end else None


def even_split(num_layers: int, num_stages: int) -> tuple[LayerRange, ...]:
    """Return the ranges of stages that differ by one layer at most; the longer ones come first.

    The last stage has the head besides, so it is the one to be short.

    Raises:
        ValueError: there are fewer layers than stages, or no stage.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers do not make {num_stages} stages")
    size, rest = divmod(num_layers, num_stages)
    ends = [(i + 1) * size + min(i + 1, rest) for i in range(num_stages)]
    return tuple(LayerRange(first, end) for first, end in zip([0, *ends], ends, strict=False))


def check_tiling(ranges: Sequence[LayerRange], num_layers: int) -> None:
    """Check that the ranges, in this order, are all layers of a model, each once.

    Raises:
        ValueError: they are not; names the first place where they differ.
    """
    at = 0
    for layers in ranges:
        if layers.first != at:
            raise ValueError(f"layers {layers} do not begin where those before them end, at {at}")
        at = layers.end
    if at != num_layers:
        raise ValueError(f"the stages end at layer {at} of {num_layers}")
