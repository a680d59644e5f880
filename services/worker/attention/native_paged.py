"""Paged attention by the worker's own CPU kernel, behind the same interface as torch's.

Used where the layers are torch's but the cache lies in main memory, and for attention on behalf of somebody else, who
needs the log-sum-exp to merge it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.worker.attention.base import Fold, KeyRanges, RaggedRows
from services.worker.contract.arrays import I32
from services.worker.memory.kv_cache import KVCache
from services.worker.models.spec import ModelSpec
from services.worker.native.library import NativeLibrary
from services.worker.native.structures import AttendArgs, RowsArgs

MAX_GROUP = 64
"""Query heads that may share a key head (kMaxGroup in src/attention_work.h)."""


@dataclass(frozen=True, slots=True)
class NativePlan:
    """The step's rows as the library reads them."""

    args: RowsArgs
    held: tuple[Any, ...]
    """Arrays that `args` points into."""


def rows_args(num_tokens: I32, start: I32, tables: I32, table_of: I32 | None = None) -> NativePlan:
    """Return the rows of a step as the library reads them.

    Args:
        num_tokens: [n]
        start: [n] position of the first token.
        tables: [.., max_blocks] block tables, contiguous.
        table_of: [n] the row's place in `tables`; None: they lie in the order of the rows.
    """
    columns = [np.ascontiguousarray(column, dtype=np.int32) for column in (num_tokens, start)]
    if table_of is not None:
        columns.append(np.ascontiguousarray(table_of, dtype=np.int32))
    args = RowsArgs(
        num_rows=len(num_tokens),
        num_tokens=int(num_tokens.sum()),
        row_tokens=columns[0].ctypes.data,
        row_start=columns[1].ctypes.data,
        row_table=None if table_of is None else columns[2].ctypes.data,
        tables=tables.ctypes.data,
        table_stride=tables.shape[1],
    )
    return NativePlan(args, (*columns, tables))


class NativePagedAttention:
    """Attention over a `KVCache` in main memory; the same bits for a token whatever else is in the batch.

    Args:
        num_threads: that compute a call, where it is worth it.
        any_head_dim: use the code for heads of any size even where this size has its own: to compare the two.
    """

    def __init__(
        self,
        library: NativeLibrary,
        spec: ModelSpec,
        cache: KVCache,
        *,
        num_threads: int = 1,
        any_head_dim: bool = False,
    ) -> None:
        assert spec.group_size <= MAX_GROUP, f"{spec.group_size} query heads share a key head; at most {MAX_GROUP} may"
        self._library = library
        self._spec = spec
        self._cache = cache
        self._num_threads = num_threads
        self._any_head_dim = any_head_dim

    def plan(self, rows: RaggedRows) -> NativePlan:
        """Prepare what all layers of a step share."""
        return rows_args(rows.num_tokens, rows.start, np.ascontiguousarray(rows.tables, dtype=np.int32))

    def attend(self, plan: NativePlan, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Return the attention's output [t, num_heads * head_dim]; see `Attention`."""
        if queries.stride()[1:] != (self._spec.head_dim, 1):
            queries = queries.contiguous()
        out = queries.new_empty(queries.shape[0], self._spec.q_size)
        args = self._args(plan, layer, queries)
        args.out = out.data_ptr()
        self._library.attend(ctypes.byref(args))
        return out

    def plan_fold(self, ranges: KeyRanges) -> Fold:
        """Prepare what all layers of a step share that fold a part of the context into states; see `Fold`."""
        rows = ranges.rows
        plan = self.plan(rows)
        columns = [np.ascontiguousarray(each, np.int32) for each in (ranges.first, ranges.end, rows.first_token)]

        def fold(layer: int, queries: torch.Tensor, states: torch.Tensor) -> None:
            args = self._args(plan, layer, queries)
            first, end, place = columns
            args.row_first, args.row_end, args.row_state = first.ctypes.data, end.ctypes.data, place.ctypes.data
            args.states = states.data_ptr()
            self._library.attend(ctypes.byref(args))

        return fold

    def _args(self, plan: NativePlan, layer: int, queries: torch.Tensor) -> AttendArgs:
        spec, keys = self._spec, self._cache.keys[layer]
        assert queries.stride()[1:] == (spec.head_dim, 1), "heads lie one behind the other"
        return AttendArgs(
            rows=plan.args,
            num_threads=self._num_threads,
            is_bf16=int(keys.dtype == torch.bfloat16),
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=self._cache.block_size,
            window=spec.windows[layer] or 0,
            scale=spec.head_dim**-0.5,
            any_head_dim=int(self._any_head_dim),
            keys=keys.data_ptr(),
            values=self._cache.values[layer].data_ptr(),
            queries=queries.data_ptr(),
            query_stride=queries.stride(0),
        )
