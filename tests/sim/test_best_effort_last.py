"""Sluice keeps its promises: readers do not notice best effort, and the oldest of it ends whatever the load."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.experiment.result import RunResult
from sim.experiment.run import Progress, StopRun, run_system
from sim.scenarios.files import load_scenario
from sim.scenarios.scenario import Scenario, validated

PATIENCE_S = 5.0
SCENARIO: dict[str, Any] = {
    "name": "beside",
    "model": "llama-3-8b",
    "gpu": "a100",
    "instances": 1,
    "lengths": "200x60",
    "kv_tokens": 12_000,
    "reader": {"kind": "fixed"},
    "best_effort": {"lengths": "700x40", "batch": 16, "num_batches": 2},
    "variants": {
        "sluice-host": {"system": "sluice", "host_memory": "4GiB"},
        "impatient": {"system": "sluice", "policy": {"patience_s": PATIENCE_S}},
        "patient": {"system": "sluice", "policy": {"patience_s": 1e6}},
    },
}


def scenario(rate_per_s: float, duration_s: float, **changes: Any) -> Scenario:
    arrivals = {"kind": "poisson", "rate_per_s": rate_per_s}
    return validated({**SCENARIO, "arrivals": arrivals, "duration_s": duration_s, **changes}, "scenario beside")


def run(chosen: Scenario, system: str) -> RunResult:
    return run_system(chosen, system, seed=1)


def run_until_the_last_comes(chosen: Scenario, system: str) -> RunResult:
    """Return what becomes of requests before that; a backlog takes long."""

    def look(progress: Progress) -> None:
        if progress.at_s > progress.end_s:
            raise StopRun

    return run_system(chosen, system, 1, on_progress=look)


@pytest.mark.slow
@pytest.mark.parametrize("system", ["sluice", "sluice-host"])
def test_readers_do_not_notice_best_effort(system: str) -> None:
    """Memory holds some 45 of them, and 32 documents take all that they leave; first come, first served they wait."""
    chosen = scenario(8.0, 40.0)
    beside, fcfs = (run(chosen, name).records for name in (system, "fcfs-chunked"))
    people, waiting = beside.real_time, fcfs.real_time
    assert beside.select(beside.is_best_effort).is_complete.sum() > 100
    assert people.qoe.min() > 0.995
    assert np.percentile(people.ttft_s, 99) < 0.4 < np.percentile(waiting.ttft_s, 99)


@pytest.mark.slow
def test_in_an_overload_that_never_ends_the_oldest_of_best_effort_ends_within_its_time() -> None:
    """One document after the other: each once it has been the oldest for `patience_s`, and as fast as it can run then.

    Readers ask for more than there is all the time, so without that none would end before they do.
    """
    chosen = scenario(40.0, 40.0)
    records = run_until_the_last_comes(chosen, "impatient").records
    documents = records.select(records.is_best_effort)
    ends = np.sort(documents.last_token_s[documents.is_complete])
    in_time = ends[ends < 40]
    assert in_time.size >= 5
    assert np.diff(in_time, prepend=0.0).max() < PATIENCE_S + 4.0, "a prompt of 700 tokens, and 40 steps"
    never = run_until_the_last_comes(chosen, "patient").records
    assert not never.select(never.is_best_effort).is_complete.any()


@pytest.mark.slow
def test_without_pressure_it_is_as_if_everybody_were_served_as_he_comes() -> None:
    chosen = load_scenario("burst-demo").model_copy(update={"upscale": 0.4, "duration_s": 100.0})
    fcfs, sluice = (run(chosen, name).records for name in ("fcfs-chunked", "sluice"))
    assert sluice.ttft_s.mean() == pytest.approx(fcfs.ttft_s.mean(), rel=0.01)
    assert np.percentile(sluice.ttft_s, 99) == pytest.approx(np.percentile(fcfs.ttft_s, 99), rel=0.01)
    assert sluice.token_s.max() == pytest.approx(fcfs.token_s.max(), rel=0.01)
    assert sluice.is_complete.all()
