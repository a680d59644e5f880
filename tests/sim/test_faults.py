"""Random faults on the virtual clock: whatever fails, the invariants hold. A failure names its seed.

`python -m sim.faults --seed N` shows what happened in one.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from services.dispatcher.session.leases import Loss
from sim.faults.campaign import SeedReport, run_seed
from sim.faults.cluster import Outcome
from sim.faults.kinds import BROKER_KINDS, GROUP_KINDS, WORKER_KINDS, FaultKind, FaultSpace, draw_faults
from tests.support.traces import outputs_of

NUM_SEEDS = 200
SEEDS_PER_TEST = 5

REQUIRED = (
    *(f"fault {kind.value}" for kind in FaultKind if kind not in GROUP_KINDS),
    *(f"call {outcome.name.lower()}" for outcome in Outcome if outcome is not Outcome.OPEN),
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
    "preempted",
    "swapped out",
    "swapped in",
)
"""Paths that the seeds together must reach."""

_reports: dict[int, SeedReport] = {}


def report_of(seed: int) -> SeedReport:
    """Each seed runs once, whichever test asks first."""
    if seed not in _reports:
        _reports[seed] = run_seed(seed)
    return _reports[seed]


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_the_invariants_hold_whatever_fails(first: int) -> None:
    wrong = [
        f"seed {seed}: {violation}"
        for seed in range(first, first + SEEDS_PER_TEST)
        for violation in report_of(seed).violations
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(900)  # by itself it runs all seeds
def test_every_recovery_path_was_reached() -> None:
    total: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        total.update(report_of(seed).coverage)
    missing = [path for path in REQUIRED if not total[path]]
    assert not missing, f"never reached: {missing}"


@pytest.mark.parametrize("seed", [3, 11])
def test_one_seed_gives_one_trace_in_any_process(seed: int) -> None:
    program = f"from sim.faults.campaign import run_seed; print(run_seed({seed}).digest)"
    digests = outputs_of(program)
    assert digests == {report_of(seed).digest}
    assert report_of(seed + 1).digest not in digests


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
