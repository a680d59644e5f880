"""Carries out the effects of one move at one end; the agent owns it."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from services.worker.transfer.link import (
    Arrival,
    Buffer,
    Link,
    LinkError,
    MessageTooLargeError,
    Sending,
    TrafficClass,
)
from services.worker.transfer.move_messages import MoveMessage
from services.worker.transfer.move_source import MoveSource
from services.worker.transfer.move_target import MoveTarget
from services.worker.transfer.ports import BlockPort, KvPort, KvPortError
from services.worker.transfer.session import (
    Blocks,
    Commit,
    Effect,
    End,
    Free,
    GiveBack,
    MoveSpec,
    Outcome,
    Pin,
    Post,
    Reserve,
    Revoke,
    Send,
    SendChunk,
    Unpin,
    Withdraw,
    Write,
)
from shared.ids import WorkerId
from shared.tasks import TaskOwner


class Office(Protocol):
    """What a run needs of its agent."""

    kv: KvPort
    blocks: BlockPort
    tasks: TaskOwner

    def link_to(self, peer_id: WorkerId) -> Link | None:
        """Return the link to a worker, if there is one."""
        ...

    def say(self, peer_id: WorkerId, message: MoveMessage) -> None:
        """Send a control message; it may get lost."""
        ...

    def room_changed(self) -> None:
        """Blocks became free, or are wanted."""
        ...


class _Run:
    """Effects are carried out one after the other, also those that come up meanwhile; then the timer is set."""

    def __init__(self, office: Office, spec: MoveSpec, peer_id: WorkerId, on_end: Callable[[Outcome], None]) -> None:
        self.spec = spec
        self.peer_id = peer_id
        self.has_ended = False
        self._office = office
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Effect] = deque()
        self._is_busy = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def _now_s(self) -> float:
        return self._loop.time()

    def do(self, effects: Sequence[Effect]) -> None:
        """Carry out effects, behind those under way."""
        self._queue.extend(effects)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._queue:
                self._carry_out(self._queue.popleft())
        finally:
            self._is_busy = False
        self._arm()

    def stop(self) -> None:
        """Set no timer any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self.stop()
        due_s = self._next_tick_s
        if due_s is not None:
            self._timer = self._loop.call_at(max(due_s, self._now_s), self._tick)

    @property
    @abstractmethod
    def _next_tick_s(self) -> float | None: ...

    @abstractmethod
    def _tick(self) -> None: ...

    @abstractmethod
    def _carry_out(self, effect: Effect) -> None: ...

    def _end(self, outcome: Outcome) -> None:
        self.has_ended = True
        self._on_end(outcome)


class SourceRun(_Run):
    """A move away from this worker."""

    def __init__(self, office: Office, end: MoveSource, on_end: Callable[[Outcome], None]) -> None:
        super().__init__(office, end.spec, end.spec.target_id, on_end)
        self.end = end
        self._sendings: dict[int, Sending] = {}

    @property
    def _next_tick_s(self) -> float | None:
        return self.end.next_tick_s

    def _tick(self) -> None:
        self.do(self.end.tick(self._now_s))

    def _carry_out(self, effect: Effect) -> None:
        blocks = self._office.blocks
        match effect:
            case Send(message):
                self._office.say(self.peer_id, message)
            case Pin(ids):
                blocks.pin(self.spec, ids)
            case Unpin(ids):
                blocks.unpin(self.spec, ids)
            case Free(ids):
                blocks.free(self.spec, ids)
                self._office.room_changed()
            case SendChunk(chunk, ids):
                self._read(chunk, ids)
            case Revoke(chunk):
                sending = self._sendings.get(chunk)
                if sending is not None:
                    sending.revoke()
            case End(outcome):
                self._end(outcome)
            case _:
                raise AssertionError(f"{effect} is not a source's")

    def _read(self, chunk: int, blocks: Blocks) -> None:
        try:
            parts = self._office.kv.read(blocks, self.spec.layers)
        except KvPortError as error:
            self.do(self.end.read_failed(chunk, str(error)))
            return
        if parts is not None:
            self._send(chunk, parts)
        else:
            self._office.tasks.start(self._fetch(chunk, blocks), name=f"fetch {self.spec.session_id} {chunk}")

    async def _fetch(self, chunk: int, blocks: Blocks) -> None:
        try:
            parts = await self._office.kv.fetch(blocks, self.spec.layers)
        except KvPortError as error:
            self.do(self.end.read_failed(chunk, str(error)))
        else:
            self._send(chunk, parts)

    def _send(self, chunk: int, parts: Sequence[Buffer]) -> None:
        link = self._office.link_to(self.peer_id)
        if link is None or self.end.state.is_over:
            self.do(self.end.chunk_unsent(chunk))
            return
        try:
            sending = link.send(TrafficClass.KV, self.spec.stream, chunk, parts)
        except MessageTooLargeError as error:
            self.do(self.end.read_failed(chunk, error.reason))
        except LinkError:
            self.do(self.end.chunk_unsent(chunk))
        else:
            self._sendings[chunk] = sending
            sending.done.add_done_callback(partial(self._on_sent, chunk))

    def _on_sent(self, chunk: int, done: asyncio.Future[int]) -> None:
        del self._sendings[chunk]
        if done.cancelled() or done.exception() is not None:
            self.do(self.end.chunk_unsent(chunk))
        else:
            self.do(self.end.chunk_sent(chunk, done.result(), self._now_s))


class TargetRun(_Run):
    """A move to this worker."""

    def __init__(self, office: Office, end: MoveTarget, on_end: Callable[[Outcome], None]) -> None:
        super().__init__(office, end.spec, end.spec.source_id, on_end)
        self.end = end
        self._zones: dict[int, list[memoryview]] = {}
        self._arrivals: dict[int, tuple[Link, Arrival]] = {}
        """Chunks that have landed and are not yet where they belong."""

    @property
    def _next_tick_s(self) -> float | None:
        return self.end.next_tick_s

    def _tick(self) -> None:
        self.do(self.end.tick(self._now_s))

    def on_chunk(self, link: Link, arrival: Arrival) -> None:
        """A chunk has been received whole."""
        chunk = arrival.number
        effects = self.end.chunk_arrived(chunk, arrival.checksum, landed=arrival.landed, now_s=self._now_s)
        if any(isinstance(effect, Write) for effect in effects):
            self._arrivals[chunk] = (link, arrival)
        else:
            link.release(arrival)
        self.do(effects)

    def grant(self, blocks: Blocks) -> None:
        """Room was found; none: not yet."""
        self.do(self.end.reserved(blocks))

    def _carry_out(self, effect: Effect) -> None:
        blocks = self._office.blocks
        match effect:
            case Send(message):
                self._office.say(self.peer_id, message)
            case Reserve(num_blocks):
                self._reserve(num_blocks)
            case Post(chunk, ids):
                self._post(chunk, ids)
            case Write(chunk, ids):
                self._office.tasks.start(self._write(chunk, ids), name=f"write {self.spec.session_id} {chunk}")
            case Withdraw():
                link = self._office.link_to(self.peer_id)
                if link is not None:
                    link.withdraw(self.spec.stream)
                self._zones = {chunk: self._zones[chunk] for chunk in self._arrivals}
            case Commit(ids):
                blocks.commit(self.spec, ids)
            case GiveBack(ids):
                blocks.give_back(self.spec, ids)
                self._office.room_changed()
            case End(outcome):
                self._end(outcome)
            case _:
                raise AssertionError(f"{effect} is not a target's")

    def _reserve(self, num_blocks: int) -> None:
        if self.spec.by_chunk:
            self.grant(())
            self._office.room_changed()
            return
        blocks = self._office.blocks.reserve(self.spec, num_blocks)
        self.do(self.end.refused("no room") if blocks is None else self.end.reserved(blocks))

    def _post(self, chunk: int, blocks: Blocks) -> None:
        if chunk not in self._zones:
            self._zones[chunk] = self._office.kv.zones(blocks, self.spec.layers)
        link = self._office.link_to(self.peer_id)
        if link is not None:
            link.post(self.spec.stream, chunk, self._zones[chunk])

    async def _write(self, chunk: int, blocks: Blocks) -> None:
        link, arrival = self._arrivals[chunk]
        try:
            await self._office.kv.write(blocks, self.spec.layers, self._zones[chunk])
        except KvPortError as error:
            effects = partial(self.end.write_failed, chunk, str(error))
        else:
            effects = partial(self.end.chunk_written, chunk)
        del self._arrivals[chunk], self._zones[chunk]
        link.release(arrival)
        self.do(effects())
