"""FlashInfer's kernels on a CUDA device: against attention written out, against torch's, within the workspace."""

from __future__ import annotations

import importlib
import importlib.util
import random
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.attention.base import KeyRanges, RaggedRows
from services.worker.attention.block_lists import block_lists
from services.worker.attention.flashinfer_paged import FlashInferAttention, workspace_bytes
from services.worker.attention.remote import attended_of, new_states, remote_rows
from services.worker.attention.torch_paged import TorchPagedAttention
from services.worker.contract.arrays import I32
from services.worker.executor.kernels import WantedKernels, choose_kernels
from tests.support.attention_cases import AttentionCase, attention_spec, turned
from tests.support.gpu import NEEDS_FLASHINFER, WITH_LIBRARIES

pytestmark = [*WITH_LIBRARIES, NEEDS_FLASHINFER]

CUDA = torch.device("cuda")
LIMITS = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Absolute and relative; outputs are of the order of 1 and less, and weights are rounded to the type too."""
HEADS = [(8, 8, 64), (14, 2, 64), (32, 8, 128), (28, 4, 128), (8, 1, 256)]
"""Heads of Llama 3 8B and Qwen2 0.5B and 7B among them: groups of 1, 7, 4, 7 and 8."""
MIXED = [(700, 1), (0, 1), (8191, 1), (15, 1), (0, 300), (1000, 129), (37, 2), (511, 1)]


def attention_of(case: AttentionCase) -> FlashInferAttention:
    processors = torch.cuda.get_device_properties(CUDA).multi_processor_count
    library = importlib.import_module("flashinfer")
    return FlashInferAttention(library, case.spec, case.cache, workspace_bytes(case.spec, processors))


def random_lengths(seed: int) -> list[tuple[int, int]]:
    """Decodes first, as the engine orders them; contexts from nothing to thousands of tokens."""
    rng = random.Random(seed)
    decodes = [(rng.choice((0, rng.randrange(64), rng.randrange(5000))), 1) for _ in range(rng.randrange(0, 40))]
    return decodes + [(rng.randrange(2000), rng.randrange(1, 400)) for _ in range(rng.randrange(1, 4))]


@pytest.mark.parametrize(
    ("heads", "dtype"), [*((heads, torch.bfloat16) for heads in HEADS), ((32, 8, 128), torch.float16)], ids=str
)
def test_a_mixed_step_equals_attention_written_out(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Three kinds of layer: all keys, a short window, one that a single row has outgrown."""
    case = AttentionCase(
        attention_spec(heads, (None, 100, 4096)), MIXED, dtype=dtype, device=CUDA, block_size=16, seed=1
    )
    attention = attention_of(case)
    plan = attention.plan(case.rows)
    for layer in range(3):
        out = attention.attend(plan, layer, case.queries)
        torch.testing.assert_close(out.cpu().double(), case.expected(layer), atol=LIMITS[dtype], rtol=LIMITS[dtype])


@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
@pytest.mark.parametrize("seed", range(4))
def test_random_steps_equal_torchs_attention(seed: int, block_size: int) -> None:
    case = AttentionCase(
        attention_spec((32, 8, 128), (None, 333)), random_lengths(seed), device=CUDA, block_size=block_size, seed=seed
    )
    own, other = attention_of(case), TorchPagedAttention(case.spec, case.cache)
    plan, other_plan = own.plan(case.rows), other.plan(case.rows)
    for layer in range(2):
        found, expected = own.attend(plan, layer, case.queries), other.attend(other_plan, layer, case.queries)
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("heads", "dtype"), [*((heads, torch.bfloat16) for heads in HEADS), ((32, 8, 128), torch.float16)], ids=str
)
def test_blocks_from_the_right_equal_attention_written_out(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Half of the blocks, some of them shared from both ends, in the three kinds of layer."""
    case = AttentionCase(
        attention_spec(heads, (None, 100, 4096)), MIXED, dtype=dtype, device=CUDA, block_size=16, seed=1
    )
    other = turned(case, 1)
    attention = attention_of(other)
    plan = attention.plan(other.rows)
    for layer in range(3):
        out = attention.attend(plan, layer, case.queries)
        torch.testing.assert_close(out.cpu().double(), case.expected(layer), atol=LIMITS[dtype], rtol=LIMITS[dtype])


@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
@pytest.mark.parametrize("seed", range(4))
def test_random_steps_with_blocks_from_the_right_equal_torchs_attention(seed: int, block_size: int) -> None:
    """Torch's has the bits of blocks from the left; FlashInfer's is close to both."""
    case = AttentionCase(
        attention_spec((32, 8, 128), (None, 333)), random_lengths(seed), device=CUDA, block_size=block_size, seed=seed
    )
    mixed = turned(case, seed)
    own, other, alone = attention_of(mixed), TorchPagedAttention(mixed.spec, mixed.cache), attention_of(case)
    ordinary = TorchPagedAttention(case.spec, case.cache)
    plans = own.plan(mixed.rows), other.plan(mixed.rows), alone.plan(case.rows), ordinary.plan(case.rows)
    for layer in range(2):
        found, by_torch = own.attend(plans[0], layer, case.queries), other.attend(plans[1], layer, case.queries)
        assert torch.equal(by_torch, ordinary.attend(plans[3], layer, case.queries))
        torch.testing.assert_close(found, by_torch, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(found, alone.attend(plans[2], layer, case.queries), atol=2e-2, rtol=2e-2)


def test_steps_of_both_kinds_one_behind_the_other_do_not_disturb_each_other() -> None:
    """Plans of rows from the right are sent from the same host memory by turns."""
    lengths = random_lengths(1)
    case = AttentionCase(attention_spec((32, 8, 128), (None, 200)), lengths, device=CUDA, block_size=16)
    cases = case, turned(case, 1)
    attentions = [attention_of(each) for each in cases]
    alone = [[a.attend(a.plan(c.rows), i, c.queries) for i in range(2)] for a, c in zip(attentions, cases, strict=True)]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for attention, each in zip(attentions, cases, strict=True):
            plan = attention.plan(each.rows)
            results.append([attention.attend(plan, layer, each.queries) for layer in range(2)])
        for found, expected in zip(results, alone, strict=True):
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_steps_one_behind_the_other_do_not_disturb_each_other() -> None:
    """Plans follow layers that have not been computed yet; each step's result is that of the step by itself."""
    cases = [
        AttentionCase(attention_spec((32, 8, 128), (None,)), random_lengths(seed), device=CUDA, block_size=16)
        for seed in range(3)
    ]
    attentions = [attention_of(case) for case in cases]
    alone = []
    for attention, case in zip(attentions, cases, strict=True):
        alone.append(attention.attend(attention.plan(case.rows), 0, case.queries))
        torch.cuda.synchronize()
    one = attentions[0]
    rows = cases[0].rows
    for _ in range(30):
        results = [one.attend(one.plan(rows), 0, cases[0].queries) for _ in range(4)]
        assert all(torch.equal(result, alone[0]) for result in results)
    for _ in range(10):
        together = [a.attend(a.plan(c.rows), 0, c.queries) for a, c in zip(attentions, cases, strict=True)]
        assert all(torch.equal(result, expected) for result, expected in zip(together, alone, strict=True))


def full_rows(num_rows: int, num_tokens: int, num_keys: int) -> tuple[I32, I32, I32]:
    counts = np.full(num_rows, num_tokens, dtype=np.int32)
    return counts, counts * 0 + num_keys - num_tokens, np.zeros((num_rows, -(-num_keys // 16)), dtype=np.int32)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 100_000), (3, 17, 50_000), (1, 128, 100_000), (40, 1, 9_000), (2, 300, 70_000)]
)
def test_the_workspace_is_at_least_what_the_library_asks_for(
    heads: tuple[int, int, int], shape: tuple[int, int, int]
) -> None:
    """Rows, tokens and keys that make it split contexts: few pieces, long contexts."""
    spec = attention_spec(heads, (None,))
    processors = torch.cuda.get_device_properties(CUDA).multi_processor_count
    library: Any = importlib.import_module("flashinfer")
    buffer = torch.zeros(2**20, dtype=torch.uint8, device=CUDA)
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(buffer, "NHD", backend="fa2")
    lists = block_lists(RaggedRows(*full_rows(*shape)), slice(None), None, 16)
    columns = (lists.query_starts, lists.block_starts, lists.blocks, lists.last_block_tokens)
    float_bytes, _ = wrapper.workspace_size(
        *(torch.from_numpy(column) for column in columns),
        *heads,
        16,
        causal=True,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    assert float_bytes <= workspace_bytes(spec, processors)


@pytest.mark.parametrize("heads", [(32, 32, 128), (32, 8, 128)], ids=str)
def test_recorded_steps_of_many_rows_find_room(heads: tuple[int, int, int]) -> None:
    """512 rows with contexts of 1 000 tokens, in blocks that they share."""
    case = AttentionCase(attention_spec(heads, (None,)), [(999, 1)], device=CUDA, block_size=16)
    ones = np.ones(512, dtype=np.int32)
    tables = np.repeat(case.rows.tables, 512, axis=0)
    queries = case.queries.expand(512, -1, -1).contiguous()
    attention = attention_of(case).fixed(512, tables.shape[1])
    attention.plan(RaggedRows(ones, ones * 999, tables))
    out = attention.attend(0, queries)
    expected = case.expected(0).expand(512, -1)
    torch.testing.assert_close(out.cpu().double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("from_right", [False, True])
@pytest.mark.parametrize("windows", [(None,), (4096,), (None, 1024)], ids=str)
def test_the_trial_accepts_it(windows: tuple[int | None, ...], from_right: bool) -> None:
    spec = attention_spec((32, 8, 128), windows)
    wanted = WantedKernels("flashinfer", fused=False, from_right=from_right)
    chosen = choose_kernels(wanted, spec, CUDA, torch.bfloat16)
    assert chosen.name == "flashinfer"


def test_parts_of_a_context_are_folded_into_states() -> None:
    """What lies elsewhere without a causal mask, what holds the queries with one; a layer with a window by torch."""
    case = AttentionCase(attention_spec((32, 8, 128), (None, 300)), MIXED, device=CUDA, block_size=16, seed=3)
    first = np.minimum(case.rows.start // 256 * 256, 256).astype(np.int32)
    found = remote_rows(case.rows, first, np.asarray(case.rows.start // 256 * 256, np.int32))
    assert found is not None
    tokens = torch.from_numpy(found.tokens).to(CUDA)
    attention = attention_of(case)
    other = attention_of(case)  # somebody else's: of one, the newest plan of a kind is valid
    before, after = attention.plan_fold(found.here_before), attention.plan_fold(found.here_after)
    elsewhere = other.plan_fold(KeyRanges(found.rows, found.first, found.end))
    for layer in range(2):
        states = new_states(len(tokens), 32, 128, CUDA)
        before(layer, case.queries[tokens], states)
        elsewhere(layer, case.queries[tokens], states)
        after(layer, case.queries[tokens], states)
        expected = case.expected(layer)[tokens.cpu()]
        found_out = attended_of(states, torch.bfloat16).cpu().double()
        torch.testing.assert_close(found_out, expected, atol=2e-2, rtol=2e-2)
