"""What the engine's driver calls: steps, and copies beside them, of hardware or of a model of it."""

from __future__ import annotations

from asyncio import Future
from dataclasses import dataclass, replace
from typing import Protocol

from services.worker.contract.arrays import I32
from services.worker.contract.batch import Batch, BatchOutput


class BatchFailedError(Exception):
    """A step did not finish. KV of the positions that it was to compute is garbage; everything else is as before."""

    def __init__(self, step_id: int, cause: str, rows: tuple[int, ...] = (), *, is_lost: bool = False) -> None:
        super().__init__(f"step {step_id} failed: {cause}")
        self.step_id = step_id
        self.cause = cause
        self.rows = rows
        """Rows known to be guilty; empty if the executor cannot tell."""
        self.is_lost = is_lost
        """The executor is gone, so no row is to blame and no other step will succeed."""


class CopyFailedError(Exception):
    """A copy did not finish: the blocks that it was to fill hold garbage; those it read are as they were."""

    def __init__(self, copy_id: int, cause: str) -> None:
        super().__init__(f"copy {copy_id} failed: {cause}")
        self.copy_id = copy_id
        self.cause = cause


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Blocks to copy between device and host memory, all layers, K and V, beside the steps.

    The engine keeps the blocks on both sides as they are until the copy is done.
    """

    copy_id: int
    """Grows by one with each copy of this engine."""
    device: I32
    """[c] ids of device blocks"""
    host: I32
    """[c] ids of host blocks"""
    to_host: bool
    """From the device to the host, or back."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory of an executor for KV that left the device."""

    num_blocks: int
    """Ids are 0 to num_blocks - 1."""
    block_kv_bytes: int
    """Bytes of one block, all layers, K and V."""
    block_copy_s: float
    """Seconds that one block takes over the link, one way."""

    def share(self, num_layers: int, num_all: int) -> HostMemory:
        """Return it for a stage with some of the model's layers: a block takes as much less time."""
        return replace(self, block_copy_s=self.block_copy_s * num_layers / num_all)


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """KV memory of an executor."""

    num_blocks: int
    """Blocks with memory behind them; ids are 0 to num_blocks - 1 at the start."""
    block_size: int
    """Token slots of one block."""
    host: HostMemory | None = None
    """None: `Executor.copy` is not to be called."""


class Executor(Protocol):
    """What the engine's driver calls: hardware, or a model of it."""

    @property
    def depth(self) -> int:
        """How many batches may be in flight: one for each lane, and one more where steps overlap."""

    @property
    def num_lanes(self) -> int:
        """Batches in flight with other rows each: 1, or the number of pipeline stages."""

    @property
    def capacity(self) -> KvCapacity:
        """KV memory now; it changes only while the step gate is held."""

    def submit(self, batch: Batch) -> Future[BatchOutput]:
        """Queue a step behind those submitted before. Raises nothing: the future fails with `BatchFailedError`.

        After a failure the executor has applied the batch's `drops`, `admits`, `table_delta` and `copies`.
        """

    def copy(self, copy: HostCopy) -> Future[None]:
        """Begin to copy blocks, beside the steps or between them; copies of one direction end in order.

        Raises nothing: the future fails with `CopyFailedError`. It is done when source and target may change.
        """

    async def close(self) -> None:
        """Finish what is queued and release threads and memory. Idempotent."""


def overlaps(executor: Executor) -> bool:
    """Return whether a step may be submitted behind the one that samples its first tokens."""
    return executor.depth > executor.num_lanes
