"""Stages without hardware, on the event loop's clock: a stage takes its share of the cost model's time for a step.

One stage runs one step at a time, in order. Its copies between device and host go over its own link, block after block,
in each direction by itself, beside the steps, as in `modelled.py`; a block weighs what these layers hold of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import BatchFailedError, HostCopy, HostMemory, KvCapacity
from services.worker.modelled.executor import FailureInjector, step_s
from services.worker.modelled.shadow_kv import ShadowKv
from services.worker.peers.frames import PeerLostError
from services.worker.pipeline.channel import StageSender
from services.worker.pipeline.stage import Ended, StageInbox, StageOrderError, Work, outcome, run_step
from services.worker.pipeline.stage_messages import (
    Activation,
    CopyEnded,
    Hidden,
    KvOver,
    StageClose,
    StageMessage,
    StepFailed,
)
from shared.cost import StageCost
from shared.layers import LayerRange
from sim.devices.channel import MemoryChannel, ModelledLink

REMOTE_STATES = 2.0
"""Bytes of the states that come back by those of the queries that go out: float32 by 16 bits."""


class ModelledStage:
    """A modelled `StageDevice`: shadow KV of some layers.

    Args:
        cost: of these layers.
        kv: their memory; its weight is theirs.
        failure: makes steps fail here; None lets all succeed.
        host: as the group sees it: blocks with all layers.
    """

    def __init__(
        self,
        cost: StageCost,
        kv: ShadowKv,
        *,
        failure: FailureInjector | None = None,
        host: HostMemory | None = None,
    ) -> None:
        assert host is None or host.num_blocks == kv.num_host_blocks, "the modelled host memory has another size"
        self.kv = kv
        self._cost = cost
        self._failure = failure
        self._host = host
        self._remote: ModelledLink | None = None
        self.num_remote_steps = 0
        """Steps in which keys that lie elsewhere were attended."""
        self.remote_wire_s = 0.0
        """Time for which remote attention has kept a link busy."""

    @property
    def layers(self) -> LayerRange:
        """Its layers."""
        return self._cost.layers

    @property
    def is_last(self) -> bool:
        """It samples."""
        return self.layers.end == self._cost.num_layers

    @property
    def capacity(self) -> KvCapacity:
        """Memory now."""
        return KvCapacity(self.kv.num_blocks, self.kv.block_size, self._host)

    def attend_over(self, remote: ModelledLink) -> None:
        """Attend blocks that lie elsewhere over a link, from now on; which ones is said by `kv`.

        Args:
            remote: a token's queries in one layer are as large as its hidden state.
        """
        self._remote = remote

    def step_s(self, batch: Batch) -> float:
        """Return how long these layers take for a step; blocks that lie elsewhere count from a row's second step on."""
        computing_s = step_s(self._cost, batch)
        if self._remote is None or not (num_tokens := self.kv.tokens_elsewhere(batch)):
            return computing_s
        return computing_s + len(self.layers) * (2 * self._remote.latency_s + _wire_s(self._remote, num_tokens))

    def copy_s(self, copy: HostCopy) -> float:
        """Return how long these layers' share of a copy keeps the link busy."""
        assert self._host is not None, "this stage has no host memory"
        return int(copy.device.size) * self._host.block_copy_s * len(self.layers) / self._cost.num_layers

    def launch(self, batch: Batch, hidden: Hidden | None) -> Ended:
        """Add these layers' share to the words of the rows, and on the last stage draw from them."""
        self.kv.take_in(batch)
        if self._remote is not None:
            num_tokens = self.kv.tokens_elsewhere(batch)
            self.num_remote_steps += num_tokens > 0
            self.remote_wire_s += len(self.layers) * _wire_s(self._remote, num_tokens)
        cause = None if self._failure is None else self._failure(batch)
        if cause is not None:
            self.kv.spoil(batch)
            raise BatchFailedError(batch.step_id, cause)
        words = self.kv.share(batch)
        if hidden is not None:
            words = words + hidden
        if not self.is_last:
            return Ended(words)
        tokens = self.kv.sample(batch, words)
        return Ended(BatchOutput(batch.step_id, tokens, 0.0, self.kv.logprobs(batch, tokens)))

    def skip(self, batch: Batch) -> None:
        """Take a failed step in. What it would have written is garbage."""
        self.kv.take_in(batch)
        self.kv.spoil(batch)

    def copy(self, copy: HostCopy) -> None:
        """End a copy that `kv.begin_copy` has begun."""
        self.kv.end_copy(copy)

    def end_writes(self) -> None:
        """Nothing comes late: KV is written on all stages when the leader hears of it (`modelled_exchange.py`)."""

    def close(self) -> None:
        """Nothing to give back."""


class ModelledStageServer:
    """Runs a modelled stage on the loop's clock, as the thread of a live one does on its own.

    Args:
        stage: what it runs.
        to_next: the stage behind; None: this is the last one.
        to_leader: hears tokens and ends of copies; it is cut if this stage dies.
        on_end: called once, with the reason if it dies, None if the leader closes the pipeline.
    """

    def __init__(
        self,
        stage: ModelledStage,
        to_next: MemoryChannel | None,
        to_leader: MemoryChannel,
        on_end: Callable[[str | None], None] = lambda _: None,
    ) -> None:
        assert (to_next is None) == stage.is_last, "the last stage has nobody behind it, the others do"
        self.stage = stage
        self._to_next = to_next
        self._to_leader = to_leader
        self._on_end = on_end
        self._inbox = StageInbox(is_first=stage.layers.first == 0)
        self._is_busy = False
        self._is_dead = False
        self._link_free_s = {True: 0.0, False: 0.0}
        """By direction, `HostCopy.to_host`: when the link has carried all that it was given."""

    def receive(self, message: StageMessage) -> None:
        """Take in what the leader or the stage before says."""
        if self._is_dead:
            return
        match message:
            case Batch() | Activation() | StepFailed():
                try:
                    self._inbox.put(message)
                    self._begin()
                except StageOrderError as error:
                    self.die(str(error))
            case HostCopy():
                self._begin_copy(message)
            case KvOver():
                self.stage.end_writes()
            case StageClose():
                self._is_dead = True
                self._on_end(None)
            case _:
                self.die(f"a stage was sent a {type(message).__name__}")

    def die(self, reason: str) -> None:
        """Stop for good: the process has ended, or lost somebody it needs. The leader notices. Idempotent."""
        if self._is_dead:
            return
        self._is_dead = True
        for channel in (self._to_next, self._to_leader):
            if channel is not None:
                channel.cut(reason)
        self._on_end(reason)

    def leave(self, reason: str) -> None:
        """As `die`, by the will of whoever owns the stage: `on_end` is not called."""
        self._on_end = lambda _: None
        self.die(reason)

    def _begin(self) -> None:
        if self._is_busy:
            return
        work = self._inbox.pop()
        if work is None:
            return
        self._is_busy = True
        duration_s = 0.0 if isinstance(work.upstream, StepFailed) else self.stage.step_s(work.batch)
        asyncio.get_running_loop().call_later(duration_s, self._finish, work, duration_s)

    def _finish(self, work: Work, duration_s: float) -> None:
        if self._is_dead:
            return
        said = outcome(work, run_step(self.stage, work), duration_s)
        self._send(self._to_next if self._to_next is not None else self._to_leader, said)
        self._is_busy = False
        try:
            self._begin()
        except StageOrderError as error:
            self.die(str(error))

    def _begin_copy(self, copy: HostCopy) -> None:
        loop = asyncio.get_running_loop()
        begins_s = max(loop.time(), self._link_free_s[copy.to_host])
        self._link_free_s[copy.to_host] = begins_s + self.stage.copy_s(copy)
        self.stage.kv.begin_copy(copy)
        loop.call_at(self._link_free_s[copy.to_host], self._end_copy, copy)

    def _end_copy(self, copy: HostCopy) -> None:
        if not self._is_dead:
            self.stage.copy(copy)
            self._send(self._to_leader, CopyEnded(copy.copy_id, None))

    def _send(self, channel: StageSender, message: StageMessage) -> None:
        try:
            channel.send(message)
        except PeerLostError as error:
            self.die(str(error))


def _wire_s(link: ModelledLink, num_tokens: int) -> float:
    """Return how long queries and states of some tokens keep the link busy in one layer."""
    return num_tokens * link.token_bytes * (1 + REMOTE_STATES) / link.bytes_per_s
