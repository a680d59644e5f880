"""Attention cut into parts that lie in different places: the same bits as in one place, or close to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.attention.base import Attention, KeyRanges
from services.worker.attention.fixed_splits import FixedSplitAttention
from services.worker.attention.flashinfer_paged import FlashInferAttention
from services.worker.attention.native_paged import NativePagedAttention
from services.worker.attention.remote import attended_of, new_states, remote_rows
from services.worker.attention.torch_paged import TorchPagedAttention
from services.worker.contract.remote import SPLIT_KEYS
from services.worker.memory.kv_cache import KVCache
from services.worker.models.spec import ModelSpec
from tests.support import fake_flashinfer
from tests.support.attention_cases import AttentionCase, attention_spec
from tests.support.native import LEVEL_NAMES, built_library

Maker = Callable[[ModelSpec, KVCache], Attention[Any]]
LENGTHS = [(0, 3), (700, 1), (1550, 12), (0, 1), (511, 2), (13, 40), (2000, 1), (768, 5)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def native(level: str, num_threads: int = 1) -> Maker:
    return lambda spec, cache: NativePagedAttention(built_library(level), spec, cache, num_threads=num_threads)


EXACT: dict[str, Maker] = {"fixed": FixedSplitAttention, **{level: native(level) for level in LEVEL_NAMES}}


def part_of(case: AttentionCase, ranges: KeyRanges) -> KVCache:
    """Return a cache in which these positions alone are numbers."""
    size = case.cache.block_size
    pools = [pool.clone().fill_(torch.nan) for pool in case.cache.pools()]
    for row, (first, end) in enumerate(zip(ranges.first, ranges.end, strict=True)):
        last = min(int(end), int(ranges.rows.num_keys[row]))
        for position in range(int(first), last):
            block, offset = int(ranges.rows.tables[row, position // size]), position % size
            for pool, whole in zip(pools, case.cache.pools(), strict=True):
                pool[block, offset] = whole[block, offset]
    num_layers = len(case.spec.windows)
    return KVCache.over(pools[:num_layers], pools[num_layers:], case.cache.num_blocks)


def folded(
    case: AttentionCase, layer: int, cuts: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]], makers: list[Maker]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of the rows that are cut, each part by itself from a cache of its own; and their tokens."""
    found = remote_rows(case.rows, *cuts)
    assert found is not None
    tokens = torch.from_numpy(found.tokens)
    states = new_states(len(tokens), case.spec.num_heads, case.spec.head_dim)
    parts = (found.here_before, KeyRanges(found.rows, found.first, found.end), found.here_after)
    for part, maker in zip(parts, makers, strict=True):
        maker(case.spec, part_of(case, part)).plan_fold(part)(layer, case.queries[tokens], states)
    return attended_of(states, case.queries.dtype), tokens


def whole(case: AttentionCase, layer: int, maker: Maker) -> torch.Tensor:
    attention = maker(case.spec, case.cache)
    return attention.attend(attention.plan(case.rows), layer, case.queries)


def drawn_cuts(case: AttentionCase, rng: np.random.Generator) -> tuple[Any, Any]:
    most = case.rows.start // SPLIT_KEYS
    first = rng.integers(0, most + 1)
    end = rng.integers(first, most + 1)
    if not (end > first).any():
        row = int(np.argmax(most))
        first[row], end[row] = 0, most[row]
    return (first * SPLIT_KEYS).astype(np.int32), (end * SPLIT_KEYS).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), heads=st.sampled_from([(4, 2, 64), (7, 1, 33), (8, 1, 16), (2, 2, 80)]))
def test_parts_one_after_the_other_give_the_bits_of_the_whole(
    name: str, dtype: torch.dtype, seed: int, heads: tuple[int, int, int]
) -> None:
    """Two layers, one of them with a window; each part is computed where everything else is no number."""
    rng = np.random.default_rng(seed)
    chosen = [LENGTHS[i] for i in rng.permutation(len(LENGTHS))[: int(rng.integers(1, 7))]]
    case = AttentionCase(attention_spec(heads, (None, 300)), [*chosen, (600, 2)], dtype=dtype, seed=seed)
    cuts = drawn_cuts(case, rng)
    for layer in range(2):
        found, tokens = folded(case, layer, cuts, [EXACT[name]] * 3)
        assert torch.equal(found, whole(case, layer, EXACT[name])[tokens])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_few_rows_with_long_contexts_whose_splits_are_computed_side_by_side(threads: int) -> None:
    case = AttentionCase(attention_spec((4, 2, 64), (None,)), [(9000, 1), (5000, 2)], seed=1)
    cuts = np.array([1024, 0], np.int32), np.array([8448, 4864], np.int32)
    maker = native(LEVEL_NAMES[0], threads)
    found, tokens = folded(case, 0, cuts, [maker] * 3)
    assert torch.equal(found, whole(case, 0, maker)[tokens])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_different_attentions_can_compute_the_parts(dtype: torch.dtype) -> None:
    """Close to the whole: their sums have other orders."""
    case = AttentionCase(attention_spec((4, 2, 64), (None, 300)), LENGTHS, dtype=dtype, seed=2)
    cuts = drawn_cuts(case, np.random.default_rng(2))
    makers: list[Maker] = [native(LEVEL_NAMES[-1]), FixedSplitAttention, TorchPagedAttention]
    for layer in range(2):
        for turn in range(3):
            found, tokens = folded(case, layer, cuts, makers[turn:] + makers[:turn])
            expected = case.expected(layer)[tokens]
            torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_part_without_keys_leaves_states_as_they_are() -> None:
    case = AttentionCase(attention_spec((4, 2, 64), (None,)), [(700, 2), (300, 1)], seed=3)
    zeros, some = np.zeros(2, np.int32), np.array([512, 256], np.int32)
    states = new_states(3, 4, 64)
    for maker in EXACT.values():
        attention = maker(case.spec, case.cache)
        attention.plan_fold(KeyRanges(case.rows, some, some))(0, case.queries, states)
        assert torch.equal(states, new_states(3, 4, 64))
        assert not attended_of(states, torch.float32).any()
        once, twice = new_states(3, 4, 64), new_states(3, 4, 64)
        attention.plan_fold(KeyRanges(case.rows, zeros, some))(0, case.queries, once)
        attention.plan_fold(KeyRanges(case.rows, zeros, some))(0, case.queries, twice)
        attention.plan_fold(KeyRanges(case.rows, some, zeros))(0, case.queries, twice)
        assert torch.equal(once, twice)


@pytest.mark.slow
@pytest.mark.parametrize("windows", [(None,), (None, 300)], ids=str)
def test_flashinfer_folds_parts_as_its_calls_promise(windows: tuple[int | None, ...]) -> None:
    """Over a stand-in that computes what FlashInfer documents; on a device: tests/gpu/test_gpu_attention.py."""
    case = AttentionCase(attention_spec((4, 2, 64), windows), LENGTHS, seed=4)
    cuts = drawn_cuts(case, np.random.default_rng(4))

    def maker(spec: ModelSpec, cache: KVCache) -> FlashInferAttention:
        return FlashInferAttention(fake_flashinfer, spec, cache, 2**27)

    for layer in range(len(windows)):
        found, tokens = folded(case, layer, cuts, [maker] * 3)
        expected = case.expected(layer)[tokens]
        torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=2e-2)
