from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.qoe import answer_qoe, displayed
from sluice_client.qoe import QoeTarget, delay_sum, displayed_times, final_qoe


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
