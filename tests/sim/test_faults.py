"""Random faults on the virtual clock: whatever fails, the invariants hold. A failure names its seed.

`python -m sim.faults --seed N` shows what happened in one.
"""

from __future__ import annotations

import numpy as np
import pytest

from services.dispatcher.session.leases import Loss
from sim.faults.campaign import run_scenario
from sim.faults.cluster import CallOutcome
from sim.faults.kinds import BROKER_KINDS, GROUP_KINDS, WORKER_KINDS, FaultKind, FaultSpace, draw_faults
from sim.faults.scenario import draw_scenario
from tests.support.fault_seeds import FaultSeeds
from tests.support.seeds import first_of
from tests.support.traces import outputs_of

REQUIRED = (
    *(f"fault {kind.value}" for kind in FaultKind if kind not in GROUP_KINDS),
    *(f"call {outcome.name.lower()}" for outcome in CallOutcome if outcome is not CallOutcome.OPEN),
    *(f"lost {loss.value}" for loss in Loss if loss is not Loss.RELEASED),
    "log request_goes_on",
    "log poison_request",
    "log worker_back",
    "log worker_recovered",
    "log worker_restarted",
    "log lease_ran_out",
    "log lease_renewed",
    "log orphans_ended",
    "log drain_limit_reached",
    "log planner_superseded",
    "log view_not_written",
    "log submit_without_answer",
    "sent submit again with tokens",
    "sent submit as a fork",
    "sent accepted with tokens",
    "sent refused full",
    "sent refused duplicate",
    "sent refused cancelled",
    "sent replay",
    "sent replay_unknown",
    "sent cancel",
    "failed draining",
    "failed request_timeout",
    "finished stop",
    "finished error",
    "system fcfs",
    "system fcfs-chunked",
    "system round-robin",
    "system swap",
    "system sluice",
    "preempted",
    "swapped out",
    "swapped in",
)
"""Paths that the seeds together must reach."""

SEEDS = (*range(30), 32, 61, 84, 151)
FOUND = FaultSeeds(lambda seed: run_scenario(draw_scenario(seed)), SEEDS)


@pytest.mark.parametrize("seed", first_of(SEEDS, 6))
def test_the_invariants_hold_whatever_fails(seed: int) -> None:
    FOUND.check(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)  # by itself it runs all seeds
def test_every_recovery_path_was_reached() -> None:
    FOUND.check_coverage(REQUIRED)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 11])
def test_one_seed_gives_one_trace_in_any_process(seed: int) -> None:
    program = "from sim.faults.campaign import run_scenario; from sim.faults.scenario import draw_scenario; "
    program += f"print(run_scenario(draw_scenario({seed})).digest)"
    digests = outputs_of(program)
    assert digests == {FOUND.report_of(seed).digest}
    assert FOUND.report_of(seed + 1).digest not in digests


def test_faults_are_in_order_and_each_hits_what_it_can() -> None:
    space = FaultSpace(("w0", "w1"), ("d0",), ("monitor",))
    for seed in range(200):
        plan = draw_faults(space, np.random.default_rng(seed))
        assert [fault.at_s for fault in plan.faults] == sorted(fault.at_s for fault in plan.faults)
        assert 1 <= len({fault.kind for fault in plan.faults}) <= space.max_kinds
        for fault in plan.faults:
            assert (fault.target == "broker") == (fault.kind in BROKER_KINDS)
            assert fault.target in space.workers or fault.kind not in WORKER_KINDS
            assert 0.05 <= fault.duration_s <= 12.0
