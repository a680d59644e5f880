from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.qoe import answer_qoe, displayed, qoe_by_now, unread_tokens
from shared.types import Thinking
from sluice_client.qoe import QoeTarget, delay_sum, displayed_times, final_qoe, qoe_at


@given(st.floats(0.1, 5), st.floats(0.5, 50), st.lists(st.floats(0, 10), max_size=60))
def test_the_qoe_of_a_whole_answer_is_that_of_the_definition(ttft_s: float, speed: float, gaps: list[float]) -> None:
    delivered_s = np.cumsum(np.array(gaps, dtype=np.float64))
    expected = final_qoe(QoeTarget(ttft_s, speed), delivered_s.tolist())
    assert answer_qoe(delivered_s, ttft_s, speed) == pytest.approx(expected, abs=1e-9)
    assert not gaps or math.isnan(answer_qoe(delivered_s, math.nan, math.nan))


@given(st.floats(0.1, 5), st.floats(0.5, 50), st.lists(st.floats(0, 10), min_size=1, max_size=60))
def test_what_has_been_displayed_is_told_as_by_the_definition(ttft_s: float, speed: float, gaps: list[float]) -> None:
    delivered_s, target = np.cumsum(np.array(gaps, dtype=np.float64)), QoeTarget(ttft_s, speed)
    expected = (displayed_times(target, delivered_s.tolist())[-1], delay_sum(target, delivered_s.tolist()))
    assert displayed(delivered_s, ttft_s, speed) == pytest.approx(expected, abs=1e-9)


@given(st.floats(0.1, 5), st.floats(0.5, 50), st.lists(st.floats(0, 10), max_size=60), st.floats(0, 20))
def test_the_qoe_by_now_is_that_of_the_definition_for_an_answer_that_goes_on(
    ttft_s: float, speed: float, gaps: list[float], later_s: float
) -> None:
    delivered_s, target = np.cumsum(np.array(gaps, dtype=np.float64)), QoeTarget(ttft_s, speed)
    at_s = sum(gaps) + later_s
    expected = min(max(qoe_at(target, delivered_s.tolist(), at_s, finished=False), 0.0), 1.0)
    assert qoe_by_now(delivered_s, ttft_s, speed, at_s) == pytest.approx(expected, abs=1e-6)


@given(st.floats(0.1, 5), st.floats(0.5, 50), st.lists(st.floats(0, 10), min_size=1, max_size=60))
def test_unread_is_what_was_delivered_and_is_displayed_later(ttft_s: float, speed: float, gaps: list[float]) -> None:
    """Counted one by one; what is displayed within a microsecond of a delivery may count either way."""
    delivered_s = np.cumsum(np.array(gaps, dtype=np.float64))
    displayed_s = np.array(displayed_times(QoeTarget(ttft_s, speed), delivered_s.tolist()))
    unread = unread_tokens(delivered_s, ttft_s, speed)
    for i, at_s in enumerate(delivered_s):
        later_s = displayed_s[: i + 1] - at_s
        assert np.count_nonzero(later_s > 1e-6) <= unread[i] <= np.count_nonzero(later_s > -1e-6)
        assert later_s[-1] > 1e-6 or unread[i] == 0


def test_a_reader_who_waits_for_every_token_has_none_unread() -> None:
    """Two tokens per second against ten; of twenty at once the reader sees the first."""
    assert unread_tokens(np.arange(2.0, 22.0) / 2, 1.0, 10.0).tolist() == [0] * 20
    assert unread_tokens(np.full(20, 3.0), 1.0, 10.0).tolist() == list(range(20))


@given(st.floats(0.1, 5), st.floats(0.5, 50), st.lists(st.floats(0, 10), min_size=1, max_size=30), st.integers(1, 30))
def test_of_an_answer_that_thinks_the_text_alone_counts_from_the_end_of_the_thinking_on(
    ttft_s: float, speed: float, gaps: list[float], num_thought: int
) -> None:
    """The sums of the definition over the text, written out; without any text nobody has read anything."""
    delivered_s, num_thought = np.cumsum(gaps), min(num_thought, len(gaps))
    first_s, late_s, whole_s, shown_s = max(ttft_s, delivered_s[num_thought - 1] + 1 / speed), 0.0, 0.0, 0.0
    text_s = delivered_s[num_thought:].tolist()
    ideal_s = [first_s + i / speed for i in range(len(text_s))]
    for i, at_s in enumerate(text_s):
        shown_s = max(ideal_s[i], at_s, shown_s + 1 / speed if i else 0.0)
        late_s += shown_s - ideal_s[i]
    whole_s = sum(shown_s - at_s for at_s in ideal_s)
    qoe = answer_qoe(delivered_s, ttft_s, speed, num_thought)
    if not text_s:
        assert math.isnan(qoe)
    else:
        assert qoe == pytest.approx(1 - late_s / whole_s if whole_s > 1e-9 else 1.0, abs=1e-6)


@given(st.lists(st.sampled_from([7, 8, 9]), max_size=8), st.booleans(), st.integers(0, 4))
def test_what_is_thinking_follows_from_the_tokens(tokens: list[int], is_open: bool, budget: int) -> None:
    """7 opens and 8 closes. Said of every beginning at a time, by a loop over the tokens."""
    thinking = Thinking(opening_id=7, closing_id=8, is_open=is_open, budget=budget)
    is_thinking, num_thought = is_open, None
    for i, token in enumerate(tokens):
        if i == 0 and not is_open:
            is_thinking = token == 7
            num_thought = None if is_thinking else 0
        if is_thinking and token == 8:
            is_thinking, num_thought = False, i + 1
        assert thinking.count(tokens[: i + 1]) == num_thought
        between = i + 1 - (not is_open)
        assert thinking.is_spent(tokens[: i + 1]) == (is_thinking and between == budget)
    assert thinking.count([]) is None
    assert thinking.is_spent([]) == (is_open and budget == 0)
