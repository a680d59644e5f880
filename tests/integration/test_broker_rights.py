"""Every role's password against a real broker: what JetStream answers to it, and what it can make others believe."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, RePublish, StreamConfig

from shared.ids import WorkerId
from shared.messages.plan import PLAN_KEY, PlannedWorker, PreparePlan, RestoreInstance
from shared.subjects import Subjects
from shared.transport.buckets import keep_buckets, make_buckets, open_bucket
from shared.transport.bus import BusTimeoutError, Endpoint, KeyValue, KvEntry, Message, NoBucketError, ServiceInfo
from shared.transport.nats_bus import NatsBus
from shared.transport.nats_client import round_trip
from shared.transport.nats_config import new_passwords
from shared.transport.nats_roles import BrokerRole, inbox_prefix
from shared.transport.nats_server import EmbeddedNats
from shared.transport.nats_service import QUEUE_GROUP
from shared.wire import WireError, decode_json, encode_json
from tests.support.broker import Seen, listen
from tests.support.ports import free_port
from tests.support.raw_nats import RawNats
from tests.support.waiting import until

SUBJECTS = Subjects()
VIEW, PLAN, OWNERS = SUBJECTS.buckets()
WORKER_PLAN = SUBJECTS.plan(WorkerId("w0"))
INFO = ServiceInfo("sluice-worker", "1.0.0", "reads plans", {}, "w0")
READS = ("STREAM.INFO", "STREAM.MSG.GET")
"""Of a bucket that a role reads."""
ANSWERED = {
    BrokerRole.WORKER: set(),
    BrokerRole.MONITOR: {f"STREAM.INFO.KV_{VIEW}", *(f"{verb}.KV_{PLAN}" for verb in READS)},
    BrokerRole.PLANNER: {f"{verb}.KV_{bucket}" for verb in READS for bucket in (VIEW, PLAN)},
    BrokerRole.DISPATCHER: {f"{verb}.KV_{bucket}" for verb in READS for bucket in (VIEW, PLAN, OWNERS)},
    BrokerRole.OPERATOR: {f"{verb}.KV_{bucket}" for verb in READS for bucket in (VIEW, PLAN, OWNERS)},
    BrokerRole.SETUP: {f"STREAM.{verb}.KV_{bucket}" for verb in ("INFO", "CREATE") for bucket in (VIEW, PLAN, OWNERS)},
}
"""All that JetStream answers."""
WRITTEN = {BrokerRole.MONITOR: {VIEW}, BrokerRole.PLANNER: {PLAN}, BrokerRole.DISPATCHER: {OWNERS}}
OF_A_STREAM = """
    STREAM.CREATE STREAM.UPDATE STREAM.INFO STREAM.DELETE STREAM.PURGE STREAM.SNAPSHOT STREAM.RESTORE STREAM.MSG.GET
    STREAM.MSG.DELETE STREAM.PEER.REMOVE STREAM.LEADER.STEPDOWN DIRECT.GET CONSUMER.CREATE CONSUMER.NAMES CONSUMER.LIST
""".split()  # noqa: SIM905  (a list of words is read more easily so)
OF_A_CONSUMER = """
    CONSUMER.CREATE CONSUMER.DURABLE.CREATE CONSUMER.INFO CONSUMER.DELETE CONSUMER.PAUSE CONSUMER.RESET CONSUMER.UNPIN
    CONSUMER.MSG.NEXT CONSUMER.LEADER.STEPDOWN
""".split()  # noqa: SIM905
OF_THE_SERVER = """
    INFO STREAM.NAMES STREAM.LIST STREAM.TEMPLATE.NAMES META.LEADER.STEPDOWN SERVER.REMOVE SERVER.STREAM.MOVE
    ACCOUNT.PURGE.$G ACCOUNT.STREAM.MOVE.$G.s ACCOUNT.STREAM.CANCEL_MOVE.$G.s
""".split()  # noqa: SIM905
STREAMS = (*(f"KV_{bucket}" for bucket in (VIEW, PLAN, OWNERS)), "KV_anything", "OBJ_anything", "mine")


def verbs() -> Iterator[str]:
    """Every subject of `$JS.API`, for each bucket and for a stream of the attacker's own."""
    yield from OF_THE_SERVER
    for stream in STREAMS:
        yield from (f"{verb}.{stream}" for verb in OF_A_STREAM)
        yield from (f"{verb}.{stream}.c" for verb in OF_A_CONSUMER)
        yield f"CONSUMER.CREATE.{stream}.c.$KV.{stream.removeprefix('KV_')}.>"
        yield f"DIRECT.GET.{stream}.$KV.{stream.removeprefix('KV_')}.cluster"


@dataclass
class Guarded:
    """A broker with the roles' users and, once `made`, the buckets of the cluster."""

    url: str
    passwords: dict[BrokerRole, str]

    def login(self, role: BrokerRole) -> dict[str, Any]:
        return {
            "name": role.value,
            "inbox_prefix": inbox_prefix(role, "x"),
            "credentials": (role.value, self.passwords[role]),
        }

    @asynccontextmanager
    async def bus(self, role: BrokerRole) -> AsyncIterator[NatsBus]:
        """The role's bus, as its process has it; a refusal ends nothing here."""
        bus = await NatsBus.connect(self.url, **self.login(role), on_fatal=lambda _error: None)
        try:
            yield bus
        finally:
            await bus.close()

    async def make(self) -> None:
        async with self.bus(BrokerRole.SETUP) as bus:
            await make_buckets(bus, SUBJECTS)

    @asynccontextmanager
    async def client(self, role: BrokerRole) -> AsyncIterator[tuple[Client, list[str]]]:
        """What an attacker has who knows the role's password, and what the broker refuses it."""
        refused, client = list[str](), Client()

        async def note(error: Exception) -> None:
            refused.append(str(error))

        password = self.passwords[role]
        await client.connect(
            self.url, user=role, password=password, inbox_prefix=inbox_prefix(role, "x"), error_cb=note
        )
        try:
            yield client, refused
        finally:
            await client.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    passwords = new_passwords()
    with EmbeddedNats() as server:
        yield Guarded(server.start(tmp_path_factory.mktemp("nats"), passwords=passwords), passwords)


@pytest.mark.parametrize("role", list(BrokerRole))
async def test_of_the_api_a_role_is_refused_all_but_what_it_needs(guarded: Guarded, role: BrokerRole) -> None:
    """One question per verb, without waiting: the broker deals with them in order, and says which it refuses."""
    await guarded.make()
    async with guarded.client(role) as (client, refused):
        asked = [f"$JS.API.{verb}" for verb in verbs()]
        for subject in asked:
            await client.publish(subject, b"", reply=WORKER_PLAN)
        await round_trip(client)
        assert len(asked) == len(set(asked)) > 150
        taken = {subject for subject in asked if not any(f'publish to "{subject.lower()}"' in one for one in refused)}
        assert taken == {f"$JS.API.{verb}" for verb in ANSWERED[role]}


@pytest.mark.parametrize("role", list(BrokerRole))
async def test_what_a_role_may_ask_is_answered(guarded: Guarded, role: BrokerRole) -> None:
    await guarded.make()
    async with guarded.bus(role) as bus:
        for verb in ANSWERED[role]:
            answer = json.loads(await bus.request(f"$JS.API.{verb}", b'{"seq":1}', timeout_s=5.0))
            assert answer["type"].startswith("io.nats.jetstream.api.v1.stream_")
        assert bus.stats.refused == 0


@pytest.mark.parametrize("role", list(BrokerRole))
async def test_a_role_writes_its_own_bucket_and_speaks_in_no_other_name(guarded: Guarded, role: BrokerRole) -> None:
    writes = {f"$KV.{bucket}.k" for bucket in WRITTEN.get(role, ())}
    wrong = {f"$KV.{bucket}.k" for bucket in (VIEW, PLAN, OWNERS, "anything")} - writes
    wrong |= {f"_INBOX.{other}.x.AbCd" for other in BrokerRole} | {"_INBOX.AbCd", "_R_.AbCd"}
    wrong |= {"$JS.ACK.KV_x.c.1.1.1.0.0", "$JS.FC.KV_x.c.x", "$JS.EVENT.ADVISORY.API", "$JS.SNAPSHOT.ACK.x.y"}
    wrong |= {"$JS.hub.API.STREAM.NAMES", "$O.files.C.x", "$O.files.M.x", "$JSC.R.x", "$SYS.REQ.SERVER.PING"}
    wrong |= {"$SYS.REQ.ACCOUNT.PING.CONNZ", "$SYS.REQ.USER.INFO", "$SYS.ACCOUNT.$G.CONNECT", "$NRG.x", "$GNR.x"}
    if role is not BrokerRole.OPERATOR:
        wrong |= {"$SRV.PING", "$SRV.INFO.sluice-planner", f"$SRV.STATS.sluice-{role}.x"}
    if role is not BrokerRole.PLANNER:
        wrong |= {WORKER_PLAN}
    async with guarded.client(role) as (client, refused):
        for subject in (*sorted(wrong), *sorted(writes)):
            await client.publish(subject, b"{}")
        await round_trip(client)
        assert {one.rpartition(' "')[0] for one in refused} == {"nats: permissions violation for publish to"}
        assert len(refused) == len(wrong)
        refused.clear()
        heard = {f"_INBOX.{other}.>" for other in BrokerRole if other not in (role, BrokerRole.OPERATOR)}
        heard |= {">", "*.>", "$JS.>", "$JS.API.>", "$JS.ACK.>", "$SYS.>", "$KV.>", "$O.>", f"$KV.{PLAN}x.>"}
        heard |= {"$SRV.PING.sluice-nobody"} if role is not BrokerRole.OPERATOR else set()
        for subject in sorted(heard):
            await client.subscribe(subject, cb=_ignore)
        await round_trip(client)
        names = {one.partition('subscription to "')[2].rstrip('"') for one in refused}
        assert names == {subject.lower() for subject in heard}


async def _ignore(_msg: Msg) -> None:
    return


async def test_an_operator_s_tools_get_and_hear_what_is_stored(guarded: Guarded) -> None:
    """As `nats kv get` and `nats sub` ask: the bucket's description, then the message in an envelope."""
    await guarded.make()
    async with guarded.client(BrokerRole.OPERATOR) as (tool, refused), guarded.bus(BrokerRole.MONITOR) as monitor:
        heard = Seen[Msg]()

        async def hear(msg: Msg) -> None:
            heard(msg)

        await tool.subscribe(f"$KV.{VIEW}.>", cb=hear)
        await tool.subscribe("sluice.default.>", cb=hear)
        await round_trip(tool)
        await (await monitor.key_value(VIEW)).put("cluster", b"{}")
        await monitor.publish(SUBJECTS.view(), b"{}")
        bucket = await JetStreamContext(tool).key_value(VIEW)
        assert (await bucket.get("cluster")).value == b"{}"
        assert [msg.subject for msg in await heard.wait(2)] == [f"$KV.{VIEW}.cluster", SUBJECTS.view()]
        assert refused == []


# forged plans

STEP = RestoreInstance(worker=PlannedWorker(worker_id=WorkerId("w0"), held=(0, 4)))
FORGED = encode_json(PreparePlan(epoch=99, plan_id=99, step=STEP))


class PlanReader:
    """Does with orders what a worker does first: reads them."""

    def __init__(self) -> None:
        self.obeyed: list[bytes] = []
        self.num_refused = 0

    async def answer(self, message: Message) -> bytes:
        try:
            decode_json(message.data, PreparePlan)
        except WireError:
            self.num_refused += 1
            raise
        self.obeyed.append(message.data)
        return b"{}"


@asynccontextmanager
async def plan_reader(bus: NatsBus) -> AsyncIterator[PlanReader]:
    reader = PlanReader()
    service = await bus.serve(INFO, [Endpoint("plan", WORKER_PLAN, reader.answer)])
    await bus.flush()
    try:
        yield reader
    finally:
        await service.close()


@pytest.mark.parametrize("role", [role for role in BrokerRole if role not in (BrokerRole.PLANNER, BrokerRole.SETUP)])
async def test_a_forged_plan_is_obeyed_from_nobody_but_the_planner(guarded: Guarded, role: BrokerRole) -> None:
    """Written into a bucket of the attacker's own, then brought to a worker by all that delivers out of a stream."""
    await guarded.make()
    bucket = next(iter(WRITTEN.get(role, {OWNERS})))
    key = f"$KV.{bucket}.forged"
    async with (
        guarded.bus(BrokerRole.WORKER) as worker,
        plan_reader(worker) as reader,
        guarded.client(role) as (attacker, refused),
        guarded.bus(BrokerRole.PLANNER) as planner,
    ):
        config = {"deliver_subject": WORKER_PLAN, "deliver_group": QUEUE_GROUP, "ack_policy": "none"}
        consumer = {"stream_name": f"KV_{bucket}", "config": config}
        stream = {"name": f"KV_{bucket}", "subjects": [f"$KV.{bucket}.>"], "storage": "file", "max_msgs_per_subject": 1}
        republished = {**stream, "republish": {"src": ">", "dest": WORKER_PLAN}}
        own = {**republished, "name": "mine", "subjects": ["mine"]}
        traced = {"Nats-Trace-Dest": WORKER_PLAN}
        await attacker.publish(WORKER_PLAN, FORGED)
        await attacker.publish(f"$JS.API.CONSUMER.CREATE.KV_{bucket}", json.dumps(consumer).encode())
        await attacker.publish(f"$JS.API.CONSUMER.CREATE.KV_{bucket}.c.{key}", json.dumps(consumer).encode())
        await attacker.publish(f"$JS.API.STREAM.UPDATE.KV_{bucket}", json.dumps(republished).encode())
        await attacker.publish("$JS.API.STREAM.CREATE.mine", json.dumps(own).encode())
        for reply in ("", WORKER_PLAN):
            await attacker.publish(key, FORGED, reply=reply, headers=traced)
        await attacker.publish(f"$JS.API.DIRECT.GET.KV_{bucket}.{key}", b"", reply=WORKER_PLAN)
        await attacker.publish(f"$JS.API.DIRECT.GET.KV_{bucket}", b'{"seq":1}', reply=WORKER_PLAN)
        read = json.dumps({"last_by_subj": key}).encode()
        await attacker.publish(f"$JS.API.STREAM.MSG.GET.KV_{bucket}", read, reply=WORKER_PLAN)
        await attacker.publish(SUBJECTS.submit(WorkerId("w0")), FORGED, reply=WORKER_PLAN)
        await round_trip(attacker)
        assert len(refused) >= 8
        await planner.request(WORKER_PLAN, FORGED, timeout_s=5.0)
        assert reader.obeyed == [FORGED], "the planner's, and no other"


async def test_what_comes_out_of_a_stream_is_dropped_and_counted_for_listeners_endpoints_and_answers(
    tmp_path: Path,
) -> None:
    """At a broker without users, where an attacker may do everything with streams: three ways onto three subjects.

    8, not 9: inboxes are listened to by wildcard, and nats-server brings what consumers deliver to literal ones only.
    """
    news, asked = Seen[Message](), Seen[Message]()
    with EmbeddedNats() as server:
        url = server.start(tmp_path)
        bus, other, attacker = await NatsBus.connect(url, name="w"), await NatsBus.connect(url, name="o"), Client()
        await attacker.connect(url)
        async with plan_reader(bus) as reader:
            await listen(bus, "news", news)
            await listen(other, "slow", asked)
            asking = asyncio.create_task(bus.request("slow", b"", timeout_s=15.0))
            targets = ("news", WORKER_PLAN, (await asked.wait(1))[0].reply)
            for number, target in enumerate(targets):
                await deliver_from_a_stream(attacker, f"S{number}", target)
            await until(lambda: bus.stats.strays == 8)
            assert (news.items, reader.obeyed, reader.num_refused, asking.done()) == ([], [], 0, False)
            await other.publish(targets[2], b"the true answer")
            assert await asking == b"the true answer"
            await other.publish("news", b"the true news")
            assert [message.data for message in await news.wait(1)] == [b"the true news"]
        await asyncio.gather(attacker.close(), bus.close(), other.close())


async def deliver_from_a_stream(attacker: Client, stream: str, target: str) -> None:
    """Have the broker say the forged plan on the target in its three ways."""
    js = JetStreamContext(attacker)
    republish = RePublish(src=f"{stream}.again", dest=target)
    await js.add_stream(StreamConfig(name=stream, subjects=[f"{stream}.>"], republish=republish, allow_direct=True))
    await js.publish(f"{stream}.once", FORGED)
    once = ConsumerConfig(deliver_subject=target, ack_policy=AckPolicy.NONE, filter_subject=f"{stream}.once")
    once.deliver_group = QUEUE_GROUP if target == WORKER_PLAN else None  # as endpoints listen
    await js.add_consumer(stream, once)
    await attacker.publish(f"$JS.API.DIRECT.GET.{stream}", b'{"seq":1}', reply=target)
    await js.publish(f"{stream}.again", FORGED)


async def test_a_message_that_no_client_can_read_is_dropped_and_costs_no_connection(guarded: Guarded) -> None:
    """Bytes that are no text in a subject or in headers: nats-py alone would read nothing more after them."""
    heard = Seen[Message]()
    async with guarded.bus(BrokerRole.MONITOR) as monitor:
        await listen(monitor, SUBJECTS.all_reports(), heard)
        password = guarded.passwords[BrokerRole.WORKER]
        with RawNats(guarded.url.replace("://", f"://worker:{password}@")) as raw:
            raw.send(b"PUB sluice.default.worker.\xff\xfe.report 2\r\n{}\r\n")
            for head in (b"NATS/1.0", b"NATS/1.0 5\xff3 \xff\r\n\r\n", b"NATS/1.0 \xff\r\nA: \xff\r\n\r\n"):
                sizes = f"{len(head)} {len(head) + 2}".encode()
                raw.send(b"HPUB sluice.default.worker.w0.report " + sizes + b"\r\n" + head + b"{}\r\n")
            raw.publish(SUBJECTS.report(WorkerId("w0")), b"sound")
            raw.settle()
            assert raw.errors == []
        await until(lambda: any(message.data == b"sound" for message in heard.items))
        assert monitor.stats.strays >= 3
        assert (monitor.stats.disconnects, monitor.stats.reconnects) == (0, 0)


# who makes buckets


async def test_a_service_waits_for_its_bucket_and_says_how_it_comes_to_be_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passwords = new_passwords()
    with EmbeddedNats() as server:
        guarded = Guarded(server.start(tmp_path, passwords=passwords), passwords)
        async with guarded.bus(BrokerRole.PLANNER) as planner:
            with pytest.raises(NoBucketError, match=r"bucket 'sluice_default_plan' is not there.*`sluice nats-setup`"):
                await planner.key_value(PLAN)
            opening = asyncio.create_task(open_bucket(planner, PLAN))
            await until(lambda: "waiting_for_bucket" in capsys.readouterr().err)
            await guarded.make()
            bucket = await opening
            revision = await bucket.put(PLAN_KEY, b"1")
            assert await bucket.get(PLAN_KEY) == KvEntry(PLAN_KEY, b"1", revision)
            assert planner.stats.refused == 0


async def test_a_broker_that_lost_its_disk_gets_its_buckets_again_from_the_set_up_user(tmp_path: Path) -> None:
    passwords, changes = new_passwords(), Seen[KvEntry]()
    server = EmbeddedNats()
    guarded = Guarded(server.start(tmp_path / "one", port=free_port(), passwords=passwords), passwords)
    try:
        async with guarded.bus(BrokerRole.PLANNER) as planner, guarded.bus(BrokerRole.SETUP) as setup:
            keeping = asyncio.create_task(keep_buckets(setup, SUBJECTS))
            bucket = await open_bucket(planner, PLAN)
            await bucket.watch(PLAN_KEY, changes)
            for number in range(3):
                await bucket.put(PLAN_KEY, b"%d" % number)
            await until(lambda: changes.items[-1:] == [KvEntry(PLAN_KEY, b"2", 3)])
            server.stop()
            server.start(tmp_path / "two", port=int(guarded.url.rpartition(":")[2]), passwords=passwords)
            await until(lambda: planner.stats.reconnects == 1)
            assert await _put_when_it_can(bucket) == 1
            await until(lambda: changes.items[-1] == KvEntry(PLAN_KEY, b"new", 1))
            keeping.cancel()
            await asyncio.wait([keeping])
    finally:
        server.stop()


async def _put_when_it_can(bucket: KeyValue) -> int:
    async with asyncio.timeout(30):
        while True:
            try:
                return await bucket.put(PLAN_KEY, b"new")
            except (NoBucketError, BusTimeoutError):
                await asyncio.sleep(0.1)
