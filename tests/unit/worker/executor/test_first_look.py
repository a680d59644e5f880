"""What a start measures and refuses: on real models, the memory that a refusal names suffices."""

from __future__ import annotations

import gc
import mmap
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from services.worker import load
from services.worker.config import WorkerSettings
from services.worker.executor.first_look import first_look
from services.worker.executor.runner import load_runner
from services.worker.memory.budget import MAX_TRIALS
from services.worker.memory.measure import large_apart, peak_bytes
from services.worker.models.spec import read_spec
from shared.errors import StartupError
from shared.process.config import parse_size
from tests.support.checkpoints import CheckpointShape, stored_checkpoint
from tests.support.runners import MIB, runner_settings
from tests.support.seeds import first_of

pytestmark = pytest.mark.kernels

SHAPE = CheckpointShape(seed=7)
WIDE = CheckpointShape(hidden_size=128, num_heads=2, num_kv_heads=1, head_dim=64, max_positions=4000)


def named_in(error: StartupError) -> int:
    """Return the memory that a refusal tells to give."""
    return parse_size(error.hint.rpartition("Give at least ")[2])


def test_too_little_memory_says_how_much_is_needed() -> None:
    settings = runner_settings(stored_checkpoint(SHAPE)[0], memory_bytes=MIB // 4)
    with pytest.raises(StartupError) as error:
        first_look(settings, read_spec(settings.model_dir))
    assert re.fullmatch(
        r"sluice: a memory budget of 0\.25 MiB is too small: parameters take 0\.43 MiB, one request of 64 tokens takes "
        r"0\.04 MiB, besides \S+ MiB of workspace at most\. Give at least \d+MiB; more: sluice explain memory",
        str(error.value),
    )


def test_a_first_look_loads_no_torch() -> None:
    """Which takes longer than all the rest of what is asked before a cluster starts."""
    code = "import sys, services.worker.__main__, services.worker.executor.first_look; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_a_peak_does_not_depend_on_holes_that_others_left() -> None:
    """In a process of its own, in which no other test has left any."""
    with get_context("spawn").Pool(1) as pool:
        peaks = [peak for peak in pool.apply(_peaks) if peak is not None]
    if not peaks:
        pytest.skip("this system does not tell a process its peak")
    assert 15 * MIB < min(peaks) <= max(peaks) < 17 * MIB, peaks


def test_pages_of_files_that_the_system_takes_meanwhile_do_not_hide_a_peak(tmp_path: Path) -> None:
    size = 32 * MIB
    (tmp_path / "mapped").write_bytes(bytes(size))
    with (tmp_path / "mapped").open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0  # now they are resident

        def take() -> None:
            mapped.madvise(mmap.MADV_DONTNEED)
            torch.ones(16 * MIB, dtype=torch.uint8)

        peak = peak_bytes(torch.device("cpu"), take)
    if peak is None:
        pytest.skip("this system does not tell a process its peak")
    assert 15 * MIB < peak < 50 * MIB


def _peaks() -> list[int | None]:
    """Measure the same three times, with other holes between what stays each time."""
    peaks = []
    with large_apart():
        for hole_bytes in (1, MIB, 3 * MIB):
            holes = [(torch.ones(hole_bytes, dtype=torch.uint8), bytes(64)) for _ in range(12)]
            kept = [small for _, small in holes]
            del holes
            gc.collect()
            peaks.append(peak_bytes(torch.device("cpu"), _take_and_let_go))
            del kept
    return peaks


def _take_and_let_go() -> None:
    """Have 16 MiB at most: eight tensors, of which half are freed while others of another size come."""
    for _ in range(4):
        tensors = [torch.ones(2 * MIB, dtype=torch.uint8) for _ in range(8)]
        del tensors[::2]
        others = [torch.ones(MIB, dtype=torch.uint8) for _ in range(8)]
        del tensors, others


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "changes"),
    first_of(
        [
            (WIDE, {"page_bytes": MIB}),
            (replace(WIDE, family="opt", num_kv_heads=2), {"max_model_len": 3000, "page_bytes": MIB}),
            (SHAPE, {"deterministic": True, "max_batch_rows": 1}),
            (WIDE, {"page_bytes": 2 * MIB, "max_model_len": 300}),
            (WIDE, {"kernels": "torch", "page_bytes": MIB, "dtype": "bfloat16"}),
            (WIDE, {"kernels": "torch", "max_model_len": 3000}),
            (replace(WIDE, family="opt", num_kv_heads=2), {"block_size": 128, "max_batch_tokens": 17}),
        ],
        in_ci=2,
    ),
    ids=str,
)
@pytest.mark.parametrize("is_measured", [True, False], ids=["measured", "estimated"])
def test_the_memory_that_a_refusal_names_suffices(
    shape: CheckpointShape, changes: dict[str, Any], is_measured: bool, fresh_process: ProcessPoolExecutor
) -> None:
    """Both what is named before anything is read, which bounds what is measured, and what is named after measuring."""
    limits = {"max_batch_tokens": 1024, "max_batch_rows": 64, **changes}
    fresh_process.submit(_check_refusals, stored_checkpoint(shape)[0], is_measured, limits).result()


def _check_refusals(folder: Path, is_measured: bool, limits: dict[str, Any]) -> None:
    if not is_measured:
        patch("services.worker.executor.opening.peak_bytes", lambda _device, action: action()).start()

    def start(memory_bytes: int) -> None:
        texts: list[str] = []
        settings = runner_settings(folder, memory_bytes=memory_bytes, **limits)
        load_runner(settings, lambda _done, what: texts.append(what)).close()
        assert 1 <= len([text for text in texts if text.startswith("measuring")]) <= MAX_TRIALS

    with pytest.raises(StartupError, match="of workspace at most") as first:
        start(8)
    start(named_in(first.value))
    memory_bytes, refused = 0, first.value
    while "at most" in str(refused):  # until the first look accepts what the measurement may not
        memory_bytes += MIB
        try:
            start(memory_bytes)
        except StartupError as error:
            refused = error
        else:
            return
    start(named_in(refused))


def test_without_torch_a_worker_refuses_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "find_spec", lambda _name: None)
    with pytest.raises(StartupError, match=r"torch, and it is not installed\. .*; more: sluice explain torch_missing"):
        load.check_start(WorkerSettings(instance_id="w0", model=stored_checkpoint(SHAPE)[0]))
