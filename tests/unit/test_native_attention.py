"""The C++ attention kernel, at every instruction set of this processor, against attention written out in float64."""

from __future__ import annotations

import ctypes
import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.attention.base import RaggedRows
from services.worker.attention.native_paged import rows_args
from services.worker.native.library import NativeLibrary
from services.worker.native.structures import AttendArgs
from tests.support.native import LEVEL_NAMES, built_library

BLOCK_SIZE = 8


@dataclass(frozen=True)
class Shape:
    """Heads of an attention."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0


class Case:
    """Rows of random lengths over pools that are full of NaN wherever nothing was written."""

    def __init__(self, shape: Shape, lengths: list[tuple[int, int]], seed: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.dtype = shape, dtype
        blocks = [-(-(start + count) // BLOCK_SIZE) for start, count in lengths]
        pool = (sum(blocks) + 1, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
        self.pools = [torch.full(pool, torch.nan, dtype=dtype) for _ in range(2)]
        order = torch.randperm(sum(blocks), generator=generator).to(torch.int32).numpy()
        tables = np.full((len(lengths), max(blocks)), sum(blocks), dtype=np.int32)
        self.written: list[list[torch.Tensor]] = []
        for row, (start, count) in enumerate(lengths):
            tables[row, : blocks[row]], order = np.split(order, [blocks[row]])
            slots = torch.from_numpy(tables[row, : blocks[row], None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).flatten()
            size = (start + count, shape.kv_heads, shape.head_dim)
            self.written.append([torch.randn(size, generator=generator).to(dtype) for _ in range(2)])
            for target, values in zip(self.pools, self.written[-1], strict=True):
                target.flatten(0, 1)[slots[: start + count].long()] = values
        starts, counts = (np.array(column, dtype=np.int32) for column in zip(*lengths, strict=True))
        self.rows = RaggedRows(counts, starts, tables)
        size = (int(counts.sum()), shape.heads, shape.head_dim)
        self.queries = torch.randn(size, generator=generator).to(dtype)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """In float64: output [t, heads * head_dim] and log-sum-exp [t, heads], base 2."""
        out, lse = [], []
        group = self.shape.heads // self.shape.kv_heads
        for row, (start, count) in enumerate(zip(self.rows.start, self.rows.num_tokens, strict=True)):
            keys, values = (part.double().repeat_interleave(group, dim=1) for part in self.written[row])
            first = self.rows.first_token[row]
            queries = self.queries[first : first + count].double()
            ends, places = torch.arange(start, start + count)[:, None], torch.arange(start + count)
            seen = places <= ends
            if self.shape.window:
                seen &= places > ends - self.shape.window
            scores = torch.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(self.shape.head_dim)
            scores = scores.masked_fill(~seen, -torch.inf)
            out.append(torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values).flatten(1))
            lse.append(scores.logsumexp(dim=-1).T / math.log(2))
        return torch.cat(out), torch.cat(lse)


def attend(library: NativeLibrary, case: Case, threads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    shape = case.shape
    held, rows = rows_args(case.rows)
    out = torch.full((len(case.queries), shape.heads * shape.head_dim), torch.nan, dtype=case.dtype)
    lse = torch.full((len(case.queries), shape.heads), torch.nan)
    args = AttendArgs(
        rows=rows,
        num_threads=threads,
        is_bf16=int(case.dtype == torch.bfloat16),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_size=BLOCK_SIZE,
        window=shape.window,
        scale=shape.head_dim**-0.5,
        keys=case.pools[0].data_ptr(),
        values=case.pools[1].data_ptr(),
        queries=case.queries.data_ptr(),
        query_stride=shape.heads * shape.head_dim,
        out=out.data_ptr(),
        lse=lse.data_ptr(),
    )
    library.attend(ctypes.byref(args))
    del held
    return out, lse


TOLERANCE = {torch.float32: (2e-5, 1e-4), torch.bfloat16: (2e-2, 2e-2)}
"""Absolute and relative."""
SHAPES = [
    Shape(4, 2, 64),
    Shape(3, 1, 80),
    Shape(4, 4, 96),
    Shape(7, 1, 128),
    Shape(2, 1, 256),
    Shape(20, 1, 6),
    Shape(4, 2, 33),
    Shape(2, 2, 24, window=5),
    Shape(8, 1, 16, window=300),
]
RAGGED = [(0, 3), (700, 1), (250, 12), (0, 1), (511, 2), (13, 40)]


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_equals_attention_written_out(level: str, shape: Shape, dtype: torch.dtype) -> None:
    case = Case(shape, RAGGED, 5, dtype)
    out, lse = attend(built_library(level), case)
    atol, rtol = TOLERANCE[dtype]
    for found, expected in zip((out, lse), case.expected(), strict=True):
        torch.testing.assert_close(found.double(), expected, atol=atol, rtol=rtol)


LENGTHS = st.lists(st.tuples(st.integers(0, 560), st.integers(1, 40)), min_size=1, max_size=4)


@settings(max_examples=25)
@given(lengths=LENGTHS, window=st.sampled_from([0, 1, 16, 257]), seed=st.integers(0, 1000))
def test_random_rows_equal_attention_written_out(lengths: list[tuple[int, int]], window: int, seed: int) -> None:
    case = Case(Shape(4, 2, 16, window), lengths, seed, torch.float32)
    out, lse = attend(built_library(), case)
    expected, expected_lse = case.expected()
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-5, rtol=1e-4)


def only(case: Case, row: int, first: int, count: int) -> Case:
    """Return the same case with some tokens of one row alone in the batch."""
    part = object.__new__(Case)
    part.shape, part.dtype, part.pools, part.written = case.shape, case.dtype, case.pools, case.written
    start = case.rows.start[row] + first
    part.rows = RaggedRows(np.array([count], np.int32), np.array([start], np.int32), case.rows.tables[row : row + 1])
    at = case.rows.first_token[row] + first
    part.queries = case.queries[at : at + count].clone()
    return part


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 270])
def test_a_tokens_bits_depend_on_its_context_alone(level: str, dtype: torch.dtype, window: int) -> None:
    """Alone or in a batch, in one chunk or several, with one thread or three, split over threads or not."""
    library = built_library(level)
    case = Case(Shape(4, 2, 64, window), [(0, 30), (2000, 1), (255, 60), (900, 5), (3, 1)], 2, dtype)
    whole, whole_lse = attend(library, case)
    for row, cuts in ((0, (0, 1, 17, 30)), (1, (0, 1)), (2, (0, 2, 3, 50, 60)), (3, (0, 4, 5)), (4, (0, 1))):
        for first, end in itertools.pairwise(cuts):
            for threads in (1, 3):
                out, lse = attend(library, only(case, row, first, end - first), threads)
                at = int(case.rows.first_token[row]) + first
                assert torch.equal(out, whole[at : at + end - first])
                assert torch.equal(lse, whole_lse[at : at + end - first])
