"""The line of prompts is cut into shares: about as large as each other, and no larger than a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.scheduling.shares import MIN_TOKENS, STEPS_PER_LANE, Line, Room, Shares

ROOM = Room(1000.0, 1000, 64)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_shares_stay_about_as_large_while_prompts_come_and_go(seed: int) -> None:
    """A line under random arrivals: never more than fits, never nothing, and no two neighbours differ by more than the
    leeway, unless one is the last of a line, or the line is so short or long that the leeway would be left."""
    random = np.random.default_rng(seed)
    num_lanes = int(random.integers(2, 5))
    shares, left, before_s = Shares(num_lanes), 0.0, 0.0
    for _ in range(100):
        if random.random() < 0.5:
            left += float(random.exponential(800))
        line = Line(left, int(left), int(left > 0))
        share_s = shares.next_s(line, ROOM, is_alone=False)
        assert share_s <= ROOM.work_s * 1.1, "what little has come is taken along, as far as the step's limits let it"
        assert (share_s > 0) == (left > 0)
        least, most = left / (num_lanes * STEPS_PER_LANE), max(left, MIN_TOKENS)
        if before_s and least < 900 and 1.5 * least < before_s < most / 1.5 and left > 3 * MIN_TOKENS:
            assert 1 / 2.3 < share_s / before_s < 2.3
        before_s, left = share_s, max(left - share_s, 0.0)
        if left < 1e-6:
            left = before_s = 0.0


def test_a_long_line_is_cut_into_full_steps_a_short_one_into_some_for_each_lane() -> None:
    def share_s(tokens: int, *, is_alone: bool = False) -> float:
        return Shares(2).next_s(Line(float(tokens), tokens, 1), ROOM, is_alone=is_alone)

    assert share_s(9980) == pytest.approx(998)
    assert share_s(900) == pytest.approx(150), "three for each lane"
    assert share_s(3000) == pytest.approx(500)
    assert share_s(200) == pytest.approx(200 / 3), "at least 64 tokens each"
    assert share_s(900, is_alone=True) == pytest.approx(450), "one for each lane"
    assert share_s(400, is_alone=True) == pytest.approx(400), "at least 256 tokens each"
    assert Shares(2).next_s(Line(640.0, 640, 640), ROOM, is_alone=False) == pytest.approx(64), "64 rows fit a step"


def test_pieces_come_nearer_to_what_is_wanted_step_by_step() -> None:
    """Pieces of 150; 9 000 tokens want ten full steps, which is sixty such pieces, and get 60 / 1.5 = 40. Then 700 are
    three such pieces, and want six: 3 * 1.5 = 4 of 175."""
    shares = Shares(2)
    assert shares.next_s(Line(900.0, 900, 1), ROOM, is_alone=False) == pytest.approx(150)
    assert shares.next_s(Line(9000.0, 9000, 1), ROOM, is_alone=False) == pytest.approx(225)
    assert shares.next_s(Line(700.0, 700, 1), ROOM, is_alone=False) == pytest.approx(175)
