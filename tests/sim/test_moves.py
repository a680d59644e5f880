"""What operators see of exchanges and loads while they are under way, in simulated clusters."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from services.worker.contract.executor import KvCapacity
from services.worker.contract.kept_kv import NOTHING_KEPT, KeptKv
from services.worker.engine.engine import Engine
from services.worker.engine.stats import take_stats
from shared.ids import WorkerId
from shared.messages.event import Event
from shared.messages.report import TransferKind, TransferProgress
from shared.sizes import describe_bytes
from shared.subjects import Subjects
from shared.systems import KvExchange
from sim.cluster import ClusterParams
from sim.devices.channel import ModelledLink
from sim.plan_driver import alone
from tests.support.group_room import (
    BOTH,
    HALVES,
    NUM_LAYERS,
    PAGE_BYTES,
    Room,
    draw_requests,
    group_params,
    open_room,
    room_test,
)
from tests.support.hand_planner import states
from tests.support.sim_clusters import hear_events

PATIENCE_S = 40.0
"""A minute at most is watched."""


def params(kv_exchange: KvExchange, bytes_per_s: float = 0.8e6, load_bytes_per_s: float = 25e9) -> ClusterParams:
    """KV takes about two seconds."""
    link = ModelledLink(bytes_per_s=bytes_per_s)
    return group_params(num_pages=1600, load_bytes_per_s=load_bytes_per_s, link=link, kv_exchange=kv_exchange)


class Watch:
    """Events of workers, and the moves that their reports show."""

    def __init__(self, room: Room, events: list[Event]) -> None:
        self.room = room
        self.events = events
        self.seen: list[tuple[str, TransferProgress]] = []

    @classmethod
    async def begin(cls, room: Room) -> Watch:
        return cls(room, await hear_events(room.driver.bus))

    async def until_over(self, kind: TransferKind, count: int = 1) -> list[Event]:
        """Look at every report until that many moves of a kind have ended; return their ends."""
        until_s = asyncio.get_running_loop().time() + PATIENCE_S
        while len(ends := [event for event in self.events if event.name == f"{kind}_ended"]) < count:
            assert asyncio.get_running_loop().time() < until_s, "it never ends"
            for name, report in self.room.driver.reports.items():
                self.seen += [(name, move) for move in report.moves if (name, move) not in self.seen]
            await asyncio.sleep(0.02)
        return ends

    def of(self, kind: TransferKind, name: str) -> list[TransferProgress]:
        return [move for owner, move in self.seen if move.kind is kind and owner == name]


async def num_awaiting(room: Room) -> int:
    """Return how many sequences the leader's dump says to wait for KV."""
    answer = await room.driver.bus.request(Subjects().dump(WorkerId("w0")), b"", timeout_s=1.0)
    return sum(each["awaits_kv"] for each in json.loads(answer)["sequences"])


async def busy_group(room: Room) -> None:
    """Let both workers be a group while they have much to do."""
    room.ask(*draw_requests(3, 30))
    await asyncio.sleep(0.4)
    assert states(await room.driver.drop(BOTH, HALVES)) == ["done"] * 2


async def load_beside(room: Room, *, is_ahead: bool) -> int:
    """Let both workers be a group, and load what they lack, with memory for KV ahead or not; return its blocks."""
    await room.form()
    count = min(room.device(i).whole_blocks for i in range(2)) if is_ahead else room.beside_blocks()
    assert states(await room.driver.load(BOTH, count)) == ["done"] * 2
    return count


@pytest.mark.virtual_time
@pytest.mark.parametrize("kv_exchange", [KvExchange.COORDINATED, KvExchange.LIVE])
async def test_an_exchange_is_seen_with_its_progress_and_its_bytes(kv_exchange: KvExchange) -> None:
    async with open_room(params(kv_exchange)) as room:
        watch = await Watch.begin(room)
        await busy_group(room)
        stats = take_stats(room.engine())
        awaited = await num_awaiting(room)
        if kv_exchange is KvExchange.COORDINATED:
            assert awaited == stats.num_preempted + stats.num_waiting, "nobody can go on yet"
        (end,) = await watch.until_over(TransferKind.KV_EXCHANGE)
        (begin,) = [event for event in watch.events if event.name == "kv_exchange_begun"]
        moves = watch.of(TransferKind.KV_EXCHANGE, "w0")
        total = moves[0].num_bytes
        # of every block, half of the layers goes to the other worker: keys and values
        assert total
        assert total % (NUM_LAYERS // 2 * 2 * (PAGE_BYTES // 2)) == 0
        assert {(move.num_bytes, move.mode, move.sources) for move in moves} == {(total, kv_exchange.value, BOTH)}
        assert any(0 < move.num_moved_bytes < total for move in moves), "seen on its way"
        counts = [move.num_moved_bytes for move in moves]
        assert counts == sorted(counts)
        on_the_way = [move for move in moves if 0 < move.num_moved_bytes < total]
        # two workers send at 0.8 MB/s each; remote attention takes of that
        assert all(0 < move.bytes_per_s <= 1.7e6 for move in on_the_way)
        assert not await num_awaiting(room), "those that run have theirs"
        assert take_stats(room.engine()).num_running
        if kv_exchange is KvExchange.COORDINATED:
            assert max(move.num_waiting for move in moves) > 0
        assert f"{kv_exchange.value}; " in begin.reason
        shown, _, rest = end.reason.partition(" of ")
        assert rest.startswith(f"{shown} of KV from w0, w1, {kv_exchange.value} in "), "all of it"
        assert "blocks are there" in end.reason
        await asyncio.sleep(1.0)
        assert not any(report.moves for report in room.driver.reports.values())
        assert not await num_awaiting(room)
        await room.check()


@room_test(params(KvExchange.COORDINATED))
async def test_an_exchange_that_ends_with_its_group_says_so(room: Room) -> None:
    watch = await Watch.begin(room)
    await busy_group(room)
    await asyncio.sleep(0.2)
    room.cluster.network.cut(*BOTH)
    room.cluster.network.heal(*BOTH)
    (end,) = await watch.until_over(TransferKind.KV_EXCHANGE)
    assert "given up with the group" in end.reason
    await room.check()


@room_test(params(KvExchange.COORDINATED, load_bytes_per_s=3e5))
async def test_parameters_beside_and_copies_are_seen(room: Room) -> None:
    """Each of two workers loads half of the model; then its KV is copied ahead of the end of the group."""
    watch = await Watch.begin(room)
    count = await load_beside(room, is_ahead=True)
    ends = await watch.until_over(TransferKind.PARAMETER_LOAD, 2)
    num_bytes = NUM_LAYERS // 2 * 40 * PAGE_BYTES
    for name in BOTH:
        report = room.driver.reports[name]
        assert report.param_bytes == 2 * num_bytes
        assert report.kv_bytes == count * NUM_LAYERS // 2 * 2 * (PAGE_BYTES // 2)
        moves = watch.of(TransferKind.PARAMETER_LOAD, name)
        assert {move.num_bytes for move in moves} == {num_bytes}
        assert any(0 < move.num_moved_bytes < num_bytes for move in moves)
        assert all(move.bytes_per_s <= 3.1e5 for move in moves), "never faster than its link"
        assert max(move.bytes_per_s for move in moves) > 2.9e5
    assert all("all is there" in end.reason and "the host" in end.reason for end in ends)
    room.ask(*draw_requests(5, 20))
    await asyncio.sleep(0.5)
    plan_id, answers = await room.driver.prepare(*(alone(room.driver.reports[name]) for name in BOTH))
    assert states(answers) == ["prepared"] * 2
    (copied,) = await watch.until_over(TransferKind.KV_COPY)
    assert "what is left moves when the group dissolves" in copied.reason
    assert not copied.reason.startswith("0 B")
    assert states(await room.driver.finish(plan_id, BOTH, commit=True)) == ["done"] * 2
    await room.check()


@room_test(params(KvExchange.COORDINATED, load_bytes_per_s=3e5))
async def test_a_load_that_a_burst_ends_says_so(room: Room) -> None:
    watch = await Watch.begin(room)
    count = await load_beside(room, is_ahead=False)
    await asyncio.sleep(0.3)
    assert states(await room.driver.unload(BOTH, count)) == ["done"] * 2
    ends = await watch.until_over(TransferKind.PARAMETER_LOAD, 2)
    assert all(end.reason.endswith("ended by the next change") for end in ends)
    assert not any(end.reason.startswith("0 B") for end in ends), "some of it had come"


@room_test(params(KvExchange.COORDINATED))
async def test_a_group_that_parts_says_what_went_between_its_workers(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was copied ahead, so of every block that goes along half of the layers does."""
    enter, num_kept = Engine.enter_executor, list[int]()

    def note(self: Engine, has: KvCapacity, lanes: int, kept: KeptKv = NOTHING_KEPT, *rest: Any, **more: Any) -> None:
        num_kept.append(len(kept))
        enter(self, has, lanes, kept, *rest, **more)

    watch = await Watch.begin(room)
    await load_beside(room, is_ahead=False)
    await asyncio.sleep(0.6)
    room.ask(*draw_requests(5, 20))
    await asyncio.sleep(0.5)
    monkeypatch.setattr(Engine, "enter_executor", note)
    assert states(await room.driver.restore(BOTH)) == ["done"] * 2
    await room.check()
    (parted,) = [event for event in watch.events if event.name == "kv_parted"]
    assert len(num_kept) == 2
    assert min(num_kept) > 0
    num_bytes = sum(num_kept) * NUM_LAYERS // 2 * 2 * (PAGE_BYTES // 2)
    assert parted.reason.startswith(f"{describe_bytes(num_bytes)} of KV went between 2 workers, where ")


@room_test(params(KvExchange.COORDINATED))
async def test_of_a_copy_without_blocks_nothing_is_told(room: Room) -> None:
    watch = await Watch.begin(room)
    await load_beside(room, is_ahead=True)
    await asyncio.sleep(0.6)
    assert states(await room.driver.restore(BOTH)) == ["done"] * 2
    await asyncio.sleep(0.2)
    assert not [event for event in watch.events if event.name.startswith("kv_copy")]
