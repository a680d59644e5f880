"""Placement by the product of prefill and batch, alone and by several dispatchers that read one view."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.dispatcher.policy.placement import PlacementLoad, _load, place_prefix_aware
from services.dispatcher.state import ClusterState
from shared.api_keys import Tier
from shared.ids import WorkerId
from tests.support.fake_worker import make_status
from tests.support.kinds import some
from tests.support.statuses import make_view
from tests.unit.dispatcher.test_dispatcher_policies import make_load

TOKEN_S = 0.25
LOADS = st.lists(
    st.builds(
        make_load,
        st.sampled_from("abcde"),
        ready=st.sampled_from([True, True, False]),
        num_sequences=st.integers(0, 12),
        num_demanded_blocks=st.integers(0, 100),
        token_s=st.sampled_from([TOKEN_S, 2 * TOKEN_S, 0.0]),
        pulled_token_s=st.sampled_from([0.0, 0.0, TOKEN_S / 8, 4 * TOKEN_S]),
        is_closing=st.sampled_from([False, False, True]),
    ),
    max_size=5,
    unique_by=lambda load: load.worker_id,
)


@settings(deadline=None, max_examples=400)
@given(
    LOADS,
    st.integers(1, 900),
    st.sets(st.sampled_from("ab")),
    st.dictionaries(st.sampled_from("abcde"), st.integers(0, 900)),
)
def test_of_the_open_workers_with_room_the_one_with_the_least_product_is_chosen(
    loads: list[PlacementLoad], num_known: int, refused: set[WorkerId], cached: dict[WorkerId, int]
) -> None:
    """Whoever closes, or has no room, comes after the others; if nobody holds any of the prompt it goes by load."""

    def product(load: PlacementLoad) -> Fraction:
        """Computing all that is new there, or bringing what another one has of it, if that is quicker."""
        here, most = cached.get(load.worker_id, 0), max(cached.values())
        prefill_s = max(num_known - here, 1) * Fraction(load.token_s or 1)
        if load.token_s and load.pulled_token_s:
            rest_s = max(num_known - most, 1) * Fraction(load.token_s)
            prefill_s = min(prefill_s, rest_s + (most - here) * Fraction(load.pulled_token_s))
        return prefill_s * (load.num_sequences + 1)

    able = [load for load in loads if load.ready and load.worker_id not in refused and load.num_sequences < 10]
    first = [load for load in able if not load.is_closing] or able
    placed = place_prefix_aware(loads, 1000, refused, num_known, cached)
    if placed is None:
        assert not able
        return
    if not cached:
        assert placed.worker_id in {load.worker_id for load in able if _load(load) == min(map(_load, first))}
        return
    has_room = {load.worker_id: (100 - load.num_demanded_blocks) * 16 >= num_known for load in able}
    first = [load for load in first if has_room[load.worker_id]] or first
    chosen = next(load for load in first if load.worker_id == placed.worker_id)
    assert product(chosen) == min(map(product, first))
    assert placed.needs_room == has_room[chosen.worker_id]
    assert placed.num_cached == cached.get(chosen.worker_id, 0)


def test_a_prefix_is_worth_a_longer_batch_in_proportion_so_nobody_starves() -> None:
    """1 000 tokens, 900 of them at `a`: as long as less than ten sequences are there."""
    cached = {WorkerId("a"): 900}
    for num_sequences, expected in ((8, "a"), (10, "b")):
        loads = [
            make_load("a", num_sequences=num_sequences, max_sequences=99, token_s=0.1),
            make_load("b", token_s=0.1),
        ]
        assert some(place_prefix_aware(loads, 1000, (), 1000, cached)).worker_id == expected
    closing = make_load("a", is_closing=True, token_s=0.1)
    assert some(place_prefix_aware([closing, make_load("b", token_s=0.1)], 1000, (), 1000, cached)).worker_id == "b"


def test_who_brings_a_prefix_sooner_than_it_computes_it_takes_over_from_a_longer_batch() -> None:
    """1 000 tokens, 900 of them at `a`: another one brings them in the time of 90, and has 190 to do, not 1 000."""
    cached = {WorkerId("a"): 900}
    for num_sequences, times, expected in ((2, 10, "b"), (0, 10, "a"), (2, 0, "a"), (2, 0.5, "a"), (10, 0.5, "b")):
        loads = [
            make_load("a", num_sequences=num_sequences, max_sequences=99, token_s=0.1),
            make_load("b", token_s=0.1, pulled_token_s=0.1 / times if times else 0.0),
        ]
        assert some(place_prefix_aware(loads, 1000, (), 1000, cached)).worker_id == expected


@pytest.mark.parametrize("tier", [Tier.DEFAULT, Tier.FLEX])
@pytest.mark.parametrize(("num_dispatchers", "each"), [(2, 1), (5, 1), (8, 2), (3, 40)])
def test_several_dispatchers_that_read_one_view_pile_on_nobody(num_dispatchers: int, each: int, tier: Tier) -> None:
    """All workers are alike. A random choice would put five or more of eight on one of eight workers once in 1 500."""
    names = [f"w{number}" for number in range(8)]
    placed: Counter[WorkerId] = Counter()
    for number in range(num_dispatchers):
        state = ClusterState("tiny", 10.0, f"dispatcher-{number}", asks_prefixes=True)
        state.apply(make_view(*[make_status(name, token_s=0.001) for name in names]), 0.0)
        for _ in range(each):
            found = some(place_prefix_aware(state.loads(tier), 100, (), 50))
            state.submitted(found, 50, 0, 1.0, tier)
            placed[found.worker_id] += 1
    mean = num_dispatchers * each / len(names)
    assert max(placed.values()) <= mean + num_dispatchers / 2
    assert each < 8 or len(placed) == 8


def test_what_is_cached_there_waits_for_nothing() -> None:
    """Two prompts of 100 tokens, of which one has 90 cached: 110 tokens are to be computed."""
    state = ClusterState("tiny", 10.0)
    state.apply(make_view(make_status("w0", token_s=0.001)), 0.0)
    placed = some(place_prefix_aware(state.loads(), 100, (), 100))
    state.submitted(placed, 100, 0, 1.0)
    state.submitted(replace(placed, num_cached=90), 100, 0, 1.0)
    (load,) = state.loads()
    assert load.waiting_s == pytest.approx(0.11)
    assert load.num_demanded_blocks == 13
