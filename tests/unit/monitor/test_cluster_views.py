"""The view's two ways to its readers: published, and stored for those who come later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.monitor.config import MonitorSettings
from services.monitor.service import Monitor
from shared.cluster_views import VIEW_KEY, ViewFeed
from shared.messages.report import ClusterView
from shared.subjects import Subjects
from shared.transport.bus import BusError
from shared.transport.memory_bus import MemoryBroker, MemoryBus
from shared.wire import WireError, encode_json
from tests.support.staged import played_in

SUBJECTS = Subjects()


class Room:
    """A reader of views, and what it was told."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.feed = ViewFeed(bus, SUBJECTS, self.on_view, self.on_malformed)
        self.told: list[tuple[int, bool]] = []
        self.malformed: list[str] = []

    def on_view(self, view: ClusterView, *, is_fresh: bool) -> None:
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
