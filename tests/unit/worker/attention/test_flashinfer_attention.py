"""What FlashInfer is told, against attention written out: a fake computes from exactly those arguments."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.attention.base import RaggedRows
from services.worker.attention.block_lists import block_lists, leading_decodes
from services.worker.attention.flashinfer_paged import (
    RECOMMENDED_WORKSPACE_BYTES,
    FlashInferAttention,
    fixed_workspace_bytes,
    unsupported,
    workspace_bytes,
)
from services.worker.executor import kernels as kernels_module
from services.worker.executor.attention_trial import attention_fault
from services.worker.executor.kernels import WantedKernels, choose_kernels
from services.worker.memory.kv_cache import KVCache
from services.worker.models.spec import ModelSpec
from shared.errors import StartupError
from tests.support import fake_flashinfer
from tests.support.attention_cases import CPU, AttentionCase, attention_spec
from tests.support.fake_flashinfer import BatchPrefillWithPagedKVCacheWrapper

TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Half a unit in the last place, relative: the fake rounds once, at the end."""
GROUPED = (4, 2, 64)
WORKSPACE_BYTES = workspace_bytes(attention_spec(GROUPED, (None,)), fake_flashinfer.NUM_PROCESSORS)
"""Of all heads here."""


def attention_of(case: AttentionCase, library: Any = fake_flashinfer) -> FlashInferAttention:
    return FlashInferAttention(library, case.spec, case.cache, WORKSPACE_BYTES)


def library_that(notes: Callable[..., object], **changes: Any) -> Any:
    """Return the fake whose `plan` is noted first, and has other arguments, as one that reads them wrongly."""

    class Changed(BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *places: Any, **named: Any) -> None:
            notes(self, *places, **named)
            super().plan(*places, **{**named, **changes})

    return SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Changed)


def check(case: AttentionCase) -> None:
    attention = attention_of(case)
    plan = attention.plan(case.rows)
    rounding = TOLERANCE[case.queries.dtype]
    for layer in range(case.spec.num_layers):
        found = attention.attend(plan, layer, case.queries)
        torch.testing.assert_close(found.double(), case.expected(layer), atol=1e-6, rtol=rounding)


LENGTHS = st.lists(st.tuples(st.integers(0, 200), st.one_of(st.just(1), st.integers(1, 40))), min_size=1, max_size=5)
WINDOWS = st.one_of(st.sampled_from([1, 2, 8, 9, 16, 17]), st.integers(1, 260))


@pytest.mark.slow
@settings(max_examples=25)
@given(
    lengths=LENGTHS, window=WINDOWS, heads=st.sampled_from([GROUPED, (3, 1, 64), (2, 2, 64)]), seed=st.integers(0, 9)
)
def test_random_rows_equal_attention_written_out(
    lengths: list[tuple[int, int]], window: int, heads: tuple[int, int, int], seed: int
) -> None:
    """Layers with and without a window in turn; rows in any order, decodes at the head or not."""
    check(AttentionCase(attention_spec(heads, (None, window, None)), lengths, seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 16, 33])
@pytest.mark.parametrize("heads", [(8, 1, 128), (2, 1, 256)])
def test_other_blocks_and_heads(block_size: int, heads: tuple[int, int, int]) -> None:
    lengths = [(63, 1), (0, 1), (31, 1), (0, 33), (15, 20)]
    check(AttentionCase(attention_spec(heads, (7, 40)), lengths, dtype=torch.float16, block_size=block_size))


def test_decodes_at_the_head_and_other_rows_are_planned_apart() -> None:
    """Two decodes at the head; behind them a prefill and a decode, which is computed as a prefill of one token."""
    calls: list[tuple[str, list[int]]] = []
    library = library_that(lambda wrapper, qo_indptr, *_, **__: calls.append((wrapper.backend, qo_indptr.tolist())))
    case = AttentionCase(attention_spec(GROUPED, (None,)), [(9, 1), (20, 1), (5, 6), (3, 1)])
    attention = attention_of(case, library)
    attention.plan(case.rows)
    assert calls == [("fa2", [0, 1, 2]), ("auto", [0, 6, 7])]
    del calls[:]
    decodes = RaggedRows(case.rows.num_tokens[:2], case.rows.start[:2], case.rows.tables[:2])
    attention.plan(decodes)
    assert calls == [("fa2", [0, 1, 2])]


@pytest.mark.slow
def test_the_workspace_is_taken_with_the_first_plan() -> None:
    """So the dry step's measurement counts it; one for all, and a pair of wrappers for each of the two windows."""
    buffers: list[torch.Tensor] = []

    class Recording(BatchPrefillWithPagedKVCacheWrapper):
        def __init__(self, float_workspace_buffer: torch.Tensor, *rest: Any, **named: Any) -> None:
            buffers.append(float_workspace_buffer)
            super().__init__(float_workspace_buffer, *rest, **named)

    case = AttentionCase(attention_spec(GROUPED, (None, 5, None)), [(9, 1)])
    attention = attention_of(case, SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Recording))
    assert not buffers
    attention.plan(case.rows)
    attention.plan(case.rows)
    assert [buffer.data_ptr() for buffer in buffers] == [buffers[0].data_ptr()] * 4


def test_an_old_plan_is_refused() -> None:
    case = AttentionCase(attention_spec(GROUPED, (None,)), [(9, 1)])
    attention = attention_of(case)
    old = attention.plan(case.rows)
    attention.plan(case.rows)
    with pytest.raises(AssertionError, match="old plan"):
        attention.attend(old, 0, case.queries)


def test_only_blocks_that_a_window_shows_are_named() -> None:
    """Row 0 decodes at 20 (21 keys, 3 blocks of 8); a window of 5 shows keys 16 to 20: the last block only.

    Row 1 computes 10 to 13; its first query sees 6 to 10, so both of its blocks are named, with 6 keys in the last.
    """
    tables = np.array([[4, 5, 6], [7, 8, 0]], dtype=np.int32)
    rows = RaggedRows(np.array([1, 4], np.int32), np.array([20, 10], np.int32), tables)
    lists = block_lists(rows, slice(None), 5, 8)
    assert lists.query_starts.tolist() == [0, 1, 5]
    assert lists.block_starts.tolist() == [0, 1, 3]
    assert lists.blocks.tolist() == [6, 7, 8]
    assert lists.last_block_tokens.tolist() == [5, 6]
    assert block_lists(rows, slice(None), None, 8).blocks.tolist() == [4, 5, 6, 7, 8]


def test_only_single_token_rows_before_the_first_longer_one_count_as_leading() -> None:
    def leading(*counts: int) -> int:
        column = np.array(counts, dtype=np.int32)
        return leading_decodes(RaggedRows(column, column, np.zeros((len(counts), 1), np.int32)))

    assert [leading(1, 1), leading(1, 5, 1), leading(5, 1)] == [2, 1, 0]


def test_the_workspace_is_bounded_by_what_the_device_computes_at_once() -> None:
    """64 heads, 4 key heads of 128: 2 * 132 / 4 = 66 pieces * 64 heads * 128 queries * 129 numbers * 4 bytes."""
    assert workspace_bytes(attention_spec((64, 4, 128), (None,)), 132) == 66 * 64 * 128 * 129 * 4 + 4096
    assert workspace_bytes(attention_spec((8, 8, 64), (None,)), 132) == RECOMMENDED_WORKSPACE_BYTES


@pytest.mark.slow
def test_recorded_steps_find_room_for_as_many_tiles_as_rows_of_any_lengths_could_fill() -> None:
    """512 rows, 32 heads of 128 with key heads of their own: tiles of 16 queries, 512 / 16 + 511 of them = 543.

    543 * 16 queries * 32 heads * 129 numbers * 4 bytes = 143 MB, above FlashInfer's advice of 128 MiB. 8 key heads: 4
    heads share a tile, 512 * 4 / 16 + 511 = 639 tiles of 4 queries, and that is below.
    """
    alone, shared = attention_spec((32, 32, 128), (None,)), attention_spec((32, 8, 128), (None,))
    assert fixed_workspace_bytes(alone, 512) == 543 * 16 * 32 * 129 * 4 + 4096
    assert fixed_workspace_bytes(shared, 512) == 639 * 4 * 32 * 129 * 4 + 4096
    case = AttentionCase(alone, [(5, 1)])
    attention = FlashInferAttention(fake_flashinfer, alone, case.cache, workspace_bytes(alone, 132))
    ones = np.ones(512, dtype=np.int32)
    attention.fixed(512, 1).plan(RaggedRows(ones, ones - 1, np.zeros((512, 1), dtype=np.int32)))


def test_recorded_steps_that_the_workspace_was_not_taken_for_are_refused() -> None:
    case = AttentionCase(attention_spec((32, 32, 128), (None,)), [(5, 1)])
    attention = FlashInferAttention(fake_flashinfer, case.spec, case.cache, RECOMMENDED_WORKSPACE_BYTES)
    attention.plan(case.rows)
    with pytest.raises(AssertionError, match="taken for less"):
        attention.fixed(512, 1)


def test_the_stand_in_splits_contexts_as_flashinfer_does() -> None:
    """Its figures are those that FlashInfer 0.7.2.post1's own planning gave for these, with 132 multiprocessors.

    Blocks of 16 tokens. One decode of 9 000 tokens, 8 key heads of 4 heads: 33 pieces at once, so 563 blocks in pieces
    of 18, 32 of them; each is a tile of 16 / 4 queries with 32 heads of 128 + 1 numbers. 40 such decodes are not split.
    """
    heads = (32, 8, 128)
    assert fake_flashinfer.float_bytes([1], [563], *heads, 16) == 32 * 4 * 32 * 129 * 4
    assert fake_flashinfer.float_bytes([1] * 40, [563] * 40, *heads, 16) == 0
    assert fake_flashinfer.float_bytes([1] * 16, [563] * 16, *heads, 16, fixed=True) == 33 * 4 * 32 * 129 * 4


@pytest.mark.parametrize(
    ("head_dim", "dtype", "reason"),
    [
        (64, torch.bfloat16, None),
        (256, torch.float16, None),
        (64, torch.float32, "does not compute in float32"),
        (80, torch.bfloat16, "heads of 80 dimensions"),
    ],
)
def test_what_flashinfer_cannot_compute_is_known_before(head_dim: int, dtype: torch.dtype, reason: str | None) -> None:
    found = unsupported(attention_spec((4, 2, head_dim), (None,)), dtype)
    assert found is reason is None or (reason is not None and found is not None and reason in found)


def fault(library: Any, windows: tuple[int | None, ...] = (None, 4096), *, from_right: bool = False) -> str | None:
    def make(spec: ModelSpec, cache: KVCache) -> FlashInferAttention:
        return FlashInferAttention(library, spec, cache, WORKSPACE_BYTES)

    return attention_fault(make, attention_spec(GROUPED, windows), torch.bfloat16, CPU, from_right=from_right)


@pytest.mark.slow
@pytest.mark.parametrize("from_right", [False, True])
def test_the_trial_accepts_a_library_that_agrees_with_torch(from_right: bool) -> None:
    assert fault(fake_flashinfer, from_right=from_right) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"sm_scale": 0.15}, {"window_left": -1}, {"window_left": 98}, {"window_left": 100}]
)
def test_the_trial_finds_a_library_that_reads_an_argument_wrongly(changes: dict[str, Any]) -> None:
    """A scale of 0.15 instead of 0.125; no window, or one of 99 or 101 keys instead of 100."""
    reason = fault(library_that(lambda *_, **__: None, **changes), windows=(4096,))
    assert reason is not None
    assert "differ from torch's by" in reason


@pytest.mark.slow
def test_the_trial_finds_a_library_that_masks_blocks_from_the_right() -> None:
    """Blocks that were full before are read without a causal mask, and by nothing else in the trial."""
    library = library_that(lambda *_, **__: None, causal=True)
    assert fault(library, windows=(None,)) is None, "nobody will have such blocks"
    reason = fault(library, windows=(None,), from_right=True)
    assert reason is not None
    assert "differ from torch's by" in reason


@pytest.mark.slow
def test_the_trial_turns_a_compilers_error_into_a_reason() -> None:
    assert (
        fault(library_that(Mock(side_effect=RuntimeError("nvcc not found"))))
        == "it failed: RuntimeError: nvcc not found"
    )


CUDA = torch.device("cuda")


@pytest.fixture
def as_if_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer is there and agrees with torch, on a Hopper; tests take one of these back."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(kernels_module, "_open_flashinfer", lambda: (fake_flashinfer, None))
    monkeypatch.setattr(kernels_module, "attention_fault", lambda *_, **__: None)


def chosen(wanted: str = "auto", head_dim: int = 64, *, deterministic: bool = False) -> str:
    spec = attention_spec((4, 2, head_dim), (None,))
    return choose_kernels(WantedKernels(wanted, deterministic), spec, CUDA, torch.bfloat16).name


@pytest.mark.usefixtures("as_if_on_cuda")
def test_on_cuda_flashinfer_is_taken_where_it_can_be() -> None:
    assert chosen() == chosen("flashinfer") == "flashinfer"
    assert chosen("torch") == "torch"
    assert chosen(head_dim=80) == "torch"
    assert chosen(deterministic=True) == "torch"


@pytest.mark.usefixtures("as_if_on_cuda")
@pytest.mark.parametrize("cause", ["module", "trial", "capability"])
def test_without_flashinfer_auto_falls_back_and_flashinfer_is_refused(
    cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cause == "module":
        monkeypatch.setattr(kernels_module, "_open_flashinfer", lambda: (None, "no module"))
    elif cause == "trial":
        monkeypatch.setattr(kernels_module, "attention_fault", lambda *_, **__: "no compiler")
    else:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    reason = {"module": "no module", "trial": "no compiler", "capability": "below 8.0"}[cause]
    with structlog.testing.capture_logs() as logs:
        assert chosen() == "torch"
    assert any(reason in entry.get("reason", "") for entry in logs)
    with pytest.raises(StartupError, match=reason):
        chosen("flashinfer")


@pytest.mark.usefixtures("as_if_on_cuda")
def test_deterministic_mode_refuses_flashinfer_by_name() -> None:
    with pytest.raises(StartupError, match="deterministic mode excludes"):
        chosen("flashinfer", deterministic=True)


def test_flashinfer_on_the_cpu_is_refused() -> None:
    with pytest.raises(StartupError, match="the device is cpu"):
        choose_kernels(WantedKernels("flashinfer"), attention_spec(GROUPED, (None,)), CPU, torch.bfloat16)


def test_a_module_that_cannot_be_imported_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    library, reason = kernels_module._open_flashinfer()
    assert library is None
    assert reason is not None
    assert "pip install 'flashinfer-python>=0.7'" in reason
