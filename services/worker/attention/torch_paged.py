"""Paged attention from torch's own operators: gather keys and values by slot, then scaled dot product attention.

Rows with one token are put together into groups of similar length, so that little is padded; longer rows are computed
one by one in tiles of queries, each against the keys up to its last query only. Padding reads the row's own last
position and is masked: what other sequences left in the cache is never touched.

A layer with a window gets a plan of its own: the same rows, of which only the keys are gathered that some query of the
group or tile sees. As long as no row has outgrown the window, the plan is the one without.

The query heads that share a key head become rows of one product, so keys are not repeated.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from services.worker.attention.base import DeviceTables, Fold, KeyRanges, RaggedRows
from services.worker.attention.fixed_splits import FixedSplitAttention
from services.worker.contract.arrays import I32, I64
from services.worker.memory.kv_cache import KVCache
from services.worker.memory.reserve import GROUP_BYTES
from services.worker.models.spec import ModelSpec

QUERY_TILE, LONG_QUERY_TILE = 128, 32
"""Queries of a prefill chunk in one product; with keys up to and above LONG_KEYS. Bounds mask and score matrix."""
LONG_KEYS = 8192
GROWTH_ELEMENTS = 2**18
"""The buffer of gathered keys and values grows by multiples of this: a context grows with every token."""
WASTE_KEYS = 2048
"""Padding that a group may hold before another one, with its fixed cost, is cheaper."""
CUDA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Of torch, without cuDNN's: a mask at an address that it does not expect ends all that the process has on the device,
where the others say so (seen on an H200, torch 2.11)."""
MASK_ALIGNMENT = 16
"""Bytes, of a mask's address on CUDA."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows with one query each."""

    tokens: torch.Tensor | None
    """[g] indices in the batch; None: the batch's tokens are this group, in order"""
    slots: torch.Tensor
    """[g * max_keys]"""
    mask: torch.Tensor | None
    """[g, 1, 1, max_keys] additive; None: all rows have max_keys keys"""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A row with several queries."""

    first_token: int
    num_tokens: int
    slots: torch.Tensor
    """[num_keys] of the keys that any of its queries sees"""
    window: int | None
    """Keys that a query sees at most; None: all before it"""
    tail: torch.Tensor
    """[tile, >= keys of a tile] mask of a full tile whose last query sees up to the last column; other tiles' masks are
    its corner"""


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """What the layers of one window share."""

    groups: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillRow, ...]


PagedPlan = dict[int | None, WindowPlan]
"""By window (None: all keys are seen): what its layers share in a step."""


class TorchPagedAttention:
    """Attention over a `KVCache` on any device of torch."""

    def __init__(self, spec: ModelSpec, cache: KVCache) -> None:
        self._spec = spec
        self._cache = cache
        self._device = cache.keys[0].device
        self._dtype = cache.keys[0].dtype
        self._windows = tuple(dict.fromkeys(spec.windows))
        self._tails: dict[tuple[int, int | None], torch.Tensor] = {}
        self._offsets = torch.arange(cache.block_size, device=self._device)
        self._gathered = torch.empty(0, device=self._device, dtype=self._dtype)

    def plan(self, rows: RaggedRows) -> PagedPlan:
        """Group the single-token rows and list the others, once for each window that a row has outgrown."""
        longest = int(rows.num_keys.max())
        effective = {window: window if window is not None and window < longest else None for window in self._windows}
        plans = {window: self._plan(rows, window) for window in dict.fromkeys(effective.values())}
        return {window: plans[used] for window, used in effective.items()}

    def _plan(self, rows: RaggedRows, window: int | None) -> WindowPlan:
        first_key = first_keys(rows, window)
        num_keys, first_token = rows.num_keys - first_key, rows.first_token
        single = np.flatnonzero(rows.num_tokens == 1)
        groups = tuple(
            self._group(rows, group, first_key[group], whole=len(group) == len(rows.num_tokens))
            for group in group_rows(single, num_keys[single], max_group_keys(self._spec, self._dtype))
        )
        prefills = []
        for row in np.flatnonzero(rows.num_tokens > 1).tolist():
            count, only = int(rows.num_tokens[row]), np.array([row], dtype=np.int64)
            slots = self._slots(rows, only, first_key[only], int(num_keys[row])).flatten()
            tail = self._tail(int(num_keys[row]), window)
            prefills.append(PrefillRow(int(first_token[row]), count, slots, window, tail))
        return WindowPlan(groups, tuple(prefills))

    def plan_fold(self, ranges: KeyRanges) -> Fold:
        """Prepare what all layers of a step share that fold a part of the context into states; see `Fold`.

        Joined with what is here by log-sum-exp, so the sums have another order than in `attend`.
        """
        return FixedSplitAttention(self._spec, self._cache).plan_fold(ranges)

    def attend(self, plan: PagedPlan, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Return the attention's output [t, num_heads * head_dim]; see `Attention`."""
        with self._backends():
            return self._attend(plan[self._spec.windows[layer]], layer, queries)

    def _backends(self) -> AbstractContextManager[None]:
        return sdpa_kernel(CUDA_BACKENDS) if self._device.type == "cuda" else nullcontext()

    def _attend(self, part: WindowPlan, layer: int, queries: torch.Tensor) -> torch.Tensor:
        keys, values = self._cache.keys[layer].flatten(0, 1), self._cache.values[layer].flatten(0, 1)
        if len(part.groups) == 1 and part.groups[0].tokens is None:
            return self._decode(part.groups[0], queries, keys, values)
        out = queries.new_empty(queries.shape[0], self._spec.q_size)
        for group in part.groups:
            assert group.tokens is not None, "a group that is not the whole batch names its tokens"
            out.index_copy_(0, group.tokens, self._decode(group, queries[group.tokens], keys, values))
        for row in part.prefills:
            span = slice(row.first_token, row.first_token + row.num_tokens)
            self._prefill(row, queries[span], keys, values, out[span])
        return out

    def _decode(
        self, group: DecodeGroup, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        spec, num_rows = self._spec, queries.shape[0]
        shape = (num_rows, -1, spec.num_kv_heads, spec.head_dim)
        gathered_keys, gathered_values = (
            part.view(shape).transpose(1, 2) for part in self._gather(group.slots, keys, values)
        )
        folded = queries.reshape(num_rows, spec.num_kv_heads, spec.group_size, spec.head_dim)
        out = scaled_dot_product_attention(folded, gathered_keys, gathered_values, attn_mask=group.mask)
        return out.reshape(num_rows, spec.q_size)

    def _prefill(
        self, row: PrefillRow, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Fill `out` [num_tokens, num_heads * head_dim] tile by tile."""
        spec, start = self._spec, row.slots.numel() - row.num_tokens
        shape = (spec.num_kv_heads, spec.group_size, -1, spec.head_dim)
        gathered_keys, gathered_values = (
            part.transpose(0, 1).unsqueeze(1) for part in self._gather(row.slots, keys, values)
        )
        size, width = row.tail.shape
        for first in range(0, row.num_tokens, size):
            last = min(first + size, row.num_tokens)
            end = start + last
            begin = 0 if row.window is None else max(start + first + 1 - row.window, 0)
            tile = queries[first:last].transpose(0, 1).reshape(shape)
            mask = row.tail[size - (last - first) :, width - (end - begin) :]
            if mask.device.type == "cuda":
                mask = aligned(mask)
            attended = scaled_dot_product_attention(
                tile,
                gathered_keys[:, :, begin:end].expand(-1, spec.group_size, -1, -1),
                gathered_values[:, :, begin:end].expand(-1, spec.group_size, -1, -1),
                attn_mask=mask,
            )
            out[first:last] = attended.reshape(spec.num_heads, last - first, spec.head_dim).transpose(0, 1).flatten(1)

    def _gather(
        self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [m, num_kv_heads, head_dim] at the slots [m], valid until the next call.

        They lie in a buffer that is kept: fresh memory of this size costs more in page faults than the copy itself.
        """
        needed = 2 * slots.numel() * self._spec.kv_size
        if self._gathered.numel() < needed:
            self._gathered = keys.new_empty(0)  # the old one goes before the new one comes
            self._gathered = keys.new_empty(-(-needed // GROWTH_ELEMENTS) * GROWTH_ELEMENTS)
        shape = (2, slots.numel(), self._spec.num_kv_heads, self._spec.head_dim)
        buffer = self._gathered[:needed].view(shape)
        torch.index_select(keys, 0, slots, out=buffer[0])
        torch.index_select(values, 0, slots, out=buffer[1])
        return buffer[0], buffer[1]

    def _group(self, rows: RaggedRows, group: I64, first_key: I32, *, whole: bool) -> DecodeGroup:
        """Prepare single-token rows; the rows' order in the group is free unless it is the whole batch."""
        order = np.argsort(group)
        group, first_key = group[order], first_key[order]
        num_keys = rows.num_keys[group] - first_key
        max_keys = int(num_keys.max())
        tokens = None if whole else self._to_device(rows.first_token[group])
        slots = self._slots(rows, group, first_key, max_keys)
        if int(num_keys.min()) == max_keys:
            return DecodeGroup(tokens, slots.flatten(), None)
        ends = self._to_device(num_keys).unsqueeze(1)
        unseen = torch.arange(max_keys, device=self._device) >= ends
        slots = torch.where(unseen, slots.gather(1, ends - 1), slots)
        mask = torch.zeros(unseen.shape, dtype=self._dtype, device=self._device).masked_fill_(unseen, -torch.inf)
        return DecodeGroup(tokens, slots.flatten(), mask.view(len(group), 1, 1, max_keys))

    def _slots(self, rows: RaggedRows, group: I64, first_key: I32, max_keys: int) -> torch.Tensor:
        """Return [g, max_keys] from each row's first key on; past a row's end, any slots."""
        block_size = self._cache.block_size
        if first_key.any():
            first, last, row = (
                self._to_device(each).unsqueeze(1) for each in (first_key, rows.num_keys[group] - 1, group)
            )
            positions = (first + torch.arange(max_keys, device=self._device)).minimum(last)
            return DeviceTables.of(rows.tables, self._device).slots_at(row, positions, block_size)
        tables = DeviceTables.of(rows.tables[group, : -(-max_keys // block_size)], self._device)
        return tables.first_slots(max_keys, self._offsets)

    def _to_device(self, values: I32 | I64) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    def _tail(self, num_keys: int, window: int | None) -> torch.Tensor:
        """Return a mask for a row of which `num_keys` keys are gathered; kept until a longer row comes."""
        size = query_tile(num_keys)
        if window is not None:
            num_keys = min(num_keys, window + size - 1)  # no tile sees more
        tail = self._tails.get((size, window))
        if tail is None or tail.shape[1] < num_keys:
            width = -(-max(num_keys, size) // 64) * 64
            tail = torch.full((size, width), -torch.inf, dtype=self._dtype, device=self._device)
            before = tail.tril(width - size - window) if window is not None else torch.zeros((), device=self._device)
            self._tails[size, window] = tail.triu_(width - size + 1).add_(before)
        return self._tails[size, window]


def aligned(mask: torch.Tensor) -> torch.Tensor:
    """Return the mask as kernels of CUDA take it: its rows one behind the other, from an aligned address on."""
    mask = mask.contiguous()
    return mask.clone() if mask.data_ptr() % MASK_ALIGNMENT else mask  # a single row is contiguous wherever it begins


def first_keys(rows: RaggedRows, window: int | None) -> I32:
    """Return [n] the first position that a row's first query sees."""
    if window is None:
        return np.zeros(len(rows.start), dtype=np.int32)
    return np.asarray(np.maximum(rows.start + 1 - window, 0), dtype=np.int32)


def query_tile(num_keys: int) -> int:
    """Return the queries of a prefill chunk in one product, if so many keys are gathered."""
    return QUERY_TILE if num_keys <= LONG_KEYS else LONG_QUERY_TILE


def max_group_keys(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the padded keys of a group at most, unless it is one row."""
    return max(GROUP_BYTES // (2 * spec.kv_size * dtype.itemsize), 1)


def fullest_group(spec: ModelSpec, dtype: torch.dtype, context: int, num_rows: int) -> tuple[int, int]:
    """Return rows and keys of each of a group that gathers as much as any, in layers with a window as in others.

    Rows as long as the context may leave a group half empty where more and shorter ones fill it.

    Args:
        spec: of the model.
        dtype: of the cache.
        context: most keys of a row.
        num_rows: there are at most.
    """
    seen, most = min([context, *(window for window in spec.windows if window is not None)]), max_group_keys(spec, dtype)
    num_rows = min(most // seen + 1, num_rows)
    return num_rows, min(most // max(num_rows, 1), seen)


def group_rows(rows: I64, num_keys: np.ndarray[tuple[int, ...], np.dtype[np.int32]], max_keys: int) -> list[I64]:
    """Split rows into groups of similar length, longest first.

    A group ends when its padding passes `WASTE_KEYS` or its padded keys pass `max_keys`.

    Args:
        rows: [g]
        num_keys: [g] length of each
        max_keys: padded keys of a group, unless it is one row
    """
    order = np.argsort(-num_keys, kind="stable")
    lengths = num_keys[order].tolist()
    groups, first, waste = [], 0, 0
    for i, length in enumerate(lengths):
        longest = lengths[first]
        waste += longest - length
        if i > first and (waste > WASTE_KEYS or (i + 1 - first) * longest > max_keys):
            groups.append(rows[order[first:i]])
            first, waste = i, 0
    if lengths:
        groups.append(rows[order[first:]])
    return groups
