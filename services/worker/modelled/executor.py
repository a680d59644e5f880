"""An executor without hardware: a step takes as long as the cost model says, and its tokens come from the shadow KV.

It uses the event loop's clock only (`call_at`), so it runs on the virtual clock as well as live; no threads.

Copies between device and host go over a link that carries one block after the other at a fixed rate, in each direction
by itself, while steps run. Steps and copies do not slow each other down: decodes read device memory, not the link.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections import deque
from collections.abc import Callable

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import BatchFailedError, HostCopy, HostMemory, KvCapacity
from services.worker.cost.steps import shape_of
from services.worker.executor.recent_steps import RecentSteps
from services.worker.modelled.shadow_kv import ShadowKv
from shared.cost import CostModel, StageCost

FailureInjector = Callable[[Batch], str | None]
"""Returns the cause with which a step is to fail, or None."""


def step_s(cost: CostModel | StageCost, batch: Batch) -> float:
    """Return how long a batch takes."""
    return cost.step_s(*shape_of(batch.start, batch.num_tokens))


class ModelledExecutor:
    """One modelled worker: steps run one after the other, in the order in which they were submitted."""

    num_lanes = 1

    def __init__(
        self,
        cost: CostModel,
        kv: ShadowKv,
        *,
        host: HostMemory | None = None,
        failure: FailureInjector | None = None,
        overlaps: bool = False,
    ) -> None:
        """Begin idle.

        Args:
            cost: how long a step takes.
            kv: the modelled memory, of the device and of the host.
            host: how large the blocks of the host's memory are, and how fast the link is.
            failure: makes steps fail; None lets all succeed.
            overlaps: a step may be submitted before the one before it has ended, and begin with `OWN_SAMPLE`.
        """
        assert host is None or host.num_blocks == kv.num_host_blocks, "the modelled host memory has another size"
        self._cost = cost
        self._kv = kv
        self._host = host
        self._failure = failure
        self.depth = 1 + overlaps
        """One batch in flight, and another one behind it where steps overlap."""
        self._recent = RecentSteps()
        self._copying: dict[Future[None], None] = {}
        self._link_free_s = {True: 0.0, False: 0.0}
        """By direction, `HostCopy.to_host`: when the link has carried all that it was given."""
        self._queue: deque[tuple[Batch, Future[BatchOutput], float]] = deque()
        self._busy_until_s = 0.0

    @property
    def recent_step_s(self) -> float:
        """How long a step with prompts took lately, seconds; 0 before the first one."""
        return self._recent.long_s

    @property
    def capacity(self) -> KvCapacity:
        """Memory now."""
        return KvCapacity(self._kv.num_blocks, self._kv.block_size, self._host)

    def submit(self, batch: Batch) -> Future[BatchOutput]:
        """Queue a step behind those submitted before; the future is done when the modelled device is."""
        loop = asyncio.get_running_loop()
        future: Future[BatchOutput] = loop.create_future()
        duration_s = step_s(self._cost, batch)
        self._busy_until_s = max(loop.time(), self._busy_until_s) + duration_s
        self._queue.append((batch, future, duration_s))
        loop.call_at(self._busy_until_s, self._finish)
        return future

    def copy(self, copy: HostCopy) -> Future[None]:
        """Queue a copy behind those of its direction; the future is done when its last block has arrived."""
        assert self._host is not None, "this executor has no host memory"
        loop = asyncio.get_running_loop()
        future: Future[None] = loop.create_future()
        self._copying[future] = None
        begins_s = max(loop.time(), self._link_free_s[copy.to_host])
        self._link_free_s[copy.to_host] = begins_s + int(copy.device.size) * self._host.block_copy_s
        self._kv.begin_copy(copy)
        loop.call_at(self._link_free_s[copy.to_host], self._end_copy, copy, future)
        return future

    async def close(self) -> None:
        """Wait until what is queued is done. Idempotent."""
        if self._queue:
            await asyncio.wait([future for _, future, _ in self._queue])
        if self._copying:
            await asyncio.wait(self._copying)

    def _end_copy(self, copy: HostCopy, future: Future[None]) -> None:
        self._kv.end_copy(copy)
        del self._copying[future]
        if not future.cancelled():
            future.set_result(None)

    def _finish(self) -> None:
        """Do the oldest step of the queue: each timer finishes one, so the order is kept whatever timers do."""
        batch, future, duration_s = self._queue.popleft()
        self._kv.take_in(batch)
        cause = None if self._failure is None else self._failure(batch)
        if cause is not None:
            self._kv.spoil(batch)
            error = BatchFailedError(batch.step_id, cause)
            if not future.cancelled():
                future.set_exception(error)
                future.exception()  # looked at: whoever submitted it may have died, in a simulated cluster
            return
        tokens = self._kv.compute(batch)
        if not future.cancelled():
            self._recent.note(duration_s)
            future.set_result(BatchOutput(batch.step_id, tokens, duration_s, self._kv.logprobs(batch, tokens)))
