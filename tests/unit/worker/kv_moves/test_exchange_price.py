"""Whose KV is attended while it moves: figures by hand, laws, and that no single change would be cheaper."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.contract.kept_kv import KeptKv
from services.worker.contract.remote import SPLIT_KEYS
from services.worker.kv_moves.exchange_modes import ExchangeCosts, all_live, modes_of, usable, work_of
from services.worker.kv_moves.exchange_price import LotWork, Pace, Prices, choose_live
from services.worker.kv_moves.kv_table import KvOffer, MovingKv, none_live
from shared.layers import LayerRange, even_split
from shared.systems import KvExchange


def lot_of(
    lengths: list[int],
    stage: int = 0,
    num_stages: int = 2,
    *,
    block_s: float = 1.0,
    ask_s: float = 0.0,
    messages_s: float = 0.0,
) -> LotWork:
    """Return a lot of sequences of so many blocks, four to a split, that one stage sends to all others."""
    ends = np.cumsum(lengths, dtype=np.int32) - 1
    begins = [end + 1 - length % 4 for length, end in zip(lengths, ends, strict=True)]
    tails = [place for begin, end in zip(begins, ends, strict=True) for place in range(begin, end + 1)]
    sends = np.eye(num_stages)[stage] * block_s
    takes = (1 - np.eye(num_stages)[stage]) * block_s / (num_stages - 1)
    asks = np.full(num_stages, ask_s)
    return LotWork(sum(lengths), np.array(tails, np.int32), ends, sends, takes, asks, messages_s)


@st.composite
def drawn_lots(draw: st.DrawFn) -> tuple[LotWork, ...]:
    """Return lots of up to three stages, each of which sends one."""
    num = draw(st.integers(1, 3))
    lengths, block_s = st.lists(st.integers(1, 13), max_size=5), st.sampled_from([0.0, 0.01, 0.1, 1.0])
    ask_s, messages_s = st.sampled_from([0.0, 0.001, 0.03, 0.5]), st.sampled_from([0.0, 0.01, 0.3])
    return tuple(
        lot_of(draw(lengths), i, max(num, 2), block_s=draw(block_s), ask_s=draw(ask_s), messages_s=draw(messages_s))
        for i in range(num)
    )


lots_drawn = drawn_lots()
steps = st.sampled_from([0.01, 0.1, 1.0])


def test_prices_by_hand() -> None:
    """Two sequences of 6 blocks, splits of 4: tails come at 2 and 4 s, whole splits at 8 and 12 s."""
    free = lot_of([6, 6])
    prices = Prices([free], Pace(0.5))
    assert prices.of([False]) == pytest.approx(6 + 12)
    assert prices.of([True]) == pytest.approx(2 + 4)
    # asked (8 - 2 + 12 - 4) / 12 tokens a step on average; with 0.3 s each the busiest link has 0.35 s of it
    asking = replace(free, asks_s=np.array([0.3, 0.1]))
    longer = (0.5 + 0.35) / 0.5
    lag = 0.35 / (0.5 + 0.35)
    expected = longer * (2 + 4) + longer * (10 + 8) * lag
    assert Prices([asking], Pace(0.5)).of([True]) == pytest.approx(expected)
    assert Prices([asking], Pace(0.5)).of([False]) == pytest.approx(6 + 12)
    late = replace(free, messages_s=0.5)
    assert Prices([late], Pace(0.5)).of([True]) == pytest.approx(2 + 4 + (10 + 8) * 0.5)
    later = replace(free, messages_s=9.5)
    assert Prices([later], Pace(0.5)).of([True]) == pytest.approx(2 + 4 + 2 * 9.5), "one step is begun, and takes 10 s"


def test_what_would_come_too_late_is_computed_again_unless_something_is_live() -> None:
    lots = [lot_of([6, 6]), lot_of([5], stage=1)]
    plenty, short = (Prices(lots, Pace(0.5, limit_s, again_s=10.0)) for limit_s in (12.0, 9.0))
    assert plenty.of([False, False]) == pytest.approx(5 + 6 + 12)
    assert short.of([False, False]) == pytest.approx(5 + 6 + 9 + 3 * 10)
    assert short.of([True, False]) == plenty.of([True, False])
    both = Prices(lots, Pace(0.5, 3.0, again_s=10.0))
    assert both.of([False, False]) == pytest.approx((3 + (2 + 2) * 10) + (3 + (3 + 2) * 10) + (3 + (9 + 2) * 10))


def test_a_lot_waits_for_its_turn_on_a_link_that_another_uses() -> None:
    one, other = lot_of([2], 0, 3, block_s=1.0), lot_of([3], 1, 3, block_s=1.0)
    # each sends alone; stage 2 takes half of both: 2 blocks of the one and 3 of the other
    assert Prices([one, other], Pace(1.0)).of([False, False]) == pytest.approx(2 + 3)
    slow = replace(other, takes_s=np.array([0.0, 0.0, 2.0]))
    assert Prices([one, slow], Pace(1.0)).of([False, False]) == pytest.approx((2 * 0.5 + 2 * 2) + (2 * 0.5 + 3 * 2))


@given(lots=lots_drawn, step_s=steps)
def test_no_mode_of_all_and_no_other_mode_of_one_is_cheaper(lots: tuple[LotWork, ...], step_s: float) -> None:
    chosen = choose_live(lots, Pace(step_s))
    price_s = Prices(lots, Pace(step_s)).of
    assert price_s(chosen) <= price_s([False] * len(lots))
    able = [bool(lot.ends.size) and len(lot.tails) < lot.num_blocks for lot in lots]
    assert price_s(chosen) <= price_s(able)
    for index in range(len(lots)):
        other = [live != (i == index) for i, live in enumerate(chosen)]
        assert not able[index] or price_s(chosen) <= price_s(other)


@given(lots=lots_drawn, step_s=steps)
def test_of_lots_that_cost_alike_the_choice_is_the_cheapest_of_all(lots: tuple[LotWork, ...], step_s: float) -> None:
    """For up to two lots improving one at a time finds it."""
    lots = lots[:2]
    able = [bool(lot.ends.size) and len(lot.tails) < lot.num_blocks for lot in lots]
    choices = product(*[(False, True) if may else (False,) for may in able])
    price_s = Prices(lots, Pace(step_s)).of
    assert price_s(choose_live(lots, Pace(step_s))) <= min(map(price_s, choices)) + 1e-9


@given(lots=lots_drawn, step_s=steps)
def test_what_cannot_gain_or_is_not_known_is_coordinated(lots: tuple[LotWork, ...], step_s: float) -> None:
    chosen = choose_live(lots, Pace(step_s))
    for lot, live in zip(lots, chosen, strict=True):
        assert not (live and not lot.ends.size), "nobody waits"
        assert not (live and len(lot.tails) == lot.num_blocks), "all contexts are shorter than a split"
    instant = [replace(lot, sends_s=lot.sends_s * 0, takes_s=lot.takes_s * 0) for lot in lots]
    assert not any(choose_live(instant, Pace(step_s))), "nothing to wait for"
    unknown = choose_live([replace(lots[0], can_be_live=False), *lots[1:]], Pace(step_s))
    assert not unknown[0]
    assert not any(choose_live(lots, Pace(0.0)))


@given(lots=lots_drawn, step_s=steps, factor=st.sampled_from([1.5, 4.0, 100.0]))
def test_dearer_remote_attention_only_makes_it_rarer(lots: tuple[LotWork, ...], step_s: float, factor: float) -> None:
    one = lots[:1]
    dearer = [replace(lot, asks_s=lot.asks_s * factor, messages_s=lot.messages_s * factor) for lot in one]
    assert choose_live(one, Pace(step_s)) >= choose_live(dearer, Pace(step_s))
    assert Prices(dearer, Pace(step_s)).of([False]) == Prices(one, Pace(step_s)).of([False])
    assert Prices(dearer, Pace(step_s)).of([True]) >= Prices(one, Pace(step_s)).of([True])


@given(lots=lots_drawn, step_s=steps, factor=st.sampled_from([1.5, 4.0, 100.0]))
def test_kv_that_takes_longer_by_itself_only_makes_live_better(
    lots: tuple[LotWork, ...], step_s: float, factor: float
) -> None:
    """With the same remote attention all waits grow alike; what does not is the step that is begun."""
    slower = [replace(lot, sends_s=lot.sends_s * factor, takes_s=lot.takes_s * factor) for lot in lots]
    price_s, slower_s = Prices(lots, Pace(step_s)).of, Prices(slower, Pace(step_s)).of
    for choice in product((False, True), repeat=len(lots)):
        assert slower_s(choice) <= factor * price_s(choice) * (1 + 1e-9)
    none = [False] * len(lots)
    assert slower_s(none) == pytest.approx(factor * price_s(none))
    assert choose_live(slower[:1], Pace(step_s)) >= choose_live(lots[:1], Pace(step_s))


def moving(lengths: list[int], first: int, source: int) -> MovingKv:
    work = lot_of(lengths)
    names = tuple(i.to_bytes(16, "little") for i in range(first, first + work.num_blocks))
    return MovingKv((source,), KeptKv(names, np.arange(work.num_blocks, dtype=np.int32), work.tails, work.ends))


def by_price_of(
    rates: tuple[float, float] = (100.0, 100.0), *, latency_s: float = 0.0, token_bytes: int = 1
) -> list[bool]:
    """Return how a lot of each of two workers moves, whose links have these rates."""
    offers = [KvOffer(LayerRange(0, 4), 0, 0, link_bytes_per_s=rate, step_s=0.1) for rate in rates]
    costs = ExchangeCosts(4, 10, token_bytes, latency_s, math.inf, None)
    choose = modes_of(KvExchange.BY_PRICE, offers, even_split(4, 2), costs)
    return list(choose([moving([6], 0, 0), moving([6], 6, 1)]))


def test_facts_of_links_become_prices() -> None:
    """A link that is not known keeps all coordinated that uses it."""
    assert by_price_of() == [True, True]
    assert by_price_of(latency_s=10.0) == [False, False]
    assert by_price_of(token_bytes=10_000) == [False, False]
    for unknown in ((0.0, 100.0), (100.0, 0.0)):
        assert by_price_of(unknown) == [False, False]


def test_layers_that_stay_where_they_are_cost_nothing() -> None:
    """A group of 3 and 1 layers becomes one of 2 and 2: one layer moves, from stage 0 to stage 1."""
    held, rates = (LayerRange(0, 3), LayerRange(3, 4)), (100.0, 50.0)
    offers = [KvOffer(layers, 0, 0, link_bytes_per_s=rate) for layers, rate in zip(held, rates, strict=True)]
    costs = ExchangeCosts(4, pair_bytes=10, token_bytes=7, latency_s=0.25, limit_s=math.inf, cost=None)
    work = work_of(replace(moving([6], 0, 0), sources=(0, 1)), offers, even_split(4, 2), costs)
    assert work.sends_s.tolist() == [0.1, 0.0]
    assert work.takes_s.tolist() == [0.0, 0.2]
    assert work.asks_s.tolist() == [0.07, 0.14]
    assert work.messages_s == 0.5
    assert work.can_be_live
    assert (work.num_blocks, work.tails.tolist(), work.ends.tolist()) == (6, [4, 5], [5])


def test_systems_that_do_not_choose_have_one_mode() -> None:
    costs = ExchangeCosts(4, 10, 1, 0.0, math.inf, None)
    assert modes_of(KvExchange.LIVE, (), (), costs) is all_live
    assert modes_of(KvExchange.COORDINATED, (), (), costs) is none_live
    assert {usable(each, SPLIT_KEYS - 1) for each in KvExchange} == {KvExchange.COORDINATED}
    assert all(usable(each, SPLIT_KEYS // 2) is each for each in KvExchange)
