"""The view's two ways to its readers: published, and stored for those who come later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cli.status import render
from services.dispatcher.policy.placement import place_least_loaded
from services.dispatcher.state import ClusterState
from services.monitor.config import MonitorSettings
from services.monitor.service import Monitor
from services.planner.policy.observe import ObserveParams, observe
from shared.cluster_views import FACTS_PERIOD_S, VIEW_KEY, ViewFeed, ViewWriter
from shared.messages.report import ClusterView, WorkerPhase
from shared.subjects import Subjects
from shared.transport.bus import BusError, KvEntry, Message
from shared.transport.memory_bus import MemoryBroker, MemoryBus
from shared.view_parts import MAX_PART_BYTES
from shared.wire import WireError, encode_json
from tests.support.staged import played_in
from tests.support.statuses import make_elastic_report, make_elastic_view, make_report

SUBJECTS = Subjects()


class Room:
    """A reader of views, and what it was told."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.feed = ViewFeed(bus, SUBJECTS, self.on_view, self.on_malformed)
        self.told: list[tuple[int, bool]] = []
        self.view: ClusterView | None = None
        self.malformed: list[str] = []

    def on_view(self, view: ClusterView, *, is_fresh: bool) -> None:
        self.view = view
        self.told.append((view.sequence_number, is_fresh))

    def on_malformed(self, where: str, error: WireError) -> None:
        del error
        self.malformed.append(where)

    async def publish(self, number: int) -> None:
        await self.bus.publish(SUBJECTS.view(), encode_json(ClusterView(sequence_number=number)))
        await asyncio.sleep(0.1)

    async def store(self, number: int) -> None:
        bucket = await self.bus.key_value(SUBJECTS.view_bucket())
        await bucket.put(VIEW_KEY, encode_json(ClusterView(sequence_number=number)))
        await asyncio.sleep(0.1)


@asynccontextmanager
async def open_room() -> AsyncIterator[Room]:
    bus = MemoryBroker(latency_s=0.001).connect("test")
    room = Room(bus)
    yield room
    await room.feed.close()
    await bus.close()


@played_in(open_room)
async def test_the_stored_view_comes_first_and_its_age_is_unknown(room: Room) -> None:
    await room.store(7)
    await room.feed.start()
    await asyncio.sleep(0.1)
    await room.store(8)
    assert room.told == [(7, False), (8, True)]


@played_in(open_room)
async def test_what_is_stored_is_not_heard_twice_once_views_are_published(room: Room) -> None:
    await room.store(7)
    await room.feed.start()
    await asyncio.sleep(0.1)
    for number in (8, 9):
        await room.publish(number)
        await room.store(number)
    assert room.told == [(7, False), (8, True), (9, True)]


@played_in(open_room)
async def test_what_is_no_view_is_told_and_changes_nothing(room: Room) -> None:
    bucket = await room.bus.key_value(SUBJECTS.view_bucket())
    await bucket.put(VIEW_KEY, b"[]")
    await room.feed.start()
    await room.bus.publish(SUBJECTS.view(), b"{")
    await asyncio.sleep(0.1)
    assert sorted(room.malformed) == sorted([VIEW_KEY, SUBJECTS.view()])
    await room.store(3)  # nothing that counts was published, nor was the first stored one a view
    assert room.told == [(3, False)]


@played_in(open_room)
async def test_nothing_is_heard_after_the_end(room: Room) -> None:
    await room.feed.start()
    await room.feed.close()
    await room.publish(1)
    await room.store(1)
    assert room.told == []


@played_in(open_room)
async def test_a_monitor_whose_store_is_full_is_heard_all_the_same(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    await room.feed.start()
    monitor = Monitor(MonitorSettings(), room.bus)
    await monitor.start()

    async def refuse(key: str, value: bytes) -> int:
        del key, value
        raise BusError("the store is full")

    assert monitor._view is not None
    monkeypatch.setattr(monitor._view, "put", refuse)
    await asyncio.sleep(6.0)
    await monitor.stop()
    await asyncio.sleep(0.1)
    assert monitor.counters["views_written"] == 0
    assert monitor.counters["views_not_written"] >= 8
    assert len(room.told) == monitor.counters["views_not_written"]
    assert all(is_fresh for _, is_fresh in room.told)


# --- in parts --------------------------------------------------------------------------------------------------------


async def make_writer(room: Room) -> ViewWriter:
    bucket = await room.bus.key_value(SUBJECTS.view_bucket())
    return ViewWriter(room.bus, SUBJECTS, bucket)


@played_in(open_room)
async def test_who_comes_later_finds_parts_and_facts_in_the_store(room: Room) -> None:
    view = make_elastic_view(700)
    writer = await make_writer(room)
    await writer.publish(view)
    await writer.store()
    await room.feed.start()
    await asyncio.sleep(0.1)
    assert room.told == [(1, False)]
    assert room.view == view


@played_in(open_room)
async def test_who_comes_between_two_views_reads_the_facts_that_were_told_before(room: Room) -> None:
    writer = await make_writer(room)
    await writer.publish(make_elastic_view(300, 1))
    await writer.store()
    await (await room.bus.key_value(SUBJECTS.view_bucket())).delete(VIEW_KEY)
    await room.feed.start()
    view = make_elastic_view(300, 2, num_running=3)
    await writer.publish(view)
    await asyncio.sleep(0.1)
    assert room.view == view


@played_in(open_room)
async def test_facts_that_were_missed_and_are_not_stored_are_told_again(room: Room) -> None:
    view, writer = make_elastic_view(150), await make_writer(room)
    await writer.publish(view)
    await asyncio.sleep(0.1)
    await room.feed.start()
    began_s = asyncio.get_running_loop().time()
    for number in range(2, 40):
        await asyncio.sleep(0.5)
        await writer.publish(view.model_copy(update={"sequence_number": number}))
        if room.told:
            break
    assert room.told
    took_s = asyncio.get_running_loop().time() - began_s
    assert FACTS_PERIOD_S - 0.2 <= took_s <= FACTS_PERIOD_S + 2.0, "page by page, one with each view"


class Wire:
    """Everything that is said on the subject of views, and stored of them."""

    def __init__(self) -> None:
        self.published: list[bytes] = []
        self.stored: list[bytes] = []

    def on_message(self, message: Message) -> None:
        self.published.append(message.data)

    def on_entry(self, entry: KvEntry) -> None:
        self.stored.append(entry.value or b"")


@pytest.mark.parametrize("num_workers", [700, pytest.param(5000, marks=pytest.mark.slow)])
@played_in(open_room)
async def test_every_reader_sees_a_large_cluster_whole_and_acts_on_it(room: Room, num_workers: int) -> None:
    """Each worker says how large 80 layers are; some 570 of them fill a message of 1 MiB."""
    wire = Wire()
    monitor = Monitor(MonitorSettings(), room.bus)
    await monitor.start()
    await room.feed.start()
    for second in range(3):
        for number in range(num_workers):
            report = make_elastic_report(number, sequence_number=second)
            await room.bus.publish(SUBJECTS.report(report.worker_id), encode_json(report))
        await asyncio.sleep(1.0)
        if second == 1:
            await room.bus.subscribe(SUBJECTS.view(), wire.on_message)
            await (await room.bus.key_value(SUBJECTS.view_bucket())).watch(">", wire.on_entry)
    later = Room(room.bus)
    await later.feed.start()
    await asyncio.sleep(0.1)
    await later.feed.close()
    await monitor.stop()

    assert monitor.counters["views_not_written"] == 0
    assert room.bus.stats.too_large == 0
    assert wire.published
    assert max(map(len, wire.published + wire.stored)) < 2 * MAX_PART_BYTES
    assert not any(b"layer_bytes" in data for data in wire.published), "the facts were told before"
    for view in (room.view, later.view):
        assert view is not None
        assert len(view.workers) == num_workers
        state = ClusterState("a-model-of-seventy-billion-parameters", 30.0)
        state.apply(view, 0.0)
        assert state.num_ready == num_workers
        placed = place_least_loaded(state.loads(), 100)
        assert placed is not None
        assert placed.worker_id == "worker-00000", "the one that holds the fewest blocks"
        facts = observe(view, 0.0, ObserveParams((1.0, 2.0))).snapshot.facts
        assert facts is not None
        assert len(facts.instances) == num_workers
        assert f"{num_workers} of {num_workers} workers can take requests" in render(view)


@played_in(open_room)
async def test_a_crowd_of_changes_makes_no_more_views_than_readers_have_time_for(room: Room) -> None:
    """500 workers: 0.1 s from one view to the next, however many change their phase in between."""
    monitor = Monitor(MonitorSettings(), room.bus)
    await monitor.start()
    await room.feed.start()
    reports = [make_report(f"w{number:03}", sequence_number=0) for number in range(500)]
    for report in reports:
        await room.bus.publish(SUBJECTS.report(report.worker_id), encode_json(report))
    await asyncio.sleep(1.0)
    before = len(room.told)
    for report in reports:
        changed = report.model_copy(update={"sequence_number": 1, "phase": WorkerPhase.DRAINING})
        await room.bus.publish(SUBJECTS.report(report.worker_id), encode_json(changed))
        await asyncio.sleep(0.002)
    assert 5 <= len(room.told) - before <= 1.0 / 0.1 + 1
    await monitor.stop()
