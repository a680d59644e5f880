"""Blocks that are filled from the right, some of them by one row while another fills them from the left.

Keys are taken in the order of their positions wherever they lie, so results have the bits of blocks filled from the
left. Every slot that no row wrote is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.attention.base import Attention, KeyRanges, RaggedRows
from services.worker.attention.block_lists import (
    BlockLists,
    chosen_rows,
    full_block_lists,
    rows_from_right,
    slot_lists,
)
from services.worker.attention.fixed_splits import FixedSplitAttention
from services.worker.attention.flashinfer_paged import FlashInferAttention
from services.worker.attention.native_paged import NativePagedAttention
from services.worker.attention.remote import new_states
from services.worker.attention.torch_paged import TorchPagedAttention
from services.worker.contract.table_entries import blocks_of, slots_of
from services.worker.memory.kv_cache import KVCache
from services.worker.models.spec import ModelSpec
from tests.support import fake_flashinfer
from tests.support.attention_cases import AttentionCase, attention_spec, slot_written_out, turned
from tests.support.native import LEVEL_NAMES, built_library

Maker = Callable[[ModelSpec, KVCache], Attention[Any]]
MIXED = [(700, 1), (0, 1), (250, 12), (3, 1), (13, 40), (511, 2), (9, 1), (0, 3), (2, 1)]
LENGTHS = st.lists(st.tuples(st.integers(0, 560), st.integers(1, 40)), min_size=1, max_size=6)
HEADS = [(4, 2, 64), (3, 1, 80), (2, 2, 96), (7, 1, 128), (2, 1, 256), (20, 1, 6), (4, 2, 33)]


def native(level: str = LEVEL_NAMES[0], **options: Any) -> Maker:
    return lambda spec, cache: NativePagedAttention(built_library(level), spec, cache, **options)


def flashinfer(spec: ModelSpec, cache: KVCache) -> FlashInferAttention:
    return FlashInferAttention(fake_flashinfer, spec, cache, 2**27)


MAKERS: dict[str, Maker] = {
    "torch": TorchPagedAttention,
    "fixed": FixedSplitAttention,
    **{level: native(level) for level in LEVEL_NAMES},
}


def attended(maker: Maker, case: AttentionCase) -> list[torch.Tensor]:
    """Return the output of each layer."""
    attention = maker(case.spec, case.cache)
    plan = attention.plan(case.rows)
    return [attention.attend(plan, layer, case.queries) for layer in range(case.spec.num_layers)]


def assert_same_bits(maker: Maker, case: AttentionCase, seed: int = 0) -> None:
    other = turned(case, seed)
    for found, expected in zip(attended(maker, other), attended(maker, case), strict=True):
        assert not found.isnan().any()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [4, 16, 24, 32])
def test_every_attention_gives_the_bits_of_blocks_filled_from_the_left(
    name: str, dtype: torch.dtype, block_size: int
) -> None:
    """The matrix unit reads blocks of 16 and 32 where they lie; of others it has its keys copied."""
    case = AttentionCase(attention_spec((4, 2, 64), (None, 100)), MIXED, dtype=dtype, block_size=block_size)
    assert_same_bits(MAKERS[name], case)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=25, deadline=None)
@given(
    lengths=LENGTHS,
    layers=st.tuples(st.sampled_from(HEADS), st.sampled_from([1, 16, 257])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    block_size=st.integers(4, 32),
    seed=st.integers(0, 1000),
)
def test_random_rows_in_random_blocks(
    name: str,
    lengths: list[tuple[int, int]],
    layers: tuple[tuple[int, int, int], int],
    dtype: torch.dtype,
    block_size: int,
    seed: int,
) -> None:
    spec = attention_spec(layers[0], (None, layers[1]))
    case = AttentionCase(spec, [*lengths, (5, 1), (2, 1)], dtype=dtype, block_size=block_size, seed=seed)
    assert_same_bits(MAKERS[name], case, seed)


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_size_of_heads_has_the_same_bits(level: str, heads: tuple[int, int, int]) -> None:
    """By its own code and that for any size, by one thread and by several that compute splits side by side."""
    case = AttentionCase(attention_spec(heads, (None,)), [(1300, 1), (40, 9), (3, 1)], seed=1)
    for any_head_dim in (False, True):
        for threads in (1, 3):
            assert_same_bits(native(level, num_threads=threads, any_head_dim=any_head_dim), case, threads)


def test_many_rows_whose_keys_are_fetched_ahead_have_the_same_bits() -> None:
    """More items than threads: each row asks for the keys of the next one."""
    case = AttentionCase(attention_spec((4, 2, 64), (None, 50)), [(60 + 7 * i, 1) for i in range(20)], seed=4)
    assert_same_bits(native(num_threads=2), case)


@pytest.mark.parametrize("name", sorted(MAKERS.keys() - {"torch"}))
def test_parts_of_a_context_are_folded_to_the_same_bits(name: str) -> None:
    """Keys [256, 512) of those rows that have them, into states without any."""
    case = AttentionCase(attention_spec((4, 2, 64), (None, 300)), [(700, 2), (600, 1), (3, 1)], seed=3)
    first, end = np.array([256, 256, 0], np.int32), np.array([512, 512, 0], np.int32)
    states = []
    for each in (case, turned(case, 1)):
        fold = MAKERS[name](each.spec, each.cache).plan_fold(KeyRanges(each.rows, first, end))
        states.append([new_states(4, 4, 64) for _ in range(2)])
        for layer in range(2):
            fold(layer, each.queries, states[-1][layer])
    for expected, found in zip(*states, strict=True):
        assert torch.equal(found, expected)
        assert found[0].any()


ENTRIES = st.integers(-(2**31), 2**31 - 1)


@given(entries=st.lists(st.tuples(ENTRIES, st.integers(0, 2**20)), max_size=9), block_size=st.integers(1, 40))
def test_slots_and_blocks_of_entries(entries: list[tuple[int, int]], block_size: int) -> None:
    columns = np.array(entries, dtype=np.int64).reshape(-1, 2).T
    named = columns[0].astype(np.int32)
    slots = [slot_written_out(entry, position, block_size) for entry, position in entries]
    assert slots_of(named, columns[1], block_size).tolist() == slots
    assert blocks_of(named).tolist() == [slot // block_size for slot in slots]


def test_a_block_of_four_from_both_ends() -> None:
    """Block 5 has slots 20 to 23; ~5 is -6."""
    both, positions = np.array([5, 5, 5, 5, -6, -6, -6, -6], np.int32), np.array([8, 9, 10, 11] * 2)
    assert slots_of(both, positions, 4).tolist() == [20, 21, 22, 23, 23, 22, 21, 20]


def drawn_rows(lengths: list[tuple[int, int]], block_size: int, seed: int) -> RaggedRows:
    """Return rows with entries of any sign, also past their ends."""
    start, counts = (np.array(column, np.int32) for column in zip(*lengths, strict=True))
    width = int(-(-(start + counts).max() // block_size)) + 1
    tables = np.random.default_rng(seed).integers(-99, 99, (len(lengths), width)).astype(np.int32)
    return RaggedRows(counts, start, tables)


def by_row(lists: BlockLists) -> list[list[int]]:
    return [part.tolist() for part in np.split(lists.blocks, lists.block_starts[1:-1])]


@given(lengths=LENGTHS, block_size=st.integers(1, 40), seed=st.integers(0, 99))
def test_what_flashinfer_is_told_of_rows_equals_lists_written_out(
    lengths: list[tuple[int, int]], block_size: int, seed: int
) -> None:
    """Full blocks before the first query by their ids, and the slots of what is behind them."""
    rows = drawn_rows(lengths, block_size, seed)
    used = [table[: -(-int(end) // block_size)].tolist() for table, end in zip(rows.tables, rows.num_keys, strict=True)]
    assert rows_from_right(rows, block_size).tolist() == [min(entries) < 0 for entries in used]
    first = np.asarray(rows.start // block_size * block_size, np.int32)
    found = slot_lists(rows, first, block_size)
    assert (found.block_size, found.last_block_tokens.tolist()) == (1, [1] * len(lengths))
    assert found.query_starts[-1] == rows.num_tokens.sum()
    assert by_row(found) == [
        [slot_written_out(entries[p // block_size], p, block_size) for p in range(begin, end)]
        for entries, begin, end in zip(used, first.tolist(), rows.num_keys.tolist(), strict=True)
    ]
    place = np.flatnonzero(rows.start >= block_size)
    some, tokens = chosen_rows(rows, place)
    ends = np.cumsum(rows.num_tokens).tolist()
    assert tokens.tolist() == [t for row in place for t in range(ends[row] - int(rows.num_tokens[row]), ends[row])]
    if len(place):
        full = full_block_lists(some, block_size)
        assert by_row(full) == [[max(e, ~e) for e in used[row][: int(rows.start[row]) // block_size]] for row in place]
        assert set(full.last_block_tokens.tolist()) == {block_size}
        assert full.query_starts.tolist() == [0, *np.cumsum(rows.num_tokens[place]).tolist()]


FLASHINFER_LIMITS = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Each part is rounded to the type, and so is the whole."""


def check_flashinfer(case: AttentionCase, seed: int) -> None:
    limit = FLASHINFER_LIMITS[case.queries.dtype]
    other = turned(case, seed)
    for layer, found in enumerate(attended(flashinfer, other)):
        torch.testing.assert_close(found.double(), case.expected(layer), atol=limit, rtol=limit)


@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_flashinfer_computes_what_its_calls_promise(block_size: int) -> None:
    lengths = [*MIXED[1:], (block_size, 1), (2 * block_size, 1), (block_size, 5)]
    case = AttentionCase(attention_spec((4, 2, 64), (None, 100)), lengths, block_size=block_size, seed=5)
    check_flashinfer(case, 5)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 200), st.one_of(st.just(1), st.integers(1, 40))), min_size=1, max_size=5),
    windows=st.sampled_from([(None,), (9,), (None, 16), (70, 3)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    block_size=st.integers(1, 32),
    seed=st.integers(0, 1000),
)
def test_flashinfer_with_random_rows(
    lengths: list[tuple[int, int]],
    windows: tuple[int | None, ...],
    dtype: torch.dtype,
    block_size: int,
    seed: int,
) -> None:
    case = AttentionCase(attention_spec((4, 2, 64), windows), lengths, dtype=dtype, block_size=block_size, seed=seed)
    check_flashinfer(case, seed)


def test_rows_of_other_blocks_go_the_way_they_go_without_such_rows() -> None:
    """Alone, and between two rows from the right: the same calls, so the same bits."""
    lengths = [(30, 1), (20, 1), (50, 1), (9, 7), (40, 5), (0, 3)]
    case = AttentionCase(attention_spec((4, 2, 64), (None, 20)), lengths, seed=6)
    tables, among = case.rows.tables.copy(), [1, 4]
    tables[among] = ~tables[among]
    place = np.array([0, 2, 3, 5])
    others, tokens = chosen_rows(case.rows, place)
    mixed, alone = flashinfer(case.spec, case.cache), flashinfer(case.spec, case.cache)
    plan = mixed.plan(RaggedRows(case.rows.num_tokens, case.rows.start, tables))
    alone_plan = alone.plan(others)
    assert [span for _, span in plan.parts] == [span for _, span in alone_plan.parts]
    for layer in range(2):
        found = mixed.attend(plan, layer, case.queries)[tokens]
        assert torch.equal(found, alone.attend(alone_plan, layer, case.queries[tokens]))


@pytest.mark.slow
def test_flashinfer_leaves_folds_of_such_rows_to_torch() -> None:
    case = turned(AttentionCase(attention_spec((4, 2, 64), (None,)), [(700, 2), (600, 1)], seed=3), 1)
    zeros, end = np.zeros(2, np.int32), np.array([512, 256], np.int32)
    states = [new_states(3, 4, 64) for _ in range(2)]
    makers: list[Maker] = [flashinfer, FixedSplitAttention]
    for maker, each in zip(makers, states, strict=True):
        maker(case.spec, case.cache).plan_fold(KeyRanges(case.rows, zeros, end))(0, case.queries, each)
    assert torch.equal(*states)
