"""Opens runners over small random checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from services.worker.executor.runner import ModelRunner, RunnerSettings, load_runner
from services.worker.native.build import find_compiler
from tests.support.checkpoints import CheckpointShape, stored_checkpoint

MIB = 2**20
KERNELS = os.environ.get("SLUICE_WORKER_KERNELS", "auto")
"""What computes the forward pass, unless a test says; `make test-torch-kernels` sets it."""


def runner_settings(folder: Path, **changes: Any) -> RunnerSettings:
    """Return settings that suit a checkpoint of a few thousand parameters."""
    defaults: dict[str, Any] = {
        "memory_bytes": 32 * MIB,
        "max_batch_tokens": 96,
        "max_batch_rows": 8,
        "max_rows": 8,
        "kernels": KERNELS,
    }
    return RunnerSettings(folder, **{**defaults, "num_threads": 1, **changes})


def load(folder: Path, **changes: Any) -> ModelRunner:
    """Return a runner over a checkpoint, on whatever kernels."""
    return load_runner(runner_settings(folder, **changes), lambda _done, _what: None)


def soil(runner: ModelRunner) -> None:
    """Put numbers that are none into the KV: who reads what nobody wrote is found out."""
    for pool in runner.cache.pools():
        pool.fill_(torch.nan)


def open_runner(shape: CheckpointShape, **changes: Any) -> ModelRunner:
    """Return a runner over a stored checkpoint; on the CPU never on torch's operators by accident."""
    settings = runner_settings(stored_checkpoint(shape)[0], **changes)
    runner = load_runner(settings, lambda _done, _what: None)
    expected: tuple[str, ...] = ("native ", "attention ")
    if settings.kernels == "torch" or (settings.device == "cpu" and find_compiler() is None):
        expected = ("torch",)
    elif settings.device != "cpu":
        expected = ("torch", "flashinfer")
    assert runner.info.kernels.startswith(expected)
    return runner
