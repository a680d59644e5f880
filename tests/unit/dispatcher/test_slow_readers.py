"""When a reader counts as not reading, from numbers alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.dispatcher.http.unsent import Reading

STALL_S = 30.0


def first_cut(looks: list[tuple[float, int, int]]) -> float | None:
    """Return when the reader is cut; looks are (time, bytes written so far, bytes unsent)."""
    reading = Reading(0.0)
    for now_s, num_written, num_unsent in looks:
        if reading.is_stalled(num_written - num_unsent, num_unsent, now_s, STALL_S):
            return now_s
    return None


@pytest.mark.parametrize(
    ("looks", "cut_s"),
    [
        ([(float(s), 500 + 10 * s, 0 if s < 10 else 10 * s + 5) for s in range(100)], 39.0),
        ([(float(s), 10**6 + 100 * s, 10**6 + 100 * s - s // 29) for s in range(1000)], None),
        ([(float(s), 5000, 0) for s in range(1000)], None),
        ([(float(s), 10_000 * (s // 20 + 1), 10_000) for s in range(200)], None),
    ],
    ids=[
        "nothing is taken from second 10 on, however little waits",
        "a byte in 29 seconds is taken, however much waits",
        "a silent stream",
        "pauses shorter than the limit",
    ],
)
def test_a_reader_is_cut_that_takes_nothing(looks: list[tuple[float, int, int]], cut_s: float | None) -> None:
    assert first_cut(looks) == cut_s


@given(st.lists(st.tuples(st.integers(1, 29), st.integers(0, 5000), st.integers(1, 5000)), min_size=1, max_size=200))
def test_whoever_takes_something_within_the_limit_is_never_cut(steps: list[tuple[int, int, int]]) -> None:
    """After some seconds at a time something was written and something taken, however little of it."""
    reading, now_s, written, taken = Reading(0.0), 0, 10**7, 0
    for pause_s, more, read in steps:
        for _ in range(pause_s):
            now_s += 1
            written += more
            assert not reading.is_stalled(taken, written - taken, float(now_s), STALL_S)
        taken = min(written, taken + read)
