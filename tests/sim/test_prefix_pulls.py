"""Prefixes that travel: KV of a prompt comes from the worker that has it, whatever happens to that one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from services.worker.contract.kept_kv import NOTHING_KEPT
from services.worker.engine.sketch import sketch_prefixes
from services.worker.engine.stats import take_stats
from services.worker.migration.prefix_pulls import PrefixPulls
from services.worker.serving.reporter import SKETCH_PERIOD_S
from shared.ids import WorkerId
from shared.messages.fetch import FetchOutcome, FetchReason
from shared.messages.request import PrefixSource
from shared.types import ReaderTarget
from sim.cluster import ClusterParams, SimCluster
from sim.requests import SimRequest
from sim.worker import SimWorker
from tests.sim.test_migration import check_nothing_is_kept, linked, migration_of
from tests.support.sim_clusters import check_answers, cluster_of

BLOCK = 16


def pulled(workers: Sequence[SimWorker]) -> dict[FetchOutcome, int]:
    """Return what came of prefixes that were to come."""
    counts: dict[FetchOutcome, int] = {}
    for worker in workers:
        for (reason, outcome), number in migration_of(worker).fetching.outcomes.items():
            if reason is FetchReason.PREFIX:
                counts[outcome] = counts.get(outcome, 0) + number
    return counts


def num_hits(workers: Sequence[SimWorker]) -> int:
    """Return the prompt tokens that were found in a cache."""
    return sum(take_stats(worker.service.engine).totals.num_prefix_cache_hits for worker in workers)


def crowd(num_prompt: int = 3000, count: int = 24) -> list[SimRequest]:
    """Return requests about one document, more than one worker should have."""
    random = np.random.default_rng(0)
    document = random.integers(300, 31_000, num_prompt)
    return [
        SimRequest(
            f"q{number}",
            np.concatenate([document, random.integers(300, 31_000, 40)]).astype(np.int32),
            num_output=int(random.integers(20, 60)),
            seed=number,
            qoe=ReaderTarget(ttft_s=1.0, speed_tokens_per_s=5.0),
        )
        for number in range(count)
    ]


def two(gbits: float = 100, **more: Any) -> ClusterParams:
    return linked(cluster_of(2, 3000, system="sluice", **more), gbits)


async def ask_behind_the_first(cluster: SimCluster, requests: Sequence[SimRequest], after_s: float = 3.0) -> None:
    """Let the first be answered, and a while later all the others come at once; check the answers."""
    first = await cluster.ask(requests[0])
    await asyncio.sleep(after_s)
    others = [asyncio.ensure_future(cluster.ask(request)) for request in requests[1:]]
    check_answers(cluster, [first, *await asyncio.gather(*others)])


@pytest.mark.virtual_time
async def test_a_prefix_comes_from_the_worker_that_has_it_and_is_computed_once_in_all() -> None:
    requests = crowd()
    async with SimCluster(two()) as cluster:
        await ask_behind_the_first(cluster, requests)
        assert pulled(cluster.workers) == {FetchOutcome.MOVED: 1}, "one of the two has it from the other"
        num_prompts = sum(worker.service.engine.totals.num_finished > 0 for worker in cluster.workers)
        assert num_prompts == 2, "both are used"
        assert num_hits(cluster.workers) >= (len(requests) - 1) * 3000 // BLOCK * BLOCK - 3000
        check_nothing_is_kept(cluster.workers)
        cluster.check_idle()
        told = sorted(migration_of(worker).look().pulled_token_s for worker in cluster.workers)
        assert told == [0.0, pytest.approx(196_608 / 12.5e9, rel=0.1)], "who has got one knows how long a token takes"


@pytest.mark.virtual_time
@pytest.mark.parametrize(("gbits", "expected"), [(0.05, {}), (100, {FetchOutcome.MOVED: 1})])
async def test_a_slow_link_is_asked_for_little_and_then_for_nothing(
    gbits: float, expected: dict[FetchOutcome, int]
) -> None:
    """The first pieces tell how fast it is; who has learnt it computes."""
    requests = crowd()
    async with SimCluster(two(gbits)) as cluster:
        await ask_behind_the_first(cluster, requests)
        found = pulled(cluster.workers)
        assert (found.get(FetchOutcome.MOVED, 0) > 0) == bool(expected)
        if not expected:
            assert set(found) <= {FetchOutcome.LATE}
        check_nothing_is_kept(cluster.workers)
        cluster.check_idle()


@pytest.mark.virtual_time
async def test_without_pulling_a_prefix_is_computed_where_it_lacks() -> None:
    async with SimCluster(two(pull_prefixes=False)) as cluster:
        await ask_behind_the_first(cluster, crowd())
        assert not pulled(cluster.workers)
        cluster.check_idle()


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("cut", FetchOutcome.LOST),
        ("evicted", FetchOutcome.GONE),
        ("refuses", FetchOutcome.REFUSED),
        ("aborted", FetchOutcome.LOST),
    ],
)
async def test_a_source_that_is_lost_or_has_nothing_any_more_costs_a_computation(
    how: str, expected: FetchOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, begun = PrefixPulls.begin, list[str]()
    cluster = SimCluster(two())

    def spoil(pulls: PrefixPulls, row: int, source: PrefixSource | None) -> None:
        begin(pulls, row, source)
        if len(pulls) and not begun:
            assert source is not None
            begun.append(source.worker_id)
            other = next(worker for worker in cluster.workers if worker.params.worker_id == source.worker_id)
            own = next(worker for worker in cluster.workers if worker is not other)
            if how == "cut":
                cluster.network.cut(WorkerId(own.params.worker_id), WorkerId(source.worker_id))
            elif how == "evicted":
                monkeypatch.setattr("services.worker.migration.departures.find_prefix", lambda *_: NOTHING_KEPT)
            elif how == "refuses":
                migration_of(other).departures.refusal = lambda: "not now"
            else:
                asyncio.get_running_loop().create_task(migration_of(own).abort(), name="abort")

    monkeypatch.setattr(PrefixPulls, "begin", spoil)
    async with cluster:
        await ask_behind_the_first(cluster, crowd())
        assert begun
        assert pulled(cluster.workers).get(expected, 0) >= 1
        check_nothing_is_kept(cluster.workers)
        cluster.check_idle()


@pytest.mark.virtual_time
async def test_a_report_tells_what_is_cached_when_it_is_made_and_keeps_it_for_two_seconds() -> None:
    async with SimCluster(two()) as cluster:
        await cluster.ask(crowd()[0])
        loop = asyncio.get_running_loop()
        worker = next(worker for worker in cluster.workers if len(worker.service.engine.blocks.index))
        at_s, holds = loop.time() + SKETCH_PERIOD_S, sketch_prefixes(worker.service.engine)
        assert holds is not None
        assert worker.reporter.make_report(at_s).prefixes == holds
        worker.service.engine.blocks.index.forget(np.arange(3000, dtype=np.int32))
        assert worker.reporter.make_report(at_s + SKETCH_PERIOD_S / 2).prefixes == holds
        assert worker.reporter.make_report(at_s + SKETCH_PERIOD_S).prefixes == sketch_prefixes(worker.service.engine)
