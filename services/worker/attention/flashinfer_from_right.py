"""FlashInfer's attention of rows some of whose blocks are filled from the right.

FlashInfer reads a block's slots in one direction only. The order of keys matters to a causal mask and to a window, and
to which slots of a block that is not full are read, but not to attention over keys that all queries see:

    positions   0 ──── blocks that were full before the first query ────┬──── the rest, the step's own keys in it ────
    read as     blocks, without a causal mask                           │    a list of slots in order, with one

Both outputs are joined by their log-sum-exp. In layers with a window all keys that are seen are read as slots.

Rows of other blocks are computed as if these were not there (`flashinfer_paged.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from services.worker.attention.base import RaggedRows
from services.worker.attention.block_lists import BlockLists, chosen_rows, full_block_lists, slot_lists
from services.worker.attention.merge import merge_states
from services.worker.attention.torch_paged import first_keys
from services.worker.contract.arrays import I32
from services.worker.memory.kv_cache import KVCache
from services.worker.models.spec import ModelSpec

Wrappers = dict[int | None, Any]
"""FlashInfer's objects, by window of the layers that they compute."""


class PlanLists(Protocol):
    """Has one of FlashInfer's objects plan rows."""

    def __call__(self, wrapper: Any, lists: BlockLists, window: int | None, *, causal: bool) -> None:
        """Plan, without waiting for the device."""


@dataclass(frozen=True, slots=True)
class FromRightPlan:
    """What all layers of a step share for such rows."""

    tokens: torch.Tensor
    """[t] indices in the batch of their tokens"""
    with_full: torch.Tensor | None
    """[u] places in `tokens` of the tokens of rows that had full blocks before; None: no row had"""


class FlashInferFromRight:
    """Attention of such rows over a `KVCache` on a CUDA device. Only the newest plan is valid.

    Args:
        make: returns one of FlashInfer's objects; called when there are such rows for the first time.
        plan_lists: plans by one of them.
    """

    def __init__(self, spec: ModelSpec, cache: KVCache, make: Callable[[], Any], plan_lists: PlanLists) -> None:
        self._spec = spec
        self._cache = cache
        self._device = cache.keys[0].device
        self._plan_lists = plan_lists
        self._by_slot: Wrappers = {window: make() for window in dict.fromkeys(spec.windows)}
        self._by_block = make() if None in self._by_slot else None

    def plan(self, rows: RaggedRows, tokens: torch.Tensor) -> FromRightPlan:
        """Prepare what all layers of a step share.

        Args:
            rows: these rows alone.
            tokens: [t] indices in the batch of their tokens, on the device.
        """
        size = self._cache.block_size
        for window, wrapper in self._by_slot.items():
            first: I32 = first_keys(rows, window)
            if window is None:
                first = np.asarray(rows.start // size * size, dtype=np.int32)
            self._plan_lists(wrapper, slot_lists(rows, first, size), window, causal=True)
        place = np.flatnonzero(rows.start >= size)
        if self._by_block is None or not len(place):
            return FromRightPlan(tokens, None)
        some, places = chosen_rows(rows, place)
        self._plan_lists(self._by_block, full_block_lists(some, size), None, causal=False)
        return FromRightPlan(tokens, torch.from_numpy(places).to(self._device))

    def attend(self, plan: FromRightPlan, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Return the attention's output [t, num_heads, head_dim] of these rows' queries, of the same shape."""
        window, pools = self._spec.windows[layer], (self._cache.keys[layer], self._cache.values[layer])
        slots = tuple(pool.flatten(0, 1).unsqueeze(1) for pool in pools)
        out, lse = _run(self._by_slot[window], queries, slots)
        if window is None and plan.with_full is not None:
            before, before_lse = _run(self._by_block, queries[plan.with_full], pools)
            rest, rest_lse = out[plan.with_full].float(), lse[plan.with_full]
            whole, _ = merge_states(before.float(), before_lse, rest, rest_lse)
            out[plan.with_full] = whole.to(out.dtype)
        return out


def _run(wrapper: Any, queries: torch.Tensor, pools: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output [t, num_heads, head_dim] and log-sum-exp [t, num_heads], base 2, of what a wrapper has planned."""
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    lse = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
    wrapper.run(queries, pools, out=out, lse=lse, return_lse=True)
    return out, lse
