"""Connections between the stages of a group: who is let in, who is refused by name, and that nothing waits for ever."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import pytest

from services.worker.kv_moves.gather import Gathering, together
from services.worker.kv_moves.places import GroupFailedError, GroupPlace, StagePlace
from services.worker.kv_moves.seats import GROUP_PURPOSES, Seats, check_place
from services.worker.peers.connect import Peers, say_greeting
from services.worker.peers.greeting import PeerRefusedError, PeerWelcome, Purpose
from services.worker.peers.threads import in_thread
from shared.ids import WorkerId
from shared.layers import even_split
from tests.support.peers import identity, listening, until_greeted

KV_PURPOSES = (Purpose.KV, Purpose.AHEAD, Purpose.PARTING)
WELCOME = PeerWelcome(num_blocks=7, block_size=16)


def place_of(index: int, address: str = "127.0.0.1:9", plan_id: int = 5) -> GroupPlace:
    stages = tuple(StagePlace(WorkerId(f"w{i}"), address, layers) for i, layers in enumerate(even_split(6, 3)))
    return GroupPlace(plan_id, stages, index)


async def dial(
    place: GroupPlace, index: int, purpose: Purpose, sockets: ExitStack
) -> tuple[socket.socket, PeerWelcome]:
    """Dial a stage as the worker at a place does."""
    peers = await Peers.open(identity(place.index))
    try:
        return await Gathering(peers, place, sockets, 5.0).dial(index, purpose)
    finally:
        await peers.close()


@asynccontextmanager
async def expecting(
    index: int = 2, wait_s: float = 5.0, purpose: Purpose = Purpose.KV
) -> AsyncIterator[tuple[Peers, Seats, ExitStack]]:
    """A stage that waits for connections."""
    async with listening(index, wait_s) as peers:
        with ExitStack() as sockets:
            at = Gathering(peers, place_of(index), sockets, 5.0)
            with at.expecting(Seats(at.place, purpose=purpose)) as seats:
                yield peers, seats, sockets


async def test_the_leader_and_the_stage_before_are_let_in_early_or_late() -> None:
    async with listening(2) as peers:
        with ExitStack() as sockets:
            early = asyncio.create_task(dial(place_of(0, peers.address), 2, Purpose.LEADER, sockets))
            await until_greeted(peers)
            seats = Seats(place_of(2))
            peers.expect(GROUP_PURPOSES, 5, seats.take)
            late = asyncio.create_task(dial(place_of(1, peers.address), 2, Purpose.PREVIOUS, sockets))
            leader, previous = await seats.leader, await seats.previous
            assert not early.done(), "nobody has welcomed it"
            for sock in (leader, previous):
                await say_greeting(sock, WELCOME)
            for dialled in (await early, await late):
                assert dialled[1].num_blocks == 7
            (await late)[0].sendall(b"x")
            (await early)[0].sendall(b"y")
            loop = asyncio.get_running_loop()
            assert (await loop.sock_recv(previous, 9), await loop.sock_recv(leader, 9)) == (b"x", b"y")
            peers.forget(seats.take)
            seats.close()


@pytest.mark.parametrize(
    ("sender", "plan_id", "index", "purpose", "reason"),
    [
        (0, 5, 1, Purpose.LEADER, "it refuses: stage 1 was dialled, and this is stage 2"),
        (1, 5, 2, Purpose.LEADER, "it refuses: stage 2 wants no connection for 'leader' from w1"),
        (0, 5, 2, Purpose.PREVIOUS, "it refuses: stage 2 wants no connection for 'previous' from w0"),
        (0, 6, 2, Purpose.LEADER, "it refuses: this worker has not joined plan 6 within 0.05 s"),
    ],
)
async def test_who_does_not_belong_is_refused_by_name(
    sender: int, plan_id: int, index: int, purpose: Purpose, reason: str
) -> None:
    async with expecting(wait_s=0.05) as (peers, seats, _):
        other = await Peers.open(identity(sender))
        with pytest.raises(PeerRefusedError) as refused:
            await other.dial(WorkerId("w2"), peers.address, purpose, plan_id, index)
        await other.close()
        assert str(refused.value) == reason
        assert not seats.leader.done()


async def test_a_dialler_hears_why_it_is_refused_and_by_whom() -> None:
    async with expecting() as (peers, _, sockets):
        with pytest.raises(GroupFailedError) as failed:
            await dial(place_of(1, peers.address), 2, Purpose.LEADER, sockets)
        assert (
            str(failed.value) == f"w2 at {peers.address}: it refuses: stage 2 wants no connection for 'leader' from w1"
        )


async def test_a_second_leader_is_refused_and_the_first_one_stays() -> None:
    async with expecting() as (peers, seats, sockets):
        first = asyncio.create_task(dial(place_of(0, peers.address), 2, Purpose.LEADER, sockets))
        leader = await seats.leader
        with pytest.raises(GroupFailedError, match="a connection for 'leader' is there already"):
            await dial(place_of(0, peers.address), 2, Purpose.LEADER, sockets)
        await say_greeting(leader, WELCOME)
        assert (await first)[1] == WELCOME


async def test_seats_that_are_given_up_close_what_came() -> None:
    async with expecting() as (peers, seats, sockets):
        dialling = asyncio.create_task(dial(place_of(0, peers.address), 2, Purpose.LEADER, sockets))
        await seats.leader
        seats.close()
        with pytest.raises(GroupFailedError, match="it hung up"):
            await dialling
        said = identity(1).hello(Purpose.PREVIOUS, 5, 2)
        with socket.socket() as late, pytest.raises(PeerRefusedError, match="is there already"):
            seats.take(said, late)


def wants(sender: int, purpose: Purpose, index: int) -> bool:
    try:
        check_place(identity(sender).hello(purpose, 5, index), place_of(index))
    except PeerRefusedError:
        return False
    return True


def test_every_place_wants_its_leader_and_the_stages_before_it_and_nobody_else() -> None:
    """All of 3 places, 7 purposes and 3 senders; the leader is asked for parameters alone."""
    found = {
        (i, purpose, sender)
        for i in range(3)
        for purpose in set(Purpose) - {Purpose.FETCH}  # which is of no group
        for sender in range(3)
        if wants(sender, purpose, i)
    }
    before = [(1, 0), (2, 0), (2, 1)]
    assert found == {
        (1, Purpose.LEADER, 0),
        (1, Purpose.PREVIOUS, 0),
        (2, Purpose.LEADER, 0),
        (2, Purpose.PREVIOUS, 1),
        *((index, purpose, sender) for index, sender in before for purpose in (*KV_PURPOSES, Purpose.ATTENTION)),
        *((index, Purpose.PARAMETERS, sender) for index in range(3) for sender in range(3) if sender != index),
    }


@pytest.mark.parametrize("due", KV_PURPOSES)
async def test_connections_for_kv_are_let_in_when_they_are_due_and_not_before(due: Purpose) -> None:
    other = next(purpose for purpose in KV_PURPOSES if purpose is not due)
    async with expecting(purpose=due) as (peers, seats, sockets):
        for sender in range(2):
            dialling = asyncio.create_task(dial(place_of(sender, peers.address), 2, due, sockets))
            await say_greeting(await seats.of(due, sender), WELCOME)
            assert (await dialling)[1] == WELCOME
            for purpose, reason in ((due, "is there already"), (other, f"no connection for '{other}' is due now")):
                with pytest.raises(GroupFailedError, match=reason):
                    await dial(place_of(sender, peers.address), 2, purpose, sockets)


# Together


async def test_together_gives_all_results_in_order() -> None:
    async def later(value: int) -> int:
        for _ in range(5 - value):
            await asyncio.sleep(0)
        return value

    assert await together({str(i): later(i) for i in range(5)}, 5) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("how", "error", "reason"),
    [
        ("fails", GroupFailedError, "^no$"),
        ("is late", GroupFailedError, "^b, c did not come within 0.02 s$"),
        ("is cancelled", asyncio.CancelledError, "^$"),
    ],
)
async def test_together_ends_all_when_one_fails_or_is_late_or_its_caller_is_cancelled(
    how: str, error: type[BaseException], reason: str
) -> None:
    ended: list[str] = []

    async def wait(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    async def fail() -> None:
        if how == "fails":
            raise GroupFailedError("no")

    parts = {"a": fail(), "b": wait("b"), "c": wait("c")}
    task = asyncio.create_task(together(parts, 0.02 if how == "is late" else 5))
    if how == "is cancelled":
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(error, match=reason):
        await task
    assert ended == ["b", "c"]


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


async def test_seats_can_be_closed_twice() -> None:
    seats = Seats(place_of(1))
    seats.close()
    seats.close()
    assert seats.leader.cancelled()
    assert seats.previous.cancelled()
