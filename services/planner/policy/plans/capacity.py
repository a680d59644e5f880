"""How many tokens of KV a stage, and a group, has room for: counted in pages, as the worker's memory does.

Stated so that a worker can be held to it. A stage that serves the layers [a, b) with a budget of B pages:

    parameters  p = Σ over its layers ⌈bytes of the layer / page⌉ + pages that the outer bytes it needs touch
    pages for K of one layer, and as many for V:   q = ⌊(B - p) / (2 (b - a))⌋     the remainder is spare
    blocks backed in every one of its ranges:      n = ⌊q · page / block_bytes⌋    at most max_blocks

While the parameters of other layers are resident beside, p counts all that are, and KV exists for [a, b) all the same.
Of N blocks that it serves with then, it can have the other layers too of as many as the rest of the budget holds
(`blocks_ahead`): those of its share, if KV is to move before the group dissolves.

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

from services.planner.policy.plans.drop_facts import InstanceFacts, ModelFacts
from shared.layers import LayerRange

Table = npt.NDArray[np.int64]

UNLIMITED_BLOCKS = 2**62
"""Where addresses are reserved for any plan."""


class CapacityRule:
    """The rule above for one model."""

    def __init__(self, model: ModelFacts) -> None:
        self.model = model
        self._layer_pages = (0, *accumulate(self._pages(size) for size in model.layer_bytes))
        self._first_pages = self._pages(model.first_stage_end)
        self._last_pages, self._end_pages = 0, self._first_pages
        if model.last_stage_begin < model.outer_bytes:
            begin, end = model.last_stage_begin // model.page_bytes, self._pages(model.outer_bytes)
            self._last_pages = end - begin
            self._end_pages = self._first_pages + self._last_pages - max(self._first_pages - begin, 0)

    def _pages(self, num_bytes: int) -> int:
        return -(-num_bytes // self.model.page_bytes)

    def kv_pages(self, num_blocks: int) -> int:
        """Return the pages of the keys of so many blocks in one layer; their values take as many."""
        return self._pages(num_blocks * self.model.block_bytes)

    def parameter_pages(self, layers: LayerRange) -> int:
        """Return the pages that the parameters of a stage of these layers take."""
        pages = self._layer_pages[layers.end] - self._layer_pages[layers.first]
        if layers.end < self.model.num_layers:
            return pages + self._first_pages if layers.first == 0 else pages
        return pages + (self._end_pages if layers.first == 0 else self._last_pages)

    def blocks(
        self,
        layers: LayerRange,
        num_pages: int,
        max_blocks: int | None = None,
        resident: LayerRange | None = None,
    ) -> int:
        """Return the blocks that a stage of these layers backs; 0 if its parameters alone exceed the budget.

        Args:
            layers: that it computes.
            num_pages: its budget.
            max_blocks: for which addresses are reserved; None: enough.
            resident: layers whose parameters have memory, `layers` among them; None: just those.
        """
        free_pages = max(num_pages - self.parameter_pages(resident or layers), 0)
        num_blocks = free_pages // (2 * len(layers)) * self.model.page_bytes // self.model.block_bytes
        return num_blocks if max_blocks is None else min(num_blocks, max_blocks)

    def blocks_of(self, first: Table, end: Table, num_pages: Table, max_blocks: Table) -> Table:
        """Return `blocks` element by element; the arrays are broadcast against each other, and no range is empty."""
        free_pages = np.maximum(num_pages - self._all_parameter_pages[first, end], 0)
        num_blocks = free_pages // (2 * (end - first)) * self.model.page_bytes // self.model.block_bytes
        backed: Table = np.minimum(num_blocks, max_blocks)
        return backed

    @cached_property
    def _all_parameter_pages(self) -> Table:
        """[first, end]; 0 where there is no such range."""
        edges = range(self.model.num_layers + 1)
        rows = [
            [self.parameter_pages(LayerRange(first, end)) if first < end else 0 for end in edges] for first in edges
        ]
        return np.array(rows, dtype=np.int64)

    def group_blocks(self, members: Iterable[InstanceFacts], resident: LayerRange | None = None) -> int:
        """Return the blocks of a group whose members serve what they hold.

        Args:
            members: of the group.
            resident: layers whose parameters each of them has; None: just those that it serves.
        """
        return min(self.blocks(each.layers, each.num_pages, each.max_blocks, resident) for each in members)

    def blocks_ahead(self, layers: LayerRange, num_pages: int, num_blocks: int, max_blocks: int | None = None) -> int:
        """Return of how many blocks a stage can have all layers, beside the whole model and the KV that it serves with.

        No more than it serves with, and than it has alone.

        Args:
            layers: that it serves.
            num_pages: its budget.
            num_blocks: of these layers.
            max_blocks: for which addresses are reserved; None: enough.
        """
        model, whole = self.model, self.model.all_layers
        most = min(num_blocks, self.blocks(whole, num_pages, max_blocks))
        num_others = len(whole) - len(layers)
        if not num_others:
            return most
        own = 2 * len(layers) * self.kv_pages(num_blocks)
        free = max(num_pages - self.parameter_pages(whole) - own, 0)
        return min(free // (2 * num_others) * model.page_bytes // model.block_bytes, most)

    def whole_blocks(self, members: Iterable[InstanceFacts]) -> int:
        """Return the blocks that these instances have together, each of them whole and alone."""
        whole = self.model.all_layers
        return sum(self.blocks(whole, each.num_pages, each.max_blocks) for each in members)

    def tokens(self, num_blocks: int) -> int:
        """Return the tokens that so many blocks hold."""
        return num_blocks * self.model.block_size
