"""Connections between stages: who is let in, who is refused by name, and that nothing waits for ever or is left."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from services.worker.peers import connect
from services.worker.peers import door as sockets
from services.worker.peers.connect import Seats, StageListener, dial, together
from services.worker.peers.greeting import (
    StageHello,
    StageRefused,
    StageRefusedError,
    StageRole,
    StageWelcome,
    hello,
    read_greeting,
    why_refused,
)
from services.worker.peers.messages import say
from services.worker.peers.threads import in_thread
from services.worker.roles.device import GroupFailedError, GroupPlace, StagePlace
from shared.ids import WorkerId
from shared.layers import even_split
from shared.messages.base import PROTOCOL_VERSION, ControlMessage
from shared.wire import encode
from tests.support.leaks import whats_open

KV_ROLES = (StageRole.KV, StageRole.AHEAD, StageRole.PARTING)
WELCOME = StageWelcome(num_blocks=7, block_size=16)


def place_of(index: int, address: str = "127.0.0.1:9", plan_id: int = 5) -> GroupPlace:
    stages = tuple(StagePlace(WorkerId(f"w{i}"), address, layers) for i, layers in enumerate(even_split(6, 3)))
    return GroupPlace(plan_id, "secret", stages, index)


@asynccontextmanager
async def listening(wait_s: float = 5.0) -> AsyncIterator[StageListener]:
    """A listener after which no socket and no task is left."""
    await asyncio.get_running_loop().getaddrinfo("127.0.0.1", 0)
    before, tasks = whats_open(), asyncio.all_tasks()
    listener = await StageListener.open(wait_s=wait_s)
    try:
        yield listener
    finally:
        await listener.close()
        await listener.close()
    assert whats_open() == before
    assert asyncio.all_tasks() == tasks


def port_of(listener: StageListener) -> int:
    return int(listener.address.rpartition(":")[2])


async def raw(listener: StageListener, data: bytes) -> bytes:
    """Say some bytes, and return what comes until the end of the connection."""
    loop, heard = asyncio.get_running_loop(), b""
    with socket.socket() as sock:
        sock.settimeout(0)
        async with asyncio.timeout(10):
            await loop.sock_connect(sock, ("127.0.0.1", port_of(listener)))
            await loop.sock_sendall(sock, data)
            while part := await loop.sock_recv(sock, 4096):
                heard += part
    return heard


def framed(message: ControlMessage) -> bytes:
    data = encode(message)
    return len(data).to_bytes(4, "little") + data


async def test_the_leader_and_the_stage_before_are_let_in_early_or_late() -> None:
    async with listening() as listener:
        with ExitStack() as sockets:
            early = asyncio.create_task(dial(place_of(0, listener.address), 2, StageRole.LEADER, sockets))
            while listener.num_greeted < 1:
                await asyncio.sleep(0.001)
            seats = listener.expect(place_of(2))
            late = asyncio.create_task(dial(place_of(1, listener.address), 2, StageRole.PREVIOUS, sockets))
            leader, previous = await seats.leader, await seats.previous
            assert not early.done(), "nobody has welcomed it"
            for sock in (leader, previous):
                await say(sock, WELCOME)
            for dialled in (await early, await late):
                assert dialled[1].num_blocks == 7
            (await late)[0].sendall(b"x")
            (await early)[0].sendall(b"y")
            loop = asyncio.get_running_loop()
            assert (await loop.sock_recv(previous, 9), await loop.sock_recv(leader, 9)) == (b"x", b"y")
            listener.forget(seats)
            seats.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token": "guess"}, "the token is not that of plan 5"),
        ({"token": "gueß"}, "the token is not that of plan 5"),
        ({"target": "w1"}, "stage 2, w1, was dialled, and this is stage 2, w2"),
        ({"index": 1}, "stage 1, w2, was dialled, and this is stage 2, w2"),
        ({"sender": "w1"}, "w0 leads, not w1"),
        ({"sender": "w0", "role": StageRole.PREVIOUS}, "w1 is before stage 2, not w0"),
        ({"plan_id": 6}, "this worker has not joined plan 6 within 0.05 s"),
    ],
)
async def test_who_does_not_belong_is_refused_by_name(change: dict[str, object], reason: str) -> None:
    async with listening(wait_s=0.05) as listener:
        seats = listener.expect(place_of(2))
        said = hello(place_of(0), 2, StageRole.LEADER).model_copy(update=change)
        answer = await raw(listener, framed(said))
        with pytest.raises(StageRefusedError) as refused:
            read_greeting(answer[4:], StageWelcome)
        assert str(refused.value) == f"it refuses: {reason}"
        assert listener.num_refused == 1
        assert not seats.leader.done()
        seats.close()


async def test_a_dialler_hears_why_it_is_refused() -> None:
    async with listening() as listener:
        seats = listener.expect(place_of(2))
        stranger = replace(place_of(0, listener.address), token="guess")
        with ExitStack() as sockets, pytest.raises(GroupFailedError) as failed:
            await dial(stranger, 2, StageRole.LEADER, sockets)
        assert str(failed.value) == f"w2 at {listener.address}: it refuses: the token is not that of plan 5"
        seats.close()


async def test_a_second_leader_is_refused_and_the_first_one_stays() -> None:
    async with listening() as listener:
        seats = listener.expect(place_of(2))
        with ExitStack() as sockets:
            first = asyncio.create_task(dial(place_of(0, listener.address), 2, StageRole.LEADER, sockets))
            leader = await seats.leader
            with pytest.raises(GroupFailedError, match="a connection of the leader is there already"):
                await dial(place_of(0, listener.address), 2, StageRole.LEADER, sockets)
            await say(leader, WELCOME)
            assert (await first)[1] == WELCOME
        seats.close()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET ", "a greeting of 542393671 bytes"),
        ((5).to_bytes(4, "little") + b"x" * 5, "it does not greet"),
        (framed(WELCOME), "a stage_welcome where another part of a greeting was due"),
        (framed(hello(place_of(0), 2, StageRole.LEADER).model_copy(update={"version": 9})), "it speaks protocol 9"),
        (framed(hello(place_of(0), 2, StageRole.LEADER).model_copy(update={"index": 0})), "it does not greet"),
    ],
)
async def test_who_does_not_greet_is_refused(data: bytes, reason: str) -> None:
    async with listening() as listener:
        answer = await raw(listener, data)
        with pytest.raises(StageRefusedError, match=reason):
            read_greeting(answer[4:], StageWelcome)
        assert listener.num_refused == 1


async def test_who_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "GREETING_S", 0.05)
    async with listening() as listener:
        for data in (b"", b"\x10\x00", framed(hello(place_of(0), 2, StageRole.LEADER))[:-1]):
            with pytest.raises(StageRefusedError, match="no greeting in time"):
                read_greeting((await raw(listener, data))[4:], StageWelcome)
        assert listener.num_refused == 3


async def test_more_callers_than_are_greeted_are_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_GREETINGS", 2)
    async with listening() as listener:
        waiting = [socket.create_connection(("127.0.0.1", port_of(listener))) for _ in range(2)]
        while listener.num_greeted < 2:
            await asyncio.sleep(0.001)
        assert await raw(listener, b"") == b""
        assert listener.num_refused == 1
        for sock in waiting:
            sock.close()
        while listener.num_greeted > 0:
            await asyncio.sleep(0.001)
        assert listener.num_refused == 3, "who hangs up gives its place back"


async def test_seats_that_are_given_up_close_what_came() -> None:
    async with listening() as listener:
        seats = listener.expect(place_of(2))
        with ExitStack() as sockets:
            dialling = asyncio.create_task(dial(place_of(0, listener.address), 2, StageRole.LEADER, sockets))
            await seats.leader
            listener.forget(seats)
            seats.close()
            with pytest.raises(GroupFailedError, match="it hung up"):
                await dialling
        with socket.socket() as late, pytest.raises(StageRefusedError, match="is there already"):
            seats.take(hello(place_of(1), 2, StageRole.PREVIOUS), late)


async def test_a_listener_that_closes_drops_who_waits() -> None:
    async with listening() as listener:
        with ExitStack() as sockets:
            dialling = asyncio.create_task(dial(place_of(0, listener.address), 2, StageRole.LEADER, sockets))
            while listener.num_greeted < 1:
                await asyncio.sleep(0.001)
            await listener.close()
            with pytest.raises(GroupFailedError):
                await dialling


async def test_a_listener_that_closes_drops_who_came_this_moment() -> None:
    """Before the task that greets has done anything."""
    async with listening() as listener:
        with socket.create_connection(("127.0.0.1", port_of(listener))) as caller:
            while listener.num_greeted < 1:
                await asyncio.sleep(0)
            await listener.close()
            assert listener.num_greeted == 0
            assert caller.recv(1) == b""


async def test_a_listener_whose_close_is_cancelled_is_closed() -> None:
    async with listening() as listener:
        with socket.create_connection(("127.0.0.1", port_of(listener))) as caller:
            while listener.num_greeted < 1:
                await asyncio.sleep(0)
            closing = asyncio.create_task(listener.close())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            assert caller.recv(1) == b""
            assert listener._door._sock.fileno() < 0


@pytest.mark.parametrize("gets_free", [True, False])
async def test_a_listener_without_descriptors_tries_again_and_can_be_closed(
    monkeypatch: pytest.MonkeyPatch, gets_free: bool
) -> None:
    monkeypatch.setattr(sockets, "_ACCEPT_RETRY_S", 0.01)
    tried = list[int]()

    class Full(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            tried.append(1)
            if len(tried) < 4 or not gets_free:
                raise OSError(24, "Too many open files")
            return super().accept()

    async with listening() as listener:
        listener._door._sock = Full(fileno=listener._door._sock.detach())
        with socket.create_connection(("127.0.0.1", port_of(listener))):
            while len(tried) < 4:
                await asyncio.sleep(0.001)
            assert listener.num_greeted == gets_free
            await listener.close()
            await asyncio.sleep(0.03)
            assert len(tried) == 4


@pytest.mark.parametrize(
    ("address", "reason"),
    [("", "no host:port"), ("127.0.0.1", "no host:port"), ("127.0.0.1:x", "no host:port"), ("[::1]:1", "w2 at ")],
)
async def test_addresses_that_lead_nowhere_are_named(address: str, reason: str) -> None:
    with ExitStack() as sockets, pytest.raises(GroupFailedError, match=reason):
        await dial(place_of(0, address), 2, StageRole.LEADER, sockets)


async def test_a_listener_tells_others_the_name_that_it_was_given() -> None:
    for host, advertise, shown in (("127.0.0.1", "", "127.0.0.1"), ("0.0.0.0", "w0.local", "w0.local")):
        listener = await StageListener.open(host, advertise=advertise)
        assert listener.address.startswith(f"{shown}:")
        assert port_of(listener) > 0
        await listener.close()
    with contextlib.suppress(OSError):  # a machine without IPv6 has nothing to show
        listener = await StageListener.open("::1")
        assert listener.address.startswith("[::1]:")
        place = place_of(0, listener.address)
        seats = listener.expect(place_of(2))
        with ExitStack() as sockets:
            dialling = asyncio.create_task(dial(place, 2, StageRole.LEADER, sockets))
            await say(await seats.leader, WELCOME)
            assert (await dialling)[1] == WELCOME
        seats.close()
        await listener.close()


def test_every_place_wants_its_leader_and_the_stages_before_it_and_nobody_else() -> None:
    """All of 2 members, 7 roles and 3 senders; and of the leader, who is asked for parameters alone."""
    wanted = set()
    for index in range(3):
        for role in StageRole if index else (StageRole.PARAMETERS,):
            for sender in range(3):
                said = hello(place_of(sender), index, role)
                if why_refused(said, place_of(index)) is None:
                    wanted.add((index, role, sender))
    assert wanted == {
        (1, StageRole.LEADER, 0),
        (1, StageRole.PREVIOUS, 0),
        (2, StageRole.LEADER, 0),
        (2, StageRole.PREVIOUS, 1),
        *(
            (index, role, sender)
            for index, sender in ((1, 0), (2, 0), (2, 1))
            for role in (*KV_ROLES, StageRole.ATTENTION)
        ),
        *((index, StageRole.PARAMETERS, sender) for index in range(3) for sender in range(3) if sender != index),
    }


async def test_parameters_are_lent_to_the_other_stages_of_a_group_that_stands() -> None:
    taken: list[socket.socket] = []
    async with listening() as listener:
        with ExitStack() as sockets:
            early = asyncio.create_task(dial(place_of(1, listener.address), 0, StageRole.PARAMETERS, sockets))
            await asyncio.sleep(0.05)
            assert not early.done(), "the group may be about to stand"
            listener.lend(place_of(0), taken.append)
            while not taken:
                await asyncio.sleep(0.005)
            await say(taken[0], WELCOME)
            assert (await early)[1] == WELCOME
            with pytest.raises(GroupFailedError, match="w0 is no other stage of the group"):
                await dial(place_of(0, listener.address), 0, StageRole.PARAMETERS, sockets)
            wrong = replace(place_of(2, listener.address), token="another")
            with pytest.raises(GroupFailedError, match="the token is not that of plan"):
                await dial(wrong, 0, StageRole.PARAMETERS, sockets)
            listener.lend_no_more(place_of(0))
            listener.lend_no_more(place_of(0))
            with pytest.raises(GroupFailedError, match="has not joined plan"):
                await dial(place_of(2, listener.address), 0, StageRole.PARAMETERS, sockets)
            assert len(taken) == 1
            taken[0].close()


@pytest.mark.parametrize("due", KV_ROLES)
async def test_connections_for_kv_are_let_in_when_they_are_due_and_not_before(due: StageRole) -> None:
    other = next(role for role in KV_ROLES if role is not due)
    async with listening() as listener:
        seats = listener.expect(place_of(2), purpose=due)
        with ExitStack() as sockets:
            for sender in range(2):
                dialling = asyncio.create_task(dial(place_of(sender, listener.address), 2, due, sockets))
                await say(await seats.of(due, sender), WELCOME)
                assert (await dialling)[1] == WELCOME
                for role, reason in ((due, "is there already"), (other, f"no connection of the role {other} is due")):
                    with pytest.raises(GroupFailedError, match=reason):
                        await dial(place_of(sender, listener.address), 2, role, sockets)
            with pytest.raises(GroupFailedError, match="w2 is not before stage 2"):
                await dial(place_of(2, listener.address), 2, due, sockets)
        listener.forget(seats)
        seats.close()


def test_greetings_are_read_back_as_they_were() -> None:
    said = hello(place_of(1), 2, StageRole.PREVIOUS)
    assert read_greeting(encode(said), StageHello) == said
    assert said.version == PROTOCOL_VERSION
    assert read_greeting(encode(WELCOME), StageWelcome) == WELCOME
    with pytest.raises(StageRefusedError, match="it refuses: because"):
        read_greeting(encode(StageRefused(reason="because")), StageWelcome)


# Together


async def test_together_gives_all_results_in_order() -> None:
    async def later(value: int) -> int:
        for _ in range(5 - value):
            await asyncio.sleep(0)
        return value

    assert await together({str(i): later(i) for i in range(5)}, 5) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("fails", [True, False])
async def test_together_ends_all_when_one_fails_or_is_late(fails: bool) -> None:
    ended: list[str] = []

    async def wait(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    async def fail() -> None:
        if fails:
            raise GroupFailedError("no")

    reason = "^no$" if fails else "^b, c did not come within 0.02 s$"
    with pytest.raises(GroupFailedError, match=reason):
        await together({"a": fail(), "b": wait("b"), "c": wait("c")}, 5 if fails else 0.02)
    assert ended == ["b", "c"]


async def test_together_ends_all_when_its_caller_is_cancelled() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("it")

    task = asyncio.create_task(together({"it": wait()}, 60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["it"]


# In a thread


async def test_work_in_a_thread_is_waited_for_also_when_nobody_wants_it_any_more() -> None:
    go, began, done = threading.Event(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(began.set)
        assert go.wait(10)
        done.set()
        raise ValueError("nobody hears of it")

    task = asyncio.create_task(in_thread(work, "work"))
    await began.wait()
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0, "work")
    assert await in_thread(lambda: threading.current_thread().name, "a name") == "a name"


async def test_a_seat_is_made_on_the_running_loop() -> None:
    seats = Seats(place_of(1))
    seats.close()
    seats.close()
    assert seats.leader.cancelled()
    assert seats.previous.cancelled()
