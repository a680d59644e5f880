"""When a reader counts as not reading, from numbers alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.dispatcher.http.unsent import FULL_BUFFER_BYTES, ReaderLimits, Reading

LIMITS = ReaderLimits(stall_s=30.0, max_bytes=1_000_000)


def first_cut(looks: list[tuple[float, int, int]]) -> float | None:
    """Return when the reader is cut; looks are (time, bytes written so far, bytes unsent)."""
    reading = Reading(0.0)
    for now_s, num_written, num_unsent in looks:
        if reading.is_stalled(num_written, num_unsent, now_s, LIMITS):
            return now_s
    return None


@pytest.mark.parametrize(
    ("looks", "cut_s"),
    [
        ([(float(s), 500 + 10 * s, 0 if s < 10 else 10 * s + 5) for s in range(100)], 39.0),
        ([(float(s), 200_000 + 100 * s, 200_000 + 99 * s) for s in range(100)], 30.0),
        ([(float(s), 1000 + 100 * s, 1000) for s in range(1000)], None),
        ([(float(s), 5000, 0) for s in range(1000)], None),
        ([(float(s), 10_000 * (s // 20 + 1), 10_000) for s in range(200)], None),
        ([(0.0, 2_000_000, 1_000_000), (1.0, 2_100_000, 1_000_001)], 1.0),
    ],
    ids=[
        "nothing is taken from second 10 on, however little waits",
        "a full buffer stays, although a little is taken",
        "slow, but little waits",
        "a silent stream",
        "pauses shorter than the limit",
        "too much at once",
    ],
)
def test_a_reader_is_cut_that_takes_nothing_leaves_a_full_buffer_or_lets_too_much_wait(
    looks: list[tuple[float, int, int]], cut_s: float | None
) -> None:
    assert first_cut(looks) == cut_s


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), min_size=1, max_size=200))
def test_whoever_empties_the_buffer_within_each_limit_is_never_cut(steps: list[tuple[int, int]]) -> None:
    """Each second something is written and something taken; every 29th look finds nothing waiting."""
    reading, written, taken = Reading(0.0), 0, 0
    for second, (more, read) in enumerate(steps, start=1):
        written += more
        taken = written if second % 29 == 0 else min(written, taken + read)
        unsent = written - taken
        assert unsent < FULL_BUFFER_BYTES * 3
        assert not reading.is_stalled(written, unsent, float(second), LIMITS)
