"""Requests go from worker to worker while processes, links and messages fail: by seed, every text as undisturbed.

`draw_migration_scenario` says what a seed stands for. At the end of each nothing is pinned, reserved, leased or open.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.dispatcher.session.leases import Loss
from services.worker.modelled.shadow_kv import ShadowKv
from shared.messages.fetch import FetchOutcome
from sim.faults.campaign import run_scenario
from sim.faults.cluster import FaultCluster
from sim.faults.kinds import FaultKind
from sim.faults.scenario import MOVING_SYSTEMS, draw_migration_scenario, draw_scenario
from tests.support.fault_seeds import FaultSeeds
from tests.support.traces import outputs_of

BESIDES = (FaultKind.BROKER_CRASH, FaultKind.BROKER_HANG)
"""What comes upon neither worker alone."""
STRUCK = {
    kind: {f"{kind.value} of {side}" for side in (("broker",) if kind in BESIDES else ("source", "target"))}
    for kind in FaultKind
}
REQUIRED = (
    *(f"fetch {outcome.value}" for outcome in FetchOutcome if outcome not in {FetchOutcome.BUSY, FetchOutcome.LATE}),
    *(f"struck {state}" for state in ("asked", "copying", "leaving", "done")),
    "close done",
    "close silent",
    "sent refused closing",
    "log open_again",
    *(f"system {name}" for name in MOVING_SYSTEMS),
    "log request_moved",
    "drain: moved",
    "recovery: moved",
    "recovery: lost",
    f"lost {Loss.RELEASED.value}",
    f"lost {Loss.DRAINING.value}",
    "fetch silent",
    "crash of d0",
    "hang of d0",
    "restart of d0",
    "log request_left",
    "log group_broken",
    "preempted",
    "swapped out",
)
"""Paths that the seeds together must reach."""

SEEDS = range(200)
FOUND = FaultSeeds(lambda seed: run_scenario(draw_migration_scenario(seed)), SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_invariants_hold_whatever_fails_while_requests_change_their_workers(seed: int) -> None:
    FOUND.check(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)  # by itself it runs all seeds
def test_every_state_of_a_move_was_reached_and_struck_by_everything() -> None:
    total = FOUND.check_coverage(REQUIRED)
    missing = [kind.value for kind, paths in STRUCK.items() if not any(total[path] for path in paths)]
    assert not missing, f"never came upon a move: {missing}"
    assert total["fetch moved"] > len(SEEDS)
    assert FOUND.num_seeds_with("struck asked", "struck copying", "struck leaving", "struck done") > len(SEEDS) // 4
    assert FOUND.num_seeds_with("fetch moved") > len(SEEDS) // 2


@pytest.mark.slow
def test_one_seed_gives_one_trace_in_any_process() -> None:
    program = (
        "from sim.faults.campaign import run_scenario; from sim.faults.scenario import draw_migration_scenario; "
        "print(run_scenario(draw_migration_scenario(4)).digest)"
    )
    assert outputs_of(program) == {FOUND.report_of(4).digest}


@pytest.mark.long
def test_a_block_that_is_lost_in_a_move_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof that texts depend on what is fetched: where nothing is copied, other words are said."""
    monkeypatch.setattr(ShadowKv, "take_from", lambda *_: None)
    found = [violation for seed in range(12) for violation in run_scenario(draw_migration_scenario(seed)).violations]
    assert any("I2" in violation for violation in found)


def test_moves_are_drawn_only_where_they_are_what_a_run_is_about() -> None:
    assert draw_migration_scenario(1).plan.moves
    assert not draw_scenario(1).plan.moves


@pytest.mark.slow
def test_no_request_is_in_steps_of_two_workers_at_once() -> None:
    """Where nothing fails; a worker that is given up computes until its lease is over."""
    places: dict[str, set[int]] = {}

    def look(cluster: FaultCluster) -> None:
        engines = [node.worker.service.engine for node in cluster.workers if node.worker is not None]
        found: dict[str, list[int]] = {}
        for number, engine in enumerate(engines):
            for request in {engine.table.sequence(row).key[0] for row in engine.flights.rows.tolist()}:
                found.setdefault(request, []).append(number)
        assert not [request for request, numbers in found.items() if len(numbers) > 1]
        for name, numbers in found.items():
            places.setdefault(f"{name} of {seed}", set()).update(numbers)

    for seed in range(10):
        scenario = draw_migration_scenario(seed)
        report = run_scenario(replace(scenario, plan=replace(scenario.plan, faults=())), watch=look)
        assert not report.violations
    assert sum(len(numbers) > 1 for numbers in places.values()) > 20, "they move"
