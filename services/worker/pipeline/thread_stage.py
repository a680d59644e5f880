"""Live stages: each computes in a thread of its own, and another thread per connection receives.

    leader's process                                    a member's process
    ┌────────────────────────────────┐                 ┌─────────────────────────────────┐
    │ event loop ─batch─► StageThread│ ───batches────► │ reader ─┐                       │
    │     ▲               (stage 0)  │ ──activations─► │ reader ─┴─► StageThread ────────┼─► the next stage
    │     └───────────── reader ◄────┼──tokens, copies─┼───────────────┘                 │
    └────────────────────────────────┘                 └─────────────────────────────────┘

Activations never pass an event loop. Readers take everything off the wire at once, so a stage that computes does not
stop the one before it from going on. Where a device computes beside the host, a stage's thread launches a step while
the one before computes, and one more thread waits for their ends and says them in order; whatever else the leader says
waits until no step is under way. A channel that breaks ends the threads at both ends, and with them their other
channels, until the leader knows: no stage goes on by itself. So does a leader that says nothing for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from services.worker.contract.batch import Batch
from services.worker.contract.executor import CopyFailedError, HostCopy, KvCapacity
from services.worker.contract.remote import RemoteLostError
from services.worker.peers.frames import PeerLostError
from services.worker.pipeline.channel import SocketChannel, StageSender, receive_all
from services.worker.pipeline.stage import (
    MAX_LAUNCHED,
    StageDevice,
    StageInbox,
    StageOrderError,
    StageStep,
    Work,
    end_step,
    launch_step,
    outcome,
)
from services.worker.pipeline.stage_messages import (
    Activation,
    Alive,
    CopyEnded,
    KvOver,
    StageClose,
    StageMessage,
    StepFailed,
)
from services.worker.pipeline.step_ends import StepEnds

ALIVE_PERIOD_S = 3.0
"""In which a leader says that it is there."""


class StageThread:
    """Runs the steps of a device in a thread of its own, in the order in which the leader made them.

    Args:
        device: owned; closed at the end.
        to_next: the stage behind; None: this is the last one.
        to_leader: hears tokens and ends of copies.
        members: stages to which this one, the leader's, passes on what the leader says.
        on_end: called in the thread at its end, with the reason if the pipeline is broken, None after a `StageClose`.
    """

    def __init__(
        self,
        device: StageDevice,
        to_next: StageSender | None,
        to_leader: StageSender,
        members: Sequence[StageSender] = (),
        on_end: Callable[[str | None], None] = lambda _: None,
    ) -> None:
        assert (to_next is None) == device.is_last, "the last stage has nobody behind it, the others do"
        self._device = device
        self._to_next = to_next
        self._to_leader = to_leader
        self._members = tuple(members)
        self._on_end = on_end
        self._inbox = StageInbox(is_first=device.layers.first == 0)
        self._queue: SimpleQueue[StageMessage | str] = SimpleQueue()
        self._ends = StepEnds(f"ends of stage {device.layers}", self._fail)
        self._ended_s = 0.0
        """When the newest step ended."""
        self._failure: Exception | None = None
        """Of an end: nothing may be said behind it."""
        self._is_broken = False
        """Nothing more is said."""
        self._thread = threading.Thread(target=self._work, name=f"stage {device.layers}", daemon=True)
        self._thread.start()

    def receive(self, message: StageMessage) -> None:
        """Queue a message; from any thread."""
        self._queue.put(message)

    def lose(self, reason: str) -> None:
        """Let the stage know that somebody it needs is gone; from any thread."""
        self._queue.put(reason)

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join()

    def _work(self) -> None:
        """Body of the thread."""
        reason: str | None = None
        try:
            while not isinstance(message := self._queue.get(), StageClose | str):
                self._take(message)
            if isinstance(message, str):
                reason = message
            else:
                self._wait()
        except Exception as error:  # the thread's supervisor: whatever went wrong breaks the pipeline, not only a step
            reason = self._reason_of(error)
        self._end(reason)

    def _reason_of(self, error: Exception) -> str:
        if isinstance(error, PeerLostError | StageOrderError | RemoteLostError):
            return str(error)
        return f"stage {self._device.layers} ended with {type(error).__name__}: {error}"

    def _take(self, message: StageMessage) -> None:
        match message:
            case Batch():
                self._pass_on(message)
                self._inbox.put(message)
            case Activation() | StepFailed():
                self._inbox.put(message)
            case Alive():
                self._pass_on(message)
            case HostCopy():
                self._pass_on(message)
                self._wait()  # it may read what a step writes
                self._to_leader.send(self._copy(message))
            case KvOver():
                self._pass_on(message)
                self._wait()
                self._device.end_writes()
            case _:
                raise StageOrderError(f"a stage was sent a {type(message).__name__}")
        while (work := self._inbox.pop()) is not None:
            self._run(work)

    def _run(self, work: Work) -> None:
        """Launch a step, and have its end waited for."""
        self._wait(MAX_LAUNCHED - 1)
        began_s = time.perf_counter()
        step = launch_step(self._device, work)
        self._ends.put(partial(self._land, work, step, began_s), is_done=step.is_done)

    def _land(self, work: Work, step: StageStep, began_s: float) -> None:
        """Wait for a step and say what became of it; its duration counts from its launch, or from the last end."""
        try:
            result = end_step(work, step)
            last_s, self._ended_s = self._ended_s, time.perf_counter()
            if not self._is_broken:
                said = outcome(work, result, self._ended_s - max(began_s, last_s))
                (self._to_leader if self._to_next is None else self._to_next).send(said)
        finally:
            step.free()

    def _fail(self, error: Exception) -> None:
        """Something went wrong in the thread that waits for ends."""
        if not self._is_broken:
            self._failure, self._is_broken = error, True
            self._queue.put(self._reason_of(error))

    def _wait(self, num_left: int = 0) -> None:
        """Return when at most so many steps are under way; raise what has gone wrong with them."""
        self._ends.wait(num_left)
        if self._failure is not None:
            raise self._failure

    def _copy(self, copy: HostCopy) -> CopyEnded:
        try:
            self._device.copy(copy)
        except CopyFailedError as error:
            return CopyEnded(copy.copy_id, error.cause)
        except Exception as error:  # as in `launch_step`: the engine computes the KV again
            return CopyEnded(copy.copy_id, f"{type(error).__name__}: {error}")
        return CopyEnded(copy.copy_id, None)

    def _pass_on(self, message: StageMessage) -> None:
        for member in self._members:
            member.send(message)

    def _end(self, reason: str | None) -> None:
        """Let everybody know, in order or by a broken channel, and give back memory."""
        others = (*self._members, *(() if self._to_next is None else (self._to_next,)))
        if reason is None:
            for channel in others:
                with contextlib.suppress(PeerLostError):  # it has heard of the end from somebody else
                    channel.send(StageClose())
        else:
            self._is_broken = True
            for channel in (*others, self._to_leader):
                channel.close()  # also wakes whoever sends the end of a step
        self._ends.close()
        self._device.close()
        self._on_end(reason)


class StageServer:
    """A member of a pipeline: a stage, and what it is connected to.

    Args:
        device: owned.
        leader: batches come from it, tokens and ends of copies go to it.
        previous: activations come from it.
        to_next: the stage behind; None: this is the last one.
    """

    def __init__(
        self, device: StageDevice, leader: SocketChannel, previous: SocketChannel, to_next: SocketChannel | None
    ) -> None:
        self.reason: str | None = None
        """Why the pipeline is broken, once it is."""
        self._channels = [leader, previous, *([] if to_next is None else [to_next])]
        self._stage = StageThread(device, to_next, leader, on_end=self._note)
        self._readers = [_reader(channel, self._stage.receive, self._stage.lose) for channel in (leader, previous)]

    def join(self) -> None:
        """Wait until the leader has closed the pipeline, or it is broken; then close all channels."""
        self._stage.join()
        for channel in self._channels:
            channel.close()
        for reader in self._readers:
            reader.join()
        for channel in self._channels:
            channel.free()

    def close(self) -> None:
        """Leave the pipeline, which breaks it unless the leader has closed it. Idempotent."""
        self._stage.lose("this stage was closed")
        self.join()

    def _note(self, reason: str | None) -> None:
        self.reason = reason


class ThreadStages:
    """A `StageGroup` for a live leader: its own stage in a thread here, the members at the end of channels.

    Args:
        device: of stage 0; owned.
        to_next: the channel of its activations; None: it is the only stage.
        members: a channel to each other stage, in order.
        capacity: what every stage has.
        loop: on which the leader lives.
    """

    def __init__(
        self,
        device: StageDevice,
        to_next: SocketChannel | None,
        members: Sequence[SocketChannel],
        capacity: KvCapacity,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._loop = loop
        self._capacity = capacity
        self._channels = (*members, *(() if to_next is None else (to_next,)))
        self._closing = False
        self._on_message: Callable[[StageMessage], None] = lambda _: None
        self._on_lost: Callable[[str], None] = lambda _: None
        self._ended: asyncio.Future[None] = loop.create_future()
        self._speaking = loop.call_soon(self._say_alive)
        to_leader = _LoopSender(lambda message: self._call(self._hear, message))
        self._stage = StageThread(device, to_next, to_leader, members, lambda reason: self._call(self._end, reason))
        self._readers = [
            _reader(channel, to_leader.send, lambda reason: self._call(self.lose, reason)) for channel in members
        ]

    @property
    def num_stages(self) -> int:
        """How many there are."""
        return 1 + len(self._readers)

    @property
    def capacity(self) -> KvCapacity:
        """What every stage has."""
        return self._capacity

    def attach(self, on_message: Callable[[StageMessage], None], on_lost: Callable[[str], None]) -> None:
        """Name who hears the stages; see `StageGroup`."""
        self._on_message, self._on_lost = on_message, on_lost

    def post(self, message: Batch | HostCopy | KvOver) -> None:
        """Queue a message for every stage."""
        self._stage.receive(message)

    async def close(self) -> None:
        """End all stages, and wait for the threads here."""
        self._closing = True
        self._speaking.cancel()
        self._stage.receive(StageClose())
        await asyncio.shield(self._ended)
        self._stage.join()
        self._break_channels()
        for reader in self._readers:
            reader.join()
        for channel in self._channels:
            channel.free()

    def lose(self, reason: str) -> None:
        """Break the pipeline: a member is gone, or as if; on the loop. After `close` that is as it should be."""
        if not (self._closing or self._ended.done()):
            self._stage.lose(reason)
            self._break_channels()
            self._on_lost(reason)

    def _hear(self, message: StageMessage) -> None:
        self._on_message(message)

    def _say_alive(self) -> None:
        self._stage.receive(Alive())
        self._speaking = self._loop.call_later(ALIVE_PERIOD_S, self._say_alive)

    def _end(self, reason: str | None) -> None:
        self._speaking.cancel()
        if reason is not None:
            self._break_channels()
            self._on_lost(reason)
        if not self._ended.done():
            self._ended.set_result(None)

    def _break_channels(self) -> None:
        """Also wakes a thread that is blocked in one of them."""
        for channel in self._channels:
            channel.close()

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        """Call something on the loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear of it
            self._loop.call_soon_threadsafe(function, *args)


@dataclass(frozen=True, slots=True)
class _LoopSender:
    """The way from a thread to the leader's loop."""

    send: Callable[[StageMessage], None]

    def close(self) -> None:
        """Nothing to close: the loop hears of the end by `on_end`."""


def _reader(
    channel: SocketChannel, on_message: Callable[[StageMessage], None], on_lost: Callable[[str], None]
) -> threading.Thread:
    thread = threading.Thread(target=receive_all, args=(channel, on_message, on_lost), name="reader", daemon=True)
    thread.start()
    return thread
