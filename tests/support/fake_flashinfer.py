"""Stands in for the module `flashinfer`: computes from exactly the arguments that the real one would get, in float64.

It refuses what the real one refuses or reads wrongly, so that a test on it is one of the bookkeeping.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch

NUM_PROCESSORS = 132
"""Multiprocessors of the device that it stands for."""
PLAN_BYTES = 8 * 2**20
_WRAPPERS: list[BatchPrefillWithPagedKVCacheWrapper] = []


_SENT: deque[tuple[torch.Tensor, int]] = deque(maxlen=2)
"""Host memory from which the device may still read the newest plans, and what is in it."""


def _send_plan(source: torch.Tensor) -> None:
    """Stand in for the copy of a plan to the device, which nobody waits for."""
    for under_way, number in _SENT:
        assert int(under_way[:8].view(torch.int64)) == number, "a plan was written over before the device had read it"
    number = _SENT[-1][1] + 1 if _SENT else 1
    source[:8].view(torch.int64).fill_(number)
    _SENT.append((source, number))


def float_bytes(
    num_queries: list[int],
    num_blocks: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    *,
    window_left: int = -1,
    fixed: bool = False,
) -> int:
    """Return what the real one reserves for partial results (`scheduler.cuh`): nothing if it splits no context.

    Args:
        num_queries: of each row.
        num_blocks: of each row's keys.
        num_heads, num_kv_heads, head_dim, page_size: of the model and its cache.
        window_left: of the layers; -1: all keys.
        fixed: for a CUDA graph.
    """
    group, total, rows = num_heads // num_kv_heads, sum(num_queries), len(num_queries)
    mean = (total - rows + 1) * group if fixed else total * group // rows
    tile = 128 if mean > 64 and head_dim < 256 else 64 if mean > 16 else 16
    most = -(-(window_left + tile) // page_size) if window_left >= 0 else max(num_blocks)
    seen = [min(count, most) for count in num_blocks]

    def pieces(chunk: int) -> int:
        parts = zip(num_queries, seen, strict=True)
        return sum(-(-count * group // tile) * -(-max(keys, 1) // chunk) for count, keys in parts)

    at_once = 2 * NUM_PROCESSORS // num_kv_heads
    low, high = max(128 // page_size, 1), max(1, *seen)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if pieces(middle) > at_once else (low, middle)
    if not fixed and low >= max(1, *seen):
        return 0
    padded = max(at_once, -(-total * group // tile) + rows - 1) if fixed else pieces(low)
    numbers = num_heads * -(-padded * tile // group)
    return -(-numbers * head_dim * 4 // 16) * 16 + numbers * 4


@torch.library.custom_op("sluice_tests::flashinfer_run", mutates_args={"out"})
def run_fixed(handle: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
    """Stand in for a kernel: whoever records sees one operator, which reads the buffers whenever it runs."""
    _WRAPPERS[handle].compute_fixed(q, (keys, values), out)


class BatchPrefillWithPagedKVCacheWrapper:
    """As flashinfer-python 0.7.2: `plan` keeps a batch, `run` computes a layer of it."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        *,
        backend: str,
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        assert backend in ("auto", "fa2", "fa3")
        self.backend = backend
        self._float_workspace_buffer = float_workspace_buffer
        self._plan: dict[str, Any] | None = None
        self._use_cuda_graph = use_cuda_graph
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        if use_cuda_graph:
            assert all(buffer is not None and buffer.dtype == torch.int32 for buffer in buffers)
            starts, block_starts, _, last = (len(buffer) for buffer in buffers if buffer is not None)
            assert starts == block_starts == last + 1
        self._buffers = buffers
        self._pin_memory_int_workspace_buffer = torch.zeros(8, dtype=torch.uint8)
        self._max_total_num_rows: int | None = None
        self._handle = len(_WRAPPERS)
        _WRAPPERS.append(self)

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8
        assert len(int_workspace_buffer) >= PLAN_BYTES
        self._float_workspace_buffer = float_workspace_buffer
        self._pin_memory_int_workspace_buffer = torch.zeros(8, dtype=torch.uint8)

    def plan(  # noqa: PLR0917 - the real one's places
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        seq_lens: torch.Tensor,
    ) -> None:
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, seq_lens):
            assert tensor.dtype == torch.int32
            assert tensor.device.type == "cpu", "the host would wait for the device to read them back"
            assert tensor.dim() == 1
            assert tensor.is_contiguous()
        rows = len(qo_indptr) - 1
        assert rows > 0
        assert len(paged_kv_indptr) == rows + 1
        assert len(paged_kv_last_page_len) == rows
        assert qo_indptr[0] == paged_kv_indptr[0] == 0
        assert (qo_indptr.diff() > 0).all()
        assert (paged_kv_indptr.diff() > 0).all()
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        assert torch.equal(seq_lens, (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len)
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim_qk in (64, 128, 256)
        assert causal or window_left == -1, "calls without a causal mask have been reported to miss windows"
        assert window_left >= -1
        assert q_data_type in (torch.float16, torch.bfloat16)
        assert kv_data_type in (None, q_data_type)
        needed = float_bytes(
            qo_indptr.diff().tolist(),
            paged_kv_indptr.diff().tolist(),
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            window_left=window_left,
            fixed=self._use_cuda_graph,
        )
        assert needed <= len(self._float_workspace_buffer), "buffer overflow: increase the workspace buffer size"
        self._plan = {name: value for name, value in locals().items() if name not in ("self", "needed")}
        _send_plan(self._pin_memory_int_workspace_buffer)
        if self._use_cuda_graph:
            self._fill_buffers(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)

    def _fill_buffers(self, *lists: torch.Tensor) -> None:
        for buffer, values in zip(self._buffers, lists, strict=True):
            assert buffer is not None
            assert len(values) == len(buffer) or (len(values) < len(buffer) and values is lists[2]), (
                "a fixed batch size"
            )
            buffer.fill_(2**30)  # what is read behind the plan's end is nothing
            buffer[: len(values)].copy_(values)
        total = int(lists[0][-1])
        assert self._max_total_num_rows in (None, total), "the first plan fixes the number of queries"
        self._max_total_num_rows = total

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        plan = self._plan
        assert plan is not None, "plan comes first"
        self._check(plan, q, paged_kv_cache, out)
        if self._use_cuda_graph:
            assert lse is None
            run_fixed(self._handle, q, *paged_kv_cache, out)
            return out
        return self._compute(plan, q, paged_kv_cache, out, lse, return_lse=return_lse)

    def compute_fixed(self, q: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        """Compute from what lies in the buffers, and of the plan only from what every plan has."""
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        assert self._plan is not None
        plan = {**self._plan, **dict(zip(names, self._buffers, strict=True))}
        self._compute(plan, q, pools, out, None, return_lse=False)

    def _compute(
        self,
        plan: dict[str, Any],
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None,
        *,
        return_lse: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        queries, blocks = plan["qo_indptr"].tolist(), plan["paged_kv_indptr"].tolist()
        scores_lse = torch.empty(q.shape[:2], dtype=torch.float32) if lse is None else lse
        assert scores_lse.shape == q.shape[:2]
        for row, last in enumerate(plan["paged_kv_last_page_len"].tolist()):
            span = slice(queries[row], queries[row + 1])
            pages = plan["paged_kv_indices"][blocks[row] : blocks[row + 1]].long()
            num_keys = (len(pages) - 1) * plan["page_size"] + last
            keys, values = (pool[pages].flatten(0, 1)[:num_keys].double() for pool in paged_kv_cache)
            self._row(plan, q[span].double(), keys, values, out[span], scores_lse[span])
        return (out, scores_lse) if return_lse else out

    @staticmethod
    def _check(
        plan: dict[str, Any], q: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
    ) -> None:
        assert q.shape == (plan["qo_indptr"][-1], plan["num_qo_heads"], plan["head_dim_qk"])
        assert q.dtype == plan["q_data_type"]
        assert q.stride(-1) == 1
        for pool in pools:
            assert pool.shape[1:] == (plan["page_size"], plan["num_kv_heads"], plan["head_dim_qk"])
            assert pool.dtype == plan["q_data_type"]
        assert pools[0].stride() == pools[1].stride()
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        assert out.is_contiguous()

    @staticmethod
    def _row(
        plan: dict[str, Any],
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        num_queries, num_keys = len(queries), len(keys)
        group = plan["num_qo_heads"] // plan["num_kv_heads"]
        scale = plan["sm_scale"] if plan["sm_scale"] is not None else 1 / math.sqrt(plan["head_dim_qk"])
        place, key = torch.arange(num_queries)[:, None], torch.arange(num_keys)
        seen = key + num_queries <= num_keys + place
        if not plan["causal"]:
            seen = torch.ones_like(seen)
        if plan["window_left"] >= 0:
            seen &= key + num_queries + plan["window_left"] >= num_keys + place
        scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(group, dim=1)) * scale
        scores = scores.masked_fill(~seen, -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values.repeat_interleave(group, dim=1))
        out.copy_(attended)
        lse.copy_(scores.logsumexp(dim=-1).T / math.log(2))
