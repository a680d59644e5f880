"""What steps of a runner take beside parameters and KV is kept free for them."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.contract.batch import Batch, RowInit
from services.worker.executor import opening as opening_module
from services.worker.executor.runner import ModelRunner
from services.worker.executor.trial_batch import trial_batch
from services.worker.memory.measure import large_apart, peak_bytes
from shared.types import SamplingParams
from tests.support.checkpoints import CheckpointShape, stored_checkpoint
from tests.support.runner_driver import Driver
from tests.support.runners import MIB, load, open_runner
from tests.support.seeds import first_of

pytestmark = pytest.mark.kernels

SHAPE = CheckpointShape(seed=7)
WIDE = CheckpointShape(vocab_size=931, hidden_size=128, intermediate_size=1024, seed=1)
WINDOWS = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}


def _reserve_and_peaks_of_full_batches(folder: Path, kernels: str, chunks: int) -> tuple[int, list[int | None]]:
    limits = {"max_batch_tokens": 200 + 390 * chunks, "max_batch_rows": 200, "max_rows": 200, "max_model_len": 400}
    opened = load(folder, memory_bytes=256 * MIB, kernels=kernels, **limits)
    driver = Driver(opened, num_blocks=5000)
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, top_k=100)
    sequences = [driver.add([5] * 390, sampling) for _ in range(200)]
    for sequence in sequences[:-chunks]:
        sequence.num_computed = 389
    work = [(sequence, 1) for sequence in sequences[:-chunks]] + [(sequence, 390) for sequence in sequences[-chunks:]]
    batch = driver.batch(work)
    opened.run(batch)  # its KV is now resident

    def again() -> None:
        opened.run(batch)

    return opened.info.reserve_bytes, [peak_bytes(torch.device("cpu"), again) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [WIDE, replace(WIDE, family="qwen2", extra=WINDOWS)], ids=["llama", "qwen2, window"])
@pytest.mark.parametrize(("kernels", "chunks"), first_of([("auto", 12), ("torch", 4)], in_ci=1))
def test_the_reserve_covers_the_peak_of_a_full_batch(
    shape: CheckpointShape, kernels: str, chunks: int, fresh_process: ProcessPoolExecutor
) -> None:
    """A vocabulary of 931 in batches of 200 drawn rows and thousands of tokens: far above the least reserve."""
    folder, _ = stored_checkpoint(shape)
    reserve, peaks = fresh_process.submit(_reserve_and_peaks_of_full_batches, folder, kernels, chunks).result()
    peak = min((peak for peak in peaks if peak is not None), default=None)  # whatever else happens here only adds
    assert peak is None or 5 * MIB < peak < reserve


LONG = CheckpointShape(hidden_size=128, num_heads=2, num_kv_heads=2, head_dim=64, max_positions=12_000)


def _reserves_and_peaks(folder: Path, num_rows: int, changes: dict[str, Any]) -> list[tuple[int, int | None]]:
    # four decodes of 8 000 tokens fill a group of torch's attention, two of the longest do not
    return [_reserve_and_peak(folder, num_rows, end, changes) for end in (12_000, 8_000)]


def _reserve_and_peak(folder: Path, num_rows: int, end: int, changes: dict[str, Any]) -> tuple[int, int | None]:
    """Return the reserve, but for the angles, and the peak of a whole chunk beside decodes that see as much."""
    limits = {"max_batch_tokens": 1024, "max_batch_rows": num_rows, "max_rows": num_rows, "max_model_len": 12_000}
    opened = load(folder, memory_bytes=512 * MIB, **limits, **changes)
    for pool in opened.cache.pools():
        pool.fill_(0)
    num_tokens = np.ones(num_rows, dtype=np.int32)
    num_tokens[-1] = 1025 - num_rows
    sampling = SamplingParams(max_tokens=1, top_p=0.9, logprobs=20)
    admits = tuple(RowInit(row, sampling, 12_000) for row in range(num_rows))
    batch = trial_batch(end - num_tokens, num_tokens, 750, admits=admits)
    with large_apart():
        peak = peak_bytes(torch.device("cpu"), lambda: opened.try_step(batch))
    return opened.info.reserve_bytes - 2 * 12_000 * 64 * 4, peak


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    first_of([LONG, replace(LONG, family="mistral", extra={"sliding_window": 3000})], in_ci=1),
    ids=["whole", "window"],
)
@pytest.mark.parametrize(
    ("num_rows", "changes"),
    first_of([(32, {}), (1, {"kernels": "torch"}), (32, {"kernels": "torch", "deterministic": True})], in_ci=2),
    ids=["auto", "torch", "fixed"],
)
def test_the_reserve_covers_a_whole_chunk_in_a_long_context(
    shape: CheckpointShape, num_rows: int, changes: dict[str, Any], fresh_process: ProcessPoolExecutor
) -> None:
    """What is kept free was found out with few tokens there."""
    folder, _ = stored_checkpoint(shape)
    for reserve, peak in fresh_process.submit(_reserves_and_peaks, folder, num_rows, changes).result():
        assert peak is None or MIB < peak < reserve + 3 * MIB, "two measurements differ by as much"


@pytest.mark.slow
def test_a_long_context_is_measured_with_few_tokens_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many pairs of a query and a key as a prompt in one batch has, and a few times the context."""
    tried: list[tuple[Batch, float]] = []
    try_step = ModelRunner.try_step

    def noting(runner: ModelRunner, batch: Batch) -> None:
        began_s = time.perf_counter()
        try_step(runner, batch)
        tried.append((batch, time.perf_counter() - began_s))

    monkeypatch.setattr(ModelRunner, "try_step", noting)
    shape, max_tokens = CheckpointShape(seed=7, max_positions=100_000), 2048
    info = open_runner(shape, memory_bytes=256 * MIB, max_batch_tokens=max_tokens).info
    batch, took_s = tried[-1]
    ends = batch.start + batch.num_tokens
    assert (info.max_model_len, ends.max(), batch.num_tokens.sum()) == (100_000, 100_000, max_tokens)
    assert np.dot(batch.num_tokens.astype(np.int64), ends) < max_tokens**2 + 50 * 100_000
    assert info.dry_step_s > 10 * took_s, "whoever watches the steps knows what a whole chunk there would take"


def test_without_a_way_to_measure_the_reserve_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimated at least as large as measured, but for what else of the process took memory meanwhile."""
    measured = open_runner(SHAPE).info.reserve_bytes
    monkeypatch.setattr(opening_module, "peak_bytes", lambda _device, _action: None)
    assert measured - MIB // 8 <= open_runner(SHAPE, memory_bytes=512 * MIB).info.reserve_bytes < 320 * MIB
