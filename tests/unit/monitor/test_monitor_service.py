"""The monitor on the virtual clock: when it judges, what it writes, what it refuses, what it answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from pydantic import ValidationError

from cli.status import render
from services.monitor import service
from services.monitor.config import MonitorSettings
from services.monitor.service import Monitor
from services.planner.config import PlannerSettings
from shared import view_parts
from shared.ids import WorkerId
from shared.messages.base import PROTOCOL_VERSION
from shared.messages.event import Event
from shared.messages.plan import Plan, PlanPhase
from shared.messages.report import ClusterView, Liveness, WorkerPhase
from shared.subjects import Subjects
from shared.transport.bus import BusError, KvEntry, Message
from shared.transport.memory_bus import MemoryBroker, MemoryBus
from shared.wire import decode_json, encode_json
from sim.virtual_time import run
from tests.support.staged import played_in
from tests.support.statuses import make_elastic_report, make_report

SUBJECTS = Subjects()
SETTINGS = MonitorSettings(instance_id="m")


class Room:
    """A monitor, and a bus from which it is watched."""

    def __init__(self, monitor: Monitor, bus: MemoryBus, broker: MemoryBroker) -> None:
        self.monitor = monitor
        self.bus = bus
        self.broker = broker
        self.events: list[tuple[float, str, str]] = []
        self.views: list[tuple[float, ClusterView]] = []
        self.numbers: dict[str, int] = {}

    def on_event(self, message: Message) -> None:
        event = decode_json(message.data, Event)
        self.events.append((_now(), event.name, event.about))

    def on_view(self, entry: KvEntry) -> None:
        assert entry.value is not None
        self.views.append((_now(), decode_json(entry.value, ClusterView)))

    async def report(self, worker: str = "w", phase: WorkerPhase = WorkerPhase.READY, **fields: Any) -> None:
        number = self.numbers.get(worker, -1) + 1
        self.numbers[worker] = number
        report = make_report(worker, sequence_number=number, phase=phase, pid=1, **fields)
        await self.bus.publish(SUBJECTS.report(report.worker_id), encode_json(report))


def _now() -> float:
    return round(asyncio.get_running_loop().time(), 6)


@asynccontextmanager
async def open_room(settings: MonitorSettings = SETTINGS) -> AsyncIterator[Room]:
    """A room with a monitor, from 0 s of virtual time on."""
    broker = MemoryBroker(latency_s=0.0)
    bus, monitor_bus = broker.connect("test"), broker.connect("monitor")
    room = Room(Monitor(settings, monitor_bus), bus, broker)
    await bus.subscribe("sluice.*.event.>", room.on_event)
    await room.monitor.start()
    await (await bus.key_value(SUBJECTS.view_bucket())).watch("cluster", room.on_view)
    yield room
    await room.monitor.stop()
    await monitor_bus.close()
    await bus.close()


@played_in(open_room)
async def test_a_silent_worker_is_suspect_dead_and_gone_in_events_and_views_at_exactly_its_times(room: Room) -> None:
    await asyncio.sleep(0.77)
    await room.report()
    await asyncio.sleep(100)
    assert room.events == [
        (0.77, "worker_ready", "w"),
        (0.77 + 1.5, "worker_suspect", "w"),
        (0.77 + 3.0, "worker_dead", "w"),
        (0.77 + 60.0, "worker_gone", "w"),
    ]
    times = [at_s for at_s, _ in room.views]
    assert max(later - earlier for earlier, later in pairwise(times)) <= 0.5 + 1e-9, "a view by period"
    seen = {at_s: view.workers[0].liveness for at_s, view in room.views if view.workers}
    judged = [Liveness.ALIVE, Liveness.SUSPECT, Liveness.DEAD]
    assert [seen[0.77 + after_s] for after_s in (0.0, 1.5, 3.0)] == judged, "and at the moment of each change"


@played_in(open_room)
async def test_a_new_monitor_does_not_replace_the_view_before_it_has_heard_the_workers(room: Room) -> None:
    """The view of the monitor before stays; two workers report at 0.2 s and 0.4 s, as they do every 0.5 s."""
    await asyncio.sleep(0.2)
    await room.report()
    await asyncio.sleep(5)
    first_at_s, first = room.views[0]
    assert first_at_s == 0.2
    assert [status.report.worker_id for status in first.workers] == ["w"]


@played_in(open_room)
async def test_a_monitor_that_hears_nobody_says_so_after_a_while(room: Room) -> None:
    await asyncio.sleep(1.6)
    assert [(at_s, view.workers) for at_s, view in room.views] == [(1.5, ())]


@played_in(open_room)
async def test_views_are_numbered_and_reports_without_a_change_do_not_cause_more(room: Room) -> None:
    """10 s at one view per 0.5 s are 20 views, and 1 for the worker's appearance; 100 reports add none."""
    for _ in range(100):
        await room.report()
        await asyncio.sleep(0.1)
    assert 19 <= len(room.views) <= 22
    numbers = [view.sequence_number for _, view in room.views]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


@played_in(open_room)
async def test_each_phase_is_told_once(room: Room) -> None:
    for phase in WorkerPhase:
        for _ in range(3):
            await room.report(phase=phase)
            await asyncio.sleep(0.5)
    await asyncio.sleep(70)
    names = [name for _, name, _ in room.events]
    assert names == ["worker_loading", "worker_ready", "worker_draining", "worker_gone"]


@played_in(open_room)
async def test_refused_reports_change_nothing_and_are_counted(room: Room) -> None:
    subject = SUBJECTS.report(WorkerId("w"))
    good = make_report("w")
    other = good.model_copy(update={"worker_id": WorkerId("x")})
    absurd = good.model_copy(update={"num_running": -5})
    huge = good.model_copy(update={"model": "m" * 5000})
    for data in (b"", b"\xff\x00", b"[]", b'{"kind":"plan"}', *map(encode_json, (other, absurd, huge))):
        await room.bus.publish(subject, data)
    await asyncio.sleep(1)
    assert room.monitor.counters["reports_refused"] == 7
    assert room.events == []
    assert all(view.workers == () for _, view in room.views)


@played_in(partial(open_room, settings=SETTINGS.model_copy(update={"max_workers": 1})))
async def test_one_worker_too_many_is_refused(room: Room) -> None:
    await room.report("a")
    await room.report("b")
    await asyncio.sleep(1)
    assert [status.report.worker_id for status in room.views[-1][1].workers] == ["a"]
    assert room.monitor.counters["reports_refused"] == 1


@played_in(partial(open_room, settings=SETTINGS.model_copy(update={"max_workers": 2})))
async def test_workers_without_room_are_told_of_and_counted_in_the_view_while_they_report(room: Room) -> None:
    for name in "abcde":
        await room.report(name)
    await asyncio.sleep(1)
    assert room.views[-1][1].num_left_out == 3
    assert [about for _, name, about in room.events if name == "worker_left_out"] == ["c", "d"], "the 1st, the 2nd"
    assert "3 more workers report" in render(room.views[-1][1])
    await asyncio.sleep(4)
    await room.report("a")
    await asyncio.sleep(1)
    assert room.views[-1][1].num_left_out == 0


@pytest.mark.parametrize("fields", [{"kernels": "k" * 600}, {"worker": "w" * 65}])
@played_in(open_room)
async def test_no_report_makes_a_row_of_the_view_arbitrarily_large(room: Room, fields: dict[str, Any]) -> None:
    await room.report(**fields)
    await asyncio.sleep(1)
    assert room.monitor.counters["reports_refused"] == 1


@played_in(open_room)
async def test_a_view_that_cannot_be_written_is_told_of(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_parts, "MAX_PART_BYTES", 10**9)
    for number in range(1500):
        report = make_elastic_report(number)
        await room.bus.publish(SUBJECTS.report(report.worker_id), encode_json(report))
    await asyncio.sleep(1)
    assert room.monitor.counters["views_not_written"] >= 1
    assert "view_not_written" in [name for _, name, _ in room.events]


@played_in(open_room)
async def test_people_read_a_large_view_part_by_part(room: Room) -> None:
    for number in range(300):
        report = make_elastic_report(number)
        await room.bus.publish(SUBJECTS.report(report.worker_id), encode_json(report))
    await asyncio.sleep(1)
    subject = SUBJECTS.admin("monitor", "m", "view")
    parts: list[dict[str, Any]] = [json.loads(await room.bus.request(subject, b"", timeout_s=1))]
    for part in range(1, parts[0]["num_parts"]):
        parts.append(json.loads(await room.bus.request(subject, str(part).encode(), timeout_s=1)))
    assert len(parts) > 3
    shown = [worker["report"] for part in parts for worker in part["workers"]]
    assert [report["worker_id"] for report in shown] == [f"worker-{number:05}" for number in range(300)]
    assert all(report["elastic"]["num_pages"] for report in shown), "for people it is whole"
    for payload in (b"99", b"x"):
        with pytest.raises(BusError, match="400"):
            await room.bus.request(subject, payload, timeout_s=1)


@played_in(open_room)
async def test_a_lost_broker_is_not_the_workers_death(room: Room) -> None:
    """Cut off from 1 s to 31 s: nobody is judged; after that a silent worker gets its 1.5 s and 3 s anew."""
    await room.report()
    await asyncio.sleep(1.0)
    room.broker.available = False
    await asyncio.sleep(30.0)
    room.broker.available = True
    await asyncio.sleep(10.0)
    assert room.events[0] == (0.0, "worker_ready", "w")
    assert [name for _, name, _ in room.events[1:]] == ["worker_suspect", "worker_dead"]
    suspect_s, dead_s = (at_s for at_s, _, _ in room.events[1:])
    assert 31.0 + 1.0 <= suspect_s <= 31.0 + 1.5
    assert dead_s - suspect_s == pytest.approx(1.5)
    assert room.monitor.counters["views_not_written"] >= 59


@played_in(open_room)
async def test_it_answers_the_service_protocol_and_its_endpoints(room: Room) -> None:
    await room.report("b")
    await room.report("a")
    await asyncio.sleep(0.1)
    subjects = ("$SRV.INFO.sluice-monitor", *(SUBJECTS.admin("monitor", "m", name) for name in ("view", "counters")))
    info, view, counters = [json.loads(await room.bus.request(subject, b"", timeout_s=1)) for subject in subjects]
    assert info["description"]
    assert all(isinstance(value, str) for value in info["metadata"].values())
    assert [endpoint["name"] for endpoint in info["endpoints"]] == ["view", "counters"]
    assert [worker["report"]["worker_id"] for worker in view["workers"]] == ["a", "b"]
    assert counters["reports_accepted"] == 2


# --- running short of memory -----------------------------------------------------------------------------------------

SHORT: dict[str, Any] = {"num_blocks": 100, "num_used_blocks": 95, "num_head_blocks": 10, "num_queued_for_memory": 2}
ENOUGH: dict[str, Any] = {"num_blocks": 100, "num_used_blocks": 50}


def throttled(view: ClusterView) -> list[str]:
    return [status.report.worker_id for status in view.workers if status.throttled]


@played_in(open_room)
async def test_a_worker_that_begins_to_run_short_is_in_a_view_at_once_and_told_once(room: Room) -> None:
    await room.report(**ENOUGH)
    await asyncio.sleep(1.23)
    for _ in range(4):
        await room.report(**SHORT)
        await asyncio.sleep(0.5)
    await room.report(**ENOUGH)
    await asyncio.sleep(1)
    first_s, first = next((at_s, view) for at_s, view in room.views if throttled(view))
    assert first_s == 1.23
    assert (
        first.workers[0].throttled_reason == "105 of 100 KV blocks wanted, and 2 requests are queued for lack of them"
    )
    assert [name for _, name, _ in room.events] == ["worker_ready", "worker_throttled"]
    assert throttled(room.views[-1][1]) == []
    assert room.views[-1][1].workers[0].throttled_reason == ""


@played_in(open_room)
async def test_requests_that_begin_to_wait_at_a_worker_that_was_about_to_run_short_are_in_a_view_at_once(
    room: Room,
) -> None:
    await room.report(num_blocks=100, num_used_blocks=40)
    await asyncio.sleep(0.64)
    await room.report(num_blocks=100, num_used_blocks=72)  # 32 more in 0.64 s
    await asyncio.sleep(0.59)
    await room.report(**SHORT)
    await asyncio.sleep(0.3)
    views = room.views
    reasons = [(at_s, view.workers[0].throttled_reason) for at_s, view in views if throttled(view)]
    assert reasons[0] == (0.64, "72 of 100 KV blocks wanted; in 1 s it would be 122 of 100")
    at_s, _ = next(row for row in reasons if "queued" in row[1])
    assert at_s == 1.23


@played_in(open_room)
async def test_many_that_run_short_together_are_no_flood_of_views(room: Room) -> None:
    """100 workers within 0.1 s: one view at once, and one per 20 ms."""
    for number in range(100):
        await room.report(f"w{number:02d}", **ENOUGH)
    await asyncio.sleep(1.01)
    room.views.clear()
    for number in range(100):
        await room.report(f"w{number:02d}", **SHORT)
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    assert len(room.views) <= 1 + 0.1 / 0.02 + 1
    assert len(throttled(room.views[-1][1])) == 100


@played_in(open_room)
async def test_a_plan_that_is_carried_out_is_what_lets_it_be_told_again(room: Room) -> None:
    bucket = await room.bus.key_value(SUBJECTS.plan_bucket())
    await room.report(**ENOUGH)
    for epoch, phase in [(1, "done"), (2, "preparing"), (3, "committing"), (4, "done")]:
        await bucket.put("plan", encode_json(Plan(epoch=epoch, phase=PlanPhase(phase))))
        await asyncio.sleep(0.5)
        await room.report(**SHORT)
    await bucket.put("plan", b"no plan")
    await asyncio.sleep(0.5)
    await room.report(**SHORT)
    await asyncio.sleep(0.1)
    assert [name for _, name, _ in room.events] == ["worker_ready", "worker_throttled", "worker_throttled"]


@played_in(open_room)
async def test_a_worker_that_is_gone_runs_short_of_nothing(room: Room) -> None:
    await room.report(**SHORT)
    await asyncio.sleep(0.2)
    await room.report(phase=WorkerPhase.STOPPED)
    await asyncio.sleep(2)
    assert any(throttled(view) for _, view in room.views)
    assert throttled(room.views[-1][1]) == []


@played_in(open_room)
async def test_after_stop_nothing_is_heard_or_written(room: Room) -> None:
    await room.report()
    await asyncio.sleep(0.1)
    await room.monitor.stop()
    before = (len(room.views), dict(room.monitor.counters))
    await room.report()
    await asyncio.sleep(10)
    assert (len(room.views), dict(room.monitor.counters)) == before


def test_limits_out_of_order_are_refused_by_the_settings() -> None:
    for limits in ((0.0, 1.0, 2.0), (2.0, 1.0, 3.0), (1.0, 3.0, 3.0)):
        with pytest.raises(ValidationError, match=r"must hold|greater than 0"):
            MonitorSettings(suspect_after_s=limits[0], dead_after_s=limits[1], forget_after_s=limits[2])
    with pytest.raises(ValidationError):
        MonitorSettings(throttling_horizon_s=-1.0)


@pytest.mark.parametrize(("worker_s", "gap_s"), [(0.01, 0.5), (0.08, 0.8), (60.0, 1.0)])
def test_the_more_workers_the_fewer_views_but_never_too_few_for_the_planner(
    worker_s: float, gap_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "VIEW_WORKER_S", worker_s)

    async def life() -> list[float]:
        async with open_room() as room:
            for number in range(10):
                await room.report(f"w-{number}")
            await asyncio.sleep(10)
            written_s = [at_s for at_s, view in room.views if len(view.workers) == 10]
        return [after - before for before, after in pairwise(written_s)]

    gaps_s = run(life())
    assert gaps_s == pytest.approx([gap_s] * len(gaps_s))
    assert len(gaps_s) > 6
    assert max(gaps_s) < PlannerSettings(instance_id="p").max_view_age_s


def test_the_same_run_twice_gives_the_same_trace() -> None:
    async def life() -> Room:
        async with open_room() as room:
            for worker in "cab":
                await room.report(worker)
                await asyncio.sleep(0.3)
            await asyncio.sleep(70)
        return room

    first, second = run(life()), run(life())
    assert first.events == second.events
    assert first.views == second.views
    assert len(first.events) == 12


@played_in(open_room)
async def test_reports_of_another_major_version_are_shown_and_those_of_a_newer_minor_are_read(room: Room) -> None:
    other = PROTOCOL_VERSION + 1
    newer = json.loads(encode_json(make_report("new")))
    await room.bus.publish("sluice.default.worker.new.report", json.dumps({**newer, "hue": {"a": 1}}).encode())
    for fields in ({"version": other}, {"version": other, "anything": [1]}, {"version": -7}):
        await room.bus.publish("sluice.default.worker.other.report", json.dumps(fields).encode())
    await room.bus.publish(
        "sluice.default.worker.a b.report".replace(" ", "%"), json.dumps({"version": other}).encode()
    )
    await asyncio.sleep(1)
    assert [(name, about) for _, name, about in room.events] == [
        ("worker_ready", "new"),
        ("worker_incompatible", "other"),
        ("worker_incompatible", "other"),
    ]
    shown = {str(status.report.worker_id): status for status in room.views[-1][1].workers}
    assert {name: status.incompatible for name, status in shown.items()} == {"new": "", "other": "-7"}
    assert shown[WorkerId("other")].liveness is Liveness.DEAD
    assert dict(room.monitor.counters) | {"views_written": 0} == {
        "reports_accepted": 1,
        "reports_incompatible": 3,
        "reports_refused": 1,
        "views_written": 0,
    }
