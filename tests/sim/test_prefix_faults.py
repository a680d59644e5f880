"""Prefixes go from worker to worker while processes, links and messages fail: by seed, every text as undisturbed.

`draw_prefix_scenario` says what a seed stands for. At the end of each nothing is pinned, reserved, leased or open.
"""

from __future__ import annotations

import pytest

from shared.messages.fetch import FetchOutcome
from sim.faults.campaign import run_scenario
from sim.faults.scenario import draw_prefix_scenario
from tests.support.fault_seeds import FaultSeeds

REQUIRED = tuple(f"prefix: {outcome.value}" for outcome in FetchOutcome if outcome is not FetchOutcome.BUSY)
"""Who is busy itself asks nobody."""
SEEDS = range(200)
FOUND = FaultSeeds(lambda seed: run_scenario(draw_prefix_scenario(seed)), SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_invariants_hold_whatever_fails_while_prefixes_travel(seed: int) -> None:
    FOUND.check(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)  # by itself it runs all seeds
def test_prefixes_came_and_did_not_come_for_every_reason() -> None:
    total = FOUND.check_coverage(REQUIRED)
    assert total["prefix: moved"] > len(SEEDS) // 2
