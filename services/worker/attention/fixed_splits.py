"""Attention whose bits depend on the query and its context alone, whatever else is in the batch.

Every product has one shape: TILES tiles of QUERIES queries against SPLIT_KEYS keys, padded and masked where there are
fewer. The context is cut at multiples of SPLIT_KEYS, each split's result is joined to those before it by log-sum-exp,
in the order of the context. Keys outside a layer's window are masked like those that are not there; a split that none
of the tiles sees is left out, which changes no bit. Decodes and prefill chunks take the same path, so it does not
matter which computed a token. Arithmetic is float32 whatever the cache holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.attention.base import DeviceTables, Fold, KeyRanges, RaggedRows
from services.worker.attention.merge import merge_states
from services.worker.contract.remote import SPLIT_KEYS
from services.worker.memory.kv_cache import KVCache
from services.worker.models.spec import ModelSpec

QUERIES = 4
TILES = 8
Places = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class TileGroup:
    """TILES tiles, computed together; surplus tiles repeat the last real one and go nowhere."""

    tokens: torch.Tensor
    """[TILES, QUERIES] index in the batch; surplus queries repeat the tile's last one"""
    positions: torch.Tensor
    """[TILES, QUERIES] position of each query: the last key that it sees"""
    rows: torch.Tensor
    """[TILES, 1] each tile's row of `tables`"""
    tables: DeviceTables
    """Of all rows of the step"""
    last: torch.Tensor
    """[TILES, 1] the last position whose key a tile sees; what stands for keys past it is that one's"""
    num_splits: int
    """up to the last of `last`"""
    first_position: int
    """the least of `positions`"""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """What all layers of a step share."""

    groups: tuple[TileGroup, ...]


@dataclass(frozen=True, slots=True)
class _FoldGroup:
    """A group of tiles, and of each the keys that are folded in."""

    group: TileGroup
    first: torch.Tensor
    """[TILES, 1] positions [first, end)"""
    end: torch.Tensor
    """[TILES, 1]"""


class FixedSplitAttention:
    """Attention over a `KVCache` in fixed shapes."""

    def __init__(self, spec: ModelSpec, cache: KVCache) -> None:
        self._spec = spec
        self._cache = cache
        self._device = cache.keys[0].device
        self._scale = math.log2(math.e) / math.sqrt(spec.head_dim)
        self._key_offsets = torch.arange(SPLIT_KEYS, device=self._device)

    def plan(self, rows: RaggedRows) -> SplitPlan:
        """Prepare what all layers of a step share."""
        tables = DeviceTables.of(rows.tables, self._device)
        return SplitPlan(tuple(self._group(rows, tables, row, offset) for row, offset in _tiles(rows)))

    def plan_fold(self, ranges: KeyRanges) -> Fold:
        """Prepare what all layers of a step share that fold a part of the context into states; see `Fold`.

        With states of this class alone the bits are those of one `attend` over all ranges.
        """
        rows, device = ranges.rows, self._device
        groups, tables = [], DeviceTables.of(rows.tables, device)
        for row, offset in _tiles(rows):
            first, end = (
                torch.from_numpy(each[row, None].astype(np.int64)).to(device) for each in (ranges.first, ranges.end)
            )
            groups.append(_FoldGroup(self._group(rows, tables, row, offset, end), first, end))

        def fold(layer: int, queries: torch.Tensor, states: torch.Tensor) -> None:
            for part in groups:
                tokens = part.group.tokens.flatten()
                before = self._as_tiles(states[tokens])
                after = self._fold(part.group, layer, self._scaled(queries, part.group), before, part)
                states[tokens] = self._as_states(*after)  # repeated queries write the same bits again

        return fold

    def _as_tiles(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and log-sum-exp, by tile as `_fold` has them, of states [TILES * QUERIES, num_heads, ..]."""
        spec = self._spec
        values, top, total = states[..., : spec.head_dim], states[..., -2], states[..., -1]
        whole = torch.where((total > 0).unsqueeze(-1), values / total.unsqueeze(-1), torch.zeros_like(values))
        lse = torch.where(total > 0, top + torch.log2(total), torch.full_like(top, -torch.inf))
        shape = (TILES, QUERIES, spec.num_kv_heads, spec.group_size)
        whole = whole.view(*shape, spec.head_dim).transpose(1, 2).flatten(2, 3)
        return whole, lse.view(shape).transpose(1, 2).flatten(2, 3)

    def _as_states(self, whole: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Return the opposite of `_as_tiles`: the output is a state whose sum of weights is 1."""
        spec = self._spec
        shape = (TILES, spec.num_kv_heads, QUERIES, spec.group_size)
        values = whole.view(*shape, spec.head_dim).transpose(1, 2).reshape(-1, spec.num_heads, spec.head_dim)
        top = lse.view(shape).transpose(1, 2).reshape(-1, spec.num_heads, 1)
        return torch.cat((values, top, (top > -torch.inf).to(values.dtype)), dim=-1)

    def _pools(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.keys[layer].flatten(0, 1), self._cache.values[layer].flatten(0, 1)

    def _group(
        self, rows: RaggedRows, tables: DeviceTables, row: Places, offset: Places, end: torch.Tensor | None = None
    ) -> TileGroup:
        """Return tiles of these queries, with their keys at positions below `end` [TILES, 1]; None: all."""
        tokens = torch.from_numpy(rows.first_token[row, None] + offset).long().to(self._device)
        positions = torch.from_numpy(rows.start[row, None] + offset).long().to(self._device)
        last = positions[:, -1:] if end is None else positions[:, -1:].minimum(end - 1).clamp_min(0)
        num_splits = int(last.max()) // SPLIT_KEYS + 1
        in_tables = torch.from_numpy(row).unsqueeze(1).to(self._device)
        return TileGroup(tokens, positions, in_tables, tables, last, num_splits, int(positions.min()))

    def attend(self, plan: SplitPlan, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Return the attention's output [t, num_heads * head_dim]; see `Attention`."""
        spec = self._spec
        out = queries.new_empty(queries.shape[0], spec.q_size)
        for group in plan.groups:
            tile = self._scaled(queries, group)
            nothing = torch.zeros_like(tile), tile.new_full(tile.shape[:-1], -torch.inf)
            attended, _ = self._fold(group, layer, tile, nothing)
            attended = attended.view(TILES, spec.num_kv_heads, QUERIES, spec.group_size, spec.head_dim)
            attended = attended.transpose(1, 2).reshape(TILES * QUERIES, spec.q_size)
            out[group.tokens.flatten()] = attended.to(out.dtype)  # repeated queries write the same bits again
        return out

    def _scaled(self, queries: torch.Tensor, group: TileGroup) -> torch.Tensor:
        """Return a group's queries, scaled: [TILES, num_kv_heads, QUERIES * group_size, head_dim] float32."""
        spec = self._spec
        tile = queries[group.tokens.flatten()].float().mul_(self._scale)
        tile = tile.view(TILES, QUERIES, spec.num_kv_heads, spec.group_size, spec.head_dim)
        return tile.transpose(1, 2).reshape(TILES, spec.num_kv_heads, QUERIES * spec.group_size, spec.head_dim)

    def _fold(
        self,
        group: TileGroup,
        layer: int,
        tile: torch.Tensor,
        before: tuple[torch.Tensor, torch.Tensor],
        part: _FoldGroup | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and log-sum-exp with the keys of all splits, or of a part, in them.

        Args:
            group: of tiles.
            layer: numbered in the model.
            tile: as `_scaled`.
            before: output, as the tile, and log-sum-exp of the keys before.
            part: which keys; None: all.
        """
        (keys, values), window, (whole, lse) = self._pools(layer), self._spec.windows[layer], before
        begin = 0 if window is None else max(group.first_position + 1 - window, 0) // SPLIT_KEYS
        last = group.positions.unsqueeze(-1)
        for index in range(begin, group.num_splits):
            position = index * SPLIT_KEYS + self._key_offsets
            seen = position <= last if window is None else (position <= last) & (position > last - window)
            there = None
            if part is not None:
                there = (position >= part.first) & (position < part.end)
                seen &= there.unsqueeze(1)
                if not seen.any():
                    continue
            # for each layer anew: kept, those of a chunk at the end of a long context outgrow all else of a step
            slots = group.tables.slots_at(group.rows, position.minimum(group.last), self._cache.block_size)
            found, found_lse = self._attend_split(tile, slots, seen, keys, values, there)
            whole, lse = merge_states(whole, lse, found, found_lse)
        return whole, lse

    def _attend_split(
        self,
        tile: torch.Tensor,
        slots: torch.Tensor,
        seen: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        there: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output over one split and its log-sum-exp, base 2.

        Args:
            tile: as `_scaled`.
            slots: [TILES, SPLIT_KEYS]
            seen: [TILES, QUERIES, SPLIT_KEYS]
            keys: of all slots.
            values: likewise.
            there: [TILES, SPLIT_KEYS] slots that hold numbers; None: all of them.
        """
        spec = self._spec
        shape = (TILES, SPLIT_KEYS, spec.num_kv_heads, spec.head_dim)
        split_keys = keys.index_select(0, slots.flatten()).view(shape).float().permute(0, 2, 3, 1).contiguous()
        split_values = values.index_select(0, slots.flatten()).view(shape).float().transpose(1, 2).contiguous()
        if there is not None:
            split_values.masked_fill_(~there[:, None, :, None], 0)  # no weight, but it might be no number
        hidden = ~seen.repeat_interleave(spec.group_size, dim=1).unsqueeze(1)
        scores = torch.matmul(tile, split_keys).masked_fill_(hidden, -torch.inf)
        top = scores.amax(dim=-1, keepdim=True)
        top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
        weights = torch.exp2(scores - top)
        total = weights.sum(dim=-1, keepdim=True)
        part = torch.matmul(weights, split_values) / total.clamp_min(1e-30)
        return part, (top + torch.log2(total)).squeeze(-1)


def _tiles(rows: RaggedRows) -> Iterator[tuple[Places, Places]]:
    """Cut the rows into tiles of queries and put tiles of similar context together.

    Yields:
        Of each group the rows [TILES], and the places of the queries among the tokens of theirs [TILES, QUERIES].
    """
    counts = -(-rows.num_tokens // QUERIES)
    row = np.repeat(np.arange(len(counts)), counts)
    first = QUERIES * (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts))
    offset = np.minimum(first[:, None] + np.arange(QUERIES), rows.num_tokens[row, None] - 1)
    order = np.argsort(rows.start[row] + offset[:, -1], kind="stable")
    for begin in range(0, len(order), TILES):
        tiles = order[np.minimum(np.arange(begin, begin + TILES), len(order) - 1)]
        yield row[tiles], offset[tiles]
