"""Workers of one device that become a group by handing over pages: when they do, and what a fault costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from services.worker.contract.kept_kv import KeptKv
from services.worker.executor.elastic_model import ElasticModel
from services.worker.kv_moves.kv_table import KvOffer, KvTable, table_to_form
from services.worker.kv_moves.places import GroupFailedError, GroupPlace, StagePlace
from services.worker.memory.card import card_of
from services.worker.memory.change import MemoryLostError
from services.worker.memory.elastic import ElasticMemory
from services.worker.memory.layout import MemoryFacts, MemoryLayout
from services.worker.memory.page_swap import PageSwap
from services.worker.memory.posix import PosixMemory
from services.worker.memory.ranges import PageHandle, PageId
from services.worker.memory.spans import Spans
from services.worker.pages import hand_over
from services.worker.pages.exchange import PageExchange
from services.worker.pages.wire import PageDoor, PageSocket
from services.worker.peers.frames import PeerLostError
from services.worker.roles.torch_device import TorchGroupDevice
from shared.errors import StartupError
from shared.ids import WorkerId
from shared.layers import LayerRange
from tests.support.exchanged_kv import (
    check_group_bits,
    devices_with_kv,
    kept_three,
    numbered,
    pages_of_all,
    serves,
    snapshot_each,
)
from tests.support.live_groups import check, dissolve, form, live_devices, places, ranges_of

pytestmark = pytest.mark.kernels

RANGES = ranges_of(1, 2, 4)


def refuse(*_arguments: object) -> object:
    raise OSError("made up")


COPIED = {
    "no place for a door": ("PageDoor", refuse),
    "no door is reached": ("dial_doors", refuse),
    "another device": ("card_of", Mock(side_effect=["one", "another", "one"])),
    "a device without a name": ("card_of", lambda _device: ""),
}


@pytest.mark.parametrize("why", ["is off at one", *COPIED])
async def test_what_cannot_be_handed_over_is_copied(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with devices_with_kv(hands_over=True) as (devices, kept):
        expected = snapshot_each(devices, kept)
        pages = pages_of_all(devices)
        with monkeypatch.context() as patch:
            if why == "is off at one":
                patch.setattr(devices[1], "_hands_over", False)
            else:
                patch.setattr(hand_over, *COPIED[why])
            group = await form(devices, RANGES, kept)
        assert len(group.coming) == len(group.kept) == 24
        check_group_bits(devices, group, expected)
        assert pages_of_all(devices) == pages
        await group.executor.close()


@pytest.mark.parametrize(
    ("num_blocks", "room", "by_pages"), [(80, 64, True), (20, 64, False), (20, 20, False), (20, 3, True)]
)
def test_pages_are_handed_over_if_no_more_is_lost_so(
    num_blocks: int, room: int, by_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has 12 blocks, the last of them far behind: 20 blocks have room for copies of 20, but not for 16 and 24."""
    layout = MemoryLayout(MemoryFacts((4096,) * 4, 4096, 4096, 4096, 1024, 4096, 400, 2000))
    ids = np.array([*range(11), 15], np.int32)
    offers = [
        KvOffer(LayerRange(0, 4), room, num_blocks, kept=KeptKv(numbered(12, offset).names, ids), card="card")
        for offset in (0, 100)
    ]
    stages = tuple(StagePlace(WorkerId(f"w{i}"), "", layers) for i, layers in enumerate(ranges_of(2, 4)))
    model = SimpleNamespace(layout=layout, facts=layout.facts, device=torch.device("cpu"))
    asked: list[int] = []
    dialled: list[Sequence[str]] = []

    def by_copies(_offers: Sequence[KvOffer]) -> KvTable:
        asked.append(1)
        return table_to_form(offers, 4)

    def dial(paths: Sequence[str], _limit_s: float) -> list[PageSocket]:
        dialled.append(paths)
        return []

    monkeypatch.setattr(hand_over, "dial_doors", dial)
    hand = hand_over.HandOver(GroupPlace(1, stages, 0), model, 1.0, is_on=True)  # type: ignore[arg-type]
    assert hand.card.endswith("/cpu/4096/1024")
    table = hand.decide(offers, by_copies)
    assert table.by_pages == by_pages == bool(dialled)
    assert bool(asked) == (num_blocks == 20), "who chooses is not asked where nothing is lost"
    hand.close()


async def test_pages_are_handed_over_and_none_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    keep = ElasticModel.keep_by_pages

    def watching(self: ElasticModel, *args: object) -> None:
        seen.append((self.info.num_layers, len(self.layers)))
        keep(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ElasticModel, "keep_by_pages", watching)
    monkeypatch.setattr(ElasticModel, "keep", refuse)
    async with devices_with_kv(hands_over=True, exchange_bytes=0) as (devices, kept):
        before = [pages_of_all([device]) for device in devices]
        expected = snapshot_each(devices, kept)
        group = await form(devices, RANGES, kept)
        assert len(group.kept) == 24
        assert not group.coming
        check_group_bits(devices, group, expected)
        assert len(seen) == 3
        after = [pages_of_all([device]) for device in devices]
        assert set.union(*after) == set.union(*before)
        assert [len(each) for each in after] == [len(each) for each in before], "no memory has more than it had"
        assert all(now != then for now, then in zip(after, before, strict=True))
        check(devices)
        await group.executor.close()


FAULTS: dict[str, tuple[type, str, Callable[..., object]]] = {
    "export": (PageSwap, "export", refuse),
    "adopt": (PageSwap, "adopt", refuse),
    "apply": (PageSwap, "apply", refuse),
    "a word": (PageSocket, "say", Mock(side_effect=PeerLostError("made up"))),
    "the door": (PageDoor, "accept", refuse),
}


@pytest.mark.parametrize("kind", FAULTS)
async def test_a_fault_costs_the_kv_and_not_the_group(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with devices_with_kv(hands_over=True) as (devices, kept):
        pages = [pages_of_all([device]) for device in devices]
        with monkeypatch.context() as patch:
            patch.setattr(*FAULTS[kind])
            group = await form(devices, RANGES, kept)
        assert not group.kept
        assert [pages_of_all([device]) for device in devices] == pages
        check(devices)
        await serves(group)
        await asyncio.gather(*(device.alone() for device in devices))
        group = await form(devices, RANGES, kept)
        assert len(group.kept) == 24
        assert bool(group.coming) != (kind in ("the door", "a word")), "whose memory has failed hands over no more"
        await group.executor.close()


async def test_where_pages_cannot_go_on_kv_is_copied_after_the_first_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that cannot export what it has imported: the fault is the memory's, and stays."""
    export = PosixMemory.export

    def only_own(self: PosixMemory, page: PageId) -> PageHandle:
        if page >= self.num_pages:
            raise OSError("made up: it was imported")
        return export(self, page)

    monkeypatch.setattr(PosixMemory, "export", only_own)
    ways = []
    async with live_devices(2, hands_over=True) as devices:
        for _ in range(4):
            kept = await kept_three(devices)
            group = await form(devices, ranges_of(2, 4), kept)
            ways.append("copies" if group.coming else "pages" if group.kept else "nothing")
            assert len(group.kept) in (0, 16)
            await dissolve(group.executor, devices)
    assert ways[0] == "pages"
    assert ways[-1] == "copies"
    assert ways.count("nothing") <= 1


async def all_told(
    devices: Sequence[TorchGroupDevice], ranges: Sequence[LayerRange], kept: Sequence[KeptKv]
) -> list[object]:
    """Return what each stage of a group that forms comes to, or raises."""
    own = places(devices, ranges)
    joining = (devices[i].join(own[i], lambda _: None, kept[i]) for i in range(1, len(devices)))
    leading = devices[0].lead(own[0], lambda _: None, kept[0])
    return [*await asyncio.gather(leading, *joining, return_exceptions=True)]


async def test_memory_in_doubt_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may use pages that it thinks are its own."""

    def doubtful(self: PageExchange, _flows: object, swap: PageSwap) -> None:
        swap.undo()
        raise MemoryLostError("the leader does not say who keeps which pages")

    async with devices_with_kv(2, hands_over=True) as (devices, kept):
        monkeypatch.setattr(PageExchange, "carry_out", doubtful)
        for found in await all_told(devices, ranges_of(2, 4), kept):
            assert isinstance(found, GroupFailedError)
            assert "who keeps which pages" in str(found) or "left before" in str(found)
        for device in devices:
            with pytest.raises(StartupError, match="Start the worker again"):
                await device.alone()


async def test_a_stage_that_cannot_drop_ends_the_group_and_no_page_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    leave, calls = ElasticMemory.leave, [0]

    def failing(self: ElasticMemory, layers: Sequence[int], in_use: Spans, by_blocks: int) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise MemoryError("made up")
        leave(self, layers, in_use, by_blocks)

    async with devices_with_kv(hands_over=True) as (devices, kept):
        pages = [pages_of_all([device]) for device in devices]
        with monkeypatch.context() as patch:
            patch.setattr(ElasticMemory, "leave", failing)
            found = await all_told(devices, RANGES, kept)
        assert any(isinstance(each, GroupFailedError) for each in found)
        await asyncio.gather(*(device.alone() for device in devices))
        assert [pages_of_all([device]) for device in devices] == pages
        check(devices)
        group = await form(devices, RANGES, await kept_three(devices))
        assert len(group.kept) == 24
        await group.executor.close()


def test_main_memory_of_one_machine_is_one_device() -> None:
    cpu = torch.device("cpu")
    assert card_of(cpu) == card_of(torch.device("cpu"))
    assert card_of(cpu).endswith("/cpu")
