"""What each operation does, on bins that are small enough to be looked at."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.planner.policy.packing.class_packer import ClassPacker
from services.planner.policy.packing.mell import Mell
from services.planner.policy.packing.mell_printed import PrintedMell
from tests.unit.planner.packing.checks import FORMS

Form = Callable[..., ClassPacker]


def packed(form: Form, **sizes: int) -> ClassPacker:
    """Have requests come, in this order."""
    packer = form(1000)
    for name, size in sizes.items():
        packer.place(name, size)
    return packer


def layout(packer: ClassPacker) -> dict[int, str]:
    """Return the requests of each bin, in the order of their names."""
    return {
        bin_.number: " ".join(sorted(str(name) for item in bin_.items.values() for name in item.members))
        for bin_ in packer.bins
    }


def num_moves(packer: ClassPacker) -> int:
    return len(packer.bins.take_moves())


@pytest.mark.parametrize("form", FORMS)
def test_each_class_has_bins_of_its_own_up_to_its_last_size(form: Form) -> None:
    assert layout(packed(form, s=333, t=250, l=1000)) == {0: "s", 1: "t", 2: "l"}
    assert layout(packed(form, s1=251, m1=334, s2=333, m2=500)) == {0: "s1 s2", 1: "m1 m2"}
    assert layout(packed(form, m1=500, m2=500, l1=501, l2=501)) == {0: "m1 m2", 1: "l1", 2: "l2"}


@pytest.mark.parametrize("form", FORMS)
def test_an_s_m_or_t_goes_beside_an_l_if_there_is_room(form: Form) -> None:
    packer = packed(form, l1=501, l2=700, m=334, t=126)
    assert layout(packer) == {0: "l1 m", 1: "l2 t"}
    packer.place("m2", 334)
    packer.place("s", 299)
    assert layout(packer) == {0: "l1 m t", 1: "l2 s", 2: "m2"}


@pytest.mark.parametrize("form", FORMS)
def test_small_requests_are_gathered_up_to_a_quarter_of_a_bin_and_count_as_one(form: Form) -> None:
    packer = packed(form, a=125, b=124, c=2, d=125, e=126)
    assert sorted(len(item.members) for bin_ in packer.bins for item in bin_.items.values()) == [1, 2, 2]


@pytest.mark.parametrize("form", FORMS)
def test_an_l_that_comes_fetches_a_companion_whose_bin_is_filled_up_again(form: Form) -> None:
    packer = packed(form, m1=370, m2=450, m3=460)
    assert layout(packer) == {0: "m1 m2", 1: "m3"}
    packer.place("l", 600)
    assert layout(packer) == {0: "m2 m3", 2: "l m1"}
    assert num_moves(packer) == 2


@pytest.mark.parametrize("form", FORMS)
def test_an_m_that_goes_from_beside_an_l_is_replaced_and_so_is_what_replaces_it(form: Form) -> None:
    packer = packed(form, l=600, m=400, m1=370, m2=450, m3=460)
    assert layout(packer) == {0: "l m", 1: "m1 m2", 2: "m3"}
    packer.remove("m")
    assert layout(packer) == {0: "l m1", 1: "m2 m3"}
    assert num_moves(packer) == 2


@pytest.mark.parametrize("form", FORMS)
def test_an_s_or_m_that_goes_is_replaced_from_the_latest_bin_of_its_class(form: Form) -> None:
    packer = packed(form, m1=350, m2=360, m3=370, m4=380, m5=390)
    packer.remove("m2")
    assert layout(packer) == {0: "m1 m5", 1: "m3 m4"}
    packer = packed(form, s1=260, s2=260, s3=260, s4=260, s5=270)
    packer.remove("s2")
    assert layout(packer) == {0: "s1 s3 s5", 1: "s4"}


@pytest.mark.parametrize("form", FORMS)
def test_a_t_that_goes_is_replaced_from_the_latest_t_bin(form: Form) -> None:
    packer = packed(form, t1=240, t2=240, t3=240, t4=240, t5=230, t6=130)
    assert layout(packer) == {0: "t1 t2 t3 t4", 1: "t5 t6"}
    packer.remove("t1")
    assert layout(packer) == {0: "t2 t3 t4 t5", 1: "t6"}
    packer.remove("t2")
    assert layout(packer) == {0: "t3 t4 t5 t6"}


@pytest.mark.parametrize("form", FORMS)
def test_who_goes_from_the_latest_bin_is_not_replaced(form: Form) -> None:
    packer = packed(form, m1=350, m2=360, m3=370, m4=380)
    packer.remove("m4")
    assert layout(packer) == {0: "m1 m2", 1: "m3"}
    assert num_moves(packer) == 0


@pytest.mark.parametrize("form", FORMS)
def test_once_an_l_goes_all_beside_it_find_other_places(form: Form) -> None:
    packer = packed(form, l1=510, t1=230, m1=390, m2=450, l2=740, t=240)
    assert packer.where("m1") == packer.where("l1")
    packer.remove("l1")
    assert packer.where("m1") == packer.where("m2")


@pytest.mark.parametrize("form", FORMS)
def test_an_m_that_becomes_an_l_sends_the_other_m_away_only_if_both_do_not_fit(form: Form) -> None:
    packer = packed(form, m1=340, m2=400)
    packer.resize("m1", 600)
    assert layout(packer) == {0: "m1 m2"}
    packer.resize("m1", 601)
    assert layout(packer) == {0: "m1", 1: "m2"}


@pytest.mark.parametrize("form", FORMS)
def test_an_m_that_becomes_an_l_beside_an_l_goes_itself(form: Form) -> None:
    packer = packed(form, l=501, m=490)
    packer.resize("m", 501)
    assert layout(packer) == {0: "l", 1: "m"}


@pytest.mark.parametrize("form", FORMS)
def test_a_t_bin_that_overflows_sends_away_who_has_grown(form: Form) -> None:
    packer = packed(form, t1=150, t2=200, t3=200, t4=200, t5=200)
    packer.resize("t3", 250)
    assert num_moves(packer) == 0
    packer.resize("t4", 250)
    assert layout(packer) == {0: "t1 t2 t3 t5", 1: "t4"}


@pytest.mark.parametrize("form", FORMS)
def test_who_outgrows_a_bin_of_another_capacity_goes_to_a_new_one(form: Form) -> None:
    packer = packed(form, t=200)
    packer.change_capacity(0, 300)
    packer.resize("t", 400)
    assert layout(packer) == {1: "t"}
    assert packer.evicted == []


def test_beside_an_l_goes_the_largest_that_fits() -> None:
    packer = packed(Mell, s1=260, s2=320, s3=300, m1=420, m2=430, l=600)
    assert packer.where("s2") == packer.where("l")


def test_of_the_t_beside_an_l_that_grows_the_smallest_goes_that_is_enough() -> None:
    packer = packed(Mell, l=501, t1=130, t2=180, t3=185)
    packer.resize("l", 650)
    assert layout(packer) == {0: "l t1 t3", 1: "t2"}
    packer.resize("l", 700)
    assert layout(packer) == {0: "l t3", 1: "t1 t2"}


def test_a_companion_that_does_not_fit_any_more_goes_and_the_t_stay() -> None:
    packer = packed(Mell, l=550, s=260, t=130, l2=600)
    packer.resize("l", 760)
    assert layout(packer) == {0: "l t", 1: "l2 s"}
    assert num_moves(packer) == 1


def test_as_corrected_t_fill_up_what_is_less_than_three_quarters_full() -> None:
    packer = packed(Mell, t1=230, t2=240, t3=220, t4=235, l=510)
    assert layout(packer) == {0: "t1 t3 t4", 1: "l t2"}


def test_as_printed_an_s_or_m_beside_an_l_has_all_t_placed_anew() -> None:
    """The second L has more room than the first one will have."""
    packer = packed(PrintedMell, l=510, t=130, l2=700)
    packer.place("m", 350)
    assert layout(packer) == {0: "l m", 1: "l2 t"}
    corrected = packed(Mell, l=510, t=130, l2=700)
    corrected.place("m", 350)
    assert layout(corrected) == {0: "l m t", 1: "l2"}
