"""Connections in memory whose way to the broker is cut, in one direction or both, and a broker that hangs."""

from __future__ import annotations

import asyncio

import pytest

from shared.transport.bus import BusTimeoutError, Endpoint, KvEntry, Message, NoRespondersError, ServiceInfo
from shared.transport.memory_bus import MemoryBroker, MemoryBus

pytestmark = pytest.mark.virtual_time

INFO = ServiceInfo("sluice-test", "1.0.0", "test", {}, "t1")


def is_connected(bus: MemoryBus) -> bool:
    return bus.connected


@pytest.mark.parametrize(("out", "into"), [(True, True), (True, False), (False, True)])
async def test_a_cut_loses_messages_then_both_ends_notice_and_then_it_mends(*, out: bool, into: bool) -> None:
    broker, heard, ran = MemoryBroker(), list[bytes](), list[bytes]()

    async def note(message: Message) -> bytes:
        ran.append(message.data)
        return message.data

    server, client = broker.connect("server"), broker.connect("client")
    await server.serve(INFO, [Endpoint("echo", "echo", note)])
    await client.subscribe("news", lambda message: heard.append(message.data))
    server.link.cut(out=out, into=into)
    await server.publish("news", b"during")
    with pytest.raises(BusTimeoutError):
        await client.request("echo", b"during", timeout_s=1.0)
    assert heard == ([] if out else [b"during"])
    assert ran == ([] if into else [b"during"])
    assert is_connected(server)
    await asyncio.sleep(2.1)
    assert not is_connected(server)
    with pytest.raises(NoRespondersError):
        await client.request("echo", b"late", timeout_s=1.0)
    server.link.heal()
    await asyncio.sleep(0.19)
    assert not is_connected(server)
    await asyncio.sleep(0.02)
    assert await client.request("echo", b"after", timeout_s=1.0) == b"after"


async def test_a_cut_that_is_shorter_than_the_pings_is_not_noticed() -> None:
    broker = MemoryBroker()
    bus = broker.connect("b")
    bus.link.cut()
    await asyncio.sleep(2.5)
    bus.link.heal()
    bus.link.cut()
    await asyncio.sleep(2.5)
    assert is_connected(bus), "the first cut's clock does not run on"
    await asyncio.sleep(0.6)
    assert not is_connected(bus)


async def test_a_watch_sees_the_newest_values_after_a_cut_and_none_twice() -> None:
    broker, seen = MemoryBroker(), list[tuple[str, bytes | None]]()
    writer, watcher = broker.connect("writer"), broker.connect("watcher")
    bucket = await writer.key_value("bucket")

    def note(entry: KvEntry) -> None:
        seen.append((entry.key, entry.value))

    await (await watcher.key_value("bucket")).watch(">", note)
    await bucket.put("a", b"1")
    await asyncio.sleep(0.1)
    watcher.link.cut(out=False)
    for key, value in (("a", b"2"), ("b", b"1"), ("a", b"3")):
        await bucket.put(key, value)
    await bucket.delete("b")
    await asyncio.sleep(0.1)
    assert seen == [("a", b"1")]
    watcher.link.heal()
    await bucket.put("c", b"1")
    await asyncio.sleep(0.1)
    assert seen == [("a", b"1"), ("a", b"3"), ("b", None), ("c", b"1")]


async def test_a_write_whose_answer_is_lost_happened_and_one_that_is_lost_did_not() -> None:
    broker = MemoryBroker()
    bucket = await broker.connect("other").key_value("bucket")
    values = []
    for into in (True, False):
        bus = broker.connect("writer")
        mine = await bus.key_value("bucket")
        bus.link.cut(out=not into, into=into)
        with pytest.raises(BusTimeoutError):
            await mine.put(f"key{int(into)}", b"x")
        entry = await bucket.get(f"key{int(into)}")
        values.append(entry.value if entry is not None else None)
    assert values == [b"x", None]


async def test_a_hanging_broker_delivers_later_and_in_order() -> None:
    broker, heard = MemoryBroker(), list[bytes]()
    bus = broker.connect("b")
    await bus.subscribe("news", lambda message: heard.append(message.data))
    broker.hang()
    for number in range(3):
        await bus.publish("news", b"%d" % number)
    await asyncio.sleep(2.9)
    assert heard == []
    assert is_connected(bus)
    await asyncio.sleep(0.2)
    assert not is_connected(bus)
    broker.go_on()
    assert is_connected(bus)
    await asyncio.sleep(0.001)
    assert heard == [b"0", b"1", b"2"]


async def test_an_aborted_connection_gets_nothing_more_and_its_watches_end() -> None:
    broker, heard = MemoryBroker(), list[str]()
    bus, other = broker.connect("b"), broker.connect("other")
    await bus.subscribe("news", lambda message: heard.append(message.subject))
    bucket = await other.key_value("bucket")
    await (await bus.key_value("bucket")).watch(">", lambda entry: heard.append(entry.key))
    await other.publish("news", b"")
    await bucket.put("key", b"")
    await asyncio.sleep(0.1)
    await other.publish("news", b"on its way")
    bus.abort()
    bus.abort()
    await bucket.put("key", b"again")
    await asyncio.sleep(0.1)
    assert not broker.router.num_subscriptions("b")
    assert heard == ["news", "key"]
