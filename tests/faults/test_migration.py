"""Requests change their worker with their KV while real processes die, stand still, drain, and lose their broker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import product

import pytest

from shared.messages.fetch import FetchOutcome, FetchReason
from tests.faults.conftest import SMALL_STEPS
from tests.support.fault_checks import StagedCluster, staged
from tests.support.fault_cluster import NATS, Shape, http_session
from tests.support.fault_streams import COMPLETIONS, all_read, ask, mixed_load, reading, seen
from tests.support.live_movers import moving
from tests.support.seeds import first_of
from tests.support.waiting import rounds

pytestmark = pytest.mark.timeout(240)

VICTIM = "worker-0"
FAULTS = ("killed", "broker killed", "terminated", "frozen", "broker frozen")


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagedCluster]:
    """Three workers, with memory that is one piece, or in pages."""
    flags = {"worker": ("--system", request.param), "dispatcher": ("--system", request.param)}
    shape = Shape(num_workers=3, env=SMALL_STEPS, flags=flags)
    with staged(tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagedCluster]:
    """Two workers, one of which can be cut off from the broker; it is given up after a second already."""
    env = {**SMALL_STEPS, "SLUICE_DISPATCHER_LOST_AFTER_S": "1"}
    with staged(tmp_path_factory.mktemp("proxied"), Shape(env=env, proxied=(VICTIM,))) as cluster:
        yield cluster


async def migrated(cluster: StagedCluster) -> dict[str, float]:
    """Return what the dispatcher says of requests that moved, in all: by outcome, `recovered`, `recomputed`, `gaps`."""
    async with http_session() as http, http.get(cluster.url() + "/metrics") as response:
        lines = (await response.text()).splitlines()
    found: dict[str, float] = {}
    for line in lines:
        for outcome in FetchOutcome:
            if line.startswith("sluice:migration_total{") and f'outcome="{outcome}"' in line:
                number = float(line.rpartition(" ")[2])
                found[outcome] = found.get(outcome, 0.0) + number
                if outcome is FetchOutcome.MOVED and f'reason="{FetchReason.RECOVERY}"' in line:
                    found["recovered"] = number
        if line.startswith("sluice:migration_gap_seconds_count{"):
            found["gaps"] = float(line.rpartition(" ")[2])
        if line.startswith("sluice:migration_recomputed_total{"):
            found["recomputed"] = found.get("recomputed", 0.0) + float(line.rpartition(" ")[2])
    return found


def num_left_without_kv(cluster: StagedCluster) -> int:
    """Return how many running requests have left a worker that was about to stop before their KV had."""
    went_on, released = (cluster.told(event, "dispatcher-0") for event in ("request_goes_on", "request_lost_worker"))
    return len(went_on) - len(released)


@pytest.mark.parametrize("cluster", first_of(["kunserve", "sluice"], in_ci=1), indirect=True)
async def test_texts_are_the_same_while_requests_move_at_random_moments(cluster: StagedCluster) -> None:
    """Sampling, penalties, log-probabilities, several choices, best effort: whatever the load has."""
    for seed in rounds("twenty moves"):
        async with moving(cluster, seed) as movers, cluster.unchanged(1):
            pass
        if movers.num_moved >= 20:
            break


@pytest.mark.parametrize(
    ("cluster", "fault"),
    first_of(sorted(product(("sluice", "kunserve"), FAULTS), key=lambda case: FAULTS.index(case[1])), in_ci=3),
    indirect=["cluster"],
)
async def test_what_fails_while_requests_move_changes_no_text(cluster: StagedCluster, fault: str) -> None:
    """A worker is the source of some of them, and the target of others."""
    struck = 0
    for seed in rounds("something failed while requests moved"):
        async with moving(cluster, seed, count=6) as movers, cluster.unchanged(5):
            for _ in range(200):
                if movers.num_moved > 3 and movers.num_under_way >= 2:
                    break
                await asyncio.sleep(0.01)
            struck = movers.num_under_way
            if fault == "killed":
                cluster.kill(VICTIM)
            elif fault == "frozen":
                cluster.freeze(VICTIM)
            elif fault == "terminated":
                cluster.terminate(VICTIM)
            elif fault == "broker killed":
                cluster.kill(NATS)
                await asyncio.sleep(0.5)
                await asyncio.to_thread(cluster.start_broker)
            else:
                cluster.freeze(NATS)
                await asyncio.sleep(1.0)
                cluster.thaw(NATS)
        if struck >= 2:
            break


@pytest.mark.parametrize("cluster", first_of(["sluice", "kunserve"], in_ci=1), indirect=True)
async def test_a_rolling_restart_computes_nothing_again(cluster: StagedCluster) -> None:
    """Every worker in turn, under load: its requests leave with their KV, and new ones come all the while."""
    before = await migrated(cluster)
    for _ in rounds("a request of each worker has moved"):
        async with cluster.unchanged(5):
            for name in cluster.workers:
                async with reading(cluster, mixed_load()) as more:
                    await seen(more, 10)
                    cluster.terminate(name)
                    assert await cluster.ended(name) == 0
                    cluster.start(name)
                    await cluster.check_texts(more)
                await cluster.wait_ready()
        after = await migrated(cluster)
        assert after.get("recomputed", 0) == before.get("recomputed", 0)
        grown = {outcome for outcome in FetchOutcome if after.get(outcome, 0) > before.get(outcome, 0)}
        # lost: a worker that has nothing left stops, and with it the link of who asks for what has just ended there
        assert grown <= {FetchOutcome.MOVED, FetchOutcome.GONE, FetchOutcome.LOST}
        assert num_left_without_kv(cluster) == 0
        assert after["gaps"] > before["gaps"] or after.get(FetchOutcome.MOVED, 0) == before.get(FetchOutcome.MOVED, 0)
        if after.get(FetchOutcome.MOVED, 0) >= before.get(FetchOutcome.MOVED, 0) + len(cluster.workers):
            break


async def test_a_worker_that_only_the_broker_cannot_reach_is_asked_for_what_it_has_computed(
    proxied: StagedCluster,
) -> None:
    """It goes on by itself until its lease is over; readers get the text of an undisturbed run all the same."""
    lasting = [ask(f"long-{number}", COMPLETIONS, max_tokens=900, seed=number, temperature=1.0) for number in range(8)]
    await proxied.settle(lasting)
    for _ in rounds("requests were recovered with their KV"):
        before = await migrated(proxied)
        async with proxied.unchanged(15) as readers:
            proxied.proxies[VICTIM].withhold()
            await all_read(readers)
            proxied.proxies[VICTIM].heal()
        after = await migrated(proxied)
        if after.get("recovered", 0) > before.get("recovered", 0):
            break
    assert after.get("recomputed", 0) == before.get("recomputed", 0)
