"""TokenFlow: who is parked, who must not be, and what happens where readers are faster than the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from services.worker.scheduling.registry import make_scheduler
from services.worker.scheduling.tokenflow import _swap_neighbours
from services.worker.scheduling.view import SchedulerOutput, SchedulerView
from shared.cost import CostModel
from tests.support.engine_views import check_contract, chosen, decoding, make_view, parked

NOW_S, SPEED = 100.0, 5.0
COST = CostModel(g0_s=0.01, b0_s=0.001, g1_s=0.0, b1_s=0.0, d_s=0.0, a_s=0.0)
"""10 ms a step and 1 ms a token."""


def moment(unread: list[int], num_waiting: int = 1, *, waited_s: float = 2.0, **view: Any) -> SchedulerView:
    """Rows of 18 tokens, each with so many unread, and others that wait with 12 tokens; 3 blocks are free."""
    made = make_view(
        running=[decoding(18)] * len(unread),
        waiting=[parked(12)] * num_waiting,
        now_s=NOW_S,
        cost=COST,
        free_blocks=3,
        **view,
    )
    rows = len(unread)
    last_s = np.full(rows + num_waiting, 1 - 1 / SPEED)
    last_s[:rows] = waited_s + np.array(unread) / SPEED
    columns = replace(
        made.columns,
        arrival_s=np.full(rows + num_waiting, NOW_S - waited_s),
        qoe_ttft_s=np.ones(rows + num_waiting),
        qoe_speed=np.full(rows + num_waiting, SPEED),
        qoe_gap_s=np.full(rows + num_waiting, 1 / SPEED),
        qoe_last_s=last_s,
        qoe_delay_sum_s=np.zeros(rows + num_waiting),
    )
    return replace(made, columns=columns)


def decide(view: SchedulerView, **settings: Any) -> SchedulerOutput:
    output = make_scheduler("tokenflow", **settings).schedule(view)
    check_contract(view, output)
    return output


def test_who_has_most_unread_is_parked_for_who_has_none() -> None:
    output = decide(moment([3, 15, 8]))
    assert output.preempt.tolist() == [1]
    assert set(output.rows.tolist()) == {0, 2, 3}


def test_nobody_is_parked_who_would_run_out_of_text_before_being_back() -> None:
    """To compute 18 tokens again takes about 30 ms, so with a factor of 200 not even 15 tokens of text are enough."""
    assert not decide(moment([3, 15, 8]), buffer_factor=200).preempt.size
    assert decide(moment([3, 15, 8]), buffer_factor=2).preempt.size


def test_where_readers_are_faster_than_steps_nobody_comes_in() -> None:
    """There is room for all. With 0.3 s a step, three readers read five tokens each while three are written."""
    view = replace(moment([3, 15, 8]), free_blocks=100)
    slow = replace(view, cost=replace(COST, g0_s=0.3))
    assert sorted(decide(view).rows.tolist()) == [0, 1, 2, 3]
    assert sorted(decide(slow).rows.tolist()) == [0, 1, 2]
    assert [row for row, _ in chosen(decide(replace(slow, running=slow.running[:0])))] == [3], "the machine is empty"


def test_neighbours_change_places_only_if_that_is_worth_more_and_fits() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        count = int(rng.integers(2, 20))
        inside = int(rng.integers(1, count))
        order, utility = rng.permutation(count), rng.random(count)
        weights = rng.integers(1, 9, count).astype(np.int32)
        capacity = int(weights[order[:inside]].sum()) + int(rng.integers(0, 5))
        before = order.copy()
        _swap_neighbours(order, inside, utility, weights, capacity)
        assert sorted(order.tolist()) == list(range(count))
        assert weights[order[:inside]].sum() <= capacity
        assert utility[order[:inside]].sum() >= utility[before[:inside]].sum()


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match="buffer_factor"):
        make_scheduler("tokenflow", buffer_factor=-1)
