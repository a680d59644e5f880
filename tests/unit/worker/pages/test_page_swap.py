"""Pages that workers of one device hand over: every block is where it belongs, and every page is somebody's."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from services.worker.contract.kept_kv import KeptKv
from services.worker.kv_moves.kv_table import MAX_EXCHANGED, KvLot, KvOffer, KvTable, table_to_form
from services.worker.memory.cuda import CudaMemory
from services.worker.memory.layout import MemoryFacts, MemoryLayout
from services.worker.memory.page_swap import PageSwap
from services.worker.memory.pool import LedgerError
from services.worker.memory.ranges import MappingError, PageId, VirtualMemory
from services.worker.memory.spans import Spans
from services.worker.pages.flows import page_flows, shift_of, table_by_pages
from shared.layers import LayerRange
from tests.support.elastic_cases import CPU, MadeUpError, snapshot
from tests.support.fake_cuda_driver import GRANULARITY, FakeDriver
from tests.support.page_cards import Card, apply_and_commit, card_by_pages, pages_of_all

BackendMaker = Callable[[int, int], VirtualMemory]


def one_gpu() -> BackendMaker:
    """Return what opens memories that share the stand-in of one device."""
    driver = FakeDriver(2**30)
    return lambda _number, num_pages: CudaMemory(GRANULARITY, num_pages, CPU, driver)


def live(card: Card) -> bool:
    """Let a group form with a fault first, sometimes; return whether its KV goes by pages."""
    before = pages_of_all(card.memories)
    table = card.table()
    if table is None:
        return False
    flows, taken = card.leave(table)
    if card.rng.random() < 0.5:
        states = [snapshot(memory) for memory in card.memories]
        faulty = card.faulty[int(card.rng.integers(card.num))]
        faulty.fail_after(int(card.rng.integers(0, 6)))
        try:
            card.swap(flows, taken, apply_and_commit)
        except MadeUpError:
            assert [snapshot(memory) for memory in card.memories] == states
            for memory in card.memories:
                memory.check_invariants()
            card.swap(flows, taken, apply_and_commit)
        faulty.calls_left = None
    else:
        card.swap(flows, taken, apply_and_commit)
    for memory in card.memories:
        memory.check_invariants()
    card.check_contents(table)
    assert pages_of_all(card.memories) == before
    for memory, offer in zip(card.memories, card.offers(), strict=True):
        memory.fill()
        memory.check_invariants()
        assert memory.usable == Spans.of((0, offer.num_blocks)), "as many blocks as were promised"
    card.check_contents(table)
    return True


@pytest.mark.parametrize(
    ("seed", "on_gpu"), [*((seed, False) for seed in range(60)), *((seed, True) for seed in range(1000, 1012))]
)
def test_every_block_is_where_it_belongs_and_every_page_somebodys(seed: int, *, on_gpu: bool) -> None:
    """In main memory, and behind the calls of a GPU's driver."""
    card = Card(seed, GRANULARITY, one_gpu()) if on_gpu else Card(seed)
    live(card)
    card.close()


def test_random_groups_go_by_pages_and_meet_faults_often_enough() -> None:
    """The two tests above would say little otherwise."""
    num, num_larger, num_blanks = 0, 0, 0
    for seed in range(60):
        card = Card(seed)
        table = card.table()
        if table is not None:
            num += 1
            num_larger += card.num > 2
            flows = page_flows(table, card.ranges, card.memories[0].layout)
            num_blanks += any(flow.num_blanks for flow in flows)
        card.close()
    assert num > 20
    assert num_larger > 5
    assert num_blanks > 10


def apply_commit_and_undo(swaps: Sequence[PageSwap]) -> None:
    """The latter does nothing any more."""
    apply_and_commit(swaps)
    for swap in swaps:
        swap.undo()


def test_pages_that_were_swapped_go_on_to_others_and_come_home() -> None:
    """Group after group of the same workers: later on, pages go that have another home, some of them to it."""
    card, table = card_by_pages(2)
    homes = [pages_of_all([memory]) for memory in card.memories]
    num_away = []
    for _ in range(4):
        flows, taken = card.leave(table)
        card.swap(flows, taken, apply_commit_and_undo)
        card.check_contents(table)
        for memory in card.memories:
            memory.check_invariants()
        found = [pages_of_all([memory]) for memory in card.memories]
        assert set.union(*found) == set.union(*homes)
        num_away.append(len(found[0] - homes[0]))
        card.be_whole_again()
    assert num_away[0] == sum(flow.num_pages for flow in flows if flow.source == 0)
    assert len(set(num_away)) > 1, "some have come home, or more have gone"
    card.close()


def test_a_swap_that_is_not_whole_is_not_applied() -> None:
    card, table = card_by_pages(2)
    flows, taken = card.leave(table)
    flow = next(flow for flow in flows if flow.runs)
    states = [snapshot(memory) for memory in card.memories]

    def fail(_swaps: Sequence[PageSwap]) -> None:
        raise MadeUpError

    def only_one(swap: PageSwap) -> None:
        place = next(iter(flow.at_source))
        handle = swap.export(place)
        assert swap.num_left == 2 * swap.num_pages - 1
        with pytest.raises(LedgerError, match="no page goes or comes"):
            swap.export(place)
        with pytest.raises(LedgerError, match=r"pages that go and come \d+ are missing"):
            swap.apply()
        with pytest.raises(MappingError, match="no page"):
            swap.adopt(None, handle._replace(offset=handle.offset + 1))
        os.close(handle.descriptor)
        swap.undo()
        swap.undo()
        raise MadeUpError

    with pytest.raises(MadeUpError):
        card.memories[flow.source].swap(taken[flow.source], only_one)
    with pytest.raises(MadeUpError):
        card.swap(flows, taken, fail)
    assert [snapshot(memory) for memory in card.memories] == states
    card.swap(flows, taken, apply_and_commit)
    card.check_contents(table)
    card.close()


def test_a_page_that_was_handed_over_is_gone_for_good() -> None:
    """And its memory stays for as long as somebody has it."""
    card, table = card_by_pages(2, page=GRANULARITY, make=one_gpu())
    flows, taken = card.leave(table)
    before = list(card.memories[0]._page_ids)
    card.swap(flows, taken, apply_and_commit)
    backend = card.memories[0]._memory
    gone = next(page for page in before if page not in card.memories[0]._page_ids)
    spare = backend.reserve(GRANULARITY)
    for act in (lambda: backend.export(gone), lambda: spare.map_run(0, [gone]), lambda: backend.hand_over(gone)):
        with pytest.raises(MappingError, match="is not one of this memory's"):
            act()
    with pytest.raises(MappingError, match="mapped already"):
        backend.hand_over(PageId(int(card.memories[0]._page_ids[0])))
    card.memories[0].close()
    card.check_contents(table, first=1)
    card.close()


# What is decided


LAYOUT = MemoryLayout(MemoryFacts((4096,) * 4, 4096, 4096, 4096, 1024, 4096, 400, 2000))
WHOLE = LayerRange(0, 4)


def offer(count: int, *, first: int = 0, num_blocks: int = 100, card: str = "card", offset: int = 0) -> KvOffer:
    names = tuple((offset + i).to_bytes(16, "little") for i in range(count))
    ids = np.arange(first, first + count, dtype=np.int32)[::-1].copy()
    return KvOffer(WHOLE, 64, num_blocks, kept=KeptKv(names, ids), card=card)


def test_ids_follow_each_other_from_the_border_of_a_page() -> None:
    offers = [offer(6), offer(5, first=2, offset=50), offer(0), offer(4, offset=90), offer(3, offset=110)]
    table = table_by_pages(offers, LAYOUT)
    assert table is not None
    assert table.by_pages
    assert [shift_of(lot) for lot in table.lots] == [0, 8, 16, 20], "four blocks to a page: 6 ids take 8, and 7, and 4"
    assert [lot.target_ids.max() for lot in table.lots] == [5, 14, 19, 22]


@pytest.mark.parametrize(
    "offers",
    [
        [offer(6), offer(5, card="")],
        [offer(6), offer(5, card="other")],
        [offer(0), offer(0)],
        [offer(6, num_blocks=0), offer(5, offset=50)],
    ],
    ids=["one hands over none", "two devices", "nothing is kept", "no room"],
)
def test_what_cannot_go_by_pages_is_copied(offers: list[KvOffer]) -> None:
    assert table_by_pages(offers, LAYOUT) is None
    assert not table_to_form(offers, 4).by_pages


@pytest.mark.parametrize(("num_blocks", "counts"), [(13, [6, 5]), (12, [6, 4]), (9, [6, 1]), (8, [6]), (3, [3])])
def test_blocks_that_the_group_has_no_room_for_are_left_out(num_blocks: int, counts: list[int]) -> None:
    """Wherever they stand in what is wanted: the first one named has the highest id."""
    offers = [offer(6), offer(5, offset=50, num_blocks=num_blocks)]
    table = table_by_pages(offers, LAYOUT)
    assert table is not None
    assert [len(lot.names) for lot in table.lots] == counts
    assert table.kept_at(0).ids.max() < num_blocks
    last = offers[len(counts) - 1].kept
    assert table.lots[-1].names == last.names[len(last) - counts[-1] :]


def test_no_more_is_named_than_a_message_holds() -> None:
    layout = MemoryLayout(MemoryFacts((4096,) * 4, 4096, 4096, 4096, 1024, 4096, 400, 10**6))
    offers = [offer(MAX_EXCHANGED - 3, num_blocks=10**6), offer(9, offset=MAX_EXCHANGED, num_blocks=10**6)]
    table = table_by_pages(offers, layout)
    assert table is not None
    assert [len(lot.names) for lot in table.lots] == [MAX_EXCHANGED - 3, 3]
    assert table.lots[1].names == offers[1].kept.names[:3], "the most wanted"


def test_a_block_that_two_have_is_the_first_ones() -> None:
    table = table_by_pages([offer(6), offer(8, offset=3)], LAYOUT)
    assert table is not None
    assert [len(lot.names) for lot in table.lots] == [6, 5]
    assert len(set(table.kept_at(0).names)) == 11


def test_blocks_that_would_leave_their_pages_are_refused() -> None:
    ids = np.arange(3, dtype=np.int32)
    names = (b"a" * 16, b"b" * 16, b"c" * 16)
    for places, why in ((ids + 2, "their places in their pages"), (ids[::-1].copy(), "do not stay together")):
        lot = KvLot((0,), (0, 1), ids, 0, names, places=places)
        with pytest.raises(ValueError, match=why):
            page_flows(KvTable((WHOLE, WHOLE), (lot,), by_pages=True), [LayerRange(0, 2), LayerRange(2, 4)], LAYOUT)


@pytest.mark.parametrize("seed", range(50))
def test_everybody_gives_as_many_pages_as_it_takes(seed: int) -> None:
    """Of groups that grow out of others too, with any shares of the layers."""
    rng = np.random.default_rng(seed)
    cut = int(rng.integers(1, 4))
    kept = [offer(int(rng.integers(0, 9)), first=int(rng.integers(0, 9)), offset=40 * i) for i in range(3)]
    parts = [LayerRange(0, cut), LayerRange(cut, 4)]
    group = [KvOffer(part, 0, 100, "7/a", KeptKv(), card="card") for part in parts]
    group[0] = KvOffer(parts[0], 0, 100, "7/a", kept[2].kept, card="card")
    offers = [*kept[:2], *group]
    wanted = [LayerRange(i, i + 1) for i in rng.permutation(4).tolist()]
    if not (parts[0].covers(wanted[2]) and parts[1].covers(wanted[3])):
        wanted = sorted(wanted, key=lambda layers: (layers.first >= cut, layers.first))
    table = table_by_pages(offers, LAYOUT)
    if table is None:
        assert not any(len(each.kept) for each in kept)
        return
    flows = page_flows(table, wanted, LAYOUT)
    for stage in range(4):
        given = sum(flow.num_pages for flow in flows if flow.source == stage)
        assert given == sum(flow.num_pages for flow in flows if flow.target == stage)
        places = [place for flow in flows if flow.target == stage for place in flow.at_target if place is not None]
        assert len(set(places)) == len(places)
        assert {place.region.layer for place in places} <= set(wanted[stage])
    assert [(flow.source, flow.target) for flow in flows] == sorted({(flow.source, flow.target) for flow in flows})
    for flow in flows:
        assert flow.num_pages > 0
        assert len(list(flow.at_source)) == len(list(flow.at_target)) == flow.num_pages
        assert list(flow.at_source)[flow.num_pages - flow.num_blanks :] == [None] * flow.num_blanks
