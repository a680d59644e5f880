"""KV that does not come: the group serves without it, and what came late is in nobody's way."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import Sequence
from itertools import product

import pytest

from services.worker.contract.kept_kv import NOTHING_KEPT, KeptKv
from services.worker.executor.parameter_sources import ParameterSource
from services.worker.kv_moves import kv_table, kv_wire, torch_exchange
from services.worker.kv_moves.kv_table import KvTable
from services.worker.kv_moves.kv_traffic import KvTraffic
from services.worker.kv_moves.kv_wire import KvSocket
from services.worker.kv_moves.places import GroupFailedError
from services.worker.kv_moves.torch_exchange import TorchExchange
from services.worker.memory.block_copies import BlockCopies
from services.worker.memory.kv_cache import KVCache
from services.worker.peers.frames import FrameKind, PeerLostError, pack_head
from services.worker.peers.greeting import Purpose
from services.worker.roles import torch_device
from services.worker.roles.device import Parting
from shared.layers import LayerRange
from tests.support.exchanged_kv import (
    HALVES,
    Server,
    calm,
    check_group_bits,
    devices_with_kv,
    kept_three,
    serves,
    serves_all,
    snapshot_each,
    spoil_after_changes,
)
from tests.support.late_kv import LateKv, changed_pages, exchange_of, hold_sends, pages_of
from tests.support.live_groups import (
    all_that_comes,
    check,
    ended,
    form,
    lead_and_join,
    live_devices,
    places,
    ranges_of,
)

pytestmark = pytest.mark.kernels


@pytest.fixture(autouse=True)
def _spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_after_changes(monkeypatch)


def count_sends(monkeypatch: pytest.MonkeyPatch, at: int, act: object) -> list[int]:
    """Let one of the chunks that are sent be sent by `act(socket, data)`."""
    send, lock, sent = KvSocket.send_chunk, threading.Lock(), [0]

    def counted(self: KvSocket, data: memoryview) -> None:
        with lock:
            sent[0] += 1
            number = sent[0]
        if number == at + 1:
            act(self, data)  # type: ignore[operator]
        else:
            send(self, data)

    monkeypatch.setattr(kv_wire, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(KvSocket, "send_chunk", counted)
    return sent


def no_memory(*_: object) -> BlockCopies:
    raise MemoryError("no memory")


def damaged(kind: str) -> object:
    def send(self: KvSocket, data: memoryview) -> None:
        number, size, checksum = self._num_sent, len(data), zlib.crc32(data)
        body = memoryview(bytearray(data))
        if kind == "bytes":
            body[size // 2] ^= 4
        elif kind == "length":
            size -= 1
        elif kind == "number":
            number += 1
        header = bytearray(pack_head(FrameKind.KV_CHUNK, size, (number, 0), checksum))
        if kind == "header":
            header[2] ^= 1
        self._send([memoryview(header), body])
        self._num_sent += 1

    return send


@pytest.mark.slow
async def test_damage_costs_the_kv_and_not_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one chunk, early or late, of any part of it; of what the leader says to all; and no memory for copies."""
    async with live_devices(3) as devices:
        for kind, at in [*product(["bytes", "length", "number", "header"], [0, 9]), ("table", 0), ("memory", 0)]:
            kept = await kept_three(devices)
            expected = snapshot_each(devices, kept)
            with monkeypatch.context() as patch:
                sent = count_sends(patch, at, damaged(kind))
                if kind == "table":
                    patch.setattr(torch_exchange, "pack_table", lambda _table: bytes(99))
                elif kind == "memory":
                    patch.setattr(torch_exchange, "copy_blocks", no_memory)
                group = await form(devices, ranges_of(1, 2, 4), kept)
            assert sent[0] > at or kind in ("table", "memory")
            assert len(group.kept) < 24
            assert len(group.coming) in (0, 24), "it may have failed before the group stood"
            check_group_bits(devices, group, expected)
            if at or kind == "memory":
                await serves(group)
            await group.executor.close()
            await asyncio.gather(*(device.alone() for device in devices))
        group = await form(devices, ranges_of(1, 2, 4), kept)
        assert len(group.kept) == 24
        await group.executor.close()
        with monkeypatch.context() as patch:
            sent = count_sends(patch, 4, damaged("bytes"))
            shares = tuple(KeptKv(group.kept.names[i::3], group.kept.ids[i::3]) for i in range(3))
            partings = [Parting(shares), Parting(), Parting()]
            led = await asyncio.gather(*(device.alone(part) for device, part in zip(devices, partings, strict=True)))
        assert sent[0] > 4
        assert min(len(each.kept) for each in led) == 0, "at least who was sent the damage has nothing"
        assert all(each.kept.names in ((), share.names) for each, share in zip(led, shares, strict=True))


def first_shut(patch: pytest.MonkeyPatch) -> threading.Event:
    """Return what is set when a connection for KV is shut."""
    shut, over = KvSocket.shut, threading.Event()

    def wake(self: KvSocket) -> None:
        over.set()
        shut(self)

    patch.setattr(KvSocket, "shut", wake)
    return over


async def test_kv_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with devices_with_kv(exchange_limit_s=0.3) as (devices, kept):
        with monkeypatch.context() as patch:
            over = first_shut(patch)
            count_sends(patch, 5, lambda _sock, _data: over.wait(30))
            group = await form(devices, ranges_of(1, 2, 4), kept)
        assert over.is_set()
        await serves(group)


async def test_kv_is_waited_for_by_what_its_bytes_take_and_not_by_the_longest_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The longest limit is 600 s; on a link of 1 TB/s these few bytes have `MOVE_BASE_S`."""
    monkeypatch.setattr(kv_table, "MOVE_BASE_S", 0.3)
    async with devices_with_kv(exchange_limit_s=600.0, link_bytes_per_s=1e12) as (devices, kept):
        with monkeypatch.context() as patch:
            over = first_shut(patch)
            count_sends(patch, 5, lambda _sock, _data: over.wait(30))
            group = await form(devices, ranges_of(1, 2, 4), kept)
        assert over.is_set()
        await serves(group)


@pytest.mark.parametrize("killed", [0, 1, 2])
async def test_a_worker_that_is_gone_in_mid_exchange_fails_the_group_and_the_others_are_whole_again(
    killed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections end while its KV is on the way, and the others wait for that."""
    send = KvTraffic._send
    over = first_shut(monkeypatch)

    def never(self: KvTraffic, *args: object) -> None:
        if self._stage == killed:
            over.wait(20)
            raise ConnectionResetError("killed")
        send(self, *args)  # type: ignore[arg-type]

    async with devices_with_kv() as (devices, kept):
        with monkeypatch.context() as patch:
            patch.setattr(KvTraffic, "_send", never)
            led, group = await lead_and_join(devices, ranges_of(1, 2, 4), kept)
            assert led.arrivals is not None
            waiting = asyncio.ensure_future(all_that_comes(led.arrivals))
            await devices[killed].close()
            async with asyncio.timeout(10):
                assert len(await waiting) < 24
                await ended({i: group.ends[i] for i in {1, 2} - {killed}})
        for device in devices[:killed] + devices[killed + 1 :]:
            alone = await device.alone()
            assert alone.kept.names == ()
            await serves_all(alone.executor)
            check([device])


@pytest.mark.parametrize("missing", [0, 1, 2])
async def test_who_does_not_come_to_the_parting_is_not_waited_for(missing: int) -> None:
    async with devices_with_kv() as (devices, kept):
        group = await form(devices, ranges_of(1, 2, 4), kept)
        await group.executor.close()
        for device in devices:
            device._standing._limit_s = 0.2
        partings = [Parting(tuple(kept)), Parting(), Parting()]
        led = await asyncio.gather(*(devices[i].alone(partings[i]) for i in range(3) if i != missing))
        assert all(each.kept.names == () for each in led)
        led.append(await devices[missing].alone(partings[missing]))
        assert led[-1].kept.names == ()
        check(devices)


async def test_a_member_that_parts_first_waits_in_its_pipeline_for_the_leader() -> None:
    """Else the leader would hear of a broken group, before it hears that the group is to dissolve."""
    async with devices_with_kv(2) as (devices, kept):
        broken: list[str | None] = []
        own = places(devices, HALVES)
        leading = asyncio.ensure_future(devices[0].lead(own[0], broken.append, kept[0]))
        await devices[1].join(own[1], lambda _: None, kept[1])
        led = await leading
        assert led.arrivals is not None
        await all_that_comes(led.arrivals)
        executor = led.executor
        parting = asyncio.ensure_future(devices[1].alone(Parting()))
        while (Purpose.PARTING, own[1].plan_id) not in devices[1]._peers._expected:
            await asyncio.sleep(0)
        server = await serves_all(executor)
        assert broken == []
        await executor.close()
        share = server.engine.leave_executor(0.0)
        assert (await devices[0].alone(Parting((NOTHING_KEPT, share)))).kept.names == ()
        assert (await parting).kept.names == share.names


async def test_a_wrong_number_of_shares_is_refused_before_anything_changes() -> None:
    async with live_devices(2) as devices:
        group = await form(devices, HALVES)
        with pytest.raises(ValueError, match="1 shares for 2 stages"):
            await devices[0].alone(Parting((NOTHING_KEPT,)))
        await serves(group)


# What comes late


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("way", "has_begun"),
    [("received", True), ("own", True), ("own", False)],
    ids=["received, given up", "own, given up", "own, not begun"],
)
async def test_kv_that_comes_late_is_not_written_over_what_sequences_have_there_now(
    stage: int, way: str, has_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader gives up the exchange, or never begins, and gives the blocks to others; a member goes on."""
    decide = torch_exchange._decide

    def decide_and_fail(*args: object) -> KvTable:
        decide(*args)  # type: ignore[arg-type]
        raise ConnectionResetError("it knows of no table, the others do")

    async with devices_with_kv() as (devices, kept):
        with monkeypatch.context() as patch:
            late = LateKv(patch, stage, way)
            if not has_begun:
                patch.setattr(torch_exchange, "_decide", decide_and_fail)
            led, _ = await lead_and_join(devices, ranges_of(1, 2, 4), kept)
            await late.come()
            assert (led.arrivals is not None) == has_begun
            if led.arrivals is not None:
                exchange_of(devices[0])._undertaking.give_up("it is told to")
                assert len(await all_that_comes(led.arrivals)) < 24
            server = Server(led.executor, range(6))
            await server.serve(3)
            before = pages_of(devices[stage])
            await late.write(devices[stage])
            assert changed_pages(devices[stage], before) == []
        await server.serve()
        assert server.texts == await calm()
        await led.executor.close()


async def test_memory_changes_beside_a_stage_when_nothing_is_written_there_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leader has given up; a member that is about to write is told to take parameters in."""
    async with devices_with_kv() as (devices, kept):
        member = devices[1]
        with monkeypatch.context() as patch:
            late = LateKv(patch, 1, "own")
            led, _ = await lead_and_join(devices, ranges_of(1, 2, 4), kept)
            await late.come()
            exchange_of(devices[0])._undertaking.give_up("it is told to")
            reside, was_over = member._model.reside, list[bool]()

            def note(layers: LayerRange, num_blocks: int, *sources: Sequence[ParameterSource], is_ahead: bool) -> int:
                moving = exchange_of(member)._moving
                was_over.append(moving is not None and moving.done())
                return reside(layers, num_blocks, *sources, is_ahead=is_ahead)

            patch.setattr(member._model, "reside", note)
            await asyncio.gather(member.reside(LayerRange(0, 4), 1), late.write(member))
            assert was_over == [True]
            check(devices)
        await led.executor.close()


@pytest.mark.parametrize("fails", [0, 1])
async def test_a_stage_that_fails_while_it_waits_for_kv_can_be_whole_again_at_once(
    fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though those who have its KV neither send it nor go away."""

    async def fail(*_: object) -> None:
        await asyncio.sleep(0.05)  # its threads wait by then; that they do is not needed
        raise GroupFailedError("told to")

    async def say_nothing(*_: object) -> None:
        await asyncio.sleep(0.05)
        raise PeerLostError("told to")

    async with live_devices(2) as devices:
        servers = [Server((await device.alone()).executor, [i]) for i, device in enumerate(devices)]
        for server in servers:
            await server.serve(4)
        kept = [server.engine.leave_executor(0.0) for server in servers]
        own = places(devices, HALVES)
        with monkeypatch.context() as patch:
            over = hold_sends(patch, {1 - fails})
            if fails:
                patch.setattr(torch_device, "say_greeting", say_nothing)
            else:
                patch.setattr(torch_device, "all_ready", fail)
            leading = asyncio.ensure_future(devices[0].lead(own[0], lambda _: None, kept[0]))
            joining = asyncio.ensure_future(devices[1].join(own[1], lambda _: None, kept[1]))
            await asyncio.wait([leading, joining][fails : fails + 1])
            try:
                async with asyncio.timeout(10):
                    await devices[fails].alone()
            finally:
                over.set()
            found = await asyncio.gather(leading, joining, return_exceptions=True)
        assert isinstance(found[fails], GroupFailedError)
        for device in devices:
            await device.alone()
        check(devices)


async def test_the_leader_keeps_blocks_until_nothing_is_written_there_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has given up before it says what comes, and its own KV is still about to be written."""
    begin = TorchExchange.begin

    def begin_and_give_up(self: TorchExchange, cache: KVCache) -> None:
        begin(self, cache)
        if self._stage == 0:
            self._loop.call_soon(self._undertaking.give_up, "it is told to")

    async with devices_with_kv() as (devices, kept):
        with monkeypatch.context() as patch:
            late = LateKv(patch, 0, "own")
            patch.setattr(TorchExchange, "begin", begin_and_give_up)
            led, _ = await lead_and_join(devices, ranges_of(1, 2, 4), kept)
            await late.come()
            assert exchange_of(devices[0]).failure is not None
            assert led.arrivals is not None, "nothing would keep the blocks"
            assert len(led.arrivals.coming) == 24
            waiting = asyncio.ensure_future(all_that_comes(led.arrivals))
            server = Server(led.executor, ())
            server.engine.leave_executor(0.0)
            server.enter(led.executor, arrivals=led.arrivals)
            server.add(range(3))
            await server.serve()
            assert not waiting.done()
            before = pages_of(devices[0])
            await late.write(devices[0])
            assert changed_pages(devices[0], before) == [], "it ends at once"
            assert len(await waiting) == 0
        server.engine.sharing.coming.expect_no_more()
        server.add(range(3, 6))
        await server.serve()
        assert server.texts == await calm()
        await led.executor.close()
