"""How many tokens of KV a stage, and a group, has room for: counted in pages, as the worker's memory does.

Stated so that a worker can be held to it. A stage that serves the layers [a, b) with a budget of B pages:

    parameters  p = Σ over its layers ⌈bytes of the layer / page⌉ + Σ over the outer parts that it needs ⌈bytes / page⌉
    pages for K of one layer, and as many for V:   q = ⌊(B - p) / (2 (b - a))⌋     the remainder is spare
    blocks backed in every one of its ranges:      n = ⌊q · page / block_bytes⌋    at most max_blocks

A group's block ids are 0 to C - 1 with C the smallest n of its stages, because a block is usable only where all stages
back it; its capacity is C · block_size tokens. So a merge does not simply free P: the stage with most layers counts.

Worked example: 48 equal layers, P = 28 GB of parameters and K = 40 GB for KV in each instance. Alone: 40 GB worth of
tokens. Two stages of 24: each has 68 - 14 = 54 GB for half the layers, which is 108 GB worth of tokens, 28 more than
twice 40: one P. Stages of 16, 16 and 16 beside one of 8 and one of 8 have room as three stages of 16 have.

Pure arithmetic on integers. Source: KunServe v1, section 4.1, constraint (a), which counts (|g| - 1) · P; deviation:
the smallest stage decides, in whole pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from services.planner.policy.drop_facts import InstanceFacts, ModelFacts
from shared.layer_range import LayerRange

Table = npt.NDArray[np.int64]

UNLIMITED_BLOCKS = 2**62
"""Where addresses are reserved for any plan."""


class CapacityRule:
    """The rule above for one model."""

    def __init__(self, model: ModelFacts) -> None:
        self.model = model
        self._layer_pages = (0, *accumulate(self._pages(size) for size in model.layer_bytes))
        outer = model.outer
        self._first_pages = self._pages(outer.first_bytes)
        self._last_pages = self._pages(outer.last_bytes)
        self._ends_pages = self._pages(outer.ends_bytes)
        self._resident_pages = self._pages(outer.resident_bytes)

    def _pages(self, num_bytes: int) -> int:
        return -(-num_bytes // self.model.page_bytes)

    def parameter_pages(self, layers: LayerRange) -> int:
        """Return the pages that the parameters of a stage of these layers take."""
        first, last = layers.start == 0, layers.stop == self.model.num_layers
        pages = self._layer_pages[layers.stop] - self._layer_pages[layers.start] + self._resident_pages
        if first:
            pages += self._first_pages
        if last:
            pages += self._last_pages
        return pages + self._ends_pages if first or last else pages

    def blocks(self, layers: LayerRange, num_pages: int, max_blocks: int | None = None) -> int:
        """Return the blocks that a stage of these layers backs; 0 if its parameters alone exceed the budget."""
        free_pages = max(num_pages - self.parameter_pages(layers), 0)
        num_blocks = free_pages // (2 * layers.num_layers) * self.model.page_bytes // self.model.block_bytes
        return num_blocks if max_blocks is None else min(num_blocks, max_blocks)

    def blocks_of(self, start: Table, stop: Table, num_pages: Table, max_blocks: Table) -> Table:
        """Return `blocks` element by element; the arrays are broadcast against each other, and no range is empty."""
        free_pages = np.maximum(num_pages - self._all_parameter_pages[start, stop], 0)
        num_blocks = free_pages // (2 * (stop - start)) * self.model.page_bytes // self.model.block_bytes
        return np.minimum(num_blocks, max_blocks)

    @cached_property
    def _all_parameter_pages(self) -> Table:
        """[start, stop]; 0 where there is no such range."""
        edges = range(self.model.num_layers + 1)
        rows = [
            [self.parameter_pages(LayerRange(start, stop)) if start < stop else 0 for stop in edges] for start in edges
        ]
        return np.array(rows, dtype=np.int64)

    def group_blocks(self, members: Iterable[InstanceFacts]) -> int:
        """Return the blocks of a group whose members serve what they hold."""
        return min(self.blocks(member.layers, member.num_pages, member.max_blocks) for member in members)

    def tokens(self, num_blocks: int) -> int:
        """Return the tokens that so many blocks hold."""
        return num_blocks * self.model.block_size
