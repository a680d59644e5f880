"""What every bus promises about messages, requests and closing."""

from __future__ import annotations

import asyncio

import pytest

from shared.transport import nats_service
from shared.transport.bus import (
    Bus,
    BusClosedError,
    BusTimeoutError,
    Endpoint,
    Message,
    MessageTooLargeError,
    NoRespondersError,
    Responder,
    ServiceInfo,
)
from shared.transport.nats_service import ServiceError
from tests.support.broker import WAIT_S, Net, Seen, contract, listen

INFO = ServiceInfo("sluice-test", "1.2.3", "A service for tests", {"role": "test"}, "t1")


async def serve(bus: Bus, responder: Responder, subject: str = "svc.do", max_in_flight: int = 64) -> None:
    await bus.serve(INFO, [Endpoint("do", subject, responder, max_in_flight)])
    await bus.flush()


class Gate:
    """A responder that gives back what it is asked; whoever asks `slow` waits until it opens."""

    def __init__(self) -> None:
        self.started, self.opened = asyncio.Event(), asyncio.Event()

    async def __call__(self, message: Message) -> bytes:
        self.started.set()
        if message.data == b"slow":
            await self.opened.wait()
        return message.data

    def open_soon(self) -> None:
        asyncio.get_running_loop().call_later(0.02, self.opened.set)


async def heard_all(reader: Bus, writer: Bus) -> None:
    """Return when the reader has been given all that the writer has published."""
    marks: Seen[Message] = Seen()
    await listen(reader, "mark", marks)
    await writer.publish("mark", b"")
    await marks.wait(1)


# --- publish and subscribe ---


@contract
async def test_messages_of_one_publisher_arrive_in_order(net: Net) -> None:
    first, second, reader = await net.connect("p1"), await net.connect("p2"), await net.connect("r")
    seen: Seen[Message] = Seen()
    await listen(reader, "order.>", seen)
    for number in range(300):
        await first.publish("order.first", b"%d" % number)
        await second.publish("order.second", b"%d" % number)
    await seen.wait(600)
    for subject in ("order.first", "order.second"):
        assert [int(m.data) for m in seen.items if m.subject == subject] == list(range(300))


@contract
async def test_wildcards_match_one_token_or_the_rest(net: Net) -> None:
    expected = {
        "w.a": ["w.a"],
        "w.*": ["w.a", "w.b"],
        "w.*.x": ["w.a.x"],
        "w.a.>": ["w.a.x", "w.a.x.y"],
        "w.>": ["w.a", "w.b", "w.a.x", "w.a.x.y"],
        "*.a": ["w.a"],
        "*.*.*": ["w.a.x"],
    }
    bus = await net.connect()
    seen: dict[str, Seen[Message]] = {pattern: Seen() for pattern in expected}
    for pattern, handler in seen.items():
        await bus.subscribe(pattern, handler)
    for subject in ("w.a", "w.b", "w.a.x", "w.a.x.y", "v"):
        await bus.publish(subject, b"")
    await heard_all(bus, bus)
    assert {pattern: [m.subject for m in handler.items] for pattern, handler in seen.items()} == expected


@contract
async def test_every_subscriber_gets_the_message_the_publisher_too(net: Net) -> None:
    one, two = await net.connect("one"), await net.connect("two")
    mine, other, again = Seen[Message](), Seen[Message](), Seen[Message]()
    await listen(one, "news", mine)
    await listen(two, "news", other)
    await listen(two, "news", again)
    await one.publish("news", b"x", reply="answers.here")
    for seen in (mine, other, again):
        assert await seen.wait(1) == [Message("news", b"x", "answers.here")]


@contract
async def test_one_member_of_each_queue_group_gets_the_message(net: Net) -> None:
    publisher, reader = await net.connect("p"), await net.connect("r")
    group_a = [Seen[Message](), Seen[Message]()]
    group_b, plain = Seen[Message](), Seen[Message]()
    for member in group_a:
        await reader.subscribe("jobs", member, queue="a")
    await reader.subscribe("jobs", group_b, queue="b")
    await listen(reader, "jobs", plain)
    for number in range(100):
        await publisher.publish("jobs", b"%d" % number)
    await heard_all(reader, publisher)
    everything = list(range(100))
    assert sorted(int(m.data) for member in group_a for m in member.items) == everything
    assert all(member.items for member in group_a)
    assert [int(m.data) for m in group_b.items] == everything
    assert [int(m.data) for m in plain.items] == everything


@contract
async def test_a_raising_handler_is_counted_and_gets_the_next_message(net: Net) -> None:
    bus, seen = await net.connect(), Seen[Message]()

    def handler(message: Message) -> None:
        seen(message)
        if message.data == b"bad":
            raise ValueError("not good")

    await listen(bus, "raise", handler)
    for data in (b"bad", b"good"):
        await bus.publish("raise", data)
    assert [m.data for m in await seen.wait(2)] == [b"bad", b"good"]
    assert bus.stats.handler_errors == 1


@contract
async def test_messages_over_the_pending_limit_are_dropped_and_counted(net: Net) -> None:
    """A burst of 500 into a queue of 10: the first ones arrive, the rest is counted, the subscription goes on."""
    bus, writer, seen = await net.connect(), await net.connect("w"), Seen[Message]()
    await listen(bus, "flood", seen, max_pending=10)
    for number in range(500):
        await writer.publish("flood", b"%d" % number)
    await heard_all(bus, writer)
    assert bus.stats.dropped_in > 0
    assert len(seen.items) + bus.stats.dropped_in == 500
    assert [int(m.data) for m in seen.items][:10] == list(range(10))
    before = len(seen.items)
    await writer.publish("flood", b"after")
    assert (await seen.wait(before + 1))[-1].data == b"after"


@contract
async def test_a_closed_subscription_gets_nothing_more(net: Net) -> None:
    bus, seen = await net.connect(), Seen[Message]()
    subscription = await listen(bus, "stop", seen)
    await bus.publish("stop", b"1")
    await seen.wait(1)
    await subscription.close()
    await subscription.close()
    await bus.publish("stop", b"2")
    await heard_all(bus, bus)
    assert len(seen.items) == 1


@contract
async def test_subjects_that_are_none_are_refused(net: Net) -> None:
    bus = await net.connect()
    for subject in ("", "a..b", ".a", "a.", "a b", "a.*", "a.>", "a\r\nPUB b 0", "a.b*"):
        with pytest.raises(ValueError, match="subject"):
            await bus.publish(subject, b"")
        with pytest.raises(ValueError, match="subject"):
            await bus.request(subject, b"", timeout_s=1.0)
    for pattern in ("", "a..b", "a.>.b", "a b", "a.b*", "a.x>"):
        with pytest.raises(ValueError, match="subscribed"):
            await bus.subscribe(pattern, lambda _message: None)


@contract
async def test_flush_returns_when_the_broker_has_everything(net: Net) -> None:
    """A megabyte waits in the buffer; after the flush, a subscription of another connection sees none of it."""
    writer, late, seen = await net.connect("w"), await net.connect("l"), Seen[Message]()
    for _ in range(20):
        await writer.publish("early", bytes(50_000))
    await writer.flush()
    await listen(late, "early", seen)
    await heard_all(late, writer)
    assert seen.items == []


# --- payloads ---


@contract
async def test_a_payload_at_the_limit_arrives_and_one_over_it_is_refused(net: Net) -> None:
    bus, seen = await net.connect(), Seen[Message]()
    await listen(bus, "big", seen)
    await bus.publish("big", bytes(bus.max_payload_bytes))
    assert len((await seen.wait(1))[0].data) == bus.max_payload_bytes == 1024 * 1024
    too_large = bytes(bus.max_payload_bytes + 1)
    with pytest.raises(MessageTooLargeError) as caught:
        await bus.publish("big", too_large)
    assert (caught.value.size_bytes, caught.value.max_bytes) == (1_048_577, 1_048_576)
    with pytest.raises(MessageTooLargeError):
        await bus.request("big", too_large, timeout_s=1.0)
    assert bus.stats.too_large == 2


@contract
async def test_an_answer_over_the_limit_reaches_the_requester_as_an_error(net: Net) -> None:
    bus = await net.connect()

    async def responder(_message: Message) -> bytes:
        return bytes(bus.max_payload_bytes + 1)

    await serve(bus, responder)
    with pytest.raises(ServiceError, match="over the limit"):
        await bus.request("svc.do", b"", timeout_s=WAIT_S)


# --- requests ---


@contract
async def test_each_requester_gets_its_own_answer(net: Net) -> None:
    server, client = await net.connect("s"), await net.connect("c")
    await serve(server, Gate())
    asked = [b"%d" % number for number in range(100)]
    answers = await asyncio.gather(*(client.request("svc.do", data, timeout_s=WAIT_S) for data in asked))
    assert answers == asked


@contract
async def test_a_handler_may_answer_on_the_reply_subject(net: Net) -> None:
    server, client, asked = await net.connect("s"), await net.connect("c"), Seen[Message]()
    await listen(server, "plain", asked)
    waiting = asyncio.create_task(client.request("plain", b"?", timeout_s=WAIT_S))
    await server.publish((await asked.wait(1))[0].reply, b"!")
    await server.publish(asked.items[0].reply, b"a second answer goes nowhere")
    assert await waiting == b"!"


@contract
async def test_nobody_serving_is_an_error_at_once(net: Net) -> None:
    """The timeout is far longer than the suite's limit for one wait."""
    bus = await net.connect()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(NoRespondersError) as caught:
            await bus.request("nobody.here", b"", timeout_s=1000.0)
    assert caught.value.subject == "nobody.here"


@contract
async def test_no_responders_do_not_call_the_handler_of_a_reply_subject(net: Net) -> None:
    bus, answers = await net.connect(), Seen[Message]()
    await listen(bus, "my.answers", answers)
    await bus.publish("nobody.here", b"", reply="my.answers")
    await bus.flush()
    await heard_all(bus, bus)
    assert answers.items == []


@contract
async def test_no_answer_in_time_is_a_timeout_and_the_late_answer_is_lost(net: Net) -> None:
    server, client, gate = await net.connect("s"), await net.connect("c"), Gate()
    await serve(server, gate)
    with pytest.raises(BusTimeoutError) as caught:
        await client.request("svc.do", b"slow", timeout_s=0.05)
    assert (caught.value.subject, caught.value.timeout_s) == ("svc.do", 0.05)
    gate.opened.set()
    assert await client.request("svc.do", b"next", timeout_s=WAIT_S) == b"next"


@contract
async def test_a_cancelled_request_leaves_the_bus_usable(net: Net) -> None:
    server, client, gate = await net.connect("s"), await net.connect("c"), Gate()
    await serve(server, gate)
    waiting = asyncio.create_task(client.request("svc.do", b"slow", timeout_s=WAIT_S))
    await gate.started.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.open_soon()
    assert await client.request("svc.do", b"next", timeout_s=WAIT_S) == b"next"


# --- responders ---


@contract
async def test_no_more_responders_run_than_allowed_and_the_rest_wait_in_order(net: Net) -> None:
    server, client = await net.connect("s"), await net.connect("c")
    begun: list[bytes] = []
    running = peak = 0

    async def responder(message: Message) -> bytes:
        nonlocal running, peak
        begun.append(message.data)
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.01)
        running -= 1
        return message.data

    await serve(server, responder, max_in_flight=3)
    asked = [b"%d" % number for number in range(10)]
    answers = await asyncio.gather(*(client.request("svc.do", data, timeout_s=WAIT_S) for data in asked))
    assert answers == asked
    assert begun == asked
    assert peak == 3


@contract
async def test_a_slow_answer_holds_up_no_other(net: Net) -> None:
    server, client, gate = await net.connect("s"), await net.connect("c"), Gate()
    await serve(server, gate)
    slow = asyncio.create_task(client.request("svc.do", b"slow", timeout_s=WAIT_S))
    assert await client.request("svc.do", b"quick", timeout_s=WAIT_S) == b"quick"
    assert not slow.done()
    gate.opened.set()
    assert await slow == b"slow"


@contract
async def test_too_many_waiting_requests_are_refused_at_once(net: Net) -> None:
    """One may run and two may wait: of five, two are refused, whatever the timeout."""
    server, client, gate = await net.connect("s"), await net.connect("c"), Gate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nats_service, "MAX_WAITING", 2)
        await serve(server, gate, max_in_flight=1)
        asked = [asyncio.create_task(client.request("svc.do", b"slow", timeout_s=1000.0)) for _ in range(5)]
        async with asyncio.timeout(WAIT_S):
            while sum(task.done() for task in asked) < 2:
                await asyncio.wait([task for task in asked if not task.done()], return_when=asyncio.FIRST_COMPLETED)
    gate.opened.set()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    refusals = [answer for answer in answers if isinstance(answer, ServiceError)]
    assert [refusal.code for refusal in refusals] == ["503", "503"]
    assert answers.count(b"slow") == 3


@contract
async def test_a_raising_responder_is_an_error_at_the_requester(net: Net) -> None:
    server, client = await net.connect("s"), await net.connect("c")

    async def responder(message: Message) -> bytes:
        if message.data == b"bug":
            raise KeyError("no such thing\r\nX: y")
        if message.data == b"refuse":
            raise ServiceError("409", "older epoch")
        return b"fine"

    await serve(server, responder)
    with pytest.raises(ServiceError) as caught:
        await client.request("svc.do", b"bug", timeout_s=WAIT_S)
    assert caught.value.code == "500"
    assert caught.value.description.startswith("KeyError: 'no such thing")
    with pytest.raises(ServiceError) as caught:
        await client.request("svc.do", b"refuse", timeout_s=WAIT_S)
    assert (caught.value.code, caught.value.description) == ("409", "older epoch")
    assert await client.request("svc.do", b"", timeout_s=WAIT_S) == b"fine"
    assert server.stats.handler_errors == 1, "a refusal by intent is no error of the handler"


@contract
async def test_a_closed_service_is_gone_and_its_running_answer_arrives(net: Net) -> None:
    server, client, gate = await net.connect("s"), await net.connect("c"), Gate()
    service = await server.serve(INFO, [Endpoint("do", "svc.do", gate)])
    await server.flush()
    waiting = asyncio.create_task(client.request("svc.do", b"slow", timeout_s=WAIT_S))
    await gate.started.wait()
    gate.open_soon()
    await service.close()
    await service.close()
    assert await waiting == b"slow"
    await server.flush()
    for subject in ("svc.do", "$SRV.PING.sluice-test.t1"):
        with pytest.raises(NoRespondersError):
            await client.request(subject, b"", timeout_s=WAIT_S)


# --- closing ---


@contract
async def test_a_closed_bus_refuses_everything(net: Net) -> None:
    bus = await net.connect()
    bucket = await bus.key_value(net.unique("closed"))
    before = bus.connected
    await bus.close()
    await bus.close()
    assert (before, bus.connected) == (True, False)
    attempts = [
        lambda: bus.publish("a", b""),
        lambda: bus.request("a", b"", timeout_s=1.0),
        lambda: bus.subscribe("a", lambda _message: None),
        lambda: bus.serve(INFO, []),
        lambda: bus.key_value("a"),
        lambda: bus.flush(),
        lambda: bucket.put("a", b""),
    ]
    for attempt in attempts:
        with pytest.raises(BusClosedError):
            await attempt()


@contract
async def test_closing_ends_requests_that_wait(net: Net) -> None:
    server, client, asked = await net.connect("s"), await net.connect("c"), Seen[Message]()
    await listen(server, "silent", asked)
    waiting = asyncio.create_task(client.request("silent", b"", timeout_s=1000.0))
    await asked.wait(1)
    await client.close()
    with pytest.raises(BusClosedError):
        await waiting


@contract
async def test_closing_sends_what_was_published_and_finishes_what_runs(net: Net) -> None:
    server, client, seen, gate = await net.connect("s"), await net.connect("c"), Seen[Message](), Gate()
    await serve(server, gate)
    await listen(client, "last", seen)
    waiting = asyncio.create_task(client.request("svc.do", b"slow", timeout_s=WAIT_S))
    await gate.started.wait()
    gate.open_soon()
    for number in range(50):
        await server.publish("last", b"%d" % number)
    await server.close()
    assert await waiting == b"slow"
    assert [int(m.data) for m in await seen.wait(50)] == list(range(50))


@contract
async def test_closing_cancels_a_responder_that_does_not_end(net: Net) -> None:
    server, client = await net.connect("s"), await net.connect("c")
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def responder(_message: Message) -> bytes:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nats_service, "CLOSE_GRACE_S", 0.02)
        await serve(server, responder)
        waiting = asyncio.create_task(client.request("svc.do", b"", timeout_s=1000.0))
        await started.wait()
        await server.close()
    assert cancelled.is_set()
    with pytest.raises(ServiceError, match="closing"):
        await waiting


@contract
async def test_a_responder_may_close_its_own_bus(net: Net) -> None:
    server, client = await net.connect("s"), await net.connect("c")
    closed = asyncio.Event()

    async def responder(_message: Message) -> bytes:
        await server.close()
        closed.set()
        return b""

    await serve(server, responder)
    with pytest.raises(BusTimeoutError):
        await client.request("svc.do", b"", timeout_s=0.1)
    async with asyncio.timeout(WAIT_S):
        await closed.wait()
    assert not server.connected
