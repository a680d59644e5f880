"""Decodes over the lanes of a pipeline: even shares, everybody in turn, and nobody stuck."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.worker.scheduling.registry import SCHEDULERS
from tests.support.engine_builders import per_token
from tests.support.engine_views import (
    decide,
    decoding,
    in_lanes,
    make_view,
    parked,
    prefilling,
    random_flights,
    random_view,
)

SEEDS = st.integers(0, 2**32 - 1)


PLAIN = sorted(set(SCHEDULERS) - {"lookahead", "bros", "bros-whole", "class-round-robin"})
"""Those that share decodes evenly: `lookahead` forms microbatches by cost, and the others are in no group."""


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@given(st.sampled_from(PLAIN), SEEDS, st.integers(1, 5), st.booleans())
@example("tokenflow", 27836, 1, False).via("nobody has a place, whoever gives way")
@example("andes", 3056, 1, True).via("all give way to rows whose KV comes back")
@example("round-robin", 2610, 4, False).via("the share lacks blocks, and who gives way helps others")
def test_every_answer_keeps_the_contract_and_its_share(scheduler: str, seed: int, num_lanes: int, swaps: bool) -> None:
    random = np.random.default_rng(seed)
    view = random_view(random, swaps=swaps)
    view = random_flights(view, num_lanes, random)
    output, columns = decide(scheduler, view), view.columns
    decodes = view.running[(columns.num_prompt + columns.num_output - columns.num_computed)[view.running] == 1]
    share = -(-(decodes.size + view.num_in_flight) // num_lanes)
    num_short = int(np.isin(decodes, output.rows).sum())
    lacks = -(-(columns.num_computed[decodes] + 1) // view.block_size) > columns.held_blocks[decodes]
    num_helped = int((~lacks).sum()) + int(view.blocks.freeable(output.preempt).sum())  # by who gave way
    assert num_short <= max(share, num_helped), "more than its share goes on only if the share lacks blocks"


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(PLAIN), SEEDS)
def test_one_lane_decides_as_if_there_were_none(scheduler: str, seed: int) -> None:
    view = random_view(np.random.default_rng(seed))
    plain, lane = decide(scheduler, view), decide(scheduler, in_lanes(view, 1))
    assert plain.rows.tolist() == lane.rows.tolist()
    assert plain.num_tokens.tolist() == lane.num_tokens.tolist()
    assert plain.preempt.tolist() == lane.preempt.tolist()


@pytest.mark.parametrize("scheduler", PLAIN)
def test_a_step_takes_its_share_and_first_who_has_waited_longest(scheduler: str) -> None:
    """Five decode here, two in the other lane: 7 over 2 lanes, so 4; in the order of their admission.

    Of 10, the other lane has some: this one has 5 at most. One that holds 6 gives one back when it returns.
    """
    view = make_view(running=[decoding(5)] * 7)
    steps = [9, 8, 6, 9, 7, 8, 5]
    assert decide(scheduler, in_lanes(view, 2, [0, 3], last_step=steps)).rows.tolist() == [1, 2, 4, 6]
    view = make_view(running=[decoding(5)] * 10, max_batch_rows=9)
    for num_away, share in ((1, 5), (2, 5), (3, 5), (4, 5), (5, 5), (6, 4)):
        assert decide(scheduler, in_lanes(view, 2, list(range(num_away)))).rows.size == share


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(SEEDS, st.integers(2, 4), st.integers(1, 40))
def test_everybody_goes_on_about_equally_fast_whatever_lane_comes_back(seed: int, num_lanes: int, count: int) -> None:
    """Lanes come back in turn, and begin with any rows; nobody is ever more than two steps behind another."""
    random = np.random.default_rng(seed)
    flights: list[list[int]] = [[] for _ in range(num_lanes)]
    for row in range(count):
        lane = int(random.integers(num_lanes + 1))
        if lane < num_lanes:
            flights[lane].append(row)
    num_run, last_step = [0] * count, [0] * count
    for step in range(1, 25 * num_lanes):
        del flights[0]
        view = make_view(running=[decoding(5)] * count, max_batch_tokens=64, max_batch_rows=64)
        view = in_lanes(view, num_lanes, *flights, last_step=last_step)
        flights.append(decide("chunked", view).rows.tolist() if view.running.size else [])
        for row in flights[-1]:
            num_run[row] += 1
            last_step[row] = step
    assert max(num_run) - min(num_run) <= 2
    assert max(map(len, flights)) - min(map(len, flights)) <= 1, "lanes end up equal"


@pytest.mark.parametrize("scheduler", PLAIN)
def test_who_needs_no_block_goes_on_if_the_share_cannot(scheduler: str) -> None:
    """Row 1 has waited longest, but lacks a block that only row 0's preemption would give, and row 0 stays."""
    view = make_view(running=[decoding(5), decoding(8)], free_blocks=0, cost=per_token(1e-3))
    output = decide(scheduler, in_lanes(view, 2, last_step=[2, 1]))
    assert output.rows.tolist() == [0]
    assert output.preempt.tolist() == [1]


@pytest.mark.parametrize("scheduler", ["chunked", "fcfs"])
def test_rows_in_flight_keep_the_blocks_that_they_will_need(scheduler: str) -> None:
    """A prompt of 15 and its next token need 4 blocks. In flight: a decode (1 in reserve), and a prompt of 16 with 8
    computed and their blocks (2 more and 1 in reserve). So 8 free blocks admit it, 7 do not."""
    view = make_view(running=[decoding(5), prefilling(16, 8)], waiting=[parked(15)], free_blocks=8)
    assert decide(scheduler, in_lanes(view, 2, [0, 1])).rows.tolist() == [2]
    assert not decide(scheduler, in_lanes(replace(view, free_blocks=7), 2, [0, 1])).rows.size


@pytest.mark.parametrize("scheduler", PLAIN)
def test_all_lanes_together_take_as_many_rows_as_their_steps_hold(scheduler: str) -> None:
    """Steps of 3 rows in 2 lanes: 6 rows may run. 3 are in flight, 2 decode: one more comes in."""
    view = make_view(running=[decoding(5)] * 5, waiting=[parked(4)] * 3, max_batch_rows=3)
    view = in_lanes(view, 2, [0, 1, 2])
    come = decide(scheduler, view).rows
    assert np.isin(come, view.waiting).sum() == 1


@pytest.mark.parametrize("scheduler", ["chunked", "fcfs"])
def test_a_chunk_behind_one_in_flight_takes_the_blocks_that_its_prompt_was_promised(scheduler: str) -> None:
    """A prompt of 16 has 8 tokens in two batches in flight, and their 2 blocks: the rest takes 2, and 1 is in reserve.
    A prompt of 15 and its next token need 4 blocks, so 7 free blocks let it in, 6 do not."""
    view = make_view(running=[prefilling(16, 0, held=2)], waiting=[parked(15)], free_blocks=7)
    ends = np.array([8, 0], dtype=np.int32)
    assert decide(scheduler, in_lanes(view, 3, [0], [0], ends=ends)).rows.tolist() == [0, 1]
    assert decide(scheduler, in_lanes(replace(view, free_blocks=6), 3, [0], [0], ends=ends)).rows.tolist() == [0]
