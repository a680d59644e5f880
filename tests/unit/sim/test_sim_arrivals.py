from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sim.workload.arrivals import cyclic_bursts, one_burst, poisson


def test_counts_of_a_poisson_process_vary_as_much_as_their_mean() -> None:
    """20 000 windows of 1 s at rate 3: the variance of a Poisson count is its mean; regular arrivals would give 0."""
    counts = np.histogram(poisson([(20_000, 3.0)], np.random.default_rng(1)), np.arange(20_001))[0]
    assert counts.mean() == pytest.approx(3, abs=5 * (3 / 20_000) ** 0.5)
    assert counts.var() == pytest.approx(3, rel=0.05)


def test_gaps_of_a_poisson_process_have_no_memory() -> None:
    """Exponential gaps: the share above the mean is 1/e."""
    gaps = np.diff(poisson([(30_000, 2.0)], np.random.default_rng(2)))
    assert np.mean(gaps > 0.5) == pytest.approx(np.exp(-1), abs=0.01)
    assert np.mean(gaps > 1.0) == pytest.approx(np.exp(-2), abs=0.01)


def test_each_piece_has_its_own_rate() -> None:
    times = poisson([(1000, 1.0), (500, 8.0), (1000, 0.0), (100, 1.0)], np.random.default_rng(3))
    counts = np.histogram(times, [0, 1000, 1500, 2500, 2600])[0]
    assert np.all(np.diff(times) >= 0)
    assert times[-1] < 2600
    assert counts[2] == 0
    for count, expected in zip(counts[[0, 1, 3]].tolist(), (1000, 4000, 100), strict=True):
        assert abs(count - expected) < 5 * expected**0.5


rates = st.floats(0.01, 50)


@given(rates, st.floats(1, 10), st.floats(0.05, 0.9), st.floats(10, 5000), st.integers(1, 4))
def test_whole_cycles_have_the_mean_rate(
    rate: float, intensity: float, ratio: float, cycle_s: float, num_cycles: int
) -> None:
    """Andes: intensity is the rate in the burst over that of the whole trace, so the calm part makes up for it."""
    assume(intensity * ratio <= 1)
    pieces = cyclic_bursts(rate, intensity, ratio, cycle_s, num_cycles * cycle_s)
    assert sum(length for length, _ in pieces) == pytest.approx(num_cycles * cycle_s)
    assert sum(length * piece_rate for length, piece_rate in pieces) == pytest.approx(rate * num_cycles * cycle_s)
    assert all(piece_rate >= -1e-12 for _, piece_rate in pieces)
    assert max(piece_rate for _, piece_rate in pieces) == pytest.approx(rate * intensity)


def test_the_paper_s_burst_is_twice_the_mean_for_seven_of_twenty_minutes() -> None:
    """Calm rate: (1 - 2 · 0.35) / 0.65 = 0.4615 of the mean."""
    calm, burst, after = cyclic_bursts(1.3, 2.0, 0.35, 1200, 1200)
    assert burst == pytest.approx((420, 2.6))
    assert calm == after == pytest.approx((390, 0.6))


def test_the_last_cycle_is_cut() -> None:
    pieces = cyclic_bursts(1.0, 2.0, 0.4, 100, 150)
    assert [length for length, _ in pieces] == pytest.approx([30, 40, 30, 30, 20])
    assert pieces[-1][1] == pytest.approx(2.0)


def test_one_burst_stands_where_it_should() -> None:
    assert one_burst(2.0, 3.0, 60, 90, 200) == [(60, 2.0), (30, 6.0), (110, 2.0)]
    assert one_burst(2.0, 3.0, 60, 90, 70) == [(60, 2.0), (10, 6.0), (0, 2.0)]
