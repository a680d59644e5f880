"""The replay that chooses loads is held against an independent one, the simulator, and what must hold of any server."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from benchmarks import fcfs_reference as reference
from benchmarks.load_replay import WHOLE_PROMPTS, Instance, Row, replay, replay_scenario
from shared.cost import load_profile
from shared.process.log import only_from
from sim.experiment.run import run_system
from sim.experiment.summary import summarise
from sim.scenarios.scenario import validated
from sim.workload.workload import Workload
from tests.support.workloads import plain_workload

COST = load_profile("qwen2.5-14b-tp1-a800").cost
SMALL: dict[str, Any] = {
    "name": "small",
    "model": "qwen2.5-14b",
    "gpu": "a800",
    "instances": 2,
    "lengths": "burstgpt-conversation",
    "duration_s": 40.0,
    "kv_tokens": 24_000,
    "max_batch_rows": 1024,
    "arrivals": {"kind": "one-burst", "rate_per_s": 4.0, "factor": 2.0, "burst_start_s": 5.0, "burst_end_s": 30.0},
}


def of_instances(kv_tokens: int | None, *, whole_prompts: bool, count: int = 1, **limits: int) -> list[Instance]:
    bounds = {"max_tokens": 2048, "max_rows": 1024, **limits}
    return [Instance(COST, kv_tokens, whole_prompts=whole_prompts, **bounds) for _ in range(count)]


def drawn(seed: int, rate: float = 6.0) -> Workload:
    changed = {**SMALL, "arrivals": {"kind": "poisson", "rate_per_s": rate}}
    return validated(changed, "drawn").workload(seed)


@pytest.mark.parametrize("name", ["busy", "overload"])
def test_whole_prompts_fare_as_in_the_independent_replay(name: str) -> None:
    """Its rules are vLLM's, and it counts blocks; the same memory, budget, requests and cost."""
    load = reference.draw_load(reference.LOADS[name])
    workload = plain_workload(load.arrival_s, load.num_prompt, load.num_output, has_reader=False)
    kv_tokens = reference.NUM_BLOCKS * reference.BLOCK_SIZE
    limits = {"max_tokens": reference.MAX_TOKENS, "max_rows": reference.MAX_SEQUENCES}
    outcome = replay(of_instances(kv_tokens, whole_prompts=True, **limits), workload, kv_tokens, reference.DURATION_S)
    expected = reference.figures(load)
    assert outcome.ttft_p99_s == pytest.approx(expected["ttft_p99_s"], rel=0.05)
    assert outcome.ttft_s.mean() == pytest.approx(expected["ttft_mean_s"], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("system", WHOLE_PROMPTS)
def test_a_burst_fares_as_in_the_simulator(system: str) -> None:
    """Two instances whose memory is short for half a minute; the simulator counts blocks and sends messages.

    Of 264 requests three are above the 99th percentile, so it is the mean that is compared. Without a bound on memory
    it would be 0.1 s.
    """
    scenario = validated(SMALL, "small")
    with only_from("error"):
        result = run_system(scenario, system, 1)
    expected = summarise(result.records, result.facts)["ttft_s"]["mean"]
    found = replay_scenario(scenario, system, scenario.workload(1))
    assert found.ttft_s.mean() == pytest.approx(expected, rel=0.1)
    assert found.peak_demand > 1.1
    assert (expected > 2) == (system != "oracle")


@pytest.mark.parametrize("whole_prompts", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_memory_that_suffices_is_as_good_as_memory_without_end(whole_prompts: bool, seed: int) -> None:
    """Every request at its full length and its headroom at once: no bound below that can have made anyone wait."""
    workload = drawn(seed)
    enough = int((workload.num_prompt + workload.num_output + 2 * 16).sum())
    bounded, unbounded = (
        replay(of_instances(kv_tokens, whole_prompts=whole_prompts), workload, enough, 40.0)
        for kv_tokens in (enough, None)
    )
    assert bounded.ttft_s.tolist() == unbounded.ttft_s.tolist()
    assert bounded.num_preempted == 0
    assert bounded.mean_held == unbounded.mean_held


@pytest.mark.parametrize("whole_prompts", [True, False])
@pytest.mark.parametrize("kv_tokens", [4_000, 12_000, 40_000, None])
@pytest.mark.parametrize("seed", range(3))
def test_every_request_is_answered_and_its_memory_given_back(
    whole_prompts: bool, kv_tokens: int | None, seed: int
) -> None:
    """Work is conserved: the tokens of all steps are all prompts, all outputs but the last, and what was lost."""
    workload = drawn(seed)
    priced = _Priced()
    instances = [Instance(priced, kv_tokens, whole_prompts=whole_prompts, max_tokens=2048, max_rows=1024)]  # type: ignore[arg-type]
    outcome = replay(instances, workload, 40_000, 40.0)
    assert np.isfinite(outcome.ttft_s).all()
    assert (outcome.ttft_s > 0).all()
    assert instances[0].wanted_tokens == 0
    computed = int(workload.num_prompt.sum() + (workload.num_output - 1).sum())
    assert priced.num_tokens == computed + instances[0].num_lost_tokens
    assert (instances[0].num_lost_tokens > 0) == (outcome.num_preempted > 0)
    assert max(instances[0].steps.held_tokens) <= (math.inf if kv_tokens is None else kv_tokens)


def test_short_memory_preempts_and_makes_wait() -> None:
    """So the test above has seen both sides."""
    workload = drawn(0)
    short, long = (replay(of_instances(size, whole_prompts=False), workload, size, 40.0) for size in (4_000, 400_000))
    assert short.num_preempted > 0
    assert short.ttft_p99_s > 10 * long.ttft_p99_s


def test_the_load_of_an_instance_is_the_dispatchers() -> None:
    """Steps of 2 048 tokens: of 5 000 that wait 2 952 are left, then 904; half of a second of them is a whole memory.

    One that runs holds half a block more than its tokens.
    """
    (instance,) = of_instances(None, whole_prompts=False)
    instance.put(Row(0, 0.0, 5_000, 2))
    for until_s, num_left in ((0.0, 5_000), (1e-9, 2_952), (0.4, 904)):
        instance.advance(until_s)
        assert instance.uncomputed_tokens == num_left
        expected = (5_008 if num_left < 5_000 else 5_000) / 40_000 + 0.5 * num_left * COST.b1_s
        assert instance.load(40_000) == pytest.approx(expected)


def test_requests_go_where_the_load_is_least() -> None:
    """Four at once on two instances: 900 | 500, then 500 + 300 is still the lesser, and 800 + 200 too."""
    workload = plain_workload([0.0] * 4, [900, 500, 300, 200], 1)
    outcome = replay(of_instances(40_000, whole_prompts=False, count=2), workload, 40_000, 40.0)
    one, other = (
        COST.step_s(900, 0, 900 * 901 // 2),
        COST.step_s(1000, 0, sum(n * (n + 1) // 2 for n in (500, 300, 200))),
    )
    assert outcome.ttft_s.tolist() == pytest.approx([one, other, other, other])


class _Priced:
    """Counts the tokens of the steps that it prices."""

    b1_s = COST.b1_s

    def __init__(self) -> None:
        self.num_tokens = 0

    def step_s(self, num_tokens: float, kv_decode_tokens: float, prefill_pairs: float) -> float:
        self.num_tokens += int(num_tokens)
        return COST.step_s(num_tokens, kv_decode_tokens, prefill_pairs)
