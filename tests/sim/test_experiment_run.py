"""One run of a workload on a simulated cluster: nothing is lost, and the figures are those of what happened."""

from __future__ import annotations

import numpy as np
import pytest

from sim.experiment.alone import alone_records
from sim.experiment.records import UNFINISHED
from sim.experiment.result import RunResult
from sim.experiment.run import Progress, StopRun, run_workload
from sim.experiment.setup import ExperimentCluster
from sim.experiment.summary import summarise
from sim.workload.workload import Workload
from sluice_client.qoe import QoeState, QoeTarget
from tests.support.sim_clusters import COST, cluster_of
from tests.support.workloads import plain_workload


def cluster(
    num_blocks: int = 400, count: int = 2, system: str = "fcfs-chunked", max_model_len: int = 1024
) -> ExperimentCluster:
    params = cluster_of(
        count, num_blocks, system=system, max_model_len=max_model_len, max_batch_tokens=512, prefix_caching=False
    )
    return ExperimentCluster(params, gpus_per_worker=2)


def busy(count: int = 60, *, has_reader: bool = True) -> Workload:
    rng = np.random.default_rng(3)
    arrivals = np.cumsum(rng.exponential(0.05, count))
    return plain_workload(
        arrivals.tolist(), rng.integers(10, 300, count), rng.integers(2, 80, count), has_reader=has_reader
    )


@pytest.fixture(scope="module")
def tight() -> tuple[Workload, RunResult, list[Progress]]:
    """Sixty requests within three seconds on two workers that hold about six of them."""
    progress: list[Progress] = []
    workload = busy()
    return workload, run_workload(cluster(num_blocks=60), workload, progress.append), progress


def test_every_request_gets_all_its_tokens(tight: tuple[Workload, RunResult, list[Progress]]) -> None:
    workload, result, _ = tight
    assert result.records.is_complete.all()
    assert result.records.num_tokens.tolist() == workload.num_output.tolist()


def test_times_are_those_of_an_idle_worker_for_a_request_alone() -> None:
    """Prompt of 200: one step, then eleven decodes, each with its message; 90 µs on the way there and back."""
    records = run_workload(cluster(), plain_workload([0.5], 200, 12)).records
    assert records.ttft_s[0] == pytest.approx(COST.step_s(200, 0, 200 * 201 // 2) + 180e-6, rel=1e-6)
    decodes = [COST.step_s(1, context, 0) for context in range(201, 212)]
    assert records.tpot_s[0] == pytest.approx(np.mean(decodes), rel=1e-6)
    assert records.longest_gap_s[0] == pytest.approx(max(decodes), rel=1e-6)


def test_requests_that_are_alone_are_served_as_the_bound_says() -> None:
    """Prompts of one step and of three (of 512 tokens, and what is left), each over before the next; 90 µs on the way
    there and back."""
    workload = plain_workload([0.0, 60.0, 120.0], [1, 200, 512 + 512 + 100], [1, 40, 7])
    served = run_workload(cluster(count=1, max_model_len=2048), workload).records
    bound = alone_records(workload, COST, 512)
    assert bound.num_tokens.tolist() == served.num_tokens.tolist()
    assert served.token_s - bound.token_s == pytest.approx(180e-6, abs=1e-6)


def test_the_queue_is_at_its_peak_what_waits_or_was_preempted() -> None:
    """Twenty at once, of which a worker of 60 blocks holds four, and a fifth if one has ended before the next look."""
    at_once = run_workload(cluster(num_blocks=60, count=1), plain_workload([0.05] * 20, 200, 30)).facts
    assert at_once.queue_peak in (15, 16)
    assert run_workload(cluster(), plain_workload([0.0, 5.0], 20, 30)).facts.queue_peak == 0


def test_pressure_is_seen(tight: tuple[Workload, RunResult, list[Progress]]) -> None:
    _, result, _ = tight
    facts, samples = result.facts, result.samples
    assert samples is not None
    assert facts.kv_peak_ratio is not None
    assert 0.9 < facts.kv_peak_ratio <= 1.0
    assert facts.demand_over_capacity_peak is not None
    assert facts.demand_over_capacity_peak > 1.2
    assert facts.preemptions
    assert (samples.used_blocks <= samples.demanded_blocks).all()
    assert set(samples.num_blocks) == {120.0}
    assert (samples.used_blocks[-1], samples.num_waiting[-1]) == (0, 0)


def test_the_oracle_is_told_in_terms_of_the_real_memory(tight: tuple[Workload, RunResult, list[Progress]]) -> None:
    """It holds at once what others must keep waiting; what is beyond the real memory counts as demanded."""
    workload, bounded, _ = tight
    result = run_workload(cluster(num_blocks=60, system="oracle"), workload)
    facts = result.facts
    assert facts.preemptions == 0
    assert facts.kv_peak_ratio == 1.0
    assert facts.demand_over_capacity_peak is not None
    assert facts.demand_over_capacity_peak > 1.2
    assert result.samples is not None
    assert set(result.samples.num_blocks) == {120.0}
    assert np.percentile(result.records.ttft_s, 99) < np.percentile(bounded.records.ttft_s, 99) / 1.5


def test_the_oracle_serves_however_long_it_holds_more_than_there_is() -> None:
    """Ten requests of 17 blocks at a time, on 20 blocks, for seven seconds: longer than silence makes a worker dead."""
    workload = plain_workload((np.arange(100) / 15).tolist(), 200, 60)
    result = run_workload(cluster(num_blocks=20, count=1, system="oracle"), workload)
    assert result.records.is_complete.all()
    assert result.samples is not None
    assert float(np.median(result.samples.demanded_blocks)) > 100


def test_gpus_count_from_the_first_arrival_to_the_last_end(tight: tuple[Workload, RunResult, list[Progress]]) -> None:
    """Two instances of two GPUs each."""
    _, result, _ = tight
    assert result.facts.gpus_peak == 4
    assert result.facts.gpu_seconds == pytest.approx(4 * float(np.max(result.records.last_token_s)), abs=0.5)


def test_progress_only_grows(tight: tuple[Workload, RunResult, list[Progress]]) -> None:
    workload, _, progress = tight
    assert [each.at_s for each in progress] == sorted(each.at_s for each in progress)
    assert [each.num_done for each in progress] == sorted(each.num_done for each in progress)
    assert progress[-1].num_requests == len(workload)


def test_a_run_that_is_stopped_has_what_the_whole_one_had_by_then(
    tight: tuple[Workload, RunResult, list[Progress]],
) -> None:
    workload, whole, _ = tight
    stopped_s: list[float] = []

    def stop(progress: Progress) -> None:
        if progress.at_s > 2.0:
            stopped_s.append(progress.at_s)
            raise StopRun

    found = run_workload(cluster(num_blocks=60), workload, stop).records
    (end_s,) = stopped_s
    for index in range(len(workload)):
        tokens_s, all_s = (
            each.token_s[each.token_begin[index] : each.token_begin[index + 1]] for each in (found, whole.records)
        )
        assert tokens_s.tolist() == all_s[all_s <= end_s].tolist()
        assert (found.failure[index] == UNFINISHED) == (tokens_s.size < all_s.size)
    assert 0 < found.is_complete.sum() < len(workload)


def test_what_can_never_fit_is_refused_and_the_others_go_on() -> None:
    workload = plain_workload([0.0, 0.1], [2000, 20], 10)
    records = run_workload(cluster(), workload).records
    assert records.failure == ("context_length_exceeded", "")
    summary = summarise(records, run_workload(cluster(), workload).facts)
    assert (summary["completed"], summary["refused"]) == (1, 1)
    assert records.qoe[0] == 0


def test_nobody_reads_best_effort_answers() -> None:
    assert np.isnan(run_workload(cluster(), busy(10, has_reader=False)).records.qoe).all()


def test_qoe_is_what_the_live_dispatcher_makes_of_the_same_times() -> None:
    """It scores each answer token by token; the records do it afterwards."""
    target = QoeTarget(0.1, 40.0)
    arrivals = np.arange(30) / 30
    workload = plain_workload(arrivals.tolist(), 200, 40, ttft_s=target.ttft_s, speed=target.speed_tokens_per_s)
    records = run_workload(cluster(num_blocks=60), workload).records
    for i in range(len(records)):
        state = QoeState(target)
        for at_s in records.token_s[records.token_begin[i] : records.token_begin[i + 1]]:
            state.deliver(float(at_s - records.arrival_s[i]))
        assert records.qoe[i] == pytest.approx(state.final(), abs=1e-9)
    assert 0.1 < records.qoe.min() < 0.9
