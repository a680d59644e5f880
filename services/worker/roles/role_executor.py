"""An executor that can be exchanged for another one while nothing is in flight: the worker's own, or its group's."""

from __future__ import annotations

from asyncio import Future

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import Executor, HostCopy, KvCapacity


class RoleExecutor:
    """An `Executor` that is, at any time, another one.

    Args:
        current: used until `switch`; owned.
    """

    def __init__(self, current: Executor) -> None:
        self._current = current

    @property
    def depth(self) -> int:
        """Batches in flight at most, now."""
        return self._current.depth

    @property
    def num_lanes(self) -> int:
        """Of these with other rows each, now."""
        return self._current.num_lanes

    @property
    def capacity(self) -> KvCapacity:
        """Memory now."""
        return self._current.capacity

    def switch(self, executor: Executor) -> None:
        """Go on with another one. Nothing is in flight; the one before has been closed, or needs not be."""
        self._current = executor

    def submit(self, batch: Batch) -> Future[BatchOutput]:
        """Queue a step; see `Executor`."""
        return self._current.submit(batch)

    def copy(self, copy: HostCopy) -> Future[None]:
        """Begin to copy; see `Executor`."""
        return self._current.copy(copy)

    async def close(self) -> None:
        """Close the present one. Idempotent."""
        await self._current.close()
