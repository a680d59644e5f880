"""Every service can be found and measured by the NATS tools: `nats micro list|info|stats`.

The shapes are those of the published schemas io.nats.micro.v1.{ping,info,stats}_response, of which the tools check
more than the schemas demand: a service without a description, or with metadata that are not strings, is not shown.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from shared.checksum import seal
from shared.messages.base import PROTOCOL_VERSION
from shared.messages.plan import Plan
from shared.transport.bus import Bus, Endpoint, Message, NoRespondersError, ServiceInfo
from shared.transport.nats_service import ServiceError
from shared.wire import decode, encode
from tests.support.broker import WAIT_S, Net, Seen, contract, listen

INFO = ServiceInfo("sluice-worker", "0.1.0-rc.1", "Runs sequences", {"model": "demo", "host": "h0"}, "w-0")
IDENTITY = {"name": "sluice-worker", "id": "w-0", "version": "0.1.0-rc.1", "metadata": {"model": "demo", "host": "h0"}}
ENDPOINT = {"name": "submit", "subject": "sluice.test.submit", "queue_group": "q"}
RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z\Z")


async def respond(message: Message) -> bytes:
    await asyncio.sleep(0.01)
    if message.data == b"bad":
        raise ValueError("no")
    return b"ok"


async def start(bus: Bus, info: ServiceInfo = INFO) -> None:
    await bus.serve(info, [Endpoint("submit", ENDPOINT["subject"], respond, metadata={"format": "msgpack"})])
    await bus.flush()


async def ask(bus: Bus, subject: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(await bus.request(subject, b"", timeout_s=WAIT_S))
    return answer


@contract
async def test_a_service_answers_ping_info_and_stats_to_all_by_name_and_by_id(net: Net) -> None:
    server, tool = await net.connect("s"), await net.connect("t")
    await start(server)
    for suffix in ("", ".sluice-worker", ".sluice-worker.w-0"):
        assert await ask(tool, f"$SRV.PING{suffix}") == {"type": "io.nats.micro.v1.ping_response", **IDENTITY}
        assert await ask(tool, f"$SRV.INFO{suffix}") == {
            "type": "io.nats.micro.v1.info_response",
            **IDENTITY,
            "description": "Runs sequences",
            "endpoints": [{**ENDPOINT, "metadata": {"format": "msgpack"}}],
        }
        stats = await ask(tool, f"$SRV.STATS{suffix}")
        started = stats.pop("started")
        assert RFC3339.match(started)
        assert datetime.fromisoformat(started).tzinfo is not None
        assert stats == {
            "type": "io.nats.micro.v1.stats_response",
            **IDENTITY,
            "endpoints": [
                {
                    **ENDPOINT,
                    "num_requests": 0,
                    "num_errors": 0,
                    "last_error": "",
                    "processing_time": 0,
                    "average_processing_time": 0,
                    "data": {"running": 0, "waiting": 0},
                }
            ],
        }


@contract
async def test_stats_count_requests_errors_and_nanoseconds(net: Net) -> None:
    """Three requests of 10 ms each: 30 ms in all, 10 ms on average, at least; at most what the test took."""
    server, tool = await net.connect("s"), await net.connect("t")
    await start(server)
    now = asyncio.get_running_loop().time  # may be simulated, as the bus's is
    started_s = now()
    for data in (b"", b"bad", b""):
        await asyncio.gather(tool.request(ENDPOINT["subject"], data, timeout_s=WAIT_S), return_exceptions=True)
    (figures,) = (await ask(tool, "$SRV.STATS.sluice-worker"))["endpoints"]
    assert (figures["num_requests"], figures["num_errors"]) == (3, 1)
    assert figures["last_error"] == "500: ValueError: no"
    assert isinstance(figures["processing_time"], int)
    assert 29_000_000 <= figures["processing_time"] <= (now() - started_s + 0.01) * 1e9
    assert figures["average_processing_time"] == figures["processing_time"] // 3


@contract
async def test_another_name_or_id_is_answered_by_nobody(net: Net) -> None:
    server, tool = await net.connect("s"), await net.connect("t")
    await start(server)
    for suffix in (".sluice-planner", ".sluice-worker.w-1", ".SLUICE-WORKER"):
        with pytest.raises(NoRespondersError):
            await ask(tool, f"$SRV.PING{suffix}")


@contract
async def test_every_instance_answers_and_one_gets_each_request(net: Net) -> None:
    server, tool, answers = await net.connect("s"), await net.connect("t"), Seen[Message]()
    await start(server)
    await start(await net.connect("s2"), replace(INFO, instance_id="w-1"))
    await listen(tool, "_INBOX.tool", answers)
    await tool.publish("$SRV.PING.sluice-worker", b"", reply="_INBOX.tool")
    assert sorted(json.loads(m.data)["id"] for m in await answers.wait(2)) == ["w-0", "w-1"]
    for _ in range(10):
        await tool.request(ENDPOINT["subject"], b"", timeout_s=WAIT_S)
    counts = [(await ask(tool, f"$SRV.STATS.sluice-worker.w-{n}"))["endpoints"][0]["num_requests"] for n in (0, 1)]
    assert sum(counts) == 10


@contract
async def test_answers_go_to_inboxes_and_nowhere_else(net: Net) -> None:
    """Who asks names where the answer goes: on any subject it would be the service that speaks there."""
    server, tool, heard = await net.connect("s"), await net.connect("t"), Seen[Message]()
    await start(server)
    await listen(tool, "sluice.default.worker.*.plan", heard)
    for subject in (ENDPOINT["subject"], "$SRV.INFO.sluice-worker"):
        await tool.publish(subject, b"", reply="sluice.default.worker.w-9.plan")
    (figures,) = (await ask(tool, "$SRV.STATS.sluice-worker"))["endpoints"]
    assert (figures["num_requests"], figures["num_errors"]) == (1, 1)
    assert figures["last_error"] == "400: 'sluice.default.worker.w-9.plan' is no inbox for an answer"
    assert heard.items == []


@contract
async def test_a_service_that_the_tools_would_hide_is_refused(net: Net) -> None:
    bus = await net.connect()
    numbers: Any = {"port": 8000}
    bad = [
        replace(INFO, name="sluice worker"),
        replace(INFO, name=""),
        replace(INFO, version="1.0"),
        replace(INFO, version="v1.0.0"),
        replace(INFO, description=""),
        replace(INFO, metadata=numbers),
        replace(INFO, instance_id="a.b"),
        replace(INFO, instance_id=""),
    ]
    for info in bad:
        with pytest.raises(ValueError, match="service"):
            await bus.serve(info, [])
    for endpoint in (Endpoint("a b", "x", respond), Endpoint("a", "x", respond, max_in_flight=0)):
        with pytest.raises(ValueError, match="endpoint"):
            await bus.serve(INFO, [endpoint])
    with pytest.raises(NoRespondersError):
        await ask(bus, "$SRV.PING")


@contract
async def test_a_message_that_is_none_is_answered_with_400_and_counted_without_its_contents(net: Net) -> None:
    async def read(message: Message) -> bytes:
        return encode(decode(message.data, Plan))

    server, tool = await net.connect("s"), await net.connect("t")
    await server.serve(INFO, [Endpoint("submit", ENDPOINT["subject"], read)])
    await server.flush()
    bad = {
        b"secret": "checksum",
        encode(Plan(epoch=1))[:-1]: "checksum",
        seal(b"secret"): "not msgpack",
        _of_version(PROTOCOL_VERSION + 1): f"speaks protocol {PROTOCOL_VERSION + 1}",
    }
    for data, reason in bad.items():
        with pytest.raises(ServiceError, match=reason) as caught:
            await tool.request(ENDPOINT["subject"], data, timeout_s=WAIT_S)
        assert caught.value.code == "400"
        assert "secret" not in str(caught.value)
    assert await tool.request(ENDPOINT["subject"], encode(Plan(epoch=1)), timeout_s=WAIT_S)
    (figures,) = (await ask(tool, "$SRV.STATS.sluice-worker"))["endpoints"]
    assert (figures["num_requests"], figures["num_errors"]) == (len(bad) + 1, len(bad))
    assert server.stats.handler_errors == 0, "the sender is wrong, not the handler"


def _of_version(version: int) -> bytes:
    return encode(Plan(epoch=1, version=version))
