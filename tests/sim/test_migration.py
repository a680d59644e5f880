"""Running requests go from worker to worker with their KV, in simulated clusters: texts, and what is computed again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.dispatcher.session.migration import LOST_LIMIT_S
from services.dispatcher.session.session import Session
from services.worker.migration.departures import LEASE_S
from services.worker.migration.fetching import KEPT_S, LOST_SILENCE_S, MAX_AT_ONCE
from services.worker.migration.migration import Migration
from shared.api_keys import Tier
from shared.ids import WorkerId
from shared.messages.fetch import FetchOutcome, FetchReason
from shared.systems import SYSTEMS, Memory
from shared.transport.memory_router import Delivery
from shared.types import ReaderTarget
from sim.cluster import ClusterParams, SimCluster
from sim.devices.channel import ModelledLink
from sim.devices.modelled_migration import ModelledKvLink
from sim.requests import SimAnswer, SimRequest
from sim.worker import SimWorker
from tests.support.group_room import draw_requests, group_params
from tests.support.kinds import some
from tests.support.sim_clusters import ask_planner, check_answers, cluster_of, hear_events, reasons

MIGRATING = sorted(
    name
    for name, system in SYSTEMS.items()
    if system.memory is Memory.BOUNDED and system.num_stages == 1 and not system.shares_blocks
)
"""Systems whose requests can take their KV along."""


def requests_of(number: int, seed: int = 0, *, num_prompt: int = 400, num_output: int = 200) -> list[SimRequest]:
    """Return chats and documents; some with log-probabilities, some with a reader of their own."""
    random = np.random.default_rng(seed)
    return [
        SimRequest(
            f"r{i}",
            random.integers(300, 31_000, size=int(random.integers(num_prompt // 2, num_prompt))).astype(np.int32),
            num_output=int(random.integers(num_output // 2, num_output)),
            seed=i,
            logprobs=2 if i % 5 == 0 else None,
            qoe=ReaderTarget(ttft_s=1.0, speed_tokens_per_s=float(random.uniform(3, 15))) if i % 3 else None,
            tier=Tier.FLEX if i % 4 == 3 else Tier.DEFAULT,
        )
        for i in range(number)
    ]


def linked(params: ClusterParams, gbits: float = 25) -> ClusterParams:
    return replace(params, link=ModelledLink(latency_s=0.0001, bytes_per_s=gbits * 1e9 / 8))


def migration_of(worker: SimWorker) -> Migration:
    assert worker.service.migration is not None
    return worker.service.migration


def outcomes(workers: Sequence[SimWorker]) -> dict[FetchOutcome, int]:
    counts: dict[FetchOutcome, int] = {}
    for worker in workers:
        for (_, outcome), number in migration_of(worker).fetching.outcomes.items():
            counts[outcome] = counts.get(outcome, 0) + number
    return counts


def num_recomputed(workers: Sequence[SimWorker]) -> int:
    """Return how many requests that have come computed more than two blocks again."""
    return sum(worker.service.engine.sharing.coming.num_recomputed for worker in workers)


def check_nothing_is_kept(workers: Sequence[SimWorker]) -> None:
    for worker in workers:
        assert not worker.service.engine.sharing.coming.num_reservations
        assert not len(migration_of(worker).departures)
        assert worker.service.engine.num_used_blocks == 0 or worker.service.engine.table.num_sequences


@pytest.mark.virtual_time
@pytest.mark.parametrize("system", MIGRATING)
async def test_a_worker_that_drains_gives_its_requests_away_with_their_kv(system: str) -> None:
    """None is computed again but for two blocks at most, whatever the scheduler."""
    more: dict[str, Any] = {"kv_bytes_per_token": 100_000}
    async with SimCluster(linked(cluster_of(3, 1200, system=system, **more))) as cluster:
        asked = [asyncio.ensure_future(cluster.ask(request)) for request in requests_of(24)]
        await asyncio.sleep(1.0)
        source, others = cluster.workers[0], cluster.workers[1:]
        num_here = source.service.engine.table.num_sequences
        assert num_here > 4
        await source.service.drain(5.0)
        assert not source.service.engine.table.num_sequences
        assert migration_of(source).departures.num_left >= num_here - 2, "some may have ended"
        check_answers(cluster, await asyncio.gather(*asked))
        assert set(outcomes(others)) <= {FetchOutcome.MOVED, FetchOutcome.GONE}
        assert num_recomputed(others) == 0
        await asyncio.sleep(max(KEPT_S, LEASE_S) + 0.1)
        check_nothing_is_kept(cluster.workers)


@pytest.mark.virtual_time
@pytest.mark.parametrize("num_blocks", [2400, 150])
async def test_the_choices_of_a_request_go_to_one_worker_if_it_has_room(num_blocks: int) -> None:
    async with SimCluster(linked(cluster_of(4, num_blocks, system="sluice"))) as cluster:
        requests = requests_of(8)
        asked = [asyncio.ensure_future(cluster.ask_choices(replace(each, tier=Tier.DEFAULT), 3)) for each in requests]
        await asyncio.sleep(1.0)
        table, source = cluster.dispatcher.sessions.table, cluster.workers[0]
        here = table.on_worker(WorkerId(source.params.worker_id))
        num_choices = Counter(session.parent or session for session in here)
        assert max(num_choices.values()) > 1
        await source.service.drain(5.0)
        await asyncio.sleep(0.05)
        places: dict[Session, set[WorkerId | None]] = {}
        for session in here:
            if not session.is_over:
                places.setdefault(session.parent or session, set()).add(session.worker_id)
        if num_blocks > 1000:
            assert all(len(found) == 1 for found in places.values())
            gaps = cluster.dispatcher.sessions.recovery.gaps.snapshot()
            assert gaps[1] == outcomes(cluster.workers[1:])[FetchOutcome.MOVED]
            assert 0 < gaps[2] < 0.2 * gaps[1], "seconds"
        for answers in await asyncio.gather(*asked):
            check_answers(cluster, answers)


@pytest.mark.virtual_time
async def test_each_worker_in_turn_is_replaced_and_nothing_is_computed_again() -> None:
    async with SimCluster(linked(cluster_of(3, 2400, system="sluice"))) as cluster:
        asked = [asyncio.ensure_future(cluster.ask(request)) for request in requests_of(30, num_output=800)]
        await asyncio.sleep(1.0)
        for index in range(3):
            old = cluster.workers[index]
            assert old.service.engine.table.num_sequences
            await old.stop(drain_limit_s=5.0)
            await cluster.start_worker(replace(old.params, incarnation=1))
            await asyncio.sleep(1.0)
        check_answers(cluster, await asyncio.gather(*asked))
        assert num_recomputed(cluster.workers) == 0
        assert not cluster.failures


def cut_off(cluster: SimCluster, *names: str) -> None:
    """Let nothing pass any more between these and the broker; workers still reach each other."""

    def deliver(delivery: Delivery) -> Sequence[float]:
        return () if {delivery.sender, delivery.receiver} & set(names) else (0.0,)

    cluster.broker.router.deliver = deliver


@pytest.mark.virtual_time
@pytest.mark.parametrize("lives", [True, False])
async def test_what_a_lost_worker_has_computed_is_fetched_if_it_merely_cannot_be_heard(*, lives: bool) -> None:
    async with SimCluster(linked(cluster_of(3, 2400, system="sluice"))) as cluster:
        asked = [asyncio.ensure_future(cluster.ask(request)) for request in requests_of(30, num_output=1000)]
        await asyncio.sleep(2.0)
        lost, others = cluster.workers[0], cluster.workers[1:]
        num_here = lost.service.engine.table.num_sequences
        cut_off(cluster, "w0")
        if not lives:
            cluster.network.lose(WorkerId("w0"))
        check_answers(cluster, await asyncio.gather(*asked))
        counts = Counter[tuple[FetchReason, FetchOutcome]]()
        for worker in others:
            counts.update(migration_of(worker).fetching.outcomes)
        assert {reason for reason, _ in counts} == {FetchReason.RECOVERY}
        came = FetchOutcome.MOVED if lives else FetchOutcome.LOST
        assert counts[FetchReason.RECOVERY, came] == num_here > 4
        assert num_recomputed(others) == 0
        await asyncio.sleep(max(KEPT_S, LEASE_S) + 0.1)
        check_nothing_is_kept(others)


@pytest.mark.virtual_time
async def test_full_blocks_are_fetched_beside_a_step_that_does_not_end() -> None:
    async with SimCluster(linked(cluster_of(3, 2400, system="sluice"))) as cluster:
        asked = [asyncio.ensure_future(cluster.ask(request)) for request in requests_of(30, num_output=600)]
        await asyncio.sleep(2.0)
        hung, others = cluster.workers[0], cluster.workers[1:]
        num_here, device = hung.service.engine.table.num_sequences, some(hung.device)
        device.stuck_until_s = asyncio.get_running_loop().time() + 30.0
        check_answers(cluster, await asyncio.gather(*asked))
        assert outcomes(others) == {FetchOutcome.MOVED: num_here}
        assert num_here > 4
        assert num_recomputed(others) == 0


@pytest.mark.virtual_time
async def test_who_waits_for_kv_of_a_lost_worker_does_not_wait_for_whoever_fetches_it() -> None:
    """That one is lost, too, with its answers on their way."""
    async with SimCluster(linked(cluster_of(3, 2400, system="sluice"))) as cluster:
        asked = [asyncio.ensure_future(cluster.ask(request)) for request in requests_of(30, num_output=600)]
        await asyncio.sleep(2.0)
        sessions, now = cluster.dispatcher.sessions, asyncio.get_running_loop().time
        cut_off(cluster, "w0")
        while sessions.table.on_worker(WorkerId("w0")):
            await asyncio.sleep(0.01)
        cut_off(cluster, "w0", "w1")
        lost_s = now()
        while any(session.worker_id is None for session in sessions.table):
            await asyncio.sleep(0.01)
        assert 0.9 * LOST_LIMIT_S < now() - lost_s < LOST_LIMIT_S + 2.0
        check_answers(cluster, await asyncio.gather(*asked))


@pytest.mark.virtual_time
async def test_a_lost_worker_that_stands_still_is_waited_for_once_and_not_for_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dozen and more, four at a time at the one target: all go on within the silence of the first four."""
    async with SimCluster(linked(cluster_of(2, 2400, system="sluice"))) as cluster:
        asked = [asyncio.ensure_future(cluster.ask(request)) for request in requests_of(32, num_output=800)]
        await asyncio.sleep(2.0)
        sessions, now = cluster.dispatcher.sessions, asyncio.get_running_loop().time
        assert len(sessions.table.on_worker(WorkerId("w0"))) > 2 * MAX_AT_ONCE

        is_over = asyncio.Event()

        async def says_nothing(_: ModelledKvLink) -> None:
            await is_over.wait()

        monkeypatch.setattr(ModelledKvLink, "_welcome", says_nothing)
        cut_off(cluster, "w0")
        while sessions.table.on_worker(WorkerId("w0")):
            await asyncio.sleep(0.01)
        lost_s = now()
        for session in sessions.table:
            if session.worker_id is None:
                sessions.recovery.leave(session)  # an older view says that it drains: it is gone already
        while any(session.worker_id is None for session in sessions.table):
            await asyncio.sleep(0.01)
        assert 0.9 < (now() - lost_s) / LOST_SILENCE_S < 1.5
        check_answers(cluster, await asyncio.gather(*asked))
        is_over.set()
        assert not cluster.failures
        assert set(migration_of(cluster.workers[1]).fetching.outcomes) == {(FetchReason.RECOVERY, FetchOutcome.LOST)}


@pytest.mark.virtual_time
async def test_a_move_by_hand_leaves_what_it_has_and_goes_on_elsewhere() -> None:
    """Back and forth: what stays behind is cache, so the way back brings only what is new."""
    async with SimCluster(linked(cluster_of(2, 1200))) as cluster:
        (request,) = requests_of(1, num_output=1200)
        asked = asyncio.ensure_future(cluster.ask(request))
        await asyncio.sleep(0.5)
        source = next(w for w in cluster.workers if w.service.engine.table.num_sequences).params.worker_id
        target = "w1" if source == "w0" else "w0"
        there = await cluster.fetch("r0", source, target)
        assert (there.outcome, there.num_blocks > 10) == (FetchOutcome.MOVED, True)
        await asyncio.sleep(0.5)
        back = await cluster.fetch("r0", target, source, attempt=2)
        assert back.outcome is FetchOutcome.MOVED
        assert 0 < back.num_blocks < there.num_blocks
        assert (await cluster.fetch("r0", target, source, attempt=2)).outcome is FetchOutcome.REFUSED, "it runs here"
        assert (await cluster.fetch("nobody", target, source)).outcome is FetchOutcome.GONE
        assert (await cluster.fetch("nobody", "w9", source)).outcome is FetchOutcome.LOST
        assert num_recomputed(cluster.workers) == 0
        check_answers(cluster, [await asked])
        check_nothing_is_kept(cluster.workers)


@pytest.mark.virtual_time
async def test_how_fast_a_link_is_gets_known_with_the_first_piece_that_comes() -> None:
    """A planner divides moves by it, and a long request's KV may take half a minute."""
    async with SimCluster(linked(cluster_of(2, 1200, kv_bytes_per_token=100_000), gbits=1)) as cluster:
        (request,) = requests_of(1, num_prompt=3000, num_output=1000)
        asked = asyncio.ensure_future(cluster.ask(request))
        await asyncio.sleep(2.0)
        workers = {worker.params.worker_id: worker for worker in cluster.workers}
        source = next(name for name, w in workers.items() if w.service.engine.table.num_sequences)
        (target,) = workers.keys() - {source}
        moving = asyncio.ensure_future(cluster.fetch("r0", source, target))
        fetching, loop = migration_of(workers[target]).fetching, asyncio.get_running_loop()
        began_s = loop.time()
        while not fetching.bytes_per_s:
            await asyncio.sleep(0.01)
        assert loop.time() - began_s < 0.1, "a first piece of four blocks takes half of that"
        assert (fetching.num_bytes, fetching.num_under_way) == (0, 1), "it is not over"
        assert fetching.bytes_per_s == pytest.approx(1e9 / 8, rel=0.01)
        assert (await moving).outcome is FetchOutcome.MOVED
        assert fetching.bytes_per_s == pytest.approx(1e9 / 8, rel=0.01)
        check_answers(cluster, [await asked])


@pytest.mark.virtual_time
@pytest.mark.parametrize(("target_host", "gbits"), [("host-0", 200), ("host-1", 1), (None, 1)])
async def test_requests_travel_faster_within_a_host(target_host: str | None, gbits: float) -> None:
    params = linked(cluster_of(2, 1200, kv_bytes_per_token=100_000), gbits=1)
    hosts = ("host-0", target_host)
    workers = tuple(replace(worker, host=host) for worker, host in zip(params.workers, hosts, strict=True))
    inner = replace(some(params.link), bytes_per_s=200e9 / 8)
    async with SimCluster(replace(params, workers=workers, near_link=inner)) as cluster:
        (request,) = requests_of(1, num_prompt=3000, num_output=1000)
        asked = asyncio.ensure_future(cluster.ask(request))
        await asyncio.sleep(2.0)
        source = next(w for w in cluster.workers if w.service.engine.table.num_sequences)
        (target,) = (w for w in cluster.workers if w is not source)
        moved = await cluster.fetch("r0", WorkerId(source.params.worker_id), WorkerId(target.params.worker_id))
        assert moved.outcome is FetchOutcome.MOVED
        assert migration_of(target).fetching.bytes_per_s == pytest.approx(gbits * 1e9 / 8, rel=0.2)
        check_answers(cluster, [await asked])


@pytest.mark.virtual_time
async def test_one_quick_way_does_not_hide_the_slow_ones() -> None:
    """A planner asks how long a move takes: the time of a byte is what is averaged."""
    params = linked(cluster_of(3, 1200, kv_bytes_per_token=100_000), gbits=1)
    workers = tuple(replace(w, host=host) for w, host in zip(params.workers, ("a", "b", "b"), strict=True))
    inner = replace(some(params.link), bytes_per_s=200e9 / 8)
    async with SimCluster(replace(params, workers=workers, near_link=inner)) as cluster:
        requests = requests_of(6, num_prompt=2000, num_output=2000)
        asked = [asyncio.ensure_future(cluster.ask(request)) for request in requests]
        await asyncio.sleep(3.0)
        far, near, target = cluster.workers
        fetching = migration_of(target).fetching
        for source, gbits in ((far, 1.0), (near, 1 / (0.7 / 1 + 0.3 / 200))):
            table = source.service.engine.table
            name, _ = table.sequence(int(table.running.view[0])).key
            moved = await cluster.fetch(name, source.params.worker_id, target.params.worker_id)
            assert moved.outcome is FetchOutcome.MOVED
            assert fetching.bytes_per_s == pytest.approx(gbits * 1e9 / 8, rel=0.05)
        check_answers(cluster, await asyncio.gather(*asked))


@pytest.mark.virtual_time
async def test_a_request_goes_elsewhere_as_tokens_too() -> None:
    """No KV travels, all of it is computed again, and that is not counted as if it had been lost on the way."""
    async with SimCluster(linked(cluster_of(2, 1200))) as cluster:
        (request,) = requests_of(1, num_output=1200)
        asked = asyncio.ensure_future(cluster.ask(request))
        await asyncio.sleep(0.5)
        workers = {worker.params.worker_id: worker for worker in cluster.workers}
        source = next(name for name, w in workers.items() if w.service.engine.table.num_sequences)
        (target,) = workers.keys() - {source}
        moved = await cluster.fetch("r0", source, target, as_tokens=True)
        assert (moved.outcome, moved.num_blocks) == (FetchOutcome.MOVED, 0)
        check_answers(cluster, [await asked])
        report = migration_of(workers[target]).look()
        assert (report.num_bytes_total, report.num_as_tokens_total, report.num_recomputed_tokens_total) == (0, 1, 0)
        assert workers[target].service.engine.totals.num_prefix_cache_hits == 0
        await asyncio.sleep(max(KEPT_S, LEASE_S) + 0.1)
        check_nothing_is_kept(cluster.workers)


@pytest.mark.virtual_time
@pytest.mark.parametrize("as_tokens", [False, True])
async def test_a_target_without_room_refuses_and_nothing_has_changed(*, as_tokens: bool) -> None:
    params = cluster_of(2, 1200)
    small = replace(params.workers[1], num_blocks=30, max_model_len=400)
    async with SimCluster(linked(replace(params, workers=(params.workers[0], small)))) as cluster:
        (request,) = requests_of(1, num_prompt=900, num_output=400)
        asked = asyncio.ensure_future(cluster.ask(request))
        await asyncio.sleep(1.0)
        assert cluster.workers[0].service.engine.table.num_sequences
        assert (await cluster.fetch("r0", "w0", "w1", as_tokens=as_tokens)).outcome is FetchOutcome.FULL
        check_nothing_is_kept(cluster.workers[1:])
        check_answers(cluster, [await asked])


@pytest.mark.virtual_time
async def test_free_memory_that_a_prompt_under_way_is_still_to_get_is_no_room() -> None:
    """Who came would find it gone, and wait with its KV until somebody ends: its reader saw 5.5 s once."""
    params = cluster_of(2, 370, max_batch_tokens=64, max_model_len=5900)
    async with SimCluster(linked(params)) as cluster:
        (short,) = requests_of(1, num_output=600)
        prompt = np.random.default_rng(1).integers(300, 31_000, size=5600).astype(np.int32)
        asked = [asyncio.ensure_future(cluster.ask(replace(short, tier=Tier.DEFAULT)))]
        await asyncio.sleep(0.5)
        source, target = sorted(cluster.workers, key=lambda each: -each.service.engine.table.num_sequences)
        names = source.params.worker_id, target.params.worker_id
        asked.append(asyncio.ensure_future(cluster.ask(SimRequest("long", prompt, num_output=20, seed=2))))
        await asyncio.sleep(0.3)
        table = target.service.engine.table
        assert table.num_sequences == 1
        assert table.num_computed[0] < 2000, "its prompt is under way"
        assert target.service.engine.blocks.num_free > 200
        assert (await cluster.fetch("r0", *names)).outcome is FetchOutcome.FULL
        check_answers(cluster, [await asked[1]])
        assert (await cluster.fetch("r0", *names)).outcome is FetchOutcome.MOVED
        check_answers(cluster, [await asked[0]])


@pytest.mark.virtual_time
async def test_who_asks_twice_is_told_so_and_it_moves_once() -> None:
    async with SimCluster(linked(cluster_of(3, 1200), gbits=1)) as cluster:
        (request,) = requests_of(1, num_output=600)
        asked = asyncio.ensure_future(cluster.ask(request))
        await asyncio.sleep(0.5)
        source = next(w for w in cluster.workers if w.service.engine.table.num_sequences).params.worker_id
        first, second = (name for name in ("w0", "w1", "w2") if name != source)
        answers = await asyncio.gather(
            cluster.fetch("r0", source, first),
            cluster.fetch("r0", source, first),
            cluster.fetch("r0", source, second),
        )
        said = [answer.outcome for answer in answers]
        assert said.count(FetchOutcome.MOVED) == 1
        assert set(said) <= {FetchOutcome.MOVED, FetchOutcome.REFUSED, FetchOutcome.GONE}
        check_answers(cluster, [await asked])


@pytest.mark.virtual_time
async def test_a_reader_who_leaves_while_it_moves_leaves_nothing() -> None:
    async with SimCluster(linked(cluster_of(2, 1200), gbits=1)) as cluster:
        (request,) = requests_of(1, num_output=600)
        asked = asyncio.ensure_future(cluster.ask(request))
        await asyncio.sleep(0.5)
        source = next(w for w in cluster.workers if w.service.engine.table.num_sequences).params.worker_id
        moving = asyncio.ensure_future(cluster.fetch("r0", source, "w1" if source == "w0" else "w0"))
        await asyncio.sleep(0.3)
        asked.cancel()
        assert (await moving).outcome is FetchOutcome.GONE
        await asyncio.sleep(0.1)
        check_nothing_is_kept(cluster.workers)
        assert not any(worker.service.engine.num_used_blocks for worker in cluster.workers)


@pytest.mark.virtual_time
@pytest.mark.parametrize("planner", [True, False])
@pytest.mark.parametrize("stage", [0, 1])
async def test_a_stage_that_is_told_to_stop_has_its_group_restored_and_gives_away_what_it_has(
    stage: int, *, planner: bool
) -> None:
    """Where no planner restores it in half of the time, its group breaks, and what it ran is computed again."""
    async with SimCluster(linked(group_params(3, system="kunserve", num_pages=700))) as cluster:
        is_over = asyncio.Event()

        async def read(seed: int) -> list[SimAnswer]:
            answers: list[SimAnswer] = []
            for request in draw_requests(seed, 100):
                named = replace(request, request_id=f"{seed}-{request.request_id}", num_output=119)
                answers.append(await cluster.ask(named))
                if is_over.is_set():
                    break
            return answers

        asked = [asyncio.ensure_future(read(seed)) for seed in range(6)]
        await asyncio.sleep(1.0)
        assert (await ask_planner(cluster, "drop", "w0", "w1"))["done"]
        await asyncio.sleep(0.5)
        leaving = cluster.workers[stage]
        keeper = some(leaving.service.agent).keeper
        assert keeper.role.stage == stage
        assert keeper.role.num_stages == 2
        events = await hear_events(cluster.broker.connect("person"))
        if not planner:
            cut_off(cluster, "planner")
        began_s = asyncio.get_running_loop().time()
        await leaving.stop(drain_limit_s=20.0)
        took_s = asyncio.get_running_loop().time() - began_s
        assert took_s < 10.0 if planner else 10.0 <= took_s < 20.0
        (drained,) = reasons(events, "drained")
        assert drained.endswith("sequences left with their KV, 0 are still here")
        restored = [reason for reason in reasons(events, "plan_done") if "become whole" in reason]
        assert len(restored) == planner
        is_over.set()
        for answers in await asyncio.gather(*asked):
            check_answers(cluster, answers)
        assert not any(some(worker.service.agent).keeper.role.group for worker in cluster.workers[1 - stage :: 2])
        assert num_recomputed(cluster.workers) == 0
        assert not cluster.failures


@pytest.mark.virtual_time
@pytest.mark.parametrize("change", [{"prefix_caching": False}, {"system": "bros"}])
async def test_where_blocks_have_no_names_requests_move_without_their_kv(change: dict[str, Any]) -> None:
    async with SimCluster(linked(cluster_of(2, 1200, **change))) as cluster:
        asked = [asyncio.ensure_future(cluster.ask(request)) for request in requests_of(6)]
        await asyncio.sleep(0.5)
        await cluster.workers[0].service.drain(20.0)
        check_answers(cluster, await asyncio.gather(*asked))
        assert set(outcomes(cluster.workers)) <= {FetchOutcome.REFUSED}


@pytest.mark.virtual_time
@pytest.mark.parametrize("system", ["load-balance", "migrate", "fcfs-chunked"])
async def test_requests_move_to_a_worker_that_has_come_if_their_system_says_so(system: str) -> None:
    """`migrate` moves only while memory is short where they are."""
    params = cluster_of(2, 900, system=system, kv_bytes_per_token=100_000)
    async with SimCluster(linked(replace(params, workers=params.workers[:1]))) as cluster:
        asked = [asyncio.ensure_future(cluster.ask(request)) for request in requests_of(30, num_output=800)]
        await asyncio.sleep(3.0)
        old = cluster.workers[0].service.engine
        is_short = old.num_demanded_blocks > 0
        new = await cluster.start_worker(params.workers[1])
        await asyncio.sleep(6.0)
        num_moved = outcomes([new]).get(FetchOutcome.MOVED, 0)
        assert (num_moved > 2) == (system == "load-balance" or (system == "migrate" and is_short))
        assert is_short, "else nothing has to move"
        check_answers(cluster, await asyncio.gather(*asked))
        assert num_recomputed(cluster.workers) == 0
        assert len(set(outcomes(cluster.workers)) - {FetchOutcome.MOVED, FetchOutcome.GONE, FetchOutcome.FULL}) == 0
