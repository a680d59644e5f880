"""Where a load begins to hurt is found between the factors that were tried, and never claimed below them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.standard_loads import Crossing, find_crossing


@pytest.mark.parametrize("seed", range(20))
def test_the_crossing_is_the_first_multiple_of_the_step_that_reaches_the_target(seed: int) -> None:
    """The oracle tries every multiple of the step."""
    rng = np.random.default_rng(seed)
    steepness, middle = rng.uniform(0.05, 2.0), rng.uniform(65, 105)
    step = float(rng.choice([0.5, 1.0, 2.0]))
    tried: list[float] = []

    def ratio(factor: float) -> float:
        tried.append(factor)
        return 10 / (1 + math.exp(-steepness * (factor - middle)))

    factors = [60.0, 70.0, 80.0, 90.0, 100.0, 110.0]
    target = float(rng.uniform(1, 9))
    found = find_crossing(ratio, factors, target, step)
    every = np.arange(60, 110 + step, step)
    reached = [factor for factor in every.tolist() if ratio(factor) >= target and factor <= 110]
    if not reached:
        assert found is None
    else:
        assert found == Crossing(reached[0], is_bounded=reached[0] > 60)


def test_a_lowest_factor_above_the_target_is_no_crossing_found() -> None:
    assert find_crossing(lambda factor: factor, [80.0, 90.0], 5.0, 1.0) == Crossing(80.0, is_bounded=False)


def test_a_ratio_that_falls_again_is_found_on_its_way_up() -> None:
    """As when arithmetic is short too, so that the oracle waits as well: 3 only between 7 and 13."""
    found = find_crossing(lambda factor: 6 - abs(10 - factor), [2.0, 5.0, 10.0, 18.0], 3.0, 1.0)
    assert found == Crossing(7.0, is_bounded=True)
    assert find_crossing(lambda factor: 6 - abs(10 - factor), [2.0, 5.0, 18.0], 3.0, 1.0) is None
