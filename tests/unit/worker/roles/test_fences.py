"""What any row of orders may do to a worker's epoch, and any row of holds to its steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.roles.fences import HOLD_RATIO, MIN_HOLD_S, EpochFence, HoldBudget
from shared.messages.base import MAX_EPOCH, MAX_EPOCH_STEP
from shared.messages.plan import MAX_HOLD_S

EPOCHS = st.one_of(st.integers(1, 2**22), st.integers(1, MAX_EPOCH))


@settings(deadline=None)
@given(st.lists(EPOCHS, max_size=60))
def test_an_epoch_only_grows_by_no_more_than_a_step_and_a_planner_can_always_go_on(epochs: list[int]) -> None:
    fence = EpochFence()
    for epoch in epochs:
        before = fence.newest
        if fence.refusal(epoch) is None:
            fence.take(epoch)
        assert before <= fence.newest <= before + MAX_EPOCH_STEP
        assert (fence.newest == epoch) == (before <= epoch <= before + MAX_EPOCH_STEP)
        assert fence.refusal(fence.newest + 1) is None, "whoever claims above what it is told is heard"


@pytest.mark.parametrize(
    ("epoch", "plan_id", "words"),
    [
        (4, 0, "epoch 4 is over: a planner of epoch 5 has spoken"),
        (MAX_EPOCH_STEP + 6, 0, "more than 1048576 above 5"),
        (MAX_EPOCH, MAX_EPOCH, "more than 1048576 above 5"),
        (7, 8, "plan 8 is named by a newer epoch than 7"),
        (7, 7, None),
        (MAX_EPOCH_STEP + 5, 1, None),
    ],
)
def test_an_epoch_that_is_not_taken_is_refused_in_words(epoch: int, plan_id: int, words: str | None) -> None:
    fence = EpochFence()
    fence.take(5)
    reason = fence.refusal(epoch, plan_id)
    assert (reason is None) == (words is None)
    assert words is None or (reason is not None and words in reason)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0, 30)), min_size=1, max_size=60))
def test_however_plans_come_they_hold_the_steps_up_for_a_fifth_of_the_time_and_five_seconds(
    pauses_and_asked: list[tuple[float, float]],
) -> None:
    """Each waits as long as it may, or as it asks for."""
    now_s = held_s = 0.0
    budget = HoldBudget(now_s)
    for pause_s, asked_s in pauses_and_asked:
        now_s += pause_s
        if budget.refusal(now_s) is None:
            holds_s = min(asked_s, budget.left_s(now_s))
            assert MIN_HOLD_S <= budget.left_s(now_s) <= MAX_HOLD_S
            budget.begin(now_s)
            now_s += holds_s
            held_s += holds_s
            budget.end(now_s)
        assert held_s <= MAX_HOLD_S + HOLD_RATIO * now_s + 1e-6


def test_who_was_held_up_for_long_is_left_alone_and_said_for_how_long() -> None:
    budget = HoldBudget(0.0)
    budget.begin(1.0)
    budget.end(6.0)
    budget.end(99.0)
    assert budget.refusal(6.0) is not None
    assert "again in 2.5 s" in str(budget.refusal(6.0))
    assert budget.refusal(6.0 + MIN_HOLD_S / HOLD_RATIO) is None
    assert budget.left_s(1000.0) == MAX_HOLD_S
