"""Who has to send which layers to whom, when the KV of a request changes from one layout to another. Pure.

    from   │ A: 0 ────────────────── 8 │        one whole instance
    to     │ A: 0 ── 3 │ B: 3 ──────── 8 │      a group of two stages
    cells              │ A → B: [3, 8)   │

An exchange (layers were dropped), a migration between groups and a live restore differ in the two layouts only.

Source: KunServe v2, section 4.2 (exchange); v1, section 4.2 (restore). Deviations: none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shared.ids import WorkerId
from shared.layers import LayerRange


@dataclass(frozen=True, slots=True)
class Layout:
    """Which worker holds the KV of which layers of a request: in order of layers, each layer once, none missing."""

    parts: tuple[tuple[WorkerId, LayerRange], ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a layout has at least one worker")
        next_layer = 0
        for worker_id, layers in self.parts:
            if layers.first != next_layer:
                raise ValueError(f"layers {layers} of {worker_id} do not follow layer {next_layer}")
            next_layer = layers.end
        if len({worker_id for worker_id, _ in self.parts}) != len(self.parts):
            raise ValueError("a worker stands twice in a layout: it holds one range of layers")

    @classmethod
    def of(cls, parts: Iterable[tuple[WorkerId, LayerRange]]) -> Layout:
        """Return the layout of parts in any order.

        Raises:
            ValueError: they are not each layer from 0 on exactly once.
        """
        return cls(tuple(sorted(parts, key=lambda part: part[1].first)))

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.parts[-1][1].end


@dataclass(frozen=True, slots=True)
class Cell:
    """Layers whose KV one worker sends another."""

    source_id: WorkerId
    target_id: WorkerId
    layers: LayerRange


def transfer_matrix(source: Layout, target: Layout) -> list[Cell]:
    """Return what has to be sent, in order of layers; layers that stay where they are do not occur.

    Raises:
        ValueError: the layouts are of models with different numbers of layers.
    """
    if source.num_layers != target.num_layers:
        raise ValueError(f"a layout of {source.num_layers} layers and one of {target.num_layers}")
    cells = []
    for source_id, held in source.parts:
        for target_id, wanted in target.parts:
            layers = held.overlap(wanted)
            if layers is not None and source_id != target_id:
                cells.append(Cell(source_id, target_id, layers))
    return sorted(cells, key=lambda cell: cell.layers.first)
