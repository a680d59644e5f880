"""Opens runners over small random checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.worker.executor.runner import ModelRunner, RunnerSettings, load_runner
from tests.support.checkpoints import CheckpointShape, stored_checkpoint

MIB = 2**20


def runner_settings(folder: Path, **changes: Any) -> RunnerSettings:
    """Return settings that suit a checkpoint of a few thousand parameters."""
    defaults: dict[str, Any] = {"memory_bytes": 32 * MIB, "max_batch_tokens": 96, "max_batch_rows": 8, "max_rows": 8}
    return RunnerSettings(folder, **{**defaults, "num_threads": 1, **changes})


def open_runner(shape: CheckpointShape, **changes: Any) -> ModelRunner:
    """Return a runner over a stored checkpoint."""
    return load_runner(runner_settings(stored_checkpoint(shape)[0], **changes), lambda _done, _what: None)
