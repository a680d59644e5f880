"""Links over real sockets, by every road: both ends in one process, and two processes, of which one dies or stops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from services.worker.sockets import send_message
from services.worker.transfer import greeting
from services.worker.transfer.agent import MoveAgent, MoveRequest
from services.worker.transfer.fd_link import FdLink
from services.worker.transfer.hello import Expected, Handshake, Identity
from services.worker.transfer.link import (
    LinkBrokenError,
    LinkClosedError,
    LinkParams,
    LinkRefusedError,
    TrafficClass,
)
from services.worker.transfer.socket_link import SocketLink
from shared.ids import Incarnation, RequestId, WorkerId
from shared.layers import LayerRange
from tests.support.fake_memory import FakeMemory
from tests.support.link_child import BULK, CHILD, ECHO, NEWS, PARENT, body_of, identity
from tests.support.link_ends import LIMIT_S, End, two_links
from tests.support.link_roads import ROADS, Road, open_socket

IDLE = LinkParams(ping_s=0.1, dead_after_s=2.0)
WATCHFUL = LinkParams(ping_s=0.2, dead_after_s=1.0)


@pytest.fixture(params=ROADS)
def road(request: pytest.FixtureRequest) -> Iterator[Road]:
    made = Road(request.param)
    yield made
    made.close()


@asynccontextmanager
async def child_process(
    road: Road, zone_bytes: int, params: LinkParams | None = None, dies_at: int = -1
) -> AsyncIterator[tuple[End, asyncio.subprocess.Process, SocketLink]]:
    """Run the other end in a process of its own.

    Args:
        road: between the two.
        zone_bytes: of the zone in which it lands bulk.
        params: of this end.
        dies_at: number of the bulk at whose arrival it kills itself; -1: it does not.
    """
    made: asyncio.Queue[SocketLink] = asyncio.Queue()
    listener, address = await road.listen(identity(PARENT, params), made.put_nowait)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.link_child", address, str(zone_bytes), str(dies_at)),
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            link = await made.get()
        link.inbox(ECHO)
        end = End(link)
        assert body_of(await end.next()) == b"ready"
        yield end, child, link
        await link.close()
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
        await listener.close()


async def test_bytes_of_all_classes_arrive_in_place_and_in_order(road: Road) -> None:
    random = np.random.default_rng(0)
    async with two_links(road) as (one, other):
        a, b = End(one), End(other)
        memory = np.zeros((6, 50_000), dtype=np.uint8)
        data = road.take(300_000).reshape(6, 50_000)
        data[:] = random.integers(0, 256, (6, 50_000), dtype=np.uint8)
        b.link.post(9, 0, [memory[row].data for row in (4, 0, 2)])
        sending = a.link.send(TrafficClass.KV, 9, 0, [data[row].data for row in (4, 0, 2)])
        big = random.bytes(3_000_000)
        a.link.send(TrafficClass.ACTIVATION, 5, 1, [big, b"", big[:10]])
        a.link.send(TrafficClass.CONTROL, 5, 2, [b""])
        got = {arrival.traffic: arrival for arrival in [await b.next() for _ in range(3)]}
        assert body_of(got[TrafficClass.ACTIVATION]) == big + big[:10]
        assert got[TrafficClass.CONTROL].size == 0
        kv = got[TrafficClass.KV]
        assert kv.landed
        assert await sending.done == kv.checksum == zlib.crc32(data[[4, 0, 2]].tobytes())
        assert (memory[[0, 2, 4]] == data[[0, 2, 4]]).all()
        assert not memory[[1, 3, 5]].any()
        if isinstance(one, FdLink):
            assert one.num_lent_bytes == (150_000 if road.kind == "fd" else 0), (
                "all bulk goes by where it lies, or none"
            )
        # and the other way, more than all windows together, so that credit has to come back
        for number in range(100):
            b.link.send(TrafficClass.ACTIVATION, 1, number, [big[: 1_000_000 + number]])
        for number in range(100):
            arrival = await a.next()
            assert (arrival.number, arrival.size) == (number, 1_000_000 + number)
        assert not a.ended.done()


async def test_a_withdrawn_zone_is_not_written_any_more(road: Road) -> None:
    """Whenever the withdrawal comes, what the zone holds afterwards stays."""
    async with two_links(road) as (one, other):
        a, b = End(one), End(other)
        data = road.put(b"x" * 8_000_000)
        for number in range(20):
            zone = bytearray(len(data))
            b.link.post(1, number, [memoryview(zone)])
            a.link.send(TrafficClass.KV, 1, number, [data])
            for _ in range(number):
                await asyncio.sleep(0)
            b.link.withdraw(1)
            then = bytes(zone)
            arrival = await b.next()
            assert bytes(zone) == then
            assert then == bytes(data) or not arrival.landed  # all may be there, and not have been checked yet


async def test_activations_reach_a_thread_without_the_event_loop(road: Road) -> None:
    """The event loop is blocked while 50 activations go to another process and come back."""
    async with child_process(road, 1) as (end, _, link):
        inbox = link.inbox(ECHO)
        for number in range(50):
            data = bytes([number]) * 1_000
            link.send_from_thread(TrafficClass.ACTIVATION, ECHO, number, [data]).result(LIMIT_S)
            arrival = inbox.get(LIMIT_S)  # blocks this thread, which is the event loop's
            assert (arrival.number, body_of(arrival)) == (number, data)
        with pytest.raises(TimeoutError):
            inbox.get(0.01)
        assert not end.ended.done()


async def test_an_activation_overtakes_kv_between_processes(road: Road) -> None:
    """50 chunks of 16 MB wait; an activation comes back before the last of them has left."""
    size = 16_000_000
    async with child_process(road, size) as (end, _, link):
        chunk = road.take(size).data
        sendings = [link.send(TrafficClass.KV, BULK, number, [chunk]) for number in range(50)]
        await sendings[1].done
        link.send_from_thread(TrafficClass.ACTIVATION, ECHO, 0, [b"now"])
        arrival = await asyncio.to_thread(link.inbox(ECHO).get, LIMIT_S)
        assert body_of(arrival) == b"now"
        assert not sendings[-1].done.done()
        for number in range(50):
            news = await end.next()
            assert (news.stream, news.number) == (NEWS, number)
            assert body_of(news) == (await sendings[number].done).to_bytes(4, "little")


async def test_a_killed_process_is_noticed_at_once_and_everything_fails(road: Road) -> None:
    """It dies in the midst of 300 MB: as the third chunk arrives."""
    size = 1_000_000
    async with child_process(road, size, dies_at=2) as (end, child, link):
        chunk = road.take(size).data
        sendings = [link.send(TrafficClass.KV, BULK, number, [chunk]) for number in range(300)]
        error = await end.end()
        assert await child.wait() == -signal.SIGKILL
        assert isinstance(error, LinkBrokenError)
        assert "nothing" not in error.reason, "it was the silence that was noticed"
        assert error.peer_id == CHILD
        assert isinstance(sendings[-1].done.exception(), LinkBrokenError)
        assert all(sending.done.done() for sending in sendings)
        with pytest.raises(LinkBrokenError):
            link.send(TrafficClass.CONTROL, 0, 0, [b""])
        with pytest.raises(LinkBrokenError):
            link.inbox(ECHO).get(1.0)
        with pytest.raises(LinkBrokenError):
            link.inbox(ECHO).get(1.0)


async def test_a_process_that_stands_still_is_noticed_in_time(road: Road) -> None:
    async with child_process(road, 1, WATCHFUL) as (end, child, _):
        child.send_signal(signal.SIGSTOP)
        error = await end.end()
        assert "1 s" in error.reason
        os.kill(child.pid, signal.SIGCONT)
        async with asyncio.timeout(LIMIT_S):
            await child.wait()
        assert child.returncode == 0, "it has noticed that its link ended"


async def test_an_idle_link_lives_and_a_closed_one_says_so(road: Road) -> None:
    """Where this process has stood still meanwhile, which is a silence too, it is done once more."""
    while True:
        async with two_links(road, IDLE) as (one, other):
            a, b = End(one), End(other)
            if await longest_pause(1.25 * IDLE.dead_after_s) < IDLE.dead_after_s / 2:
                await check_idle_link(a, b)
                return


async def longest_pause(duration_s: float) -> float:
    """Sleep for so long, and return for how long this process got no turn at most, in seconds."""
    began_s = last_s = time.monotonic()
    longest_s = 0.0
    while last_s < began_s + duration_s:
        await asyncio.sleep(0.02)
        longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
    return longest_s


async def check_idle_link(a: End, b: End) -> None:
    assert a.link.is_up
    assert b.link.is_up
    waiting = b.link.send(TrafficClass.CONTROL, 1, 1, [b"last"])
    await waiting.done
    assert body_of(await a.next()) == b"last"
    await a.link.close()
    assert isinstance(await a.end(), LinkClosedError)
    assert "the peer closed it" in (await b.end()).reason


async def test_a_link_that_was_never_started_closes(road: Road) -> None:
    async with two_links(road) as (one, other):
        waiting = one.send(TrafficClass.CONTROL, 1, 1, [b""])
        await one.close()
        with pytest.raises(LinkClosedError):
            await waiting.done
        assert (await End(other).end()).reason


def damaged_header(data: bytearray) -> None:
    data[5] ^= 1


def damaged_payload(data: bytearray) -> None:
    data[-1] ^= 1


@pytest.mark.parametrize("damage", [damaged_header, damaged_payload])
async def test_damage_on_the_way_breaks_the_link(road: Road, damage: Callable[[bytearray], None]) -> None:
    """What one end writes is changed at the socket: the other end hands nothing over."""
    async with two_links(road) as (one, other):
        wire = one._sock
        write = wire.write

        def bad_write(parts: list[bytes]) -> None:
            data = bytearray(b"".join(parts))
            damage(data)
            write([data])

        wire.write = bad_write  # type: ignore[assignment,method-assign]
        a, b = End(one), End(other)
        a.link.send(TrafficClass.CONTROL, 1, 1, [b"words"])
        error = await b.end()
        assert "checksum" in error.reason or "damaged" in error.reason
        assert b.arrivals.empty()
        await a.end()


# The greeting


@pytest.mark.parametrize(
    ("change", "expected", "reason"),
    [
        ({"token": b"another cluster's token"}, Expected(PARENT), "token is not this cluster's"),
        ({}, Expected(WorkerId("somebody")), "somebody was expected, and parent answers"),
        ({}, Expected(PARENT, Incarnation(8)), "another process of parent was expected"),
        ({"worker_id": PARENT}, Expected(PARENT), "parent is this worker's own name"),
    ],
)
async def test_who_does_not_belong_is_refused_by_name(
    road: Road, change: dict[str, object], expected: Expected, reason: str
) -> None:
    made: list[SocketLink] = []
    listener, address = await road.listen(identity(PARENT), made.append)
    with pytest.raises(LinkRefusedError, match=reason):
        await road.dial(address, replace(identity(CHILD), **change), expected)  # type: ignore[arg-type]
    async with asyncio.timeout(LIMIT_S):
        while not listener.num_refused:
            await asyncio.sleep(0.01)
    assert not made
    await listener.close()


async def test_a_dialler_without_the_token_is_refused_by_the_listener(road: Road) -> None:
    """It skips the check of the listener's proof, and sends one of its own."""
    made: list[SocketLink] = []
    listener, address = await road.listen(identity(PARENT), made.append)

    sock = await open_socket(address)
    shake = Handshake(replace(identity(CHILD), token=b"another cluster's token"), is_dialler=True)
    await send_message(sock, shake.hello)
    shake.take_hello(await greeting.hear(sock))
    await greeting.hear(sock)
    await send_message(sock, shake.proof())
    with pytest.raises(LinkRefusedError, match="refuses: its token is not this cluster's"):
        shake.check_welcome(await greeting.hear(sock))
    assert not made
    sock.close()
    await listener.close()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\x04\x00\x00\x00abcd", b"", b"\x05\x00\x00\x00ab"])
async def test_strangers_at_the_port_are_turned_away_and_others_still_let_in(road: Road, said: bytes) -> None:
    made: asyncio.Queue[SocketLink] = asyncio.Queue()
    listener, address = await road.listen(identity(PARENT), made.put_nowait)
    reader, writer = await asyncio.open_connection(sock=await open_socket(address))
    writer.write(said)
    writer.write_eof()
    async with asyncio.timeout(LIMIT_S):
        with contextlib.suppress(ConnectionResetError):  # it did not read all that was said
            await reader.read()
        while not listener.num_refused:
            await asyncio.sleep(0.01)
    writer.close()
    link = await road.dial(address, identity(CHILD), Expected(PARENT))
    await link.close()
    await (await made.get()).close()
    await listener.close()


async def test_nobody_there_is_an_error_that_names_the_worker(road: Road) -> None:
    listener, address = await road.listen(identity(PARENT), lambda _: None)
    await listener.close()
    with pytest.raises(LinkBrokenError, match=f"link to parent: {re.escape(address)}"):
        await road.dial(address, identity(CHILD), Expected(PARENT))


def test_a_short_token_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        Identity(CHILD, Incarnation(1), b"short")


# Agents


async def test_agents_move_kv_over_sockets_as_they_do_in_simulation(road: Road) -> None:
    async with two_links(road) as (one, other):
        memories = [FakeMemory(np.random.default_rng(i), num_blocks=80, is_staged=i == 1) for i in range(2)]
        agents = [
            MoveAgent(name, Incarnation(7), memory, memory)
            for name, memory in zip((CHILD, PARENT), memories, strict=True)
        ]
        agents[0].attach(one)
        agents[1].attach(other)
        wanted = []
        for number in range(8):
            source, target = (0, 1) if number % 2 else (1, 0)
            name = RequestId(f"r{number}")
            blocks = memories[source].fill(name, 7)
            contents = memories[source].contents(blocks, LayerRange(1, 3))
            request = MoveRequest(name, agents[target].worker_id, LayerRange(1, 3), blocks, 1, 2)
            wanted.append((target, contents, agents[source].move(request)))
        async with asyncio.timeout(LIMIT_S):
            outcomes = [await move.done for _, _, move in wanted]
        assert all(outcome.is_committed for outcome in outcomes), outcomes
        for target, contents, move in wanted:
            _, blocks = memories[target].committed[move.spec.session_id]
            assert memories[target].contents(blocks, LayerRange(1, 3)) == contents
        for agent, memory in zip(agents, memories, strict=True):
            await agent.close()
            memory.check()
            assert not memory.pins
            assert not memory.held
