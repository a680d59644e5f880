"""Connections: how many there may be, in all and per address, and that idle ones cost nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.dispatchers import Running, Serve, texts_of
from tests.support.raw_http import check_error, connect, status_of
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

GET = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
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
