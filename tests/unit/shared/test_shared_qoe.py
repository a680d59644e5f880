from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.qoe import answer_qoe, displayed, qoe_by_now, unread_tokens
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
