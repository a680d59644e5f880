"""Tries an attention of another library on a model's own heads before it is trusted with requests.

Its kernels are compiled on the machine when they are first used, for which a compiler must be there, and what they do
with heads and windows that its authors did not try is nowhere to be read. So it computes one small step beside torch's
attention; only one that agrees is used. This also compiles its kernels before the worker says that it is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from services.worker.attention.base import Attention, RaggedRows
from services.worker.attention.torch_paged import TorchPagedAttention
from services.worker.contract.table_entries import blocks_of, slots_of
from services.worker.memory.kv_cache import KVCache
from services.worker.models.spec import ModelSpec

BLOCK_SIZE = 16
ROWS = ((1200, 1), (0, 1), (40, 1), (0, 150), (513, 70), (30, 1))
"""Position of the first token and number of tokens: decodes, one of them so long that it is split, and prefills."""
FROM_RIGHT = ((27, 1), (200, 9))
"""The same of rows whose blocks are filled from the right."""
WINDOW = 100
"""Stands for every window of the model: shorter than some rows, not a multiple of a block."""
LIMIT = 0.03
"""Difference that is taken for rounding, in relation to 1 and to the number itself."""


def attention_fault(
    make: Callable[[ModelSpec, KVCache], Attention[Any]],
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    from_right: bool = False,
) -> str | None:
    """Return why an attention is not to be used for a model; None: it agrees with torch's.

    Args:
        make: opens it over a cache.
        spec: of the model; its heads and its kinds of windows are tried.
        dtype: of queries, keys and values.
        device: on which it computes.
        from_right: there will be rows whose blocks are filled from the right; what computes them is tried, too.
    """
    kinds = tuple(dict.fromkeys(None if window is None else WINDOW for window in spec.windows))
    spec = replace(spec, windows=kinds, num_layers=len(kinds))
    rows = _rows(FROM_RIGHT if from_right else ())
    num_blocks = int(blocks_of(rows.tables).max()) + 1
    exact = KVCache(spec, num_blocks, BLOCK_SIZE, torch.float32, device)
    tried = KVCache(spec, num_blocks, BLOCK_SIZE, dtype, device)
    queries = _fill(spec, rows, exact, tried)
    try:
        with torch.inference_mode():
            found = _attend(make(spec, tried), rows, len(kinds), queries.to(dtype))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except Exception as error:  # whatever a foreign compiler or kernel raises, the worker can go on without it
        return f"it failed: {type(error).__name__}: {str(error).strip()[:500]}"
    with torch.inference_mode():
        expected = _attend(TorchPagedAttention(spec, exact), rows, len(kinds), queries)
    excess = (found.float() - expected).abs() / (1 + expected.abs())
    if not bool((excess <= LIMIT).all()):  # also if it is not a number
        return f"its results differ from torch's by {float(excess.max()):.3g}"
    return None


def _attend(attention: Attention[Any], rows: RaggedRows, num_layers: int, queries: torch.Tensor) -> torch.Tensor:
    """Return [num_layers, t, num_heads * head_dim]."""
    plan = attention.plan(rows)
    return torch.stack([attention.attend(plan, layer, queries) for layer in range(num_layers)])


def _rows(from_right: tuple[tuple[int, int], ...]) -> RaggedRows:
    """Return `ROWS` and those of the other direction, with their blocks in falling order."""
    start, num_tokens = (np.array(column, dtype=np.int32) for column in zip(*ROWS, *from_right, strict=True))
    blocks = -(-(start + num_tokens) // BLOCK_SIZE)
    tables = np.zeros((len(blocks), int(blocks.max())), dtype=np.int32)
    ends = np.cumsum(blocks)
    for row, (count, end) in enumerate(zip(blocks, ends, strict=True)):
        tables[row, :count] = ends[-1] - 1 - np.arange(end - count, end)
    tables[len(ROWS) :] = ~tables[len(ROWS) :]
    return RaggedRows(num_tokens, start, tables)


def _fill(spec: ModelSpec, rows: RaggedRows, exact: KVCache, tried: KVCache) -> torch.Tensor:
    """Write the same keys and values into both caches, NaN where no row has any; return queries [t, heads, head_dim].

    All numbers are ones that the tried cache's type can hold.
    """
    generator = torch.Generator().manual_seed(0)
    dtype = tried.keys[0].dtype
    written = torch.zeros(exact.num_blocks * BLOCK_SIZE, dtype=torch.bool)
    for table, num_keys in zip(rows.tables, rows.num_keys, strict=True):
        places = np.arange(num_keys, dtype=np.int64)
        written[torch.from_numpy(slots_of(table[places // BLOCK_SIZE], places, BLOCK_SIZE))] = True
    for of_exact, of_tried in zip((*exact.keys, *exact.values), (*tried.keys, *tried.values), strict=True):
        numbers = torch.randn(of_exact.shape, generator=generator).to(dtype)
        numbers.flatten(0, 1)[~written] = torch.nan
        of_exact.copy_(numbers)
        of_tried.copy_(numbers)
    shape = (int(rows.num_tokens.sum()), spec.num_heads, spec.head_dim)
    return torch.randn(shape, generator=generator).to(dtype).to(exact.keys[0].device, torch.float32)
