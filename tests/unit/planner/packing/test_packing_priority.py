"""Which of several bins takes an item first: by its room, by how many items it has, and by its machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.planner.policy.packing.class_packer import ClassPacker, Priority
from services.planner.policy.packing.mell import Mell
from tests.unit.planner.packing.checks import FORMS


def prefer(*, free: float = 0.0, requests: float = 0.0, same_host: float = 0.0) -> Priority:
    return Priority(free=free, requests=requests, same_host=same_host)


def packed(form: Callable[..., ClassPacker], priority: Priority, *sizes: int) -> ClassPacker:
    """Have requests 0, 1, ... of these sizes come; even bins are on one machine, odd ones on another."""
    packer = form(1000, priority=priority, host_of=lambda number: number % 2)
    for name, size in enumerate(sizes):
        packer.place(name, size)
    return packer


@pytest.mark.parametrize("form", FORMS)
def test_a_t_goes_to_the_l_with_most_room_or_with_least_as_the_weight_says(form: Callable[..., ClassPacker]) -> None:
    for weight, expected in ((1.0, 1), (-1.0, 2)):
        packer = packed(form, prefer(free=weight), 730, 600, 740, 200)
        assert packer.where(3) == expected


@pytest.mark.parametrize("form", FORMS)
def test_a_t_goes_to_the_l_with_fewest_items_or_with_most_as_the_weight_says(form: Callable[..., ClassPacker]) -> None:
    """Both have 270 left."""
    for weight, expected in ((-1.0, 1), (1.0, 0)):
        packer = packed(form, prefer(requests=weight), 600, 130, 730, 200)
        assert packer.where(1) == 0
        assert packer.where(3) == expected


@pytest.mark.parametrize("form", FORMS)
def test_a_t_that_has_to_go_stays_on_its_machine_as_the_weight_says(form: Callable[..., ClassPacker]) -> None:
    """The T lies beside the L of 600 until an M comes that fits nowhere else."""
    for weight, expected in ((1.0, 2), (0.0, 1), (-1.0, 1)):
        packer = packed(form, prefer(same_host=weight), 600, 200, 700, 700, 380)
        assert packer.where(4) == packer.where(0) == 0
        assert packer.where(1) == expected


@pytest.mark.parametrize("form", FORMS)
def test_who_has_just_come_is_on_no_machine(form: Callable[..., ClassPacker]) -> None:
    for weight in (1.0, -1.0):
        assert packed(form, prefer(same_host=weight), 700, 700, 700, 200).where(3) == 0


@pytest.mark.parametrize("form", FORMS)
def test_the_weights_are_added_up(form: Callable[..., ClassPacker]) -> None:
    """Beside the L of 600 lay a T: it may go to 660 on the other machine, or to 700 on its own."""
    for weight, expected in ((0.05, 2), (0.03, 1)):
        packer = packed(form, prefer(free=1.0, same_host=weight), 600, 200, 660, 700, 390)
        assert packer.where(4) == 0
        assert packer.where(1) == expected


@pytest.mark.parametrize("form", FORMS)
def test_of_equals_the_first_takes_it(form: Callable[..., ClassPacker]) -> None:
    assert packed(form, Priority(), 700, 700, 700, 200).where(3) == 0


@pytest.mark.parametrize("form", FORMS)
def test_an_m_goes_beside_an_l_by_the_same_weights(form: Callable[..., ClassPacker]) -> None:
    for weight, expected in ((1.0, 1), (-1.0, 2)):
        assert packed(form, prefer(free=weight), 610, 520, 620, 350).where(3) == expected


def test_a_t_goes_to_an_m_only_if_no_l_has_room() -> None:
    assert packed(Mell, Priority(), 400, 400, 760, 200).where(3) == 1
    assert packed(Mell, Priority(), 400, 400, 860, 200).where(3) == 0
