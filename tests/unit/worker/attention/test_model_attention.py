"""Both attentions against attention written out, over random ragged rows; the joining of parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.attention import torch_paged
from services.worker.attention.fixed_splits import FixedSplitAttention
from services.worker.attention.merge import merge_states
from services.worker.attention.torch_paged import (
    MASK_ALIGNMENT,
    WASTE_KEYS,
    TorchPagedAttention,
    aligned,
    group_rows,
)
from tests.support.attention_cases import AttentionCase, attention_spec, torch_threads

MAX_KEYS = 600


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Products this small gain nothing from threads, and lose much where other processes use the cores."""
    with torch_threads(1):
        yield


def make_case(
    lengths: list[tuple[int, int]], heads: tuple[int, int, int], seed: int, window: int | None = None
) -> AttentionCase:
    """Return rows over a cache of two layers, the second one with a window."""
    return AttentionCase(attention_spec(heads, (None, window)), lengths, dtype=torch.float32, seed=seed)


def check(kind: type[Any], case: AttentionCase) -> None:
    attention = kind(case.spec, case.cache)
    found = attention.attend(attention.plan(case.rows), 1, case.queries)
    torch.testing.assert_close(found.double(), case.expected(1), atol=2e-5, rtol=1e-4)


LENGTHS = st.lists(
    st.tuples(st.integers(0, MAX_KEYS - 1), st.one_of(st.just(1), st.integers(1, 140))).filter(
        lambda row: sum(row) <= MAX_KEYS
    ),
    min_size=1,
    max_size=4,
)
WINDOWS = st.one_of(st.none(), st.sampled_from([1, 2, 127, 256, 257]), st.integers(1, MAX_KEYS))
HEADS = st.sampled_from([(4, 2, 8), (4, 4, 6), (8, 1, 4), (3, 1, 10)])


@pytest.mark.parametrize("kind", [TorchPagedAttention, FixedSplitAttention])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(lengths=LENGTHS, heads=HEADS, seed=st.integers(0, 1000), window=WINDOWS)
def test_attention_equals_attention_written_out_and_never_reads_past_a_row(
    kind: type[Any], lengths: list[tuple[int, int]], heads: tuple[int, int, int], seed: int, window: int | None
) -> None:
    check(kind, make_case(lengths, heads, seed, window))


@pytest.mark.parametrize(
    "lengths", [[(0, 1)] * 3, [(9, 1), (300, 1), (2, 1)], [(0, 129)], [(9, 140)], [(255, 1), (256, 1)]]
)
@pytest.mark.parametrize("window", [None, 1, 2, 8, 129, 256])
@pytest.mark.parametrize("kind", [TorchPagedAttention, FixedSplitAttention])
def test_border_cases_of_groups_tiles_splits_and_windows(
    kind: type[Any], window: int | None, lengths: list[tuple[int, int]]
) -> None:
    check(kind, make_case(lengths, (4, 2, 8), 3, window))


@pytest.mark.parametrize("window", [None, 1, 50, 200])
def test_long_contexts_take_smaller_tiles(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(torch_paged, "LONG_KEYS", 90)
    check(TorchPagedAttention, make_case([(0, 140), (60, 31), (200, 77), (5, 1)], (4, 2, 8), 3, window))


def test_a_plan_has_no_more_keys_than_the_window_shows() -> None:
    """Window 10: a decode gathers 10 keys, a chunk of 20 gathers 9 + 20. Until outgrown, it costs nothing."""
    case = make_case([(100, 1), (4, 1), (60, 20)], (4, 2, 8), 3, 10)
    attention = TorchPagedAttention(case.spec, case.cache)
    plan = attention.plan(case.rows)
    assert sum(group.slots.numel() for group in plan[10].groups) == 2 * 10
    assert [row.slots.numel() for row in plan[10].prefills] == [29]
    assert [row.slots.numel() for row in plan[None].prefills] == [80]
    short = make_case([(8, 1), (4, 6)], (4, 2, 8), 3, 10)
    plan = TorchPagedAttention(short.spec, short.cache).plan(short.rows)
    assert plan[10] is plan[None]


@given(
    st.lists(st.integers(1, 5000), min_size=0, max_size=60).map(lambda keys: np.array(keys, dtype=np.int32)),
    st.integers(1, 20_000),
)
def test_groups_hold_every_row_once_and_keep_their_limits(num_keys: Any, max_keys: int) -> None:
    rows = np.arange(len(num_keys), dtype=np.int64) * 3
    groups = group_rows(rows, num_keys, max_keys)
    assert sorted(int(row) for group in groups for row in group) == rows.tolist()
    for group in groups:
        keys = num_keys[group // 3]
        assert len(group) == 1 or len(group) * keys.max() <= max_keys
        assert (keys.max() - keys).sum() <= WASTE_KEYS


@pytest.mark.parametrize("num_queries", [1, 2, 7])
@pytest.mark.parametrize("num_keys", [1, 16, 61, 64])
def test_a_mask_that_is_the_corner_of_another_one_gets_an_address_of_its_own(num_queries: int, num_keys: int) -> None:
    """A corner of one row is contiguous as it lies, wherever that is: kernels of CUDA refuse it, or fail."""
    tail = torch.randn(128, 64).to(torch.bfloat16)
    corner = tail[-num_queries:, -num_keys:]
    found = aligned(corner)
    assert torch.equal(found, corner)
    assert found.is_contiguous()
    assert found.data_ptr() % MASK_ALIGNMENT == 0


def test_an_empty_part_leaves_the_other_bit_by_bit() -> None:
    part = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    lse = torch.tensor([-100.0, -1.0, 0.0, 3.3, 80.0])
    empty, nothing = torch.zeros(5, 4), torch.full((5,), -torch.inf)
    for merged in (merge_states(part, lse, empty, nothing), merge_states(empty, nothing, part, lse)):
        assert torch.equal(merged[0], part)
        assert torch.equal(merged[1], lse)
