"""Groups form and dissolve while processes, links and messages fail: by seed, every text as undisturbed.

`draw_group_scenario` says what a seed stands for.
"""

from __future__ import annotations

import pytest

from services.dispatcher.session.leases import Loss
from services.worker.modelled.shadow_kv import ShadowKv
from sim.faults.campaign import run_scenario
from sim.faults.kinds import GROUP_KINDS, FaultKind
from sim.faults.scenario import draw_group_scenario, draw_scenario
from tests.support.fault_seeds import FaultSeeds
from tests.support.traces import outputs_of

REQUIRED = (
    *(f"fault {kind.value}" for kind in FaultKind),
    f"lost {Loss.RELEASED.value}",
    "prepare prepared",
    "prepare refused",
    "prepare silent",
    "commit done",
    "commit failed",
    "commit aborted",
    "commit refused",
    "abort aborted",
    "stale refused",
    "made up refused",
    "log role_changed",
    "log group_broken",
    "log kv_arrived",
    "log kv_given_up",
    "log kv_copied",
    "sent refused stage",
    "finished length",
    "preempted",
    "swapped out",
    "swapped in",
    "given up",
    *(f"merge {word}" for word in ("committed", "aborted", "abandoned", "by half", "broken", "struck")),
)
"""Paths that the seeds together must reach."""

SEEDS = (*range(30), 137, 200)
FOUND = FaultSeeds(lambda seed: run_scenario(draw_group_scenario(seed)), SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_invariants_hold_whatever_fails_while_groups_come_and_go(seed: int) -> None:
    FOUND.check(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)  # by itself it runs all seeds
def test_every_step_of_the_protocol_was_reached_and_struck() -> None:
    total = FOUND.check_coverage(REQUIRED)
    assert total["commit done"] > 3 * len(SEEDS), "most seeds change roles several times"


@pytest.mark.slow
@pytest.mark.timeout(900)  # by itself it runs all seeds
def test_groups_of_two_became_groups_of_four_and_every_step_of_that_was_struck() -> None:
    """Struck: a fault began between the first word and the last, or the planner died in between."""
    assert FOUND.num_seeds_with("merge committed") >= len(SEEDS) // 4
    assert FOUND.num_seeds_with("merge struck", "merge abandoned", "merge by half") >= len(SEEDS) // 4
    assert FOUND.num_seeds_with("merge broken", "merge aborted") >= len(SEEDS) // 20


@pytest.mark.slow
def test_one_seed_gives_one_trace_in_any_process() -> None:
    program = (
        "from sim.faults.campaign import run_scenario; from sim.faults.scenario import draw_group_scenario; "
        "print(run_scenario(draw_group_scenario(4)).digest)"
    )
    assert outputs_of(program) == {FOUND.report_of(4).digest}


@pytest.mark.long
def test_a_block_that_is_lost_in_a_change_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof that texts depend on the exchange: where nothing is copied, other words are said."""
    monkeypatch.setattr(ShadowKv, "take_from", lambda *_: None)
    found = [violation for seed in range(12) for violation in run_scenario(draw_group_scenario(seed)).violations]
    assert any("I2" in violation for violation in found)


def test_changes_are_drawn_only_where_layers_can_be_dropped() -> None:
    scenario = draw_group_scenario(1)
    assert any(fault.kind in GROUP_KINDS for fault in scenario.plan.faults)
    assert all(worker.elastic is not None for worker in scenario.workers)
    assert not any(fault.kind in GROUP_KINDS for fault in draw_scenario(1).plan.faults)
