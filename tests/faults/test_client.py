"""Clients leave, do not read, or only hold connections (rows 19, 20, 33), beside others who must not notice."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.faults.conftest import SMALL_STEPS
from tests.support.fault_checks import StagedCluster
from tests.support.fault_cluster import Cluster, Shape, until
from tests.support.fault_proxy import FaultProxy
from tests.support.fault_streams import Ask, all_read, long_prompts, mixed_load, reading, seen
from tests.support.seeds import first_of

pytestmark = pytest.mark.timeout(180)

WRITE_LIMIT_S = 2.0
STAGES = ("connected", "headers", "half a body", "asked", "mid-prompt", "first token", "mid-stream", "end")
SHAPE = Shape(env={**SMALL_STEPS, "SLUICE_DISPATCHER_WRITE_LIMIT_S": str(WRITE_LIMIT_S)})
"""It is quick to cut those who do not read."""


def head(asked: Ask, body: bytes) -> bytes:
    return (
        f"POST {asked.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()


async def leave_at(cluster: Cluster, moment: str, asked: Ask, *, politely: bool) -> None:
    """Ask, and be gone at this moment: with a FIN, or with a RST."""
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.http_ports["dispatcher-0"])
    body = json.dumps(asked.body).encode()
    whole = head(asked, body) + body
    sent = {"connected": 0, "headers": len(whole) - len(body), "half a body": len(whole) - len(body) // 2}
    writer.write(whole[: sent.get(moment, len(whole))])
    await writer.drain()
    if moment == "mid-prompt":
        await asyncio.sleep(0.05)
    elif moment in ("first token", "mid-stream", "end"):
        count = {"first token": 1, "mid-stream": 20}.get(moment, 10**6)
        while count > 0:
            line = await reader.readline()
            count = 0 if line in (b"data: [DONE]\n", b"") else count - line.startswith(b"data: ")
    if politely:
        writer.close()
    else:
        writer.transport.abort()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@pytest.mark.parametrize("politely", first_of([False, True], in_ci=1))
async def test_a_client_that_leaves_at_any_moment_leaves_nothing(cluster: StagedCluster, *, politely: bool) -> None:
    """Row 19."""
    load, leaving = mixed_load(), [*mixed_load()[:4], *long_prompts(4)]
    async with cluster.unchanged(3, load):
        goodbyes = [leave_at(cluster, moment, asked, politely=politely) for moment in STAGES for asked in leaving]
        await asyncio.gather(*goodbyes)


async def test_a_cancelled_answer_frees_its_blocks_at_once(cluster: StagedCluster) -> None:
    """Row 19: the work stops within a step, which reports show half a second later."""
    async with reading(cluster, mixed_load()) as readers:
        await seen(readers, 5)
    await cluster.assert_nothing_left(5)


async def test_a_client_that_does_not_read_is_cut_alone(cluster: StagedCluster) -> None:
    """Row 20: it takes nothing for so long that its buffers are full, and longer."""
    asked = next(asked for asked in mixed_load() if asked.name == "boat")
    wide = Ask("wide", asked.path, {**asked.body, "top_logprobs": 20, "n": 8, "max_tokens": 900})
    body = json.dumps(wide.body).encode()
    async with cluster.unchanged(3):
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.http_ports["dispatcher-0"], limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(head(wide, body) + body)

        def was_cut() -> bool:
            return any("slow" in event.get("event", "") for event in cluster.events("dispatcher-0"))

        await until(was_cut, "the reader was cut", WRITE_LIMIT_S + 40)
        writer.transport.abort()
        del reader


async def test_idle_connections_and_slow_headers_do_not_matter(cluster: StagedCluster) -> None:
    """Row 33: 300 connections that say nothing, and 50 that send a header byte by byte."""
    port = cluster.http_ports["dispatcher-0"]
    async with cluster.unchanged() as readers:
        idle = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(350)))
        slow = [writer for _, writer in idle[:50]]
        try:
            for byte in b"GET /live HTTP/1.1\r\nX-Slow: yes":
                for writer in slow:
                    writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
            assert (await cluster.get("/live"))[0] == 200
            await all_read(readers)
        finally:
            for _, writer in idle:
                writer.transport.abort()


async def test_a_slow_link_to_one_client_slows_only_its_own_stream(cluster: StagedCluster) -> None:
    """Row 20: a reader behind a slow link gets all of its text, and the others theirs at once."""
    port = cluster.http_ports["dispatcher-0"]
    with FaultProxy(port) as proxy:
        async with (
            cluster.unchanged() as readers,
            reading(cluster, mixed_load()[:1], url=f"http://127.0.0.1:{proxy.port}") as (slow,),
        ):
            proxy.slow(delay_s=0.2, bytes_per_s=8_000)
            await all_read(readers)
            assert not slow.task.done(), "the others did not wait for it"
            proxy.heal()
            await slow.task
            assert slow.told.texts == cluster.expected["fox"]["texts"]
