"""Connections: how many there may be, in all and per address, and that idle ones cost nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from services.dispatcher.http import connection
from services.dispatcher.http.connection import MAX_BEHIND
from services.dispatcher.http.doorway import MAX_VISITORS
from tests.support.dispatchers import Running, Serve, texts_of
from tests.support.raw_http import chat_bytes, check_error, connect, exchange, status_of
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

GET = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
LIMIT_S = 20.0
NUM_IDLE = 300
TEXT = "Hello world!" * 20


@asynccontextmanager
async def idle_connections(running: Running, count: int) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Hold connections on which one request has been answered."""
    writers = []
    try:
        for _ in range(count):
            reader, writer = await connect(running.url)
            writers.append(writer)
            writer.write(GET)
            assert b" 200 " in await reader.readuntil(b"}")
        yield writers
    finally:
        for writer in writers:
            writer.close()


async def until_open(running: Running, count: int) -> None:
    await until(lambda: running.front.doorway.num_open == count)


async def test_one_connection_too_many_of_an_address_is_told_so_and_room_is_room_again(serve: Serve) -> None:
    async with serve(max_connections_per_address=3) as running:
        async with idle_connections(running, 3) as writers:
            reader, writer = await connect(running.url)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert check_error(status_of(head), json.loads(body)) == (429, "too_many_connections", None)
            assert b"x-request-id: req_" in head
            writer.close()
            writers.pop().close()
            await until_open(running, 2)
            async with idle_connections(running, 1):
                await until_open(running, 3)
        await until_open(running, 0)
        samples = {sample.name: sample.value for sample in await running.samples()}
        assert (samples["sluice:connections_open"], samples["sluice:connections_refused_total"]) == (1, 1)


async def test_one_connection_too_many_in_all_is_a_503(serve: Serve) -> None:
    async with serve(max_connections=2) as running, idle_connections(running, 2):
        reader, writer = await connect(running.url)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert check_error(status_of(head), json.loads(body)) == (503, "too_many_connections", None)
        writer.close()


@pytest.mark.parametrize(
    ("limits", "status"), [({"max_connections": 2}, 503), ({"max_connections_per_address": 2}, 429)]
)
async def test_a_full_server_answers_probes_and_nothing_else(serve: Serve, limits: dict[str, int], status: int) -> None:
    """Each over a connection of its own, which is closed then; it takes nobody's place."""
    async with serve(**limits) as running, idle_connections(running, 2):
        for probe in ("/live", "/ready", "/health", "/metrics", "/live?x=1"):
            reader, writer = await connect(running.url)
            writer.write(GET.replace(b"/live", probe.encode()) * 2)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200"), probe
            assert answer.count(b"HTTP/1.1") == 1, probe
            writer.close()
        for other in (GET.replace(b"/live", b"/v1/models"), GET.replace(b"/live", b"/liv"), chat_bytes(), GET[:9], b""):
            head, body = await exchange(running.url, other)
            assert check_error(status_of(head), body) == (status, "too_many_connections", None), other
        assert (running.front.doorway.num_open, running.front.doorway.num_refused) == (2, 5)
        assert running.worker.submits == []


async def test_visitors_that_say_nothing_make_room_for_a_probe(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that came first go first, each with its refusal; the others could stay for longer than this test takes."""
    monkeypatch.setattr(connection, "VISIT_S", 600.0)
    async with serve(max_connections=1) as running, idle_connections(running, 1):
        silent = [await connect(running.url) for _ in range(MAX_VISITORS + 3)]
        head, _ = await exchange(running.url, GET)
        assert status_of(head) == 200
        async with asyncio.timeout(LIMIT_S):
            assert [status_of(await reader.read()) for reader, _ in silent[:4]] == [503] * 4
        _, writer = silent[-1]
        writer.write(GET)
        assert status_of(await silent[-1][0].read()) == 200
        for _, writer in silent:
            writer.close()


BEHIND = {
    "few": GET * 3,
    "60": GET * 60,
    "hundreds": GET * 800,
    "a large body": chat_bytes(padding="x" * 2_000_000),
    "what is no HTTP": b"x" * 2_000_000,
    "chunks that do not end": b"POST /live HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"10000\r\n%b\r\n" % (b" " * 0x10000) * 30,
}


def _shut_down(writer: asyncio.StreamWriter) -> None:
    writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


@pytest.mark.parametrize("leave", [asyncio.StreamWriter.close, _shut_down, _reset])
@pytest.mark.parametrize("upgrade", [b"", b"Connection: upgrade\r\nUpgrade: websocket\r\n"])
@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
@pytest.mark.parametrize("streamed", [False, True])
async def test_closing_cancels_whatever_stands_behind_the_request(
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
    streamed: bool,
    behind: bytes,
    upgrade: bytes,
    leave: Callable[[asyncio.StreamWriter], None],
) -> None:
    """At once, not only when the server ends the connection itself; also where the request asks for an upgrade, of
    which nothing comes: what follows is then looked at later."""
    monkeypatch.setattr(connection, "LINGER_S", 600.0)
    _, writer = await connect(running.url)
    writer.write(chat_bytes(stream=streamed).replace(b"Host: localhost\r\n", b"Host: localhost\r\n" + upgrade))
    await running.begun()
    writer.write(behind)
    leave(writer)
    await running.until_nothing_is_left()
    await until_open(running, 0)
    writer.close()


@pytest.mark.parametrize("behind", [BEHIND["60"], BEHIND["a large body"]], ids=["60", "a large body"])
async def test_a_connection_with_too_much_behind_a_request_is_closed_and_the_request_cancelled(
    running: Running, behind: bytes
) -> None:
    _, writer = await connect(running.url)
    writer.write(chat_bytes(stream=True) + behind)
    await running.begun()
    async with asyncio.timeout(LIMIT_S):
        await until_open(running, 0)
    await running.until_nothing_is_left()
    writer.close()


@pytest.mark.parametrize("count", [1, MAX_BEHIND + 1, MAX_BEHIND + 2, 60, 800])
async def test_quick_requests_one_behind_the_other_are_answered_in_order_up_to_the_limit(
    running: Running, count: int
) -> None:
    reader, writer = await connect(running.url)
    writer.write(b"".join(GET.replace(b"Host", b"x-request-id: r%d\r\nHost" % index) for index in range(count)))
    for index in range(min(count, MAX_BEHIND + 1)):
        head = await reader.readuntil(b"\r\n\r\n")
        assert (status_of(head), b"x-request-id: r%d\r\n" % index in head) == (200, True)
        await reader.readuntil(b"}")
    if count > MAX_BEHIND + 1:
        async with asyncio.timeout(LIMIT_S):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert check_error(status_of(head), json.loads(body)) == (429, "too_many_in_flight", None)
    else:
        writer.write(GET)
        assert status_of(await reader.readuntil(b"}")) == 200
    writer.close()


async def test_large_bodies_may_come_one_after_the_other(serve: Serve) -> None:
    """Each while nothing is under way; only what comes behind a request is bounded."""
    async with serve(TEXT) as running:
        reader, writer = await connect(running.url)
        for _ in range(3):
            writer.write(chat_bytes(padding="x" * 2_000_000))
            head = await reader.readuntil(b"\r\n\r\n")
            assert status_of(head) == 200
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            assert TEXT in (await reader.readexactly(length)).decode()
        writer.close()


@pytest.mark.slow
async def test_hundreds_of_idle_connections_do_not_keep_a_stream_from_its_text(serve: Serve) -> None:
    """They are there before it and after it, and closed when they have been idle for long enough."""
    async with serve(TEXT, idle_limit_s=6.0) as running, idle_connections(running, NUM_IDLE):
        began_s = time.monotonic()
        events = await running.stream()
        assert running.front.doorway.num_open >= NUM_IDLE or time.monotonic() > began_s + 3.0
        assert texts_of(events) == [TEXT]
        await until(lambda: running.front.doorway.num_open <= 1, 30)  # the test's own client's may be left


async def test_a_server_that_stops_leaves_no_connection(serve: Serve) -> None:
    async with serve() as running:
        doorway = running.front.doorway
        connections = [await connect(running.url) for _ in range(20)]
        await until_open(running, 20)
        connections[0][1].write(GET[:7])
    for reader, writer in connections:
        assert await reader.read() == b""
        writer.close()
    assert doorway.num_open == 0
