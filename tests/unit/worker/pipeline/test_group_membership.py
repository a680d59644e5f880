"""A member of a group over sockets: it hears of the end once, and can leave also when nobody takes what it sends."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from services.worker.contract.batch import Batch
from services.worker.contract.executor import HostCopy, KvCapacity
from services.worker.pipeline import membership, thread_stage
from services.worker.pipeline.channel import SocketChannel, receive_all
from services.worker.pipeline.membership import Membership
from services.worker.pipeline.stage import Ended
from services.worker.pipeline.stage_messages import Activation, Alive, Hidden, StageClose
from services.worker.pipeline.thread_stage import StageServer, ThreadStages
from shared.layers import LayerRange
from tests.support.leaks import whats_open

MUCH = 64 * 2**20
"""Bytes that no socket's buffer takes."""


class Device:
    """The middle stage of three; what it computes is large."""

    layers = LayerRange(1, 2)
    is_last = False
    capacity = KvCapacity(7, 16)

    def __init__(self, began: asyncio.Event) -> None:
        self._began, self._loop = began, asyncio.get_running_loop()
        self.num_closed = 0

    def launch(self, batch: Batch, hidden: Hidden | None) -> Ended:
        self._loop.call_soon_threadsafe(self._began.set)
        return Ended(np.zeros((1, MUCH // 4), np.float32))

    def skip(self, batch: Batch) -> None:
        raise AssertionError("no step fails here")

    def copy(self, copy: HostCopy) -> None:
        raise AssertionError("nothing is copied here")

    def end_writes(self) -> None:
        raise AssertionError("no KV is on its way here")

    def close(self) -> None:
        self.num_closed += 1


@dataclass
class Wired:
    """A member, and the other ends of its connections."""

    member: Membership
    device: Device
    leader: socket.socket
    previous: socket.socket
    following: socket.socket
    told: list[str | None] = field(default_factory=list)
    began: asyncio.Event = field(default_factory=asyncio.Event)

    async def hear_end(self) -> None:
        async with asyncio.timeout(10):
            while not self.told:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def wired() -> AsyncIterator[Wired]:
    """Afterwards the member has left, no thread or socket of it is there, and nothing of it failed on the loop."""
    before, failures = whats_open(), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    (leader, a), (previous, b), (following, c) = (socket.socketpair() for _ in range(3))
    told: list[str | None] = []
    began = asyncio.Event()
    device = Device(began)
    member = Membership(device, a, b, c, told.append)
    try:
        yield Wired(member, device, leader, previous, following, told, began)
    finally:
        async with asyncio.timeout(10):
            await member.leave()
            await member.leave()
        for end in (leader, previous, following):
            end.close()
        await asyncio.sleep(0)
        asyncio.get_running_loop().set_exception_handler(None)
    assert not failures
    assert device.num_closed == 1
    assert whats_open() == before


async def test_an_end_in_order_is_told_once_and_passed_on() -> None:
    async with wired() as at:
        SocketChannel(at.leader).send(StageClose())
        await at.hear_end()
        assert at.told == [None]
        assert isinstance(SocketChannel(at.following).receive(), StageClose)
    assert at.told == [None]


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda at: at.leader.close(), "the other end has closed the connection"),
        (lambda at: at.previous.close(), "the other end has closed the connection"),
        (lambda at: at.leader.sendall(b"x" * 64), "the header of a frame: the checksum is wrong"),
    ],
)
async def test_a_connection_that_breaks_or_carries_nonsense_is_told_with_the_reason(
    end: Callable[[Wired], None], reason: str
) -> None:
    async with wired() as at:
        end(at)
        await at.hear_end()
    assert at.told == [reason]


async def test_a_leader_that_says_nothing_is_lost_and_one_without_work_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "SILENCE_S", 1.0)
    async with wired() as at:
        channel = SocketChannel(at.leader)
        for _ in range(6):
            channel.send(Alive())
            await asyncio.sleep(0.25)
        assert at.told == []
        await at.hear_end()
    assert at.told == ["cannot receive: timed out"]


async def test_a_leader_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_stage, "ALIVE_PERIOD_S", 0.01)
    (ours, theirs), (way, following) = socket.socketpair(), socket.socketpair()
    member, loop = SocketChannel(theirs, silence_s=10.0), asyncio.get_running_loop()
    first = Device(asyncio.Event())
    stages = ThreadStages(first, SocketChannel(way), [SocketChannel(ours)], first.capacity, loop)
    said = [await loop.run_in_executor(None, member.receive) for _ in range(3)]
    assert said == [Alive()] * 3
    await stages.close()
    while not isinstance(last := await loop.run_in_executor(None, member.receive), StageClose):
        assert last == Alive()
    member.free()
    following.close()


class HeldSocket(socket.socket):
    """One whose receiver is held up between having looked up the descriptor and asking the system."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(fileno=sock.detach())
        self.is_about, self.may_go = threading.Event(), threading.Event()

    def recv_into(self, buffer: Any, *_: Any) -> int:
        number = self.fileno()
        self.is_about.set()
        self.may_go.wait()
        return os.readv(number, [buffer])


def test_who_is_about_to_receive_when_a_channel_is_closed_reads_nothing_that_is_opened_then() -> None:
    """A thread that was held up so has read from another connection, or waited there for as long as that was silent."""
    ours, theirs = socket.socketpair()
    held, told = HeldSocket(ours), list[str]()
    channel = SocketChannel(held)
    reader = threading.Thread(target=receive_all, args=(channel, told.append, told.append))
    reader.start()
    held.is_about.wait()
    channel.close()
    pairs = [socket.socketpair() for _ in range(4)]
    for one, other in pairs:
        one.sendall(b"of somebody else")
        other.sendall(b"of somebody else")
    held.may_go.set()
    reader.join()
    assert told == ["the other end has closed the connection"]
    for each in [sock for pair in pairs for sock in pair]:
        assert each.recv(100) == b"of somebody else"
        each.close()
    channel.free()
    assert held.fileno() == -1
    theirs.close()


async def test_who_leaves_is_not_told() -> None:
    async with wired() as at:
        await at.member.leave()
        assert at.following.recv(1) == b"", "the next stage notices"
    assert at.told == []


async def test_the_end_is_told_on_the_event_loop() -> None:
    heard_in: list[threading.Thread] = []

    def hear(reason: str | None) -> None:
        heard_in.append(threading.current_thread())
        at.told.append(reason)

    async with wired() as at:
        at.member._on_end = hear
        at.leader.close()
        await at.hear_end()
    assert heard_in == [threading.current_thread()]


async def test_who_has_left_has_no_thread_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher is slow to notice."""
    join = StageServer.join

    def join_slowly(server: StageServer) -> None:
        join(server)
        if threading.current_thread().name == "stage watcher":
            time.sleep(0.2)

    monkeypatch.setattr(StageServer, "join", join_slowly)
    async with wired() as at:
        await at.member.leave()
        assert not at.member._watcher.is_alive()


def test_an_end_that_comes_when_the_event_loop_is_closed_is_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[object] = []
    monkeypatch.setattr(threading, "excepthook", broken.append)
    (leader, a), (previous, b), (following, c) = (socket.socketpair() for _ in range(3))
    told: list[str | None] = []

    async def join() -> Membership:
        return Membership(Device(asyncio.Event()), a, b, c, told.append)

    member = asyncio.run(join())
    for end in (leader, previous, following):
        end.close()
    member._watcher.join(10)
    assert not member._watcher.is_alive()
    member._break()
    assert not told
    assert not broken


async def test_a_member_can_leave_in_the_middle_of_what_nobody_takes() -> None:
    """The stage behind is frozen: its connection stands, and takes nothing more."""
    async with wired() as at:
        one = np.ones(1, np.int32)
        batch = Batch(1, np.zeros(1, np.int32), one, np.zeros(1, np.int32), one, np.zeros(1, np.bool_))
        SocketChannel(at.leader).send(batch)
        SocketChannel(at.previous).send(Activation(1, 1, np.zeros((1, 4), np.float32), (0.1,)))
        async with asyncio.timeout(10):
            await at.began.wait()
            await asyncio.get_running_loop().sock_recv(_unblocked(at.following), 1)  # it has begun to send
            await at.member.leave()
    assert at.told == []


def _unblocked(sock: socket.socket) -> socket.socket:
    sock.settimeout(0)
    return sock
