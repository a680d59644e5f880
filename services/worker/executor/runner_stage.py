"""A stage of a loaded model as a `StageDevice`: hidden states come and go as numpy arrays, in the model's type.

bfloat16, which numpy does not have, travels as its bits in uint16. In deterministic mode every stage computes the same
bits as the same layers of the whole model would, so the text is the same however the layers are split.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from services.worker.attention.remote import RemoteKeys
from services.worker.engine.types import Batch, BatchFailedError, BatchOutput, HostCopy, KvCapacity
from services.worker.executor.model_runner import ModelRunner
from services.worker.executor.stage_messages import Hidden
from shared.layers import LayerRange


class RunnerStage:
    """A `StageDevice` over a runner that holds the layers of one stage.

    Args:
        runner: loaded; owned and closed at the end.
        end_writes: ends what else writes to the runner's KV, and waits for it; in the stage's thread.
    """

    def __init__(self, runner: ModelRunner, end_writes: Callable[[], None] = lambda: None) -> None:
        self._runner = runner
        self._end_writes = end_writes
        cache = runner.cache
        self._dtype, self._device = cache.keys[0].dtype, cache.keys[0].device

    def attend_elsewhere(self, remote: RemoteKeys) -> None:
        """Let steps attend keys that are not here; before the first one."""
        self._runner.remote = remote

    @property
    def layers(self) -> LayerRange:
        """Its layers."""
        return self._runner.info.layers

    @property
    def is_last(self) -> bool:
        """It samples."""
        return self._runner.info.is_last

    @property
    def capacity(self) -> KvCapacity:
        """KV memory of its layers."""
        return self._runner.capacity

    def run(self, batch: Batch, hidden: Hidden | None) -> Hidden | BatchOutput:
        """Compute a step's layers; see `StageDevice`."""
        given = None if hidden is None else self._take(batch, hidden)
        if self.is_last:
            return self._runner.run(batch, given)
        return as_numpy(self._runner.advance(batch, given))

    def skip(self, batch: Batch) -> None:
        """Take a failed step in; see `StageDevice`."""
        self._runner.skip(batch)

    def copy(self, copy: HostCopy) -> None:
        """Copy these layers of some blocks between device and host."""
        self._runner.copy(copy)

    def end_writes(self) -> None:
        """End what else writes to these layers' KV; see `StageDevice`. No step attends elsewhere from now on."""
        self._end_writes()
        self._runner.remote = None

    def close(self) -> None:
        """Give back parameters and KV. Idempotent."""
        self._runner.close()

    def _take(self, batch: Batch, hidden: Hidden) -> torch.Tensor:
        """Return hidden states as the runner wants them; other ones than it wants fail the step, which is taken in."""
        dtype = np.dtype(np.float32 if self._dtype == torch.float32 else np.uint16)
        if hidden.dtype != dtype or hidden.shape != (batch.tokens.size, self._runner.info.hidden_size):
            self._runner.skip(batch)
            raise BatchFailedError(batch.step_id, f"hidden states {hidden.dtype} {hidden.shape} do not fit the model")
        given = hidden if hidden.flags.writeable else hidden.copy()  # torch wants memory that it may write
        if self._dtype == torch.float32:
            return torch.from_numpy(given).to(self._device)
        return torch.from_numpy(given.view(np.int16)).view(self._dtype).to(self._device)


def as_numpy(hidden: torch.Tensor) -> Hidden:
    """Return hidden states as an array: float32, or the bits of bfloat16 as uint16."""
    if hidden.dtype == torch.float32:
        array: Hidden = hidden.cpu().numpy()
        return array
    bits: Hidden = hidden.cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
    return bits
