"""How long steps took lately: the long ones count, the old ones do not."""

from __future__ import annotations

import pytest

from services.worker.executor.recent_steps import NUM_RECENT, RecentSteps


def test_before_the_first_step_nothing_is_known() -> None:
    assert RecentSteps().long_s == 0.0


@pytest.mark.parametrize(
    ("num_long", "expected_s"), [(0, 1.0), (NUM_RECENT // 10 - 1, 1.0), (NUM_RECENT // 10 + 2, 5.0)]
)
def test_a_tenth_of_the_steps_makes_them_long(num_long: int, expected_s: float) -> None:
    recent = RecentSteps()
    for duration_s in [*[100.0] * NUM_RECENT, *[5.0] * num_long, *[1.0] * (NUM_RECENT - num_long)]:
        recent.note(duration_s)
    assert recent.long_s == expected_s, "those before the last ones are forgotten"
