"""Groups form and dissolve while processes, links and messages fail: by seed, every text as undisturbed.

`draw_group_scenario` says what a seed stands for.
"""

from __future__ import annotations

from collections import Counter

import pytest

from services.dispatcher.session.leases import Loss
from services.worker.engine.types import I32
from services.worker.executor.shadow_kv import ShadowKv
from sim.faults.campaign import SeedReport, run_scenario
from sim.faults.kinds import GROUP_KINDS, FaultKind
from sim.faults.scenario import draw_group_scenario, draw_scenario
from tests.support.traces import outputs_of

NUM_SEEDS = 200
SEEDS_PER_TEST = 5

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
    "log role_changed",
    "log group_broken",
    "log kv_arrived",
    "log kv_given_up",
    "sent refused stage",
    "finished length",
    "preempted",
)
"""Paths that the seeds together must reach."""

_reports: dict[int, SeedReport] = {}


def report_of(seed: int) -> SeedReport:
    """Each seed runs once, whichever test asks first."""
    if seed not in _reports:
        _reports[seed] = run_scenario(draw_group_scenario(seed))
    return _reports[seed]


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_the_invariants_hold_whatever_fails_while_groups_come_and_go(first: int) -> None:
    wrong = [
        f"seed {seed}: {violation}"
        for seed in range(first, first + SEEDS_PER_TEST)
        for violation in report_of(seed).violations
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(900)  # by itself it runs all seeds
def test_every_step_of_the_protocol_was_reached_and_struck() -> None:
    total: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        total.update(report_of(seed).coverage)
    missing = [path for path in REQUIRED if not total[path]]
    assert not missing, f"never reached: {missing}"
    assert total["commit done"] > 3 * NUM_SEEDS, "most seeds change roles several times"


def test_one_seed_gives_one_trace_in_any_process() -> None:
    program = (
        "from sim.faults.campaign import run_scenario; from sim.faults.scenario import draw_group_scenario; "
        "print(run_scenario(draw_group_scenario(4)).digest)"
    )
    assert outputs_of(program) == {report_of(4).digest}


def test_a_block_that_is_lost_in_a_change_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof that texts depend on the exchange: where nothing is copied, other words are said."""

    def copy_nothing(kv: ShadowKv, other: ShadowKv, source: I32, target: I32) -> None:
        del kv, other, source, target

    monkeypatch.setattr(ShadowKv, "take_from", copy_nothing)
    found = [violation for seed in range(12) for violation in run_scenario(draw_group_scenario(seed)).violations]
    assert any("I2" in violation for violation in found)


def test_changes_are_drawn_only_where_layers_can_be_dropped() -> None:
    scenario = draw_group_scenario(1)
    assert any(fault.kind in GROUP_KINDS for fault in scenario.plan.faults)
    assert all(worker.elastic is not None for worker in scenario.workers)
    assert not any(fault.kind in GROUP_KINDS for fault in draw_scenario(1).plan.faults)
