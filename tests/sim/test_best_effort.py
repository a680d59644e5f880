"""Best effort in a closed loop beside requests that somebody waits for: what is sent when, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from services.dispatcher.session.request import NewRequest
from services.dispatcher.session.session import Session
from services.dispatcher.session.sessions import Sessions
from shared.api_keys import Tier
from shared.types import LatencyLimits
from sim.experiment.records import Records
from sim.experiment.run import RETRY_S, run_system, run_workload
from sim.experiment.setup import ExperimentCluster
from sim.scenarios.scenario import validated
from sim.workload.lengths import find_lengths
from sim.workload.workload import BestEffort, Workload
from tests.support.sim_clusters import cluster_of
from tests.support.workloads import plain_workload

SLO = LatencyLimits(ttft_s=0.4, tpot_s=0.2)
SCENARIO: dict[str, Any] = {
    "name": "beside",
    "model": "llama-3-8b",
    "gpu": "a100",
    "instances": 1,
    "lengths": "200x40",
    "duration_s": 3.0,
    "kv_tokens": 4000,
    "arrivals": {"kind": "poisson", "rate_per_s": 5.0},
    "best_effort": {"lengths": "100x20", "batch": 4},
    "variants": {"alone": {"system": "fcfs-chunked", "best_effort": False}},
}


def beside(batch: int, num_batches: int = 1, max_tokens: int = 10_000) -> BestEffort:
    """Return best effort of 50 to 150 prompt and 5 to 25 output tokens."""

    def draw(random: np.random.Generator) -> tuple[int, int]:
        return int(random.integers(50, 150)), int(random.integers(5, 25))

    return BestEffort(draw, max_tokens, batch, num_batches, seed=7)


def mixed(best_effort: BestEffort | None) -> Workload:
    """Return 40 requests within six seconds, and best effort beside them."""
    rng = np.random.default_rng(5)
    people = plain_workload(np.sort(rng.uniform(0, 6, 40)), rng.integers(10, 300, 40), rng.integers(2, 80, 40))
    return Workload(**{name: getattr(people, name) for name in COLUMNS}, slo=SLO, best_effort=best_effort)


COLUMNS = ("name", "arrival_s", "num_prompt", "num_output", "num_thinking", "qoe_ttft_s", "qoe_speed", "tier", "seed")


def run(workload: Workload, system: str = "fcfs-chunked", num_blocks: int = 80) -> Records:
    """Return what became of a workload on one worker that holds about six of its requests."""
    params = cluster_of(1, num_blocks, system=system, max_model_len=1024, max_batch_tokens=512, prefix_caching=False)
    return run_workload(ExperimentCluster(params), workload).records


@pytest.mark.parametrize("system", ["fcfs", "fcfs-chunked", "andes"])
def test_a_batch_is_submitted_when_the_one_before_is_done(system: str) -> None:
    """One batch of five at a time: all at once, and at the last end of the batch before, give or take a message."""
    records = run(mixed(beside(5)), system)
    those = records.select(records.is_best_effort)
    batches = [those.select(those.arrival_s == at_s) for at_s in np.unique(those.arrival_s)]
    assert [len(batch) for batch in batches] == [5] * len(batches)
    assert len(batches) > 3
    assert batches[0].arrival_s[0] == 0
    for before, after in pairwise(batches):
        assert after.arrival_s[0] == pytest.approx(before.last_token_s.max(), abs=1e-9)
    assert records.is_complete.all()


def test_best_effort_ends_after_those_who_are_waited_for() -> None:
    """None is submitted after the last end of the others; until then some is there."""
    records = run(mixed(beside(3, num_batches=2)))
    those, end_s = records.select(records.is_best_effort), records.real_time.last_token_s.max()
    assert those.arrival_s.max() < end_s <= those.last_token_s.max()
    arrivals, counts = np.unique(those.arrival_s, return_counts=True)
    assert counts[0] == 6, "two batches at once"
    for at_s in np.linspace(0, end_s - 1e-6, 50):
        assert 0 < ((those.arrival_s <= at_s) & (at_s < those.last_token_s)).sum() <= 6
    assert arrivals.size > 4


def test_every_system_gets_the_same_work_in_the_same_order() -> None:
    """As far as it comes: the shorter list begins the longer one. And the others get what they get without."""
    found = [run(mixed(beside(4)), system) for system in ("fcfs", "andes")]
    sizes = [
        list(zip(each.num_prompt[each.is_best_effort], each.num_output[each.is_best_effort], strict=True))
        for each in found
    ]
    shortest = min(map(len, sizes))
    assert shortest > 10
    assert all(each[:shortest] == sizes[0][:shortest] for each in sizes)
    alone = run(mixed(None))
    for each in found:
        for name in ("arrival_s", "num_prompt", "num_output", "qoe_ttft_s", "qoe_speed"):
            assert np.array_equal(getattr(each.real_time, name), getattr(alone, name)), name
    again = run(mixed(beside(4)), "andes")
    assert again.token_s.tobytes() == found[1].token_s.tobytes()


def test_preemptions_are_counted_by_request() -> None:
    """Where there is less memory than is needed some are preempted, and nobody is without an answer."""
    records = run(mixed(beside(5)), num_blocks=40)
    assert not np.isnan(records.num_preemptions).any()
    assert records.num_preemptions.max() >= 1
    roomy = run(mixed(beside(5)), num_blocks=2000)
    assert roomy.num_preemptions.max() == 0


def test_what_is_refused_is_not_asked_for_without_a_pause() -> None:
    """No worker holds 2 000 tokens: a batch per `RETRY_S`, until the others have ended."""
    too_long = BestEffort(lambda _: (2000, 10), 2010, batch=3, num_batches=2, seed=1)
    records = run(mixed(too_long))
    those = records.select(records.is_best_effort)
    assert set(those.failure) == {"context_length_exceeded"}
    expected_s = np.arange(0, records.real_time.last_token_s.max(), RETRY_S)
    assert np.unique(those.arrival_s).tolist() == pytest.approx(expected_s.tolist())
    assert len(those) == 6 * expected_s.size
    assert records.real_time.is_complete.all()


def test_requests_say_their_tier_and_what_they_are_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[NewRequest] = []
    admit: Callable[..., Any] = Sessions.admit

    async def note(self: Sessions, request: NewRequest) -> Session:
        sent.append(request)
        session: Session = await admit(self, request)
        return session

    monkeypatch.setattr(Sessions, "admit", note)
    run(mixed(beside(2)))
    said = {(request.tier, request.slo, request.qoe is None) for request in sent}
    assert said == {(Tier.DEFAULT, SLO, False), (Tier.FLEX, None, True)}


def test_a_variant_runs_those_who_are_waited_for_alone() -> None:
    scenario = validated(SCENARIO, "beside")
    alone, beside_it = (run_system(scenario, name, seed=2).records for name in ("alone", "fcfs-chunked"))
    assert not alone.is_best_effort.any()
    assert beside_it.is_best_effort.any()
    assert alone.arrival_s.tolist() == beside_it.real_time.arrival_s.tolist()
    assert alone.ttft_s.mean() < beside_it.real_time.ttft_s.mean()


def test_a_share_of_the_arrivals_may_be_best_effort() -> None:
    scenario = validated({**SCENARIO, "best_effort": None, "best_effort_share": 0.4, "duration_s": 6.0}, "beside")
    records, alone = (run_system(scenario, name, seed=2).records for name in ("fcfs-chunked", "alone"))
    assert 0 < records.is_best_effort.sum() < len(records)
    assert alone.arrival_s.tolist() == records.real_time.arrival_s.tolist()


@pytest.mark.parametrize("name", ["be-synthetic", "sharegpt", "burstgpt-conversation", "300x40"])
def test_no_length_is_beyond_the_longest(name: str) -> None:
    lengths = find_lengths(name)
    num_prompt, num_output = lengths.sample(20_000, np.random.default_rng(1))
    assert (num_prompt + num_output).max() <= lengths.max_tokens
    assert num_prompt.max() + num_output.max() > 0.5 * lengths.max_tokens
