"""Pages and blocks, the ledger, and plans: against literal models of bytes, and against the best of all answers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from math import lcm

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.memory import holdings
from services.worker.memory.budget import Demand, divide, least_budget
from services.worker.memory.change import plan_change
from services.worker.memory.holdings import NotEnoughPagesError
from services.worker.memory.layout import OUTER, Kind, MemoryFacts, MemoryLayout, PageHolding, Region
from services.worker.memory.pool import LedgerError, PageCopy, PagePool, Place
from services.worker.memory.spans import Spans
from shared.errors import StartupError

KEYS = Region(Kind.KEYS, 0)
VALUES = Region(Kind.VALUES, 0)


@st.composite
def layouts(draw: st.DrawFn) -> MemoryLayout:
    layers = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    outer = draw(st.integers(0, 50))
    end = draw(st.integers(0, outer))
    return MemoryLayout(
        MemoryFacts(
            layer_bytes=layers,
            outer_bytes=outer,
            first_stage_end=end,
            last_stage_begin=draw(st.integers(0, end)),
            block_bytes=draw(st.integers(1, 25)),
            page_bytes=draw(st.integers(1, 12)),
            num_pages=draw(st.integers(1, 150)),
            max_blocks=draw(st.integers(1, 30)),
        )
    )


def spans(end: int) -> st.SearchStrategy[Spans]:
    return st.sets(st.integers(0, max(end - 1, 0))).map(lambda s: Spans.of(*((number, number + 1) for number in s)))


def outer_pages_by_bytes(facts: MemoryFacts, resident: Collection[int]) -> set[int]:
    needed = set(range(facts.first_stage_end)) if 0 in resident else set()
    if facts.num_layers - 1 in resident:
        needed |= set(range(facts.last_stage_begin, facts.outer_bytes))
    return {at // facts.page_bytes for at in needed}


def fitting(layout: MemoryLayout, holding: PageHolding, usable: Spans) -> list[int]:
    """Return how many of the first usable blocks the budget holds in the layers of a holding, and beside its others."""
    counts = range(usable.total + 1)
    kept = [replace(holding, kv=layout.covering(usable.head(count))) for count in counts]
    return [count for count in counts if layout.num_pages(kept[count]) <= layout.facts.num_pages]


@pytest.mark.slow
@given(layouts(), st.data())
def test_blocks_and_pages_are_those_that_bytes_say(layout: MemoryLayout, data: st.DataObject) -> None:
    facts = layout.facts
    touched = {
        block: {at // facts.page_bytes for at in range(block * facts.block_bytes, (block + 1) * facts.block_bytes)}
        for block in range(facts.max_blocks)
    }
    assert layout.max_pages == max(touched[facts.max_blocks - 1]) + 1
    pages, blocks = data.draw(spans(layout.max_pages)), data.draw(spans(facts.max_blocks))
    assert set(layout.within(pages)) == {block for block, needed in touched.items() if needed <= set(pages)}
    assert set(layout.covering(blocks)) == set().union(*(touched[block] for block in blocks))
    held = data.draw(st.sets(st.sampled_from(range(facts.num_layers)), min_size=1))
    assert set(layout.outer_pages(tuple(held))) == outer_pages_by_bytes(facts, held)


@given(layouts(), st.lists(st.integers(0, 40), max_size=5))
def test_ids_of_a_group_share_no_page_and_keep_their_place_in_it(layout: MemoryLayout, sizes: list[int]) -> None:
    block, page = layout.facts.block_bytes, layout.facts.page_bytes
    bases = layout.group_bases(sizes)
    assert len(bases) == len(sizes) + 1
    assert layout.unit_blocks * block == lcm(block, page)
    for (base, following), size in zip(pairwise(bases), sizes, strict=True):
        assert base * block % page == 0
        assert (base + size) * block <= following * block
        assert following < base + size + layout.unit_blocks  # no further than it must


def best_growth(layout: MemoryLayout, holding: PageHolding) -> int:
    """Return how many blocks there could be at most, by trying every number of pages for the tail of each side.

    All sides need the same blocks, so the best that can be done with x more pages each is to have x.
    """
    free = layout.facts.num_pages - layout.num_pages(holding)
    most = 0
    for more in range(layout.max_pages - holding.kv.end + 1):
        if 2 * len(holding.layers) * more <= free:
            kv = holding.kv | Spans.of((holding.kv.end, holding.kv.end + more))
            most = max(most, layout.within(kv).total)
    return most


@given(layouts(), st.data())
def test_a_drop_gains_as_many_blocks_as_can_be(layout: MemoryLayout, data: st.DataObject) -> None:
    facts = layout.facts
    try:
        before = holdings.whole(layout, data.draw(st.integers(0, facts.max_blocks)))
    except NotEnoughPagesError:
        return
    gone = data.draw(st.sets(st.sampled_from(range(facts.num_layers)), max_size=facts.num_layers - 1))
    in_use = data.draw(spans(facts.max_blocks))
    after = holdings.dropped(layout, before, gone, in_use) if gone else before
    grown = holdings.grown(layout, after)
    assert layout.num_pages(grown) <= facts.num_pages
    assert layout.usable(grown).total == max(best_growth(layout, after), layout.usable(after).total)
    assert set(layout.usable(before)) <= set(layout.usable(grown))
    for layer in gone:
        assert grown.left(layer) == in_use & layout.usable(before)


@given(layouts(), st.data())
def test_layers_come_back_beside_as_many_blocks_as_can_stay(layout: MemoryLayout, data: st.DataObject) -> None:
    facts = layout.facts
    try:
        start = holdings.whole(layout, 0)
    except NotEnoughPagesError:
        return
    if facts.num_layers == 1:
        return
    gone = data.draw(st.sets(st.sampled_from(range(facts.num_layers)), min_size=1, max_size=facts.num_layers - 1))
    holding = holdings.grown(layout, holdings.dropped(layout, start, gone, Spans()))
    usable = layout.usable(holding)
    back = data.draw(st.sets(st.sampled_from(sorted(gone)), min_size=1))
    layers = tuple(sorted((*holding.layers, *back)))
    most = max(fitting(layout, PageHolding(layers, Spans()), usable))  # the whole model fitted once
    if most < usable.total:
        with pytest.raises(NotEnoughPagesError):
            holdings.restored(layout, holding, back, most + 1)
    restored = holdings.restored(layout, holding, back, most)
    assert layout.usable(restored) == usable.head(most) or most == 0
    assert layout.num_pages(restored) <= facts.num_pages


@given(layouts(), st.data())
def test_parameters_lie_beside_as_many_blocks_as_can_stay(layout: MemoryLayout, data: st.DataObject) -> None:
    """Whatever lay beside before; and what is taken away is room again, to the block that `room` says."""
    facts = layout.facts
    numbers = st.sampled_from(range(facts.num_layers))
    held = tuple(sorted(data.draw(st.sets(numbers, min_size=1))))
    others = [i for i in range(facts.num_layers) if i not in held]
    before, beside = (sorted(data.draw(st.sets(st.sampled_from(others or [0])))) if others else [] for _ in range(2))
    holding = holdings.grown(layout, PageHolding(held, Spans(), beside=tuple(before)))
    if layout.num_pages(holding) > facts.num_pages:
        return
    usable = layout.usable(holding)
    assert usable.total == holdings.room(layout, held, before)
    possible = fitting(layout, PageHolding(held, Spans(), beside=tuple(beside)), usable)
    if not possible:
        with pytest.raises(NotEnoughPagesError):
            holdings.resided(layout, holding, beside, 0)
        return
    resided = holdings.resided(layout, holding, beside, max(possible))
    assert (resided.layers, list(resided.beside)) == (held, beside)
    assert layout.num_pages(resided) <= facts.num_pages
    assert layout.usable(resided) == usable.head(max(possible)) or max(possible) == 0
    if max(possible) < usable.total:
        with pytest.raises(NotEnoughPagesError):
            holdings.resided(layout, holding, beside, max(possible) + 1)
    assert layout.usable(holdings.grown(layout, resided)).total == holdings.room(layout, held, (*held, *beside))


@given(layouts(), st.data())
def test_room_beside_parameters_is_what_their_pages_leave(layout: MemoryLayout, data: st.DataObject) -> None:
    """Counted by bytes: pages that a resident layer's parameters lie in are gone, the rest is shared out evenly."""
    facts = layout.facts
    first = data.draw(st.integers(0, facts.num_layers - 1))
    layers = range(first, data.draw(st.integers(first + 1, facts.num_layers)))
    resident = range(data.draw(st.integers(0, first)), data.draw(st.integers(layers.stop, facts.num_layers)))
    pages = len(outer_pages_by_bytes(facts, resident))
    pages += sum(len({at // facts.page_bytes for at in range(facts.layer_bytes[i])}) for i in resident)
    each = max(facts.num_pages - pages, 0) // (2 * len(layers))
    expected = min(each * facts.page_bytes // facts.block_bytes, facts.max_blocks)
    assert holdings.room(layout, layers, resident) == expected


@pytest.mark.slow
@given(layouts(), st.data())
def test_plans_lead_from_one_holding_to_another(layout: MemoryLayout, data: st.DataObject) -> None:
    """Whatever both have stays in its pages; the ledger does not tell any other story."""
    facts = layout.facts
    pool = PagePool(facts.num_pages, {region: layout.reserved_pages(region) for region in layout.regions})
    now = PageHolding((), Spans())
    for _ in range(4):
        layers = tuple(sorted(data.draw(st.sets(st.sampled_from(range(facts.num_layers)), min_size=1))))
        others = [i for i in range(facts.num_layers) if i not in layers]
        left = tuple((i, s) for i in others if (s := data.draw(spans(facts.max_blocks))))
        beside = tuple(i for i in others if data.draw(st.booleans()))
        then = PageHolding(layers, data.draw(spans(layout.max_pages)), left, beside)
        if layout.num_pages(then) > facts.num_pages:
            with pytest.raises(NotEnoughPagesError):
                plan_change(layout, now, then)
            continue
        assert sum(pages.total for pages in layout.mapped(then).values()) == layout.num_pages(then)
        change = plan_change(layout, now, then)
        before = {region: pool.pages(region) for region in layout.regions}
        pool.commit(pool.prepare(change.moves))
        pool.check_invariants()
        assert {region: pool.places(region) for region in layout.regions} == {
            region: layout.mapped(then).get(region, Spans()) for region in layout.regions
        }
        for region, pages in layout.mapped(then).items():
            for place in pages & layout.mapped(now).get(region, Spans()):
                assert pool.pages(region)[place] == before[region][place]
        assert sum(move.num_pages for move in change.moves) <= layout.num_pages(now) + layout.num_pages(then)
        now = then


@given(layouts(), st.integers(0, 40), st.integers(0, 60))
def test_the_budget_is_divided_into_what_the_pages_hold(layout: MemoryLayout, extra: int, reserve: int) -> None:
    """`budget.py` counts bytes before there are pages; what it promises must be there."""
    facts = layout.facts
    pages = facts.num_pages - -(-reserve // facts.page_bytes)
    parameters = layout.num_pages(PageHolding(tuple(range(facts.num_layers)), Spans()))
    room = (pages - parameters) // (2 * facts.num_layers) * facts.page_bytes // facts.block_bytes
    demand = Demand(
        memory_bytes=facts.num_pages * facts.page_bytes + extra % facts.page_bytes,
        parameter_bytes=parameters * facts.page_bytes,
        bytes_per_block=2 * facts.num_layers * facts.block_bytes,
        block_size=1,
        max_positions=1,
        max_model_len=None,
        num_pools=2 * facts.num_layers,
        page_bytes=facts.page_bytes,
    )
    enough = least_budget(demand, reserve)
    assert divide(replace(demand, memory_bytes=enough), reserve, 1).num_blocks >= 1
    with pytest.raises(StartupError):
        divide(replace(demand, memory_bytes=enough - 1), reserve, 1)
    if room < 1:
        with pytest.raises(StartupError):
            divide(demand, reserve, 1)
        return
    num_blocks = divide(demand, reserve, 1).num_blocks
    assert num_blocks == room
    large = MemoryLayout(replace(facts, num_pages=pages, max_blocks=room + 100))
    assert large.usable(holdings.whole(large, num_blocks)).total == num_blocks
    assert large.usable(holdings.grown(large, holdings.whole(large, 0))).total == num_blocks


def test_pages_go_straight_from_what_is_dropped_to_what_grows() -> None:
    """The worked example of `change.py`'s docstring, with one page outside: nothing passes through the free pages."""
    layout = MemoryLayout(MemoryFacts((2, 2), 1, 1, 1, 1, 1, 10, 8))
    before = holdings.whole(layout, 1)
    assert (layout.num_pages(before), before.kv.total) == (9, 1)
    after = holdings.grown(layout, holdings.dropped(layout, before, [1], Spans()))
    change = plan_change(layout, before, after)
    dropped = Region(Kind.PARAMETERS, 1)
    assert after.kv == Spans.of((0, 3))
    assert change.moves == (
        PageCopy(2, Place(dropped, 0), Place(KEYS, 1)),
        PageCopy(1, Place(Region(Kind.KEYS, 1), 0), Place(VALUES, 1)),
        PageCopy(1, Place(Region(Kind.VALUES, 1), 0), Place(VALUES, 2)),
    )


def test_plans_do_not_depend_on_the_order_of_what_is_named() -> None:
    layout = MemoryLayout(MemoryFacts((5, 6, 7, 8), 9, 4, 2, 3, 2, 80, 40))
    before = holdings.whole(layout, 4)
    plans = {
        plan_change(layout, before, holdings.grown(layout, holdings.dropped(layout, before, gone, Spans.of((0, 2)))))
        for gone in ([3, 1], [1, 3], {3, 1}, (1, 3, 1))
    }
    assert len(plans) == 1


def pool_of(num_pages: int = 8) -> PagePool:
    return PagePool(num_pages, {OUTER: 2, KEYS: 4, VALUES: 4})


def test_free_pages_are_taken_in_order_and_become_free_again() -> None:
    pool = pool_of()
    pool.commit(pool.prepare([PageCopy(2, None, Place(KEYS, 1)), PageCopy(1, None, Place(VALUES, 0))]))
    assert pool.pages(KEYS).tolist() == [-1, 0, 1, -1]
    pool.commit(pool.prepare([PageCopy(1, Place(KEYS, 1), None), PageCopy(1, Place(KEYS, 2), Place(KEYS, 1))]))
    assert (pool.pages(KEYS).tolist(), pool.num_free) == ([-1, 1, -1, -1], 6)
    pool.commit(pool.prepare([PageCopy(3, None, Place(VALUES, 1))]))
    assert (pool.pages(VALUES).tolist(), pool.places(VALUES)) == ([2, 0, 3, 4], Spans.of((0, 4)))
    assert (pool.count(Kind.KEYS), pool.count(Kind.VALUES), pool.count(Kind.OUTER)) == (1, 4, 0)
    pool.check_invariants()


IMPOSSIBLE = [
    (PageCopy(1, Place(KEYS, 0), None), "from where there are none"),
    (PageCopy(2, Place(KEYS, 2), None), "from where there are none"),
    (PageCopy(1, None, Place(KEYS, 2)), "there are pages already"),
    (PageCopy(1, Place(KEYS, 1), Place(KEYS, 2)), "there are pages already"),
    (PageCopy(2, None, Place(VALUES, 3)), "has no 2 places from 3 on"),
    (PageCopy(1, None, Place(VALUES, -1)), "has no 1 places from -1 on"),
    (PageCopy(0, None, Place(VALUES, 0)), "moves nothing"),
    (PageCopy(1, None, None), "moves nothing"),
]


@pytest.mark.parametrize(("move", "message"), IMPOSSIBLE)
def test_moves_that_do_not_fit_the_ledger_are_refused(move: PageCopy, message: str) -> None:
    pool = pool_of()
    pool.commit(pool.prepare([PageCopy(2, None, Place(KEYS, 1))]))
    with pytest.raises(LedgerError, match=message):
        pool.prepare([PageCopy(1, None, Place(OUTER, 0)), move])
    assert (pool.pages(KEYS).tolist(), pool.num_free, pool.count(*Kind)) == ([-1, 0, 1, -1], 6, 2)


def test_more_pages_than_are_free_cannot_be_taken() -> None:
    pool = pool_of(4)
    pool.commit(pool.prepare([PageCopy(2, None, Place(KEYS, 1))]))
    with pytest.raises(LedgerError, match="3 free pages are needed, there are 2"):
        pool.prepare([PageCopy(1, None, Place(OUTER, 0)), PageCopy(2, None, Place(VALUES, 0))])
    assert pool.num_free == 2


def test_a_budget_is_lowered_only_where_pages_are_free() -> None:
    pool = pool_of()
    pool.commit(pool.prepare([PageCopy(3, None, Place(KEYS, 1))]))
    for num_pages in (2, 9, 0):
        with pytest.raises(LedgerError, match="a budget of 8 pages, 5 of them free"):
            pool.set_budget(num_pages)
    pool.set_budget(3)
    assert (pool.budget, pool.num_free) == (3, 0)
    pool.check_invariants()


def test_a_broken_ledger_is_noticed() -> None:
    for damage in (
        lambda pool: pool._tables[KEYS].__setitem__(3, 0),  # at two places
        lambda pool: pool._tables[KEYS].__setitem__(0, -1),  # at none
        lambda pool: pool._is_free.__setitem__(0, True),  # free, and in use
        lambda pool: pool._tables[KEYS].__setitem__(3, 8),  # beyond the budget
    ):
        pool = pool_of()
        pool.commit(pool.prepare([PageCopy(2, None, Place(KEYS, 0))]))
        pool.check_invariants()
        damage(pool)
        with pytest.raises(AssertionError):
            pool.check_invariants()


def test_impossible_facts_are_refused() -> None:
    facts = MemoryFacts((5, 6), 9, 4, 2, 3, 2, 80, 40)
    changes: list[dict[str, object]] = [
        {"layer_bytes": ()},
        {"layer_bytes": (5, 0)},
        {"block_bytes": 0},
        {"page_bytes": -1},
        {"num_pages": 0},
        {"max_blocks": 0},
        {"first_stage_end": 10},
        {"last_stage_begin": -1},
        {"last_stage_begin": 10},
    ]
    for change in changes:
        with pytest.raises(ValueError, match=r"below 1|lie outside"):
            replace(facts, **change)  # type: ignore[arg-type]  # of changing fields


def test_planning_for_a_large_gpu_is_quick_because_it_goes_by_runs() -> None:
    """80 GB, 80 layers, half of them dropped: the plan has moves for ranges, not for its thousands of pages.

    Before: (40 000 - 100 - 80 * 220) / 160 = 139 pages on each side, of 32 blocks. After, while all KV of the dropped
    layers is still read: (40 000 - 50 - 40 * 220 - 80 * 139) / 80 = 250.
    """
    page, layer = 2 * 2**20, 220
    layout = MemoryLayout(
        MemoryFacts((layer * page,) * 80, 100 * page, 50 * page, 50 * page, 65536, page, 40000, 10**6)
    )
    before = holdings.grown(layout, holdings.whole(layout, 0))
    after = holdings.grown(layout, holdings.dropped(layout, before, range(40), layout.usable(before)))
    change = plan_change(layout, before, after)
    assert (layout.usable(before).total, layout.usable(after).total) == (139 * 32, 250 * 32)
    assert sum(move.num_pages for move in change.moves) >= 40 * layer - 80
    assert len(change.moves) < 300
    pool = PagePool(40000, {region: layout.reserved_pages(region) for region in layout.regions})
    pool.commit(pool.prepare(plan_change(layout, PageHolding((), Spans()), before).moves))
    pool.commit(pool.prepare(change.moves))
    pool.check_invariants()
    assert np.array_equal(pool.pages(Region(Kind.KEYS, 50)) >= 0, np.arange(layout.max_pages) < after.kv.end)
