"""What a policy may do with the parts of a plan: any victims, any admission, pauses, prompts left half done."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.scheduling.view import F64, I32, Bool, SchedulerView
from shared.types import FinishReason, ReaderTarget
from tests.support.engine_builders import new_sequence
from tests.support.engine_chaos import make_chaos
from tests.support.engine_harness import make_harness
from tests.support.engine_views import (
    check_contract,
    decoding,
    make_view,
    parked,
    random_flights,
    random_view,
)
from tests.support.priority_scheduler import PriorityScheduler, Weigh, readers_with_text, weight_by_name
from tests.support.seeds import first_of


def nobody(_: SchedulerView, rows: I32) -> Bool:
    return np.zeros(rows.size, dtype=np.bool_)


def by_order(*weights: int) -> Weigh:
    """The weight of each sequence, in order of their coming."""

    def weigh(view: SchedulerView, rows: I32) -> F64:
        return np.array(weights, dtype=np.float64)[view.columns.order[rows]]

    return weigh


class Whimsical:
    """Pauses about a third of the rows, others in each step."""

    def __init__(self) -> None:
        self._num_steps = 0

    def __call__(self, view: SchedulerView, rows: I32) -> Bool:
        self._num_steps += 1
        paused: Bool = (view.columns.order[rows] + self._num_steps) % 3 == 0
        return paused


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.booleans())
def test_every_answer_keeps_the_contract(seed: int, num_lanes: int, swaps: bool) -> None:
    """The contract's `first running row` is the first of the policy's order, so here all weights are equal."""
    random = np.random.default_rng(seed)
    view = random_flights(random_view(random, swaps=swaps), num_lanes, random)
    scheduler = PriorityScheduler(lambda _, rows: np.zeros(rows.size), Whimsical())
    check_contract(view, scheduler.schedule(view))


def test_the_least_priority_gives_way_whoever_came_last() -> None:
    """Each row needs a block for its next token and none is free: row 1 gives two, one for each of the others."""
    view = make_view(running=[decoding(8), decoding(8), decoding(8)], free_blocks=0)
    output = PriorityScheduler(by_order(5, 1, 9), nobody).schedule(view)
    assert output.preempt.tolist() == [1]
    assert output.rows.tolist() == [2, 0]


def test_who_waits_comes_in_by_priority_and_those_with_less_give_way_for_it() -> None:
    """Row 5 needs ceil(6 / 4) = 2 blocks, and with row 0 gone there are 2 and its headroom; row 4 does not fit."""
    running, waiting = [decoding(6), decoding(6), decoding(6)], [parked(5), parked(5), parked(5)]
    output = PriorityScheduler(by_order(2, 8, 6, 1, 3, 7), nobody).schedule(
        make_view(running=running, waiting=waiting, free_blocks=2)
    )
    assert output.preempt.tolist() == [0]
    assert output.rows.tolist() == [1, 2, 5]
    output = PriorityScheduler(by_order(2, 8, 6, 1, 3, 7), nobody).schedule(make_view(running=running, waiting=waiting))
    assert output.rows.tolist() == [1, 2, 0, 5, 4, 3]


def test_who_has_text_to_read_pauses_and_keeps_its_kv() -> None:
    """10 tokens are said in 0.5 s; at 2 per second they are read until 1 + 9 / 2 = 5.5 s after they were asked for."""
    scheduler = PriorityScheduler(weight_by_name, readers_with_text(lead_s=1.0))
    harness = make_harness(scheduler)
    slow = harness.add(
        new_sequence(0, max_tokens=16, arrival_s=0.0, qoe=ReaderTarget(ttft_s=1.0, speed_tokens_per_s=2))
    )
    fast = harness.add(
        new_sequence(1, max_tokens=60, arrival_s=0.0, qoe=ReaderTarget(ttft_s=0.1, speed_tokens_per_s=500))
    )
    assert isinstance(fast, int)
    table, paused = harness.engine.table, 0
    while harness.stories[1001].finish is FinishReason.NONE:
        before, held = int(table.num_computed[slow]), int(table.held_blocks[slow])
        batch = harness.stepped()
        assert fast in batch.rows
        if slow not in batch.rows:
            paused += 1
            assert (int(table.num_computed[slow]), int(table.held_blocks[slow])) == (before, held)
    assert paused > 30
    harness.finish()
    assert harness.engine.totals.num_preemptions == 0


def test_a_prompt_is_left_half_done_for_one_with_more_priority_and_goes_on_where_it_was() -> None:
    """16 tokens a step: 16 of 40 are computed when the other one comes, which takes two steps for its 30."""
    harness = make_harness(PriorityScheduler(by_order(1, 2), nobody), max_batch_tokens=16)
    low = harness.add(new_sequence(0, num_prompt=40, max_tokens=2))
    harness.step()
    high = harness.add(new_sequence(1, num_prompt=30, max_tokens=1))
    chunks = []
    while harness.engine.table.num_sequences:
        batch = harness.stepped()
        chunks += [*zip(batch.rows.tolist(), batch.start.tolist(), batch.num_tokens.tolist(), strict=True)]
    assert chunks == [(high, 0, 16), (high, 16, 14), (low, 16, 16), (low, 32, 8), (low, 40, 1)]
    harness.judge()
    assert harness.engine.totals.num_preemptions == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_host_blocks", [0, 20])
@pytest.mark.parametrize(("depth", "num_stages", "overlaps"), [(1, 1, False), (2, 1, True), (3, 3, False)])
@pytest.mark.parametrize("seed", first_of(range(4), in_ci=2))
def test_texts_survive_any_order_of_operations(
    depth: int, num_stages: int, seed: int, num_host_blocks: int, *, overlaps: bool
) -> None:
    make_chaos(
        PriorityScheduler(weight_by_name, Whimsical()),
        [seed, depth, num_host_blocks],
        whims=0.1,
        num_blocks=30,
        max_batch_rows=4,
        num_lanes=num_stages,
        depth=depth,
        overlaps=overlaps,
        num_host_blocks=num_host_blocks,
    ).live_through()


@pytest.mark.parametrize("num_host_blocks", [0, 40])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_everything_finishes_with_kv_for_only_one_request(num_stages: int, num_host_blocks: int) -> None:
    """9 blocks of 4 slots; each sequence needs KV for 20 + 16 - 1 = 35 tokens, so 9 blocks: all of them."""
    scheduler = PriorityScheduler(weight_by_name, Whimsical())
    harness = make_harness(scheduler, num_blocks=9, num_host_blocks=num_host_blocks, num_lanes=num_stages)
    harness.add_all(8, num_prompt=20, max_tokens=16)
    harness.finish(max_steps=8 * 60)
    assert {story.finish for story in harness.stories.values()} == {FinishReason.LENGTH}
