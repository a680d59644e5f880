"""A stage of a loaded model as a `StageDevice`: hidden states come and go as numpy arrays, in the model's type.

In deterministic mode every stage computes the same bits as the same layers of the whole model would, so the text is the
same however the layers are split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.worker.attention.remote import RemoteKeys
from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import BatchFailedError, HostCopy, KvCapacity
from services.worker.executor.launched import Launched
from services.worker.executor.model_runner import ModelRunner
from services.worker.memory.block_copies import settle
from services.worker.pipeline.hidden_link import HiddenLink, HiddenShape
from services.worker.pipeline.stage import StageStep
from services.worker.pipeline.stage_messages import Hidden
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
        info, keys = runner.info, runner.cache.keys[0]
        shape = HiddenShape(info.max_batch_tokens, info.hidden_size, keys.dtype)
        self._link = HiddenLink(shape, keys.device, arrive=info.layers.first > 0, leave=not info.is_last)

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

    def launch(self, batch: Batch, hidden: Hidden | None) -> StageStep:
        """Begin a step's layers; see `StageDevice`. Where rows have keys elsewhere, they are computed then."""
        try:
            given = None if hidden is None else self._link.to_device(hidden, batch.tokens.size)
        except Exception as error:  # what the batch says of rows and blocks counts all the same
            self._runner.skip(batch)
            raise BatchFailedError(batch.step_id, f"{type(error).__name__}: {error}") from error
        if self.is_last:
            return _Sampling(self._runner.launch(batch, given))
        return self._link.to_host(self._runner.advance(batch, given))

    def skip(self, batch: Batch) -> None:
        """Take a failed step in; see `StageDevice`."""
        self._runner.skip(batch)

    def copy(self, copy: HostCopy) -> None:
        """Copy these layers of some blocks between device and host; see `StageDevice`."""
        settle(self._runner.cache)  # a step that has failed may still copy blocks on the device
        self._runner.copy(copy)

    def end_writes(self) -> None:
        """End what else writes to these layers' KV; see `StageDevice`. No step attends elsewhere from now on."""
        self._end_writes()
        self._runner.remote = None

    def close(self) -> None:
        """Give back parameters and KV. Idempotent."""
        self._runner.close()


@dataclass(frozen=True, slots=True)
class _Sampling:
    """A step of the last stage; see `StageStep`."""

    launched: Launched

    @property
    def is_done(self) -> bool:
        """The tokens are here."""
        return self.launched.is_done

    def end(self) -> BatchOutput:
        """Return the step's tokens."""
        return self.launched.end()

    def free(self) -> None:
        """Nothing is used again."""
