"""The replay of KV sizes: its lower bound, and that packers are told all there is and nothing else."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from benchmarks.kv_sizes import PACKERS, Shrinking, lower_bound, operation_times_s, replay
from services.planner.policy.packing.fits import WorstFit
from tests.support.workloads import plain_workload
from tests.unit.planner.packing.exact import fewest_bins

TOKEN_S = 0.05


@pytest.mark.parametrize("seed", range(100))
def test_the_bound_is_never_above_the_fewest_bins_and_never_below_the_sum(seed: int) -> None:
    random, capacity = Random(seed), 100
    sizes = [random.choice([random.randrange(1, 101), random.randrange(30, 70)]) for _ in range(random.randrange(10))]
    assert -(-sum(sizes) // capacity) <= lower_bound(sizes, capacity) <= fewest_bins(sizes, capacity)


def test_the_bound_knows_that_what_is_larger_than_a_half_is_alone_with_what_fits_beside_it() -> None:
    """By the sum these would be 4, 5 and 3."""
    assert lower_bound([51] * 7, 100) == 7
    assert lower_bound([60] * 5 + [41] * 5, 100) == 8
    assert lower_bound([70, 70, 31, 31, 31], 100) == 3
    assert lower_bound([], 100) == 0


@pytest.mark.parametrize("name", PACKERS)
def test_requests_come_grow_and_end_when_they_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at 0 s of 100 tokens and 400 and 800 of output: 20 and 40 s; each second has 20 tokens more of each."""
    packer, totals = PACKERS[name](5_000), list[int]()

    def noted(now_s: float) -> None:
        totals.append(sum(bin_.used for bin_ in packer.bins))

    monkeypatch.setattr(packer, "tick", noted)
    workload = plain_workload([0.0, 0.0], 100, [400, 800])
    done = replay(workload, packer, TOKEN_S, 50.0)
    expected = [2 * (100 + 20 * t) if t < 20 else 100 + 20 * t if t < 40 else 0 for t in range(1, 51)]
    assert totals == expected
    assert done.num_requests == 2


def test_figures_are_those_of_the_time_after_the_warm_up() -> None:
    """Three requests that fill more than half of a bin each, all the time."""
    workload = plain_workload([0.0] * 3, 60, [10_000] * 3)
    done = replay(workload, WorstFit(100), TOKEN_S, 400.0)
    assert len(done.num_bins) == 101
    assert set(done.num_bins) == set(done.bound) == {3}
    figures = done.figures()
    assert figures["GPU-s"] == figures["peak"] == figures["L2"] == figures["paid 60 s"]
    assert figures["moves"] == 0


def test_operations_are_timed_one_by_one() -> None:
    times_s = operation_times_s(PACKERS["pack"](18_526), 18_526, 20, 500, seed=0)
    assert times_s.shape == (500,)
    assert np.all(times_s > 0)


@pytest.mark.parametrize("name", PACKERS)
def test_workers_that_hold_less_are_others_every_minute(name: str) -> None:
    packer, shrinking = PACKERS[name](1_000), Shrinking(0.5, 1)
    for number in range(8):
        packer.place(number, 700)
    for second in (60, 61, 120):
        shrinking.tick(packer, [], second)
        shrunk = [bin_.number for bin_ in packer.bins if bin_.capacity == 800]
        assert len(shrunk) == len(packer.bins) // 2
