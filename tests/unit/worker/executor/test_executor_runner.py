"""The runner: rows, tables and copies, failures, and what `load_runner` checks and promises."""

from __future__ import annotations

import gc
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.contract.batch import CopyOps
from services.worker.contract.executor import BatchFailedError
from services.worker.executor import opening as opening_module
from services.worker.executor.runner import ModelRunner, load_runner
from services.worker.memory.budget import bytes_per_block
from services.worker.memory.kv_cache import KVCache
from services.worker.models.spec import read_spec
from shared.errors import StartupError
from shared.types import SamplingParams
from tests.support.checkpoints import CheckpointShape, greedy_text, stored_checkpoint
from tests.support.runner_driver import Driver
from tests.support.runners import KERNELS, MIB, load, open_runner, runner_settings

pytestmark = pytest.mark.kernels

SHAPE = CheckpointShape(seed=7)
PROMPT = list(range(10, 60))


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return open_runner(SHAPE)


def generate(runner: ModelRunner) -> list[int]:
    driver = Driver(runner)
    sequence = driver.add(PROMPT)
    driver.run(12, chunk=50, max_tokens=96)
    return sequence.output


def test_info_tells_what_was_loaded(runner: ModelRunner) -> None:
    info = runner.info
    spec = read_spec(stored_checkpoint(SHAPE)[0])
    assert (info.vocab_size, info.num_layers, info.eos_token_ids) == (384, 2, (1,))
    assert (info.device, info.dtype, info.max_model_len) == ("cpu", "float32", 512)
    assert info.num_parameters == stored_checkpoint(SHAPE)[1].num_parameters()
    # K and V, 2 layers, 16 tokens, 2 heads of 16 floats: 2 * 2 * 16 * 2 * 16 * 4 bytes
    assert info.bytes_per_block == bytes_per_block(spec, 16, torch.float32) == 8192
    assert info.kv_bytes == info.capacity.num_blocks * 8192
    assert runner.capacity == info.capacity


def damaged(tmp_path: Path, name: str, row: int, value: float) -> Path:
    """Return a checkpoint in which a row of a tensor has other numbers."""
    folder = Path(shutil.copytree(stored_checkpoint(SHAPE)[0], tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors[name][row] = value
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def poisoned(tmp_path: Path) -> ModelRunner:
    """A model whose token 9 has no numbers for an embedding."""
    return load(damaged(tmp_path, "model.embed_tokens.weight", 9, torch.nan))


def test_numbers_that_are_not_finite_fail_the_step_and_name_their_rows_and_the_others_go_on(
    poisoned: ModelRunner,
) -> None:
    """Admits and tables of the failed batch were applied; the guilty row's blocks serve the next sequence."""
    expected = generate(poisoned)
    driver = Driver(poisoned, num_blocks=8)
    good, bad = driver.add(PROMPT, row=4), driver.add([*PROMPT[:20], 9, 12], row=2)
    with pytest.raises(BatchFailedError, match="not finite") as failure:
        poisoned.run(driver.batch([(good, len(PROMPT)), (bad, 22)]))
    assert (failure.value.rows, failure.value.step_id) == ((2,), 1)
    driver.drop(bad)
    later = driver.add(PROMPT[:40], row=2)
    driver.run(12, chunk=50, max_tokens=96)
    assert good.output == expected
    assert later.output == greedy_text(stored_checkpoint(SHAPE)[1], PROMPT[:40], 12)


@pytest.mark.parametrize("kernels", sorted({"torch", KERNELS}))
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("token", [0, 200, 383])
def test_logits_that_are_not_finite_fail_the_step_and_name_their_rows(
    token: int, value: float, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states are sound; one row of the head is not. Rows that nobody samples from do not see it.

    A worker would not get so far: its dry step, left out here, fails.
    """
    monkeypatch.setattr(opening_module, "peak_bytes", lambda _device, _action: None)
    folder = damaged(tmp_path, "lm_head.weight", token, value)
    broken = load(folder, kernels=kernels, memory_bytes=512 * MIB)
    driver = Driver(broken)
    drawn = SamplingParams(max_tokens=1, temperature=1.0)
    greedy, unfinished = (driver.add(PROMPT, row=row) for row in (4, 1))
    other = driver.add(PROMPT[:20], drawn, row=2)
    with pytest.raises(BatchFailedError, match="not finite") as failure:
        broken.run(driver.batch([(greedy, len(PROMPT)), (other, 20), (unfinished, 5)]))
    assert failure.value.rows == (4, 2)


WRONG = {"token": {"tokens": [384]}, "negative token": {"tokens": [-2]}, "position": {"start": [512]}}
WRONG |= {"negative position": {"start": [-1]}, "block": {"block_id": [100_000]}}
WRONG |= {"block from the right": {"block_id": [~100_000]}, "last number": {"block_id": [-(2**31)]}}


@pytest.mark.skipif(KERNELS == "torch", reason="of the native kernels")
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_exist_is_refused_before_memory_is_touched(runner: ModelRunner, name: str) -> None:
    driver = Driver(runner)
    batch = driver.batch([(driver.add([5]), 1)])
    changes: dict[str, Any] = {column: np.array(values, dtype=np.int32) for column, values in WRONG[name].items()}
    if "block_id" in changes:
        changes = {"table_delta": replace(batch.table_delta, **changes)}
    with pytest.raises(BatchFailedError, match="IndexError: a token, position or block"):
        runner.run(replace(batch, **changes))


def test_any_error_inside_a_step_is_a_failed_batch(runner: ModelRunner) -> None:
    driver = Driver(runner)
    sequence = driver.add([1000])
    with pytest.raises(BatchFailedError, match="IndexError"):
        runner.run(driver.batch([(sequence, 1)]))


def test_what_was_taken_in_by_half_fails_every_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does not repeat a copy: a row that went on without it would say something else."""
    runner = open_runner(SHAPE)
    driver = Driver(runner)
    batch = driver.batch([(driver.add(PROMPT), len(PROMPT))])
    copying = replace(batch, copies=CopyOps(np.array([0], dtype=np.int32), np.array([1], dtype=np.int32)))
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "copy_blocks", Mock(side_effect=MemoryError("no room for a copy")))
        with pytest.raises(BatchFailedError, match="no room"):
            runner.run(copying)
    with pytest.raises(BatchFailedError, match="by half"):
        runner.run(batch)


def test_the_budget_holds_parameters_reserve_and_kv(runner: ModelRunner) -> None:
    info = runner.info
    spent = info.param_bytes + info.reserve_bytes + info.kv_bytes
    assert 32 * MIB - info.bytes_per_block < spent <= 32 * MIB
    assert info.kv_bytes == runner.cache.num_bytes


@pytest.mark.slow
def test_a_context_that_was_not_asked_for_is_lowered_to_what_fits() -> None:
    """The model's own 100 000 positions would take 49 MiB of KV."""
    shape = CheckpointShape(max_positions=100_000, seed=7)
    lowered = open_runner(shape, memory_bytes=36 * MIB).info
    assert 10_000 < lowered.max_model_len < 60_000
    assert lowered.max_model_len <= lowered.capacity.num_blocks * 16
    with pytest.raises(StartupError, match=r"36\.00 MiB is too small.*one request of 100000 tokens takes 48\.8"):
        open_runner(shape, memory_bytes=36 * MIB, max_model_len=100_000)


def test_progress_rises_to_one() -> None:
    seen: list[tuple[float, str]] = []
    load_runner(runner_settings(stored_checkpoint(SHAPE)[0]), lambda done, what: seen.append((done, what)))
    shares = [done for done, _ in seen]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert all(what for _, what in seen)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "tpu9"}, "tpu9"),
        ({"device": "meta"}, "'meta' is not supported"),
        ({"device": "cuda:77"}, "is not there"),
        ({"device": "cuda:128"}, "'cuda:128' is not there"),  # torch keeps 8 bits of the index
        ({"device": "cuda:999"}, "'cuda:999' is not there"),
        ({"dtype": "float16"}, "dtype 'float16' is not supported"),
        ({"memory_bytes": 2**60}, "cpu has no memory for"),
        ({"max_model_len": 513}, "longer than the model's 512 positions"),
        ({"model_dir": Path("absent")}, "no folder absent"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(changes: dict[str, object], message: str) -> None:
    settings = replace(runner_settings(stored_checkpoint(SHAPE)[0]), **changes)  # type: ignore[arg-type]
    with pytest.raises(StartupError, match=message):
        load_runner(settings, lambda _done, _what: None)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_runners_that_come_and_go_leave_no_file_and_no_mapping() -> None:
    def use_and_close() -> tuple[int, int]:
        opened = open_runner(SHAPE)
        driver = Driver(opened)
        driver.add([5, 6, 7])
        driver.run(3, chunk=8, max_tokens=16)
        opened.close()
        del opened, driver
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count(".safetensors")
        return sum(1 for _ in Path("/proc/self/fd").iterdir()), maps

    first = use_and_close()
    assert first[1] == 0
    assert [use_and_close() for _ in range(3)] == [first] * 3
