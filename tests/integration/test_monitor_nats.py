"""The monitor and the planner as real processes on a real broker."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared.cluster_views import ViewFeed
from shared.ids import WorkerId
from shared.messages.event import Event
from shared.messages.plan import Plan
from shared.messages.report import ClusterView, Liveness, WorkerPhase, WorkerReport
from shared.subjects import Subjects
from shared.transport.bus import BusTimeoutError, KvEntry, Message, NoRespondersError
from shared.transport.nats_bus import NatsBus
from shared.wire import decode_json, encode_json
from tests.support.statuses import make_elastic_report

ROOT = Path(__file__).parents[2]
SUBJECTS = Subjects("t")
LIMIT_S = 15.0


def start(service: str, nats_url: str, *flags: str) -> subprocess.Popen[str]:
    common = ["--instance-id", service, "--nats-url", nats_url, "--cluster", "t"]
    return subprocess.Popen(
        [sys.executable, "-m", f"services.{service}", *common, *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Send SIGTERM; return what the process logged."""
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, log
    return log


async def ask_until_answered(bus: NatsBus, subject: str) -> bytes:
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                return await bus.request(subject, b"", timeout_s=5.0)
            except (NoRespondersError, BusTimeoutError):
                await asyncio.sleep(0.05)


async def test_reports_become_views_and_events_over_a_real_broker(nats_url: str) -> None:
    """A monitor that itself stands still across two limits skips a judgement, but never takes one back."""
    process = start("monitor", nats_url, "--suspect-after-s", "0.3", "--dead-after-s", "0.6", "--forget-after-s", "0.9")
    bus = await NatsBus.connect(nats_url, name="test")
    events: list[str] = []
    views: list[ClusterView] = []

    def on_event(message: Message) -> None:
        events.append(decode_json(message.data, Event).name)

    def on_view(entry: KvEntry) -> None:
        assert entry.value is not None
        views.append(decode_json(entry.value, ClusterView))

    try:
        await ask_until_answered(bus, SUBJECTS.admin("monitor", "monitor", "view"))
        await bus.subscribe("sluice.t.event.>", on_event)
        await (await bus.key_value(SUBJECTS.view_bucket())).watch("cluster", on_view)
        await bus.flush()
        report = WorkerReport(worker_id=WorkerId("w"), sequence_number=0, phase=WorkerPhase.READY, pid=1)
        await bus.publish(SUBJECTS.report(report.worker_id), encode_json(report))
        async with asyncio.timeout(LIMIT_S):
            while "worker_gone" not in events:
                await asyncio.sleep(0.02)
        assert (events[0], events[-1]) == ("worker_ready", "worker_gone")
        worse = ["worker_suspect", "worker_dead"]
        assert events[1:-1] == [name for name in worse if name in events]
        # a bucket keeps the newest value only, so a slow reader may miss a judgement, but never sees one get better
        judged = [view.workers[0].liveness for view in views if view.workers]
        assert judged
        assert judged == sorted(judged, key=list(Liveness).index)
        info = json.loads(await bus.request("$SRV.INFO.sluice-monitor", b"", timeout_s=5.0))
        assert info["description"]
        assert info["id"] == "monitor"
    finally:
        await bus.close()
        log = finish(process)
    assert json.loads(log.splitlines()[0])["event"] == "monitor_ready"


@pytest.mark.slow
async def test_the_view_of_a_large_cluster_reaches_those_who_listen_and_those_who_come_later(nats_url: str) -> None:
    """800 workers that can drop 80 layers each: 2 MB as whole reports, of which a message carries half."""
    process, bus = start("monitor", nats_url), await NatsBus.connect(nats_url, name="test")
    malformed: list[str] = []

    async def hear_all() -> list[WorkerReport]:
        """Return what a reader that begins now hears of all workers first."""
        views: list[ClusterView] = []
        feed = ViewFeed(
            bus,
            SUBJECTS,
            on_view=lambda view, *, is_fresh: views.append(view),
            on_malformed=lambda where, error: malformed.append(f"{where}: {error}"),
        )
        await feed.start()
        async with asyncio.timeout(LIMIT_S):
            while not views or len(views[-1].workers) < len(reports):
                await asyncio.sleep(0.02)
        await feed.close()
        return [status.report for status in views[-1].workers]

    reports = [make_elastic_report(number) for number in range(800)]
    try:
        await ask_until_answered(bus, SUBJECTS.admin("monitor", "monitor", "view"))
        for report in reports:
            await bus.publish(SUBJECTS.report(report.worker_id), encode_json(report))
        assert await hear_all() == reports
        assert await hear_all() == reports
    finally:
        await bus.close()
        finish(process)
    assert malformed == []
    assert bus.stats.too_large == 0


@pytest.mark.slow
async def test_the_epoch_grows_over_restarts_of_the_process(nats_url: str) -> None:
    bus = await NatsBus.connect(nats_url, name="test")
    epochs = []
    try:
        for _ in range(2):
            process = start("planner", nats_url)
            try:
                answer = json.loads(await ask_until_answered(bus, SUBJECTS.admin("planner", "planner", "plan")))
            finally:
                finish(process)
            epochs.append(answer["epoch"])
        entry = await (await bus.key_value(SUBJECTS.plan_bucket())).get("plan")
        assert entry is not None
        assert entry.value is not None
        assert decode_json(entry.value, Plan).epoch == 2
    finally:
        await bus.close()
    assert epochs == [1, 2]


@pytest.mark.slow
def test_without_a_broker_both_refuse_with_one_line() -> None:
    processes = [start(service, "nats://127.0.0.1:1") for service in ("monitor", "planner")]
    for process in processes:
        _, log = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 2
        assert log.startswith("sluice: ")
        assert log.count("\n") == 1
