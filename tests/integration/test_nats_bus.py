"""The live bus where its broker fails: what the contract, which runs on a healthy one, cannot show."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.errors import StartupError
from shared.ids import WorkerId
from shared.process.log import flush_log
from shared.subjects import Subjects
from shared.transport import nats_bus
from shared.transport.buckets import open_bucket
from shared.transport.bus import BusClosedError, BusError, BusTimeoutError, Endpoint, KvEntry, Message, ServiceInfo
from shared.transport.nats_bus import NatsBus, NoBrokerError, NotPermittedError
from shared.transport.nats_config import new_passwords
from shared.transport.nats_roles import BrokerRole, inbox_prefix
from shared.transport.nats_server import EmbeddedNats
from shared.transport.nats_watch import NatsWatch
from tests.support.broker import Seen, listen, open_descriptors
from tests.support.leaks import whats_open
from tests.support.ports import free_port
from tests.support.waiting import until

LIMIT_S = 15.0


class Broker:
    """A broker that can be killed, frozen and started again on its port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = EmbeddedNats()
        self.url = self.server.start(folder, port=free_port())

    def signal(self, number: signal.Signals) -> None:
        assert self.server.pid is not None
        os.kill(self.server.pid, number)

    def freeze(self) -> None:
        """Stop it, and return when it has stopped: the signal alone takes effect a little later."""
        self.signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.server.pid}/task")
        while {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()} != {"T"}:
            time.sleep(0.001)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.server.stop()

    def restart(self) -> None:
        self.server.start(self.folder, port=int(self.url.rpartition(":")[2]))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    made = Broker(tmp_path)
    yield made
    if made.server.pid is not None:
        made.signal(signal.SIGCONT)
    made.server.stop()


async def echo(message: Message) -> bytes:
    return message.data


async def test_after_a_killed_broker_everything_goes_on(broker: Broker) -> None:
    """Subscriptions, services, buckets and watches are there again; a bucket's values survived."""
    server, client = await NatsBus.connect(broker.url, name="s"), await NatsBus.connect(broker.url, name="c")
    seen, changes = Seen[Message](), Seen[KvEntry]()
    await listen(server, "news", seen)
    await server.serve(ServiceInfo("sluice-test", "1.0.0", "test", {}, "t"), [Endpoint("echo", "echo", echo)])
    bucket, reader = await client.key_value("plans", history=10), await server.key_value("plans")
    await bucket.put("epoch", b"1")
    await reader.watch(">", changes)
    broker.kill()
    await until(lambda: not server.connected and not client.connected)
    await client.publish("news", b"while it is down")
    broker.restart()
    await until(lambda: server.connected and client.connected)
    await asyncio.gather(server.flush(), client.flush())
    await client.publish("news", b"after")
    await seen.wait(1)
    await until(lambda: seen.items[-1].data == b"after")
    assert await client.request("echo", b"x", timeout_s=5.0) == b"x"
    assert await bucket.get("epoch") == KvEntry("epoch", b"1", 1), "what was stored is there"
    revision = await bucket.put("epoch", b"2")
    await bucket.delete("epoch")
    assert [(e.key, e.value, e.revision) for e in await changes.wait(3)] == [
        ("epoch", b"1", 1),
        ("epoch", b"2", revision),
        ("epoch", None, revision + 1),
    ]
    assert (server.stats.disconnects, server.stats.reconnects) == (1, 1)
    await asyncio.gather(server.close(), client.close())


async def test_a_watch_sees_what_was_written_while_it_was_away(broker: Broker) -> None:
    """The reader's connection is cut, the writer's is not: after it is back, every change has been seen, in order."""
    writer, reader = await NatsBus.connect(broker.url, name="w"), await NatsBus.connect(broker.url, name="r")
    bucket, changes = await writer.key_value("plans", history=10), Seen[KvEntry]()
    await (await reader.key_value("plans")).watch(">", changes)
    await bucket.put("k", b"0")
    await changes.wait(1)
    transport = reader._client._transport
    assert transport is not None
    transport.close()
    for number in range(1, 6):
        await bucket.put("k", b"%d" % number)
    entries = await changes.wait(6)
    assert [e.value for e in entries] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert [e.revision for e in entries] == [1, 2, 3, 4, 5, 6]
    await asyncio.gather(writer.close(), reader.close())


async def test_a_broker_that_lost_its_disk_gets_its_buckets_again(broker: Broker) -> None:
    bus, changes = await NatsBus.connect(broker.url, name="b"), Seen[KvEntry]()
    bucket = await bus.key_value("plans")
    for number in range(5):
        await bucket.put("k", b"%d" % number)
    await bucket.watch(">", changes)
    broker.kill()
    broker.folder /= "another"
    broker.restart()
    await until(lambda: bus.stats.reconnects == 1)
    assert await bucket.put("k", b"new") == 1
    await until(lambda: changes.items[-1].value == b"new")
    await bus.close()


async def test_a_frozen_broker_is_noticed_within_seconds_and_nothing_hangs(broker: Broker) -> None:
    """Pings every second, two may be missing. Closing does not wait for it for ever."""
    bus = await NatsBus.connect(broker.url, name="b")
    closing = await NatsBus.connect(broker.url, name="c")
    broker.freeze()
    started_s = time.monotonic()
    with pytest.raises(BusTimeoutError):
        await bus.request("anything", b"", timeout_s=0.05)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nats_bus, "CLOSE_TIMEOUT_S", 0.2)
        patch.setattr(nats_bus, "FLUSH_TIMEOUT_S", 0.2)
        with pytest.raises(BusTimeoutError):
            await closing.flush()
        await closing.close()
    await until(lambda: not bus.connected)
    assert time.monotonic() - started_s < 10.0, "about 3 s on an idle machine, 4 minutes with default settings"
    broker.signal(signal.SIGCONT)
    await until(lambda: bus.connected)
    await bus.flush()
    await bus.close()


async def test_whoever_publishes_into_a_full_buffer_can_be_cancelled(broker: Broker) -> None:
    """Also by the message that fills it: nats-py forgets a cancellation while it waits for room."""
    bus, began_s = await NatsBus.connect(broker.url, name="b"), [math.inf]
    broker.freeze()

    async def publish() -> None:
        while True:
            began_s[0] = time.monotonic()
            await bus.publish("anything", bytes(900_000))
            began_s[0] = math.inf
            await asyncio.sleep(0)

    publishing = asyncio.create_task(publish())
    await until(lambda: time.monotonic() - began_s[0] > 0.02)
    publishing.cancel()
    await asyncio.wait([publishing], timeout=5.0)
    assert publishing.cancelled()
    broker.signal(signal.SIGCONT)
    await bus.close()


async def test_a_connect_that_is_cancelled_leaves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        before, tasks = whats_open(), asyncio.all_tasks()
        url = f"nats://127.0.0.1:{silent.getsockname()[1]}"
        connecting = asyncio.create_task(NatsBus.connect(url, name="b"))
        await until(lambda: whats_open() != before)
        connecting.cancel()
        await asyncio.wait([connecting])
        await until(lambda: whats_open() == before)
        assert asyncio.all_tasks() == tasks


async def test_a_watch_that_is_cancelled_as_it_begins_is_over(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    bus, start = await NatsBus.connect(broker.url, name="b"), NatsWatch.start
    bucket = await bus.key_value("plans")

    async def start_and_be_cancelled(watch: NatsWatch) -> None:
        await start(watch)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    monkeypatch.setattr(NatsWatch, "start", start_and_be_cancelled)
    watching = asyncio.create_task(bucket.watch(">", lambda _: None))
    await asyncio.wait([watching])
    assert watching.cancelled()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("watch ")]
    await bus.close()


async def test_a_late_answer_to_a_given_up_flush_does_no_harm(broker: Broker) -> None:
    bus, seen = await NatsBus.connect(broker.url, name="b"), Seen[Message]()
    await listen(bus, "news", seen)
    broker.freeze()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await bus.flush()
    broker.signal(signal.SIGCONT)
    await bus.publish("news", b"x")
    await seen.wait(1)
    await bus.close()
    assert bus.stats.disconnects == 0


async def test_what_does_not_fit_the_buffer_while_disconnected_is_dropped_and_counted(broker: Broker) -> None:
    bus = await NatsBus.connect(broker.url, name="b")
    broker.kill()
    await until(lambda: not bus.connected)
    for _ in range(5):
        await bus.publish("news", bytes(1_000_000))
    assert bus.stats.dropped_out == 3, "two of a million fit into 2 MiB"
    with pytest.raises(BusTimeoutError):
        await bus.request("news", bytes(1_000_000), timeout_s=5.0)
    await bus.close()


async def test_a_connection_that_fails_says_where_and_what_to_do() -> None:
    before = open_descriptors()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"nats://user:secret@127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(NoBrokerError) as caught:
            await NatsBus.connect(url, name="b", connect_timeout_s=2.0)
    text = str(caught.value)
    assert isinstance(caught.value, StartupError)
    assert isinstance(caught.value, BusClosedError)
    assert "secret" not in text
    assert text.startswith("sluice: no nats-server answers at nats://127.0.0.1:")
    assert "(connection refused)" in text
    assert text.endswith("set NATS_URL to where one runs; more: sluice explain broker_unreachable")
    assert open_descriptors() == before


async def test_a_peer_that_never_speaks_is_given_up() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(NoBrokerError):
            await NatsBus.connect(f"nats://127.0.0.1:{silent.getsockname()[1]}", name="b", connect_timeout_s=0.3)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A broker with users, and the password of the worker, who may do little."""
    passwords = new_passwords()
    with EmbeddedNats() as server:
        yield server.start(tmp_path, passwords=passwords), passwords[BrokerRole.WORKER]


async def test_credentials_are_used_and_refused_ones_are_an_error_at_the_start(guarded: tuple[str, str]) -> None:
    url, password = guarded
    with_login = url.replace("nats://", f"nats://worker:{password}@")
    for where, credentials in ((url, ("worker", password)), (with_login, None)):
        bus = await NatsBus.connect(where, name="w", credentials=credentials, inbox_prefix="_INBOX.worker")
        await bus.flush()
        await bus.close()
    for credentials in (("worker", "bad"), None):
        with pytest.raises(NoBrokerError, match="authorization violation"):
            await NatsBus.connect(url, name="w", credentials=credentials, connect_timeout_s=2.0)


async def test_a_refused_subject_is_reported_as_fatal(guarded: tuple[str, str]) -> None:
    """Nothing else would tell: publish raises nothing."""
    (url, password), errors = guarded, list[BusError]()
    login: dict[str, Any] = {"credentials": ("worker", password), "inbox_prefix": "_INBOX.worker"}
    bus = await NatsBus.connect(url, name="w", **login, on_fatal=errors.append)
    await bus.publish(Subjects().report(WorkerId("w")), b"")
    await bus.flush()
    assert errors == []
    await bus.publish("plans.apply", b"")
    await bus.subscribe("_INBOX.>", lambda _message: None)
    await until(lambda: len(errors) == 2)
    assert all(isinstance(error, NotPermittedError) for error in errors)
    assert 'publish to "plans.apply"' in str(errors[0])
    assert bus.stats.refused == 2
    await bus.close()


async def test_an_answer_to_a_request_of_a_broken_connection_is_late_and_not_fatal(tmp_path: Path) -> None:
    """The broker's leave to answer goes with the connection; a worker that was cut off must not end because of it."""
    passwords, errors = new_passwords(), list[BusError]()
    asked, release = asyncio.Event(), asyncio.Event()

    async def slow(_message: Message) -> bytes:
        asked.set()
        await release.wait()
        return b"ok"

    def login(role: BrokerRole) -> dict[str, Any]:
        return {"name": role, "inbox_prefix": inbox_prefix(role, "x"), "credentials": (role, passwords[role])}

    with EmbeddedNats() as server:
        url = server.start(tmp_path, port=free_port(), passwords=passwords)
        worker = await NatsBus.connect(url, **login(BrokerRole.WORKER), on_fatal=errors.append)
        dispatcher = await NatsBus.connect(url, **login(BrokerRole.DISPATCHER), on_fatal=errors.append)
        subject = Subjects().submit(WorkerId("w"))
        await worker.serve(ServiceInfo("sluice-worker", "1.0.0", "a", {}, "w"), [Endpoint("submit", subject, slow)])
        await worker.flush()
        asking = asyncio.ensure_future(dispatcher.request(subject, b"", timeout_s=LIMIT_S))
        await asked.wait()
        server.stop()
        server.start(tmp_path, port=int(url.rpartition(":")[2]), passwords=passwords)
        await until(lambda: worker.stats.reconnects == 1 and dispatcher.connected)
        release.set()
        await until(lambda: worker.stats.late_answers == 1)
        assert (errors, worker.stats.refused) == ([], 0)
        assert await dispatcher.request(subject, b"", timeout_s=LIMIT_S) == b"ok", "the next answer is permitted"
        asking.cancel()
        await asyncio.wait([asking])
        await worker.close()
        await dispatcher.close()


async def test_a_broker_without_jetstream_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shared.transport import nats_config

    monkeypatch.setattr(nats_config, "_HEAD", nats_config._HEAD.partition("jetstream")[0])
    with EmbeddedNats() as server:
        bus = await NatsBus.connect(server.start(tmp_path), name="b")
        with pytest.raises(BusError, match="without JetStream"):
            await bus.key_value("plans")
        await bus.close()


async def test_who_opens_a_bucket_waits_for_a_broker_without_a_store_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broker that started on a full disk may have no store; it comes back with one when there is room."""
    from shared.transport import nats_config

    whole = nats_config._HEAD
    monkeypatch.setattr(nats_config, "_HEAD", whole.partition("jetstream")[0])
    with EmbeddedNats() as server:
        url = server.start(tmp_path)
        bus = await NatsBus.connect(url, name="b")
        opening = asyncio.create_task(open_bucket(bus, "plans"))
        told = ""

        def is_told() -> bool:
            nonlocal told
            flush_log()
            told += capsys.readouterr().err
            return "waiting_for_bucket" in told

        await until(is_told)
        assert "or its disk was full when it started" in told
        assert not opening.done()
        server.stop()
        monkeypatch.setattr(nats_config, "_HEAD", whole)
        server.start(tmp_path, port=int(url.rpartition(":")[2]))
        await (await opening).put("k", b"v")
        await bus.close()
