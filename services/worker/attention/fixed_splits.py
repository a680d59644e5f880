"""Attention whose bits depend on the query and its context alone, whatever else is in the batch.

Every product has one shape: TILES tiles of QUERIES queries against SPLIT_KEYS keys, padded and masked where there are
fewer. The context is cut at multiples of SPLIT_KEYS, each split's result is joined to those before it by log-sum-exp,
in the order of the context. Keys outside a layer's window are masked like those that are not there; a split that none
of the tiles sees is left out, which changes no bit. Decodes and prefill chunks take the same path, so it does not
matter which computed a token. Arithmetic is float32 whatever the cache holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.attention.base import SPLIT_KEYS, RaggedRows, slots_at
from services.worker.attention.merge import merge_states
from services.worker.memory.kv_cache import KVCache
from services.worker.models.spec import ModelSpec

QUERIES = 4
TILES = 8


@dataclass(frozen=True, slots=True)
class TileGroup:
    """TILES tiles, computed together; surplus tiles repeat the last real one and go nowhere."""

    tokens: torch.Tensor
    """[TILES, QUERIES] index in the batch; surplus queries repeat the tile's last one"""
    positions: torch.Tensor
    """[TILES, QUERIES] position of each query: the last key that it sees"""
    splits: tuple[torch.Tensor, ...]
    """each [TILES, SPLIT_KEYS] slots; past the tile's last position, that position's slot"""
    first_position: int
    """the least of `positions`"""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """What all layers of a step share."""

    groups: tuple[TileGroup, ...]


class FixedSplitAttention:
    """Attention over a `KVCache` in fixed shapes."""

    def __init__(self, spec: ModelSpec, cache: KVCache) -> None:
        self._spec = spec
        self._cache = cache
        self._device = cache.keys[0].device
        self._scale = math.log2(math.e) / math.sqrt(spec.head_dim)
        self._key_offsets = torch.arange(SPLIT_KEYS, device=self._device)

    def plan(self, rows: RaggedRows) -> SplitPlan:
        """Cut the rows into tiles of queries and put tiles of similar context together."""
        counts = -(-rows.num_tokens // QUERIES)
        row = np.repeat(np.arange(len(counts)), counts)
        first = QUERIES * (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts))
        offset = np.minimum(first[:, None] + np.arange(QUERIES), rows.num_tokens[row, None] - 1)
        order = np.argsort(rows.start[row] + offset[:, -1], kind="stable")
        groups = []
        for begin in range(0, len(order), TILES):
            tiles = order[np.minimum(np.arange(begin, begin + TILES), len(order) - 1)]
            groups.append(self._group(rows, row[tiles], offset[tiles]))
        return SplitPlan(tuple(groups))

    def _group(
        self,
        rows: RaggedRows,
        row: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
        offset: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    ) -> TileGroup:
        tokens = torch.from_numpy(rows.first_token[row, None] + offset).long().to(self._device)
        positions = torch.from_numpy(rows.start[row, None] + offset).long().to(self._device)
        tables = torch.from_numpy(rows.tables[row].astype(np.int64)).to(self._device)
        last = positions[:, -1:]
        splits = tuple(
            slots_at(tables, (first + self._key_offsets).unsqueeze(0).minimum(last), self._cache.block_size)
            for first in range(0, int(last.max()) + 1, SPLIT_KEYS)
        )
        return TileGroup(tokens, positions, splits, int(positions.min()))

    def attend(self, plan: SplitPlan, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Return the attention's output [t, num_heads * head_dim]; see `Attention`."""
        spec = self._spec
        keys, values = self._cache.keys[layer].flatten(0, 1), self._cache.values[layer].flatten(0, 1)
        out = queries.new_empty(queries.shape[0], spec.q_size)
        for group in plan.groups:
            attended = self._attend_group(group, spec.windows[layer], queries, keys, values)
            attended = attended.transpose(1, 2).reshape(TILES * QUERIES, spec.q_size)
            out[group.tokens.flatten()] = attended.to(out.dtype)  # repeated queries write the same bits again
        return out

    def _attend_group(
        self,
        group: TileGroup,
        window: int | None,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Return [TILES, num_kv_heads, QUERIES, group_size, head_dim] float32."""
        spec = self._spec
        tile = queries[group.tokens.flatten()].float().mul_(self._scale)
        tile = tile.view(TILES, QUERIES, spec.num_kv_heads, spec.group_size, spec.head_dim)
        tile = tile.transpose(1, 2).reshape(TILES, spec.num_kv_heads, QUERIES * spec.group_size, spec.head_dim)
        whole, whole_lse = torch.zeros_like(tile), tile.new_full(tile.shape[:-1], -torch.inf)
        begin = 0 if window is None else max(group.first_position + 1 - window, 0) // SPLIT_KEYS
        last = group.positions.unsqueeze(-1)
        for index in range(begin, len(group.splits)):
            position = index * SPLIT_KEYS + self._key_offsets
            seen = position <= last if window is None else (position <= last) & (position > last - window)
            part, lse = self._attend_split(tile, group.splits[index], seen, keys, values)
            whole, whole_lse = merge_states(whole, whole_lse, part, lse)
        return whole.view(TILES, spec.num_kv_heads, QUERIES, spec.group_size, spec.head_dim)

    def _attend_split(
        self, tile: torch.Tensor, slots: torch.Tensor, seen: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output over one split and its log-sum-exp, base 2; `seen` is [TILES, QUERIES, SPLIT_KEYS]."""
        spec = self._spec
        shape = (TILES, SPLIT_KEYS, spec.num_kv_heads, spec.head_dim)
        split_keys = keys.index_select(0, slots.flatten()).view(shape).float().permute(0, 2, 3, 1).contiguous()
        split_values = values.index_select(0, slots.flatten()).view(shape).float().transpose(1, 2).contiguous()
        hidden = ~seen.repeat_interleave(spec.group_size, dim=1).unsqueeze(1)
        scores = torch.matmul(tile, split_keys).masked_fill_(hidden, -torch.inf)
        top = scores.amax(dim=-1, keepdim=True)
        top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
        weights = torch.exp2(scores - top)
        total = weights.sum(dim=-1, keepdim=True)
        part = torch.matmul(weights, split_values) / total.clamp_min(1e-30)
        return part, (top + torch.log2(total)).squeeze(-1)
