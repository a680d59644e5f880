"""The bus of a whole cluster as `sluice up` starts it: what operators see, and what a hostile process may not do."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from shared.checksum import seal
from shared.ids import DispatcherId, RequestId, StreamId, WorkerId
from shared.messages.base import PROTOCOL_VERSION
from shared.messages.plan import Plan
from shared.messages.request import Submit, pack_token_ids
from shared.subjects import Subjects
from shared.token_batch import TokenBatch, stream_batch
from shared.transport.bus import BusError, KvEntry
from shared.transport.nats_bus import NatsBus
from shared.transport.nats_roles import BrokerRole, inbox_prefix
from shared.types import FinishReason, SamplingParams
from shared.wire import encode
from tests.support.broker import Seen
from tests.support.cluster import Cluster, tiny_cluster
from tests.support.processes import sluice, wait_until
from tests.support.raw_nats import RawNats
from tests.support.waiting import until

SUBJECTS = Subjects()
IDS = {"sluice-dispatcher": "dispatcher-0", "sluice-monitor": "monitor", "sluice-planner": "planner"}
IDS |= {"sluice-worker": "worker-0"}
BODY = {"prompt": "one two three", "max_tokens": 24, "temperature": 0}
OTHER_VERSION = PROTOCOL_VERSION + 1
OTHER_MAJOR = (
    b'{"version":%d,"kind":"worker_report","worker_id":"worker-9","phase":"ready","sequence_number":1}' % OTHER_VERSION
)
HOSTILE = {
    "garbage": b"\x00\xffgarbage",
    "a truncated map": encode(Plan(epoch=1))[:-3],
    "an array of 4 G elements": seal(b"\xdd\xff\xff\xff\xff"),
    "a map of 4 G pairs": seal(b"\xdf\xff\xff\xff\xff"),
    "a text of 4 GB": seal(b"\xdb\xff\xff\xff\xff"),
    "deep nesting": seal(b"\x91" * 100_000),
    "a batch of 4 G rows": seal(b"SLTB\x03\x02\x00\x00" + b"\xff" * 40),
    "json without a version": b"{}",
    "another major version": OTHER_MAJOR,
    "another major version in msgpack": encode(Plan(epoch=1, version=OTHER_VERSION)),
}
"""What arrives undamaged (sealed) must be refused by what it says."""


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with tiny_cluster() as found:
        yield found


@pytest.fixture
def operator(running: Cluster) -> Iterator[RawNats]:
    with RawNats(running.nats_url) as raw:
        yield raw


def url_of(running: Cluster, role: BrokerRole) -> str:
    """Return the URL with the role's password, as a process of that role has it in its environment."""
    name = {BrokerRole.DISPATCHER: "dispatcher", BrokerRole.WORKER: "worker-0"}.get(role, role.value)
    pairs = Path(f"/proc/{running.pids[name]}/environ").read_bytes().decode().split("\0")
    password = dict(pair.split("=", 1) for pair in pairs if "=" in pair)[f"SLUICE_{role.upper()}_NATS_PASSWORD"]
    host = running.nats_url.rpartition("@")[2]
    return f"nats://{role}:{quote(password, safe='')}@{host}"


def text(running: Cluster) -> str:
    answer: str = running.post("/v1/completions", {"model": "tiny", **BODY})["choices"][0]["text"]
    return answer


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# what operators see


@pytest.mark.parametrize("kind", ["ping", "info", "stats"])
def test_all_services_answer_the_service_protocol_to_all_by_name_and_by_id(
    running: Cluster, operator: RawNats, kind: str
) -> None:
    verb = kind.upper()
    answers = operator.ask_json(f"$SRV.{verb}", count=len(IDS))
    assert sorted(answer["name"] for answer in answers) == sorted(IDS)
    by_name = [operator.ask_json(f"$SRV.{verb}.{name}")[0] for name in IDS]
    by_id = [operator.ask_json(f"$SRV.{verb}.{name}.{instance}")[0] for name, instance in IDS.items()]
    pids = {f"sluice-{name.split('-')[0]}": str(pid) for name, pid in running.pids.items() if name != "nats"}
    for answer in (*answers, *by_name, *by_id):
        assert IDS[answer["name"]] == answer["id"]
        assert {"cluster", "host"} <= set(answer["metadata"])
        assert answer["metadata"]["pid"] == pids[answer["name"]]
        if kind != "ping":
            assert answer["endpoints"]
            assert all(endpoint["subject"].startswith("sluice.default.") for endpoint in answer["endpoints"])
        if kind == "stats":
            assert abs(datetime.fromisoformat(answer["started"]).timestamp() - time.time()) < 600


def test_every_json_endpoint_answers_an_operator_with_one_line_of_json(operator: RawNats) -> None:
    infos = operator.ask_json("$SRV.INFO", count=len(IDS))
    subjects = [
        endpoint["subject"]
        for info in infos
        for endpoint in info["endpoints"]
        if endpoint["metadata"].get("format") == "json" and endpoint["name"] != "drain"  # which ends a worker
    ]
    assert len(subjects) >= 6
    for subject in subjects:
        (body,) = operator.ask(subject)
        assert b"\n" not in body
        assert isinstance(json.loads(body), dict), subject
    assert operator.errors == []


@pytest.mark.slow
def test_tap_shows_requests_tokens_and_reports_as_lines_of_json(running: Cluster) -> None:
    tap = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "tap", "--nats-url", running.nats_url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert tap.stdout is not None
        lines = [json.loads(tap.stdout.readline())]  # it listens: a report comes twice a second, a view every second
        expected = text(running)
        while not (_has_ended(lines) and any(line["subject"].endswith(".report") for line in lines)):
            lines.append(json.loads(tap.stdout.readline()))
    finally:
        tap.terminate()
        _, errors = tap.communicate(timeout=20)
    assert (tap.returncode, errors) == (0, "")
    assert expected
    by_subject = {line["subject"].rpartition(".")[2]: line for line in lines}
    assert {"report", "submit", "tokens"} <= set(by_subject)
    submit = by_subject["submit"]
    assert (submit["format"], submit["is_request"], submit["message"]["kind"]) == ("msgpack", True, "submit")
    assert set(submit["message"]["prompt"]) == {"num_tokens"}
    batches = [line["message"] for line in lines if line["format"] == "token_batch"]
    assert sum(row["num_tokens"] for batch in batches for row in batch["rows"]) == BODY["max_tokens"]


def _has_ended(lines: list[dict[str, Any]]) -> bool:
    return any(row.get("finish") for line in lines for row in line.get("message", {}).get("rows", []))


def test_tap_says_in_one_line_that_a_subject_is_refused(running: Cluster) -> None:
    done = sluice("tap", "other.>", "--nats-url", running.nats_url)
    assert done.returncode == 1
    refused = 'permissions violation for subscription to "other.>"'
    assert done.stderr.startswith(f"sluice: the broker refuses this process a subject: {refused}")
    assert done.stderr.count("\n") == 1


# what a hostile process may not do


@pytest.mark.parametrize("login", ["", "worker:wrong@", "nobody:x@"])
def test_nobody_gets_in_without_a_password(running: Cluster, login: str) -> None:
    host = running.nats_url.rpartition("@")[2]
    with RawNats(f"nats://{login}{host}") as raw:
        raw.settle()
        assert raw.closed
        assert raw.errors == ["Authorization Violation"]


def test_a_worker_cannot_write_views_or_plans_nor_read_what_others_are_answered(running: Cluster) -> None:
    with RawNats(url_of(running, BrokerRole.WORKER)) as raw:
        for subject in (
            f"$KV.{SUBJECTS.plan_bucket()}.plan",
            f"$KV.{SUBJECTS.view_bucket()}.cluster",
            f"$KV.{SUBJECTS.owners_bucket()}.r-1",
            SUBJECTS.submit(WorkerId("worker-0")),
            SUBJECTS.event("monitor", "monitor"),
            f"$JS.API.STREAM.DELETE.KV_{SUBJECTS.plan_bucket()}",
            "$SRV.PING",
        ):
            raw.publish(subject, b"{}")
        raw.settle()
        assert len(raw.errors) == 7
        assert all(error.startswith("Permissions Violation for Publish") for error in raw.errors)
        raw.errors.clear()
        for subject in ("_INBOX.>", "_INBOX.dispatcher.>", "_INBOX.worker.>", "sluice.>", SUBJECTS.all_reports(), ">"):
            raw.subscribe(subject)
        raw.settle()
        assert len(raw.errors) == 6
        assert all(error.startswith("Permissions Violation for Subscription") for error in raw.errors)
    wait_until(lambda: _livenesses(running) == ["alive"], "the worker is alive")
    assert text(running) == text(running)


def _livenesses(running: Cluster) -> list[str]:
    return [status["liveness"] for status in running.get("/v1/cluster")["workers"]]


def test_an_operator_hears_everybody_but_the_answers_to_services(running: Cluster, operator: RawNats) -> None:
    """Even where it listens to all inboxes: the dispatcher's answers from the worker never show."""
    operator.subscribe("_INBOX.>")
    operator.subscribe("sluice.default.>")
    operator.ask("$SRV.PING.sluice-monitor")
    assert text(running)
    wait_until(lambda: _heard(operator, "sluice.default.dispatcher.dispatcher-0.tokens"), "tokens are heard")
    assert operator.errors == []
    assert _heard(operator, "_INBOX.raw")
    assert not _heard(operator, "_INBOX.dispatcher.")


def _heard(operator: RawNats, start: str) -> bool:
    operator.settle()
    return bool(operator.messages(start))


async def test_dispatchers_read_write_and_watch_the_owners_and_only_read_the_view(running: Cluster) -> None:
    url, refused = url_of(running, BrokerRole.DISPATCHER), list[BusError]()
    bus = await NatsBus.connect(
        url, name="d", inbox_prefix=inbox_prefix(BrokerRole.DISPATCHER, "d"), on_fatal=refused.append
    )
    try:
        owners = await bus.key_value(SUBJECTS.owners_bucket(), max_age_s=60.0)
        seen = Seen[KvEntry]()
        watch = await owners.watch(">", seen)
        revision = await owners.create("r-1", b"a")
        await seen.wait(1)  # of each key one value is kept: a watch that is late would not see the one before
        revision = await owners.update("r-1", b"b", revision)
        await seen.wait(2)
        assert await owners.get("r-1") == KvEntry("r-1", b"b", revision)
        await owners.delete("r-1")
        assert [entry.value for entry in await seen.wait(3)] == [b"a", b"b", None]
        await watch.close()
        view = await bus.key_value(SUBJECTS.view_bucket())
        assert await view.get("cluster") is not None
        assert refused == []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await view.put("cluster", b"{}")
        await until(lambda: refused)
        assert "permissions violation for publish" in str(refused[0])
    finally:
        await bus.close()


def counts(operator: RawNats) -> dict[str, int]:
    """What each service has refused so far."""
    (dispatcher,) = operator.ask_json("sluice.default.dispatcher.dispatcher-0.dump")
    (monitor,) = operator.ask_json("sluice.default.monitor.monitor.counters")
    (worker,) = operator.ask_json("$SRV.STATS.sluice-worker.worker-0")
    errors = {endpoint["name"]: endpoint["num_errors"] for endpoint in worker["endpoints"]}
    refused = monitor.get("reports_refused", 0) + monitor.get("reports_incompatible", 0)
    return {"tokens": dispatcher["num_malformed"], "report": refused, "submit": errors["submit"]}


def test_malformed_messages_are_dropped_and_counted_and_change_no_answer(running: Cluster, operator: RawNats) -> None:
    expected, before = text(running), counts(operator)
    processes = [running.pids[name] for name in ("dispatcher", "monitor", "worker-0")]
    sizes = [rss_bytes(pid) for pid in processes]
    with (
        RawNats(url_of(running, BrokerRole.WORKER)) as worker,
        RawNats(url_of(running, BrokerRole.DISPATCHER)) as dispatcher,
    ):
        for _ in range(5):
            for data in HOSTILE.values():
                worker.publish(SUBJECTS.tokens(DispatcherId("dispatcher-0")), data)
                worker.publish(SUBJECTS.report(WorkerId("worker-9")), data)
                dispatcher.publish(SUBJECTS.submit(WorkerId("worker-0")), data)
        worker.settle()
        dispatcher.settle()
        assert worker.errors == dispatcher.errors == []
    wanted = {name: count + 5 * len(HOSTILE) for name, count in before.items()}
    wait_until(lambda: counts(operator) == wanted, "each malformed message is counted once")
    grown = [rss_bytes(pid) - size for pid, size in zip(processes, sizes, strict=True)]
    assert max(grown) < 64 * 2**20, grown
    assert text(running) == expected


def test_a_worker_of_another_major_version_is_shown_as_incompatible_and_not_used(
    running: Cluster, operator: RawNats
) -> None:
    with RawNats(url_of(running, BrokerRole.WORKER)) as raw:
        raw.publish(SUBJECTS.report(WorkerId("worker-9")), OTHER_MAJOR)
        raw.settle()
    wait_until(lambda: len(running.get("/v1/cluster")["workers"]) == 2, "the other worker is in the view")
    status = next(one for one in running.get("/v1/cluster")["workers"] if one["report"]["worker_id"] == "worker-9")
    assert (status["incompatible"], status["liveness"]) == (str(OTHER_VERSION), "dead")
    shown = sluice("status", "--url", running.url)
    assert re.search(rf"worker-9 +incompatible +protocol {OTHER_VERSION}", shown.stdout), shown.stdout
    assert "1 of 2 workers can take requests" in shown.stdout
    assert text(running)
    assert operator.errors == []


def test_tokens_of_a_stream_that_is_not_open_are_ignored_and_counted(running: Cluster, operator: RawNats) -> None:
    (before,) = operator.ask_json("sluice.default.dispatcher.dispatcher-0.dump")
    where: dict[str, Any] = {"counter": 0, "stream": StreamId(7), "attempt": 1, "first_index": 0}
    batch = stream_batch(WorkerId("worker-9"), **where, tokens=np.array([5]), finish=FinishReason.STOP)
    with RawNats(url_of(running, BrokerRole.WORKER)) as raw:
        raw.publish(SUBJECTS.tokens(DispatcherId("dispatcher-0")), batch.pack())
        raw.settle()

    def ignored() -> int:
        (now,) = operator.ask_json("sluice.default.dispatcher.dispatcher-0.dump")
        return int(now["num_ignored_rows"]) - int(before["num_ignored_rows"])

    wait_until(lambda: ignored() == 1, "the row is counted")


def test_a_message_over_the_limit_ends_only_its_senders_connection(running: Cluster, operator: RawNats) -> None:
    with RawNats(url_of(running, BrokerRole.WORKER)) as raw:
        raw.publish(SUBJECTS.tokens(DispatcherId("dispatcher-0")), bytes(2 * 2**20))
        raw.settle()
        assert raw.closed
        assert raw.errors in ([], ["Maximum Payload Violation"])  # the reset may overtake the reason
    assert text(running)
    assert operator.ask_json("$SRV.PING", count=len(IDS))


def test_a_request_that_is_no_dispatchers_is_served_only_to_who_may_ask(running: Cluster, operator: RawNats) -> None:
    """The operator may submit, which `sluice profile` does, and is told what became of it."""
    submit = Submit(
        request_id=RequestId("raw-1"),
        stream=StreamId(1),
        attempt=1,
        dispatcher_id=DispatcherId("raw"),
        prompt=pack_token_ids([5, 6, 7]),
        sampling=SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True),
    )
    operator.subscribe(SUBJECTS.tokens(DispatcherId("raw")))
    (body,) = operator.ask(SUBJECTS.submit(WorkerId("worker-0")), encode(submit))
    assert b"accepted" in body
    wait_until(lambda: _is_finished(operator), "its tokens arrive")


def _is_finished(operator: RawNats) -> bool:
    operator.settle()
    batches = [TokenBatch.unpack(data) for data in operator.messages("sluice.default.dispatcher.raw.tokens")]
    return any(finish for batch in batches for finish in batch.finish.tolist())


@pytest.mark.slow
def test_a_service_with_the_rights_of_another_role_ends_with_one_line_and_code_2(running: Cluster) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLUICE_", "NATS_"))}
    url = url_of(running, BrokerRole.WORKER)
    done = subprocess.run(
        [sys.executable, "-m", "services.monitor", "--instance-id", "intruder", "--log-format", "json"],
        env={**kept, "NATS_URL": url},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    (line,) = [row for row in done.stderr.splitlines() if not row.startswith("{")]
    assert line.startswith("sluice: the broker refuses this process a subject: permissions violation for")
    assert "sluice nats-config" in line
    assert "Traceback" not in done.stderr
    assert url.split(":")[2].partition("@")[0] not in done.stderr, "the password is not shown"
