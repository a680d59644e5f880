"""Paged attention by FlashInfer's CUDA kernels, behind the same interface as torch's.

The decodes at the head of a batch and the rows behind them are planned apart: FlashInfer fits its tile of queries to
the mean row, and on Hopper its kernels for long rows (fa3) do not split a context among processors, which decodes need.
Both parts are calls of the same class, since a decode is a causal row of one query; the non-causal calls by which
FlashInfer's own decode class computes have been reported to miss windows.

A layer's window is FlashInfer's `window_left`, plus one, since that does not count the query itself. Blocks that lie
before the window of a row's first query are not named to it at all.

Rows with blocks that are filled from the right are taken out first: `flashinfer_from_right.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.worker.attention.base import Fold, KeyRanges, RaggedRows
from services.worker.attention.block_lists import (
    BlockLists,
    block_lists,
    chosen_rows,
    leading_decodes,
    range_lists,
    rows_from_right,
    starts_of,
)
from services.worker.attention.fixed_splits import FixedSplitAttention
from services.worker.attention.flashinfer_from_right import FlashInferFromRight, FromRightPlan, Wrappers
from services.worker.attention.merge import merge_states
from services.worker.contract.arrays import Bool
from services.worker.memory.host_link import PinnedRing, send
from services.worker.memory.kv_cache import KVCache
from services.worker.models.spec import ModelSpec

HEAD_DIMS = (64, 128, 256)
"""Others are not refused by FlashInfer, but read memory that is not theirs or give wrong numbers."""
DTYPES = (torch.bfloat16, torch.float16)
"""Of queries, keys and values: its kernels multiply on tensor cores."""
RECOMMENDED_WORKSPACE_BYTES = 128 * 2**20
"""FlashInfer's own advice."""
PLAN_BYTES = 8 * 2**20
"""Of what a wrapper keeps of a plan on the device, as FlashInfer takes by itself."""
PLANS_UNDER_WAY = 4
"""For each window: those of a step's decodes and other rows, while the device may still read the last step's."""
QUERY_TILES = (16, 64)
"""Numbers of queries that FlashInfer computes together, each for rows that have no more of them."""
MAX_QUERY_TILE = 128
CTAS_PER_PROCESSOR = 2
"""FlashInfer splits contexts until there is this much work for each multiprocessor."""
_PLAN_SOURCE = "_pin_memory_int_workspace_buffer"
"""Where a wrapper of FlashInfer 0.7 keeps the host memory from which it sends a plan."""


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """A step's parts. What FlashInfer keeps of it lies in its wrappers, so only the newest plan is valid."""

    parts: tuple[tuple[Wrappers, slice], ...]
    """What has planned consecutive tokens, and which these are of the batch, or of `tokens`."""
    tokens: torch.Tensor | None = None
    """[t] indices in the batch of the tokens of other rows than those of `from_right`; None: there are no such."""
    from_right: FromRightPlan | None = None


@dataclass(frozen=True, slots=True)
class _FixedBuffers:
    """Where the plans of recorded calls for one window lie on the device; see `BlockLists`."""

    query_starts: torch.Tensor
    block_starts: torch.Tensor
    blocks: torch.Tensor
    last_block_tokens: torch.Tensor
    workspace: torch.Tensor

    @classmethod
    def taken(cls, num_rows: int, max_blocks: int, device: torch.device) -> _FixedBuffers:
        """Take memory for plans of at most so many rows."""

        def numbers(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        workspace = torch.zeros(PLAN_BYTES, dtype=torch.uint8, device=device)
        blocks = numbers(num_rows * max_blocks)
        return cls(numbers(num_rows + 1), numbers(num_rows + 1), blocks, numbers(num_rows), workspace)


class FixedFlashInfer:
    """Attention of one token of each of a fixed number of rows; see `FlashInferAttention.fixed`."""

    def __init__(self, attention: FlashInferAttention, wrappers: Wrappers) -> None:
        self._attention = attention
        self._wrappers = wrappers

    def plan(self, rows: RaggedRows) -> None:
        """Prepare what all layers of a step share, in memory that stays where it is: recorded calls read the newest."""
        self._plan = self._attention.plan_by(rows, ((self._wrappers, slice(None)),))

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Return the attention's output; see `Attention.attend`. Waits for nothing."""
        return self._attention.attend(self._plan, layer, queries)


class FlashInferAttention:
    """Attention over a `KVCache` on a CUDA device.

    Args:
        library: the module `flashinfer`.
        workspace_bytes: see `workspace_bytes`; taken when the first step is planned, so that the dry step's measurement
            counts it.
    """

    def __init__(self, library: Any, spec: ModelSpec, cache: KVCache, workspace_bytes: int) -> None:
        reason = unsupported(spec, cache.keys[0].dtype)
        assert reason is None, reason
        self._library = library
        self._spec = spec
        self._cache = cache
        self._device = cache.keys[0].device
        self._dtype = cache.keys[0].dtype
        self._workspace_bytes = workspace_bytes
        self._decodes: Wrappers = {}
        self._others: Wrappers = {}
        self._fold_wrappers: dict[bool, Any] = {}
        """By whether they are causal."""
        self._from_right: FlashInferFromRight | None = None
        self._workspace: torch.Tensor | None = None
        self._newest: FlashInferPlan | None = None
        self._sources: PinnedRing[torch.Tensor] | None = None
        """From which plans are sent: FlashInfer has one piece of host memory for each wrapper, and does not wait."""
        self._fixed_buffers: dict[int | None, _FixedBuffers] | None = None
        """By window."""

    def plan(self, rows: RaggedRows) -> FlashInferPlan:
        """Prepare what all layers of a step share; the plan before this one is void."""
        self._open()
        is_from_right = rows_from_right(rows, self._cache.block_size)
        if is_from_right.any():
            return self._plan_apart(rows, is_from_right)
        num_decodes = leading_decodes(rows)
        return self.plan_by(rows, ((self._decodes, slice(0, num_decodes)), (self._others, slice(num_decodes, None))))

    def _plan_apart(self, rows: RaggedRows, is_from_right: Bool) -> FlashInferPlan:
        """Plan a step of rows some of which have blocks that are filled from the right."""
        if self._from_right is None:
            self._from_right = FlashInferFromRight(self._spec, self._cache, self._new_wrapper, self._plan_lists)
        (others, other_tokens), (some, tokens) = (
            chosen_rows(rows, np.flatnonzero(which)) for which in (~is_from_right, is_from_right)
        )
        from_right = self._from_right.plan(some, send(tokens, self._device))
        parts = self.plan(others).parts if len(other_tokens) else ()
        self._newest = FlashInferPlan(parts, send(other_tokens, self._device), from_right)
        return self._newest

    def plan_by(self, rows: RaggedRows, parts: Iterable[tuple[Wrappers, slice]]) -> FlashInferPlan:
        """Plan consecutive rows by wrappers each; the plan before this one is void."""
        starts, planned = starts_of(rows.num_tokens), []
        for wrappers, span in parts:
            first, end, _ = span.indices(len(rows.num_tokens))
            if first < end:
                for window, wrapper in wrappers.items():
                    lists = block_lists(rows, span, window, self._cache.block_size)
                    self._plan_lists(wrapper, lists, window, causal=True)
                planned.append((wrappers, slice(int(starts[first]), int(starts[end]))))
        self._newest = FlashInferPlan(tuple(planned))
        return self._newest

    def attend(self, plan: FlashInferPlan, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Return the attention's output [t, num_heads * head_dim]; see `Attention`."""
        assert plan is self._newest, "attention of an old plan: a newer one took its place in the wrappers"
        if queries.stride()[1:] != (self._spec.head_dim, 1):
            queries = queries.contiguous()
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        if plan.from_right is None:
            self._attend_parts(plan.parts, layer, queries, out)
            return out.flatten(1)
        assert plan.tokens is not None, "the other rows are planned by themselves"
        assert self._from_right is not None, "what has planned these rows is there"
        if len(plan.tokens):
            others = queries[plan.tokens]
            out[plan.tokens] = self._attend_parts(plan.parts, layer, others, torch.empty_like(others))
        tokens = plan.from_right.tokens
        out[tokens] = self._from_right.attend(plan.from_right, layer, queries[tokens])
        return out.flatten(1)

    def _attend_parts(
        self, parts: Iterable[tuple[Wrappers, slice]], layer: int, queries: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Fill `out`, of the queries' shape, and return it."""
        pools = (self._cache.keys[layer], self._cache.values[layer])
        for wrappers, span in parts:
            wrapper = wrappers[self._spec.windows[layer]]
            wrapper.run(queries[span], pools, out=out[span], lse=None, return_lse=False)
        return out

    def plan_fold(self, ranges: KeyRanges) -> Fold:
        """Prepare what all layers of a step share that fold a part of the context into states; see `Fold`.

        Ranges before the queries are calls without a causal mask, those up to the last query causal ones, of a wrapper
        each: of either kind only the newest plan is valid. FlashInfer counts windows from the end of the keys that it
        is given, so layers with a window, ranges of neither kind, and blocks that are filled from the right are folded
        by torch.
        """
        by_torch = FixedSplitAttention(self._spec, self._cache).plan_fold(ranges)
        rows, folds = ranges.rows, ranges.end > ranges.first
        is_before = bool((ranges.end <= rows.start)[folds].all())
        is_last = bool((ranges.end >= rows.num_keys)[folds].all())
        any_from_right = rows_from_right(rows, self._cache.block_size).any()
        if None not in self._spec.windows or not (is_before or is_last) or any_from_right:
            return by_torch
        if not folds.any():
            return lambda *_: None
        place = np.flatnonzero(folds)
        first = ranges.first[place]
        end = np.minimum(ranges.end, rows.num_keys)[place]
        chosen = np.concatenate([rows.first_token[i] + np.arange(rows.num_tokens[i], dtype=np.int64) for i in place])
        tokens = torch.from_numpy(chosen).to(self._device)
        wrapper = self._fold_wrapper(causal=not is_before)
        part = RaggedRows(rows.num_tokens[place], rows.start[place], rows.tables[place])
        self._plan_lists(wrapper, range_lists(part, first, end, self._cache.block_size), None, causal=not is_before)

        def fold(layer: int, queries: torch.Tensor, states: torch.Tensor) -> None:
            if self._spec.windows[layer] is not None:
                by_torch(layer, queries, states)
                return
            mine = queries[tokens]
            out = torch.empty(mine.shape, dtype=mine.dtype, device=mine.device)
            lse = torch.empty(mine.shape[:2], dtype=torch.float32, device=mine.device)
            wrapper.run(mine, (self._cache.keys[layer], self._cache.values[layer]), out=out, lse=lse, return_lse=True)
            states[tokens] = joined(states[tokens], out, lse)

        return fold

    def fixed(self, num_rows: int, max_blocks: int) -> FixedFlashInfer:
        """Return attention of one token of each of so many rows, whose calls can be recorded in a CUDA graph.

        Those of different numbers of rows share memory: only the newest plan of all of them is valid. The largest comes
        first.

        Args:
            num_rows: of each step.
            max_blocks: of one row at most.
        """
        needed = fixed_workspace_bytes(self._spec, num_rows)
        if self._workspace is None:
            self._workspace_bytes = max(self._workspace_bytes, needed)
        self._open()
        assert self._workspace is not None
        assert len(self._workspace) >= needed, "the workspace was taken for less than the largest recorded step"
        if self._fixed_buffers is None:
            windows = dict.fromkeys(self._spec.windows)
            self._fixed_buffers = {w: _FixedBuffers.taken(num_rows, max_blocks, self._device) for w in windows}
        wrappers: Wrappers = {}
        for window, buffers in self._fixed_buffers.items():
            wrappers[window] = self._library.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=True,
                qo_indptr_buf=buffers.query_starts[: num_rows + 1],
                paged_kv_indptr_buf=buffers.block_starts[: num_rows + 1],
                paged_kv_indices_buf=buffers.blocks[: num_rows * max_blocks],
                paged_kv_last_page_len_buf=buffers.last_block_tokens[:num_rows],
                backend="fa2",
            )
            wrappers[window].reset_workspace_buffer(self._workspace, buffers.workspace)
        return FixedFlashInfer(self, wrappers)

    def _fold_wrapper(self, *, causal: bool) -> Any:
        """Return FlashInfer's object for folds of one kind."""
        self._open()
        if causal not in self._fold_wrappers:
            self._fold_wrappers[causal] = self._new_wrapper()
        return self._fold_wrappers[causal]

    def _new_wrapper(self, backend: str = "fa2") -> Any:
        """Return one of FlashInfer's objects, over the workspace."""
        assert self._workspace is not None, "the workspace is taken first"
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=backend)

    def _open(self) -> None:
        """Take the workspace, the first time. All wrappers may share it: it holds nothing from one call to the next."""
        if self._workspace is not None:
            return
        self._workspace = torch.zeros(self._workspace_bytes, dtype=torch.uint8, device=self._device)
        windows = dict.fromkeys(self._spec.windows)
        on_gpu = self._device.type == "cuda"
        self._sources = PinnedRing(
            [
                torch.zeros(PLAN_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
                for _ in range(PLANS_UNDER_WAY * len(windows))
            ],
            self._device,
        )
        for window in windows:
            self._decodes[window] = self._new_wrapper()
            self._others[window] = self._new_wrapper("auto")

    def _plan_lists(self, wrapper: Any, lists: BlockLists, window: int | None, *, causal: bool) -> None:
        """Plan rows, without waiting for the device.

        FlashInfer reads the lists on the host, all but the blocks, and sends them to the device itself. It would wait
        for blocks that lie on the host, and for lists that are not pinned.
        """
        assert self._sources is not None
        spec, on_gpu = self._spec, self._device.type == "cuda"
        num_keys = (np.diff(lists.block_starts) - 1) * lists.block_size + lists.last_block_tokens
        read_there = (lists.query_starts, lists.block_starts, lists.last_block_tokens, num_keys)
        packed = torch.from_numpy(np.concatenate(read_there, dtype=np.int32))
        starts, block_starts, last, keys = (packed.pin_memory() if on_gpu else packed).split(list(map(len, read_there)))
        if hasattr(wrapper, _PLAN_SOURCE):
            setattr(wrapper, _PLAN_SOURCE, self._sources.take())
        elif on_gpu:  # another version of FlashInfer
            torch.cuda.current_stream(self._device).synchronize()
        wrapper.plan(
            starts,
            block_starts,
            send(lists.blocks, self._device),
            last,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            lists.block_size,
            causal=causal,
            sm_scale=spec.head_dim**-0.5,
            window_left=-1 if window is None else window - 1,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            seq_lens=keys,
        )
        self._sources.sent()


def unsupported(spec: ModelSpec, dtype: torch.dtype) -> str | None:
    """Return why FlashInfer cannot compute a model's attention; None: it can."""
    if dtype not in DTYPES:
        return f"it does not compute in {str(dtype).removeprefix('torch.')}"
    if spec.head_dim not in HEAD_DIMS:
        return f"heads of {spec.head_dim} dimensions are not among its {', '.join(map(str, HEAD_DIMS))}"
    return None


def workspace_bytes(spec: ModelSpec, num_processors: int) -> int:
    """Return a bound for the partial results that FlashInfer keeps while it splits contexts.

    It splits only as long as the pieces, of all rows and key heads, stay within `CTAS_PER_PROCESSOR` for each of the
    device's multiprocessors. A piece is at most a tile of queries, each with an output and a log-sum-exp in float32.
    Older versions reserve a whole tile for every query head, newer ones only for those that share a key head.
    """
    num_pieces = CTAS_PER_PROCESSOR * num_processors // spec.num_kv_heads
    partial_bytes = spec.num_heads * num_pieces * MAX_QUERY_TILE * (spec.head_dim + 1) * 4
    return max(partial_bytes + 4096, RECOMMENDED_WORKSPACE_BYTES)  # a page for alignment


def fixed_workspace_bytes(spec: ModelSpec, num_rows: int) -> int:
    """Return a bound for the partial results of recorded steps of so many decodes.

    FlashInfer reserves the tiles that rows of any lengths could fill with so many queries, even if they are more than
    the pieces of `workspace_bytes`. A row's queries are here those of all heads that share a key head.
    """
    tile = next((each for each in QUERY_TILES if spec.group_size <= each), MAX_QUERY_TILE)
    num_tiles = -(-num_rows * spec.group_size // tile) + num_rows - 1
    partial_bytes = spec.num_heads * -(-num_tiles * tile // spec.group_size) * (spec.head_dim + 1) * 4
    return partial_bytes + 4096


def joined(states: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return states with another part of the context in them.

    Args:
        states: [t, num_heads, head_dim + STATE_EXTRA] float32
        out: [t, num_heads, head_dim] of that part.
        lse: [t, num_heads] of that part, base 2, float32.
    """
    values, top, total = states[..., : out.shape[-1]], states[..., -2], states[..., -1]
    before = torch.where((total > 0).unsqueeze(-1), values / total.unsqueeze(-1), torch.zeros_like(values))
    before_lse = torch.where(total > 0, top + torch.log2(total), torch.full_like(top, -torch.inf))
    whole, whole_lse = merge_states(before, before_lse, out.float(), lse)
    is_there = (whole_lse > -torch.inf).to(whole.dtype)
    return torch.cat((whole, whole_lse.unsqueeze(-1), is_there.unsqueeze(-1)), dim=-1)
