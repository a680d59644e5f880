"""In how many layers a block of KV goes from one stage to another when layers change hands, and over whose links. Pure.

held 0-3 | 4-7, wanted 0-1 | 2-7:  a block goes in layers 2 and 3, out over the first stage's link, in over the second's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.worker.contract.arrays import I64
from shared.layers import LayerRange


@dataclass(frozen=True, slots=True)
class LinkLayers:
    """In how many layers a block goes over each stage's link: those to several targets are counted for each."""

    sends: I64
    """[num_stages]"""
    takes: I64
    """[num_stages]"""

    @property
    def total(self) -> int:
        """Those that go from one stage to another."""
        return int(self.sends.sum())


def link_layers(
    held: Sequence[LayerRange], wanted: Sequence[LayerRange], sources: Sequence[int], targets: Sequence[int]
) -> LinkLayers:
    """Return over whose links a block goes; layers that stay where they are go over none.

    Args:
        held: by stage: layers before the change.
        wanted: by stage: layers after it.
        sources: stages that have the block, each for its layers.
        targets: stages that get it.
    """
    sends, takes = np.zeros((2, len(held)), dtype=np.int64)
    for source in sources:
        for target in targets:
            part = held[source].overlap(wanted[target])
            if source != target and part is not None:
                sends[source] += len(part)
                takes[target] += len(part)
    return LinkLayers(sends, takes)
