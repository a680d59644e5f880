"""The pipeline's time by recurrence, beside an event simulation, and beside KunServe's equation (4)."""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_lookahead.pipeline_time import (
    bubble_ratio,
    finish_times,
    inner_bubble_ratio,
    makespan_s,
    over_stages,
)
from services.worker.scheduling.view import F64


def random_costs(random: np.random.Generator) -> F64:
    """Whole numbers, so that sums are exact; some microbatches are empty turns."""
    costs = random.integers(1, 20, size=(random.integers(1, 13), random.integers(1, 6))).astype(float)
    costs[random.random(len(costs)) < 0.15] = 0
    return costs


def simulated(costs: F64, depth: int | None) -> tuple[F64, float]:
    """Finish times and busy time by events: queues in front of stages, a gate in front of the first, a heap of ends."""
    num_batches, num_stages = costs.shape
    finish = np.zeros(costs.shape)
    queues: list[deque[int]] = [deque() for _ in range(num_stages)]
    is_idle = [True] * num_stages
    ends: list[tuple[float, int, int]] = []
    entered = left = 0
    now_s = busy_s = 0.0
    while left < num_batches:
        while entered < num_batches and (depth is None or entered - left < depth):
            queues[0].append(entered)
            entered += 1
        for stage in range(num_stages):
            if is_idle[stage] and queues[stage]:
                batch, is_idle[stage] = queues[stage].popleft(), False
                heapq.heappush(ends, (now_s + costs[batch, stage], stage, batch))
                busy_s += costs[batch, stage]
        now_s, stage, batch = heapq.heappop(ends)
        finish[batch, stage], is_idle[stage] = now_s, True
        if stage + 1 < num_stages:
            queues[stage + 1].append(batch)
        else:
            left += 1
    return finish, busy_s


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 1, 2, 3, 4]))
def test_the_recurrence_is_what_events_give(seed: int, depth: int | None) -> None:
    costs = random_costs(np.random.default_rng(seed))
    finish, busy_s = simulated(costs, depth)
    assert finish_times(costs, depth).tolist() == finish.tolist()
    assert makespan_s(costs, depth) == finish[-1, -1]
    if finish[-1, -1]:
        assert bubble_ratio(costs, depth) == pytest.approx(1 - busy_s / (finish[-1, -1] * costs.shape[1]))


def two_stage_s(costs: F64) -> float:
    """Return equation (4): two stages that move in step take b1, the larger of each two neighbours, and the last."""
    return float(costs[0] + np.maximum(costs[:-1], costs[1:]).sum() + costs[-1])


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_equation_4_is_two_stages_with_two_microbatches_in_flight(seed: int) -> None:
    costs = random_costs(np.random.default_rng(seed))[:, 0]
    assert two_stage_s(costs) == makespan_s(np.stack([costs, costs], axis=1), depth=2)
    assert two_stage_s(costs) >= makespan_s(np.stack([costs, costs], axis=1)), "waiting in between is never slower"


def test_activations_that_may_wait_let_the_first_stage_go_on() -> None:
    """3, 1, 1, 3 on two stages: in step 3 + 3 + 1 + 3 + 3 = 13; else the second ends 6, 7, 8, 11."""
    costs = np.repeat(np.array([[3.0], [1.0], [1.0], [3.0]]), 2, axis=1)
    assert two_stage_s(costs[:, 0]) == 13
    assert finish_times(costs)[:, 1].tolist() == [6, 7, 8, 11]


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_no_pipeline_beats_the_bound_and_equal_costs_reach_it(seed: int) -> None:
    """A stage works for all microbatches, and the largest one passes all the others: (sum + (S - 1)·largest) / S."""
    costs, num_stages = random_costs(np.random.default_rng(seed))[:, 0], 1 + seed % 5
    bound = (costs.sum() + (num_stages - 1) * costs.max()) / num_stages
    assert makespan_s(over_stages(costs, num_stages), num_stages) >= bound * (1 - 1e-12)
    equal = np.full(costs.size, 6.0)
    bound = (equal.sum() + (num_stages - 1) * 6) / num_stages
    assert makespan_s(over_stages(equal, num_stages), num_stages) == pytest.approx(bound)
    assert inner_bubble_ratio(over_stages(equal, num_stages), num_stages) == pytest.approx(0, abs=1e-9)


def test_inner_bubbles_are_those_between_a_stages_first_and_last_microbatch() -> None:
    """2, 4 in step: stage 0 works [0, 2] and [2, 6], stage 1 [2, 4] and [6, 10]: 2 of 6 + 8 idle; of all, 8 of 20."""
    costs = np.array([[2.0, 2.0], [4.0, 4.0]])
    assert inner_bubble_ratio(costs, 2) == pytest.approx(2 / 14)
    assert bubble_ratio(costs, 2) == pytest.approx(8 / 20)


def test_nothing_takes_no_time() -> None:
    nothing = np.zeros((0, 3))
    assert makespan_s(nothing) == bubble_ratio(nothing) == inner_bubble_ratio(nothing) == 0
    assert bubble_ratio(np.zeros((2, 2))) == inner_bubble_ratio(np.zeros((2, 2))) == 0


def test_what_is_no_table_of_costs_is_refused() -> None:
    for costs, depth in ((np.ones(3), None), (np.ones((2, 0)), None), (-np.ones((2, 2)), None), (np.ones((2, 2)), 0)):
        with pytest.raises(ValueError, match=r"table|at least one"):
            finish_times(costs, depth)
    with pytest.raises(ValueError, match="at least one stage"):
        over_stages(np.ones(3), 0)
