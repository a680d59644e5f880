"""The C++ attention kernel, at every instruction set of this processor, against attention written out in float64."""

from __future__ import annotations

import functools
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.attention.base import RaggedRows
from services.worker.attention.native_paged import NativePagedAttention
from services.worker.native.library import NativeLibrary
from tests.support.attention_cases import AttentionCase, attention_spec
from tests.support.native import LEVEL_NAMES, built_library


def attend(
    library: NativeLibrary,
    case: AttentionCase,
    rows: RaggedRows | None = None,
    queries: torch.Tensor | None = None,
    *,
    num_threads: int = 1,
    any_head_dim: bool = False,
) -> torch.Tensor:
    """Return the output of a case, or of some of its tokens."""
    attention = NativePagedAttention(library, case.spec, case.cache, num_threads=num_threads, any_head_dim=any_head_dim)
    plan = attention.plan(case.rows if rows is None else rows)
    return attention.attend(plan, 0, case.queries if queries is None else queries)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    atol, rtol = {torch.float32: (2e-5, 1e-4), torch.bfloat16: (2e-2, 2e-2)}[found.dtype]
    torch.testing.assert_close(found.double(), expected, atol=atol, rtol=rtol)


HEADS = [
    ((4, 2, 64), None),
    ((3, 1, 80), None),
    ((4, 4, 96), None),
    ((7, 1, 128), None),
    ((2, 1, 256), None),
    ((20, 1, 6), None),
    ((4, 2, 33), None),
    ((2, 2, 24), 5),
    ((8, 1, 16), 300),
]
"""(query heads, key heads, dimensions) and the window."""
RAGGED = [(0, 3), (700, 1), (250, 12), (0, 1), (511, 2), (13, 40)]


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "window"), HEADS, ids=str)
def test_every_shape_equals_attention_written_out(
    level: str, heads: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    case = AttentionCase(attention_spec(heads, (window,)), RAGGED, dtype=dtype, seed=5)
    assert_near(attend(built_library(level), case), case.expected(0))


@functools.cache
def case_with_nothing_to_see_elsewhere(
    dtype: torch.dtype, block_size: int, window: int | None
) -> tuple[AttentionCase, torch.Tensor]:
    """Return a case in which also the keys before the window of a row's first query are NaN, and what to expect."""
    case = AttentionCase(attention_spec((4, 2, 96), (window,)), RAGGED[1:], dtype=dtype, block_size=block_size, seed=3)
    expected = case.expected(0)
    for start, table in zip(case.rows.start.tolist(), case.rows.tables, strict=True):
        unseen = np.arange(0 if window is None else max(start + 1 - window, 0))
        for pool in (case.cache.keys[0], case.cache.values[0]):
            pool[table[unseen // block_size], unseen % block_size] = torch.nan
    return case, expected


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 24, 32])
@pytest.mark.parametrize("window", [None, 100])
def test_keys_are_found_in_blocks_of_every_size_and_those_before_the_window_do_not_matter(
    level: str, dtype: torch.dtype, block_size: int, window: int | None
) -> None:
    """The matrix unit reads blocks of 16 and 32 where they lie; of those of 24 it has its keys copied."""
    case, expected = case_with_nothing_to_see_elsewhere(dtype, block_size, window)
    assert_near(attend(built_library(level), case), expected)


OWN_CODE = [64, 80, 96, 128, 256]
"""Sizes of heads that have code of their own (`with_head_dim` in src/attention.h)."""


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", OWN_CODE)
def test_a_size_with_code_of_its_own_gives_the_bits_of_any_size(level: str, dtype: torch.dtype, head_dim: int) -> None:
    """Groups of 1, 2, 3 and 5 heads: tiles of one to four query rows, alone and behind others."""
    for group in (1, 2, 3, 5):
        case = AttentionCase(attention_spec((group, 1, head_dim), (None,)), RAGGED, dtype=dtype, seed=group)
        own, of_any = (attend(built_library(level), case, any_head_dim=any_size) for any_size in (False, True))
        assert torch.equal(own, of_any)


LENGTHS = st.lists(st.tuples(st.integers(0, 560), st.integers(1, 40)), min_size=1, max_size=4)


@settings(max_examples=25)
@given(lengths=LENGTHS, window=st.sampled_from([None, 1, 16, 257]), seed=st.integers(0, 1000))
def test_random_rows_equal_attention_written_out(lengths: list[tuple[int, int]], window: int | None, seed: int) -> None:
    case = AttentionCase(attention_spec((4, 2, 16), (window,)), lengths, dtype=torch.float32, seed=seed)
    assert_near(attend(built_library(), case), case.expected(0))


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 270])
def test_a_tokens_bits_depend_on_its_context_alone(level: str, dtype: torch.dtype, window: int | None) -> None:
    """Alone or in a batch, in one chunk or several, with one thread or three, split over threads or not."""
    library = built_library(level)
    lengths = [(0, 30), (2000, 1), (255, 60), (900, 5), (3, 1)]
    case = AttentionCase(attention_spec((4, 2, 64), (window,)), lengths, dtype=dtype, seed=2)
    whole = attend(library, case)
    for row, cuts in ((0, (0, 1, 17, 30)), (1, (0, 1)), (2, (0, 2, 3, 50, 60)), (3, (0, 4, 5)), (4, (0, 1))):
        for first, end in pairwise(cuts):
            count, start = np.array([end - first], np.int32), np.array([case.rows.start[row] + first], np.int32)
            rows = RaggedRows(count, start, case.rows.tables[row : row + 1])
            at = int(case.rows.first_token[row]) + first
            tokens = slice(at, at + end - first)
            for number in (1, 3):
                out = attend(library, case, rows, case.queries[tokens], num_threads=number)
                assert torch.equal(out, whole[tokens])
