"""Few bins: who finds no room is evicted, and nobody is lost, doubled or put where there is no room."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.planner.policy.packing.class_packer import ClassPacker
from services.planner.policy.packing.mell import Mell
from services.planner.policy.packing.mell_printed import PrintedMell
from tests.support.seeds import first_of
from tests.unit.planner.packing.checks import FORMS, check_room, places_of
from tests.unit.planner.packing.traces import CAPACITIES, Draw, Trace


@pytest.mark.parametrize("seed", first_of(range(18), 6))
@pytest.mark.parametrize("form", FORMS)
def test_who_finds_no_room_is_evicted_and_nobody_is_lost_or_doubled(
    form: Callable[..., ClassPacker], seed: int
) -> None:
    max_bins = 1 + seed % 5
    trace = Trace.of(form, CAPACITIES[seed % len(CAPACITIES)], max_bins=max_bins)
    draw = Draw.of(seed, most=30)
    for _ in range(250):
        draw.step(trace)
        assert len(trace.packer.bins) <= max_bins
        assert not trace.sizes.keys() & set(trace.evicted)


@pytest.mark.parametrize("form", FORMS)
def test_who_does_not_fit_is_evicted(form: Callable[..., ClassPacker]) -> None:
    packer = form(1000, max_bins=2)
    for name, size in (("l", 700), ("another", 800), ("m", 400), ("t", 190)):
        packer.place(name, size)
    assert packer.evicted == ["m"]
    assert packer.where("m") is None
    assert places_of(packer) == {"l": 0, "another": 1, "t": 0 if packer.bins[0].used > 700 else 1}


@pytest.mark.parametrize("form", FORMS)
def test_who_would_have_a_bin_of_its_own_takes_any_room_if_there_is_none(form: Callable[..., ClassPacker]) -> None:
    packer = form(1000, max_bins=1)
    packer.place("s", 300)
    packer.place("m", 400)
    packer.place("t", 200)
    assert places_of(packer) == {"s": 0, "m": 0, "t": 0}
    assert packer.evicted == []


@pytest.mark.parametrize("form", FORMS)
def test_who_grows_out_of_the_last_bin_has_others_evicted(form: Callable[..., ClassPacker]) -> None:
    packer = form(1000, max_bins=1)
    packer.place("l", 600)
    packer.place("m", 400)
    packer.resize("l", 601)
    assert packer.evicted == ["m"]
    assert places_of(packer) == {"l": 0}


@pytest.mark.parametrize("form", FORMS)
def test_requests_that_are_gathered_are_evicted_together(form: Callable[..., ClassPacker]) -> None:
    packer = form(1000, max_bins=1)
    packer.place("l", 800)
    for name in ("a", "b"):
        packer.place(name, 90)
    packer.resize("l", 900)
    assert set(packer.evicted) == {"a", "b"}
    packer.evicted.clear()
    packer.place("c", 90)
    assert places_of(packer) == {"l": 0, "c": 0}


@pytest.mark.parametrize("form", FORMS)
def test_who_was_evicted_may_come_again_once_there_is_room(form: Callable[..., ClassPacker]) -> None:
    packer = form(1000, max_bins=1)
    packer.place("l", 800)
    packer.place("m", 400)
    assert packer.evicted == ["m"]
    packer.evicted.clear()
    packer.remove("l")
    packer.place("m", 400)
    assert places_of(packer) == {"m": 0}


def test_an_m_bin_with_two_s_is_not_filled_up_with_another_m() -> None:
    """Mell._fill_with_own puts the M of 500 to 260 + 300 + 340."""
    packer = Mell(1000, max_bins=2)
    for name, size in enumerate((260, 480, 500, 300, 340)):
        packer.place(name, size)
    check_room(packer)


def test_an_l_beside_an_s_does_not_fetch_an_m() -> None:
    """PrintedMell._fetch_companion puts the M of 480 to 260 + 501."""
    packer = PrintedMell(1000, max_bins=2)
    for name, size in enumerate((260, 480, 501)):
        packer.place(name, size)
    check_room(packer)


def test_an_m_that_overflows_beside_two_s_sends_away_more_than_its_t() -> None:
    """PrintedMell._changed sends the T of 100 away from 260 + 260 + 490."""
    packer = PrintedMell(1000, max_bins=1)
    for name, size in enumerate((260, 260, 340, 100)):
        packer.place(name, size)
    packer.resize(2, 490)
    check_room(packer)


def test_nobody_is_evicted_while_there_is_a_bin_to_activate() -> None:
    """Mell._allocate takes the M-bin of 300 + 400 for the M of 400."""
    packer = Mell(1000, max_bins=2)
    for name, size in (("s", 300), ("l", 900), ("m", 400)):
        packer.place(name, size)
    packer.remove("l")
    packer.place("m2", 400)
    assert packer.evicted == []
