"""Placement and admission: the decision and its reason."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.dispatcher.policy.admission import AdmissionInput, decide_admission
from services.dispatcher.policy.placement import (
    PLACEMENTS,
    Placement,
    PlacementLoad,
    place_best_fit,
    place_by_class,
    place_gradient,
    place_least_loaded,
    place_pack,
    place_worst_fit,
)
from services.dispatcher.session.request import FailureCode
from shared.ids import WorkerId
from shared.messages.report_parts import DecodeCost
from shared.systems import SYSTEMS
from tests.support.kinds import some


def make_load(worker_id: str = "w0", **fields: object) -> PlacementLoad:
    load = PlacementLoad(
        worker_id=WorkerId(worker_id),
        ready=True,
        num_sequences=0,
        max_sequences=10,
        num_waiting=0,
        max_waiting=0,
        num_demanded_blocks=0,
        waiting_s=0.0,
        token_s=0.0,
        num_blocks=100,
        block_size=16,
        decode_cost=DecodeCost(),
        max_request_tokens=1000,
    )
    return replace(load, **fields)  # type: ignore[arg-type]  # a builder with keyword defaults


LOADS = st.lists(
    st.builds(
        make_load,
        st.sampled_from(["a", "b", "c", "d"]),
        ready=st.booleans(),
        num_sequences=st.integers(0, 12),
        num_demanded_blocks=st.integers(0, 200),
        is_closing=st.sampled_from([False, False, True]),
    ),
    max_size=4,
    unique_by=lambda load: load.worker_id,
)


@settings(deadline=None)
@given(LOADS, st.integers(1, 1500), st.sets(st.sampled_from(["a", "b"])))
def test_the_chosen_worker_can_take_the_request_and_no_other_one_that_can_is_less_loaded(
    loads: list[PlacementLoad], num_tokens: int, refused: set[WorkerId]
) -> None:
    able = [
        load
        for load in loads
        if load.ready and load.worker_id not in refused and load.num_sequences < 10 and num_tokens <= 1000
    ]
    placed = place_least_loaded(loads, num_tokens, refused)
    if placed is None:
        assert not able
        return
    chosen = next(load for load in able if load.worker_id == placed.worker_id)
    before = [load for load in able if not load.is_closing] or able
    assert chosen.num_demanded_blocks == min(load.num_demanded_blocks for load in before)
    assert chosen in before
    assert place_least_loaded(loads[::-1], num_tokens, refused) == placed


FITS = st.sampled_from([place_best_fit, place_worst_fit, place_pack, place_gradient])
"""`pack` leaves a block for each sequence besides, where nobody says what a step costs."""


@settings(deadline=None)
@given(LOADS, st.integers(1, 1500), st.integers(0, 1500), st.sets(st.sampled_from(["a", "b"])), FITS)
def test_a_fit_is_the_fullest_or_emptiest_worker_in_use_with_room_then_unused_then_closing_then_the_least_loaded(
    loads: list[PlacementLoad], num_tokens: int, num_known: int, refused: set[WorkerId], place: Placement
) -> None:
    placed = place(loads, num_tokens, refused, num_known=num_known)
    able = [each for each in loads if place_least_loaded([each], num_tokens, refused)]
    free = {each.worker_id: (100 - each.num_demanded_blocks) * 16 for each in able if each.num_sequences}
    growth = {each.worker_id: 16 * (each.num_sequences + 1) if place is place_pack else 0 for each in able}
    fits = {name: room for name, room in free.items() if room >= num_known + growth[name]}
    closing = {each.worker_id for each in able if each.is_closing}
    has_room = {each.worker_id for each in able if (100 - each.num_demanded_blocks) * 16 >= num_known}
    unused = [each.worker_id for each in able if not each.num_sequences and not each.is_closing]
    unused = [name for name in unused if name in has_room]
    fitting = {name: room for name, room in fits.items() if name not in closing} or ({} if unused else fits)
    if fitting:
        extreme = max(fitting.values()) if place is place_worst_fit else min(fitting.values())
        assert some(placed).worker_id == min(name for name, room in fitting.items() if room == extreme)
    elif unused:
        assert some(placed).worker_id == min(unused)
    else:
        assert placed == place_least_loaded(loads, num_tokens, refused)


@pytest.mark.parametrize(("num_known", "chosen"), [(760, "a"), (761, "b")])
def test_packing_leaves_room_for_what_all_there_grow_by_in_five_seconds(num_known: int, chosen: str) -> None:
    """A hundred tokens each, of the one that is there and the one that comes; 960 are free."""
    cost = DecodeCost(step_s=0.05)
    loads = [
        make_load(name, num_sequences=1, num_demanded_blocks=used, decode_cost=cost)
        for name, used in (("a", 40), ("b", 20))
    ]
    assert some(place_pack(loads, 1000, num_known=num_known)).worker_id == chosen
    assert some(place_best_fit(loads, 1000, num_known=num_known)).worker_id == "a"


@pytest.mark.parametrize(("num_sequences", "gradient", "pack"), [(17, "a", "a"), (18, "a", "b"), (44, "b", "b")])
def test_who_is_packed_by_steps_takes_no_more_than_its_readers_can_stand(
    num_sequences: int, gradient: str, pack: str
) -> None:
    """20 ms, 1 ms for each sequence, 20 µs for each of 1 600 + 200 tokens; 100 ms are the limit.

    With 18 that is 74 ms, and in five seconds 1 216 tokens more: 98 ms; with 19 it is 75 and, as they grow, 100.3 ms.
    """
    cost = DecodeCost(step_s=0.02, sequence_s=1e-3, kv_token_s=2e-5)
    loads = [
        make_load("a", num_sequences=num_sequences, max_sequences=99, num_demanded_blocks=100, num_blocks=200),
        make_load("b", num_sequences=1, max_sequences=99, num_demanded_blocks=10, num_blocks=200),
    ]
    loads = [replace(load, decode_cost=cost) for load in loads]
    for place, chosen in ((place_gradient, gradient), (place_pack, pack), (place_best_fit, "a")):
        assert some(place(loads, 1000, num_known=200)).worker_id == chosen


@pytest.mark.parametrize(("waiting_s", "others_s", "chosen"), [(0.2, 0.0, "a"), (0.3, 0.0, "b"), (0.3, 0.4, "u")])
def test_a_prompt_is_not_packed_behind_many_others(waiting_s: float, others_s: float, chosen: str) -> None:
    """A quarter of a second is the limit; who looks at memory alone does not see it."""
    loads = [
        make_load("a", num_sequences=9, num_demanded_blocks=50, waiting_s=waiting_s),
        make_load("b", num_sequences=9, num_demanded_blocks=20, waiting_s=others_s),
        make_load("u"),
    ]
    for place, expected in ((place_pack, chosen), (place_gradient, chosen), (place_best_fit, "a")):
        assert some(place(loads, 1000, num_known=100)).worker_id == expected


@pytest.mark.parametrize("place", [place_best_fit, place_worst_fit, place_pack, place_gradient])
def test_who_is_closing_comes_after_all_others_that_have_room(place: Placement) -> None:
    fuller, emptier = (
        make_load(name, num_sequences=1, num_demanded_blocks=used) for name, used in (("a", 40), ("b", 20))
    )
    for closing in (fuller, emptier):
        loads = [replace(load, is_closing=load is closing) for load in (fuller, emptier)]
        assert some(place(loads, 1000, num_known=100)).worker_id != closing.worker_id
        full = [
            replace(load, num_demanded_blocks=load.num_demanded_blocks + 60 * (not load.is_closing)) for load in loads
        ]
        assert some(place(full, 1000, num_known=800)).worker_id == closing.worker_id
        unused = make_load("u")
        assert some(place([*full, unused], 1000, num_known=800)).worker_id == "u"


@pytest.mark.parametrize(("num_known", "chosen"), [(1, "a"), (399, "a"), (400, "b"), (799, "b"), (800, "a")])
def test_by_class_a_request_goes_where_its_size_goes_next_as_long_as_there_is_room(num_known: int, chosen: str) -> None:
    next_for = {"a": ((1, 400), (800, inf)), "b": ((400, 800),), "c": ()}
    loads = [make_load(name, num_sequences=1, next_for=each) for name, each in next_for.items()]
    assert some(place_by_class(loads, 1000, num_known=num_known)).worker_id == chosen
    for change in ({"is_closing": True}, {"num_demanded_blocks": 100}, {"ready": False}):
        disturbed = [replace(load, **change) if load.worker_id == chosen else load for load in loads]
        others = some(place_best_fit(disturbed, 1000, num_known=num_known))
        assert some(place_by_class(disturbed, 1000, num_known=num_known)).worker_id == others.worker_id != chosen
        unused = make_load("u")
        assert some(place_by_class([*disturbed, unused], 1000, num_known=num_known)).worker_id == "u"


def test_equal_memory_is_decided_by_sequences_and_then_by_name() -> None:
    busy, idle = make_load("a", num_sequences=2), make_load("b", num_sequences=1)
    placed = some(place_least_loaded([busy, idle], 10))
    assert (placed.worker_id, placed.reason) == ("b", "least loaded: 0% of its KV memory asked for, 1 sequences")
    assert some(place_least_loaded([make_load("b"), make_load("a")], 10)).worker_id == "a"


def test_a_worker_with_memory_to_spare_gets_no_more_than_it_computes() -> None:
    """Half of the memory counts as one second of prompts that wait."""
    roomy, full = make_load("g", num_blocks=270, num_demanded_blocks=135), make_load("a", num_demanded_blocks=90)
    for waiting_s, expected in ((0.0, "g"), (0.7, "g"), (0.9, "a")):
        assert some(place_least_loaded([replace(roomy, waiting_s=waiting_s), full], 10)).worker_id == expected


def test_every_system_names_a_placement_that_exists() -> None:
    assert {system.placement for system in SYSTEMS.values()} <= set(PLACEMENTS)


CALM = AdmissionInput(
    draining=False,
    num_requests=0,
    max_requests=10,
    num_queued=0,
    max_queued=5,
    num_ready_workers=1,
    num_loading_workers=0,
)


@pytest.mark.parametrize(
    ("state", "decision"),
    [
        (CALM, None),
        (replace(CALM, num_requests=9, num_queued=4), None),
        (replace(CALM, draining=True), FailureCode.DRAINING),
        (replace(CALM, num_ready_workers=0, num_loading_workers=1), FailureCode.MODEL_LOADING),
        (replace(CALM, num_ready_workers=0), FailureCode.NO_CAPACITY),
        (replace(CALM, num_requests=10), FailureCode.QUEUE_FULL),
        (replace(CALM, num_queued=5), FailureCode.QUEUE_FULL),
        (replace(CALM, draining=True, num_ready_workers=0), FailureCode.DRAINING),
        (replace(CALM, num_ready_workers=1, num_loading_workers=3), None),
    ],
)
def test_a_request_is_refused_early_for_the_first_reason_that_holds(
    state: AdmissionInput, decision: FailureCode | None
) -> None:
    assert decide_admission(state) is decision
