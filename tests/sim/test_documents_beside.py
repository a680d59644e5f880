"""A backlog of documents beside people: nothing is dropped for it, nobody asked for, and no chat refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.worker.engine.best_effort import parked_best_effort
from services.worker.engine.stats import most_parked
from shared.api_keys import Tier
from shared.messages.event import Event
from shared.messages.request import RefusalReason, Submit, pack_token_ids
from shared.systems import SYSTEMS
from shared.types import FinishReason, ReaderTarget
from sim.cluster import SimCluster
from sim.requests import SimRequest
from tests.support.group_room import group_params
from tests.support.lone_worker import STEP_S, ended, lone_worker
from tests.support.sim_clusters import ask_all, ask_planner, hear_events, reasons

pytestmark = pytest.mark.virtual_time

NUM_DOCUMENTS, NUM_PEOPLE = 60, 28
READER = ReaderTarget(ttft_s=2.0, speed_tokens_per_s=8.0)


def documents(count: int = NUM_DOCUMENTS, num_output: int = 100) -> list[SimRequest]:
    """Of 13 to 19 blocks each."""
    rng = np.random.default_rng(0)
    return [
        SimRequest(f"doc-{i}", rng.integers(300, 30_000, 200), num_output, seed=i, tier=Tier.FLEX, tenant="archive")
        for i in range(count)
    ]


def people(count: int) -> list[SimRequest]:
    rng = np.random.default_rng(1)
    return [SimRequest(f"chat-{i}", rng.integers(300, 30_000, 32), 40, seed=i, qoe=READER) for i in range(count)]


@asynccontextmanager
async def beside_documents(system: str) -> AsyncIterator[tuple[SimCluster, list[Event]]]:
    """Two workers of 84 blocks, and documents that need 1100: they have begun."""
    params = group_params(system=system, num_pages=1000, planner={"max_instances": 4, "scale_wait_s": 1.0})
    async with SimCluster(params) as cluster:
        events = await hear_events(cluster.broker.connect("watch"))
        await asyncio.sleep(1.0)
        reading = asyncio.create_task(ask_all(cluster, documents()))
        await asyncio.sleep(1.0)
        yield cluster, events
        await reading


@pytest.mark.slow
@pytest.mark.parametrize("system", [name for name, system in SYSTEMS.items() if system.drops])
async def test_a_backlog_of_documents_drops_nothing_and_asks_for_nobody(system: str) -> None:
    """The people need most of the memory, and documents hold all of it when they come."""
    async with beside_documents(system) as (cluster, events):
        sessions = cluster.dispatcher.sessions
        engines = [worker.service.engine for worker in cluster.workers]
        assert sessions.num_queued > NUM_DOCUMENTS / 2, "most of them wait in the dispatcher"
        for _ in range(40):
            await asyncio.sleep(0.02)
            for engine in engines:
                assert parked_best_effort(engine).size <= most_parked(engine) + engine.config.max_batch_rows
        answers = await ask_all(cluster, people(NUM_PEOPLE))
        assert max(answer.delivered_s[0] for answer in answers) < 2.0
    assert not reasons(events, "plan_done")
    assert not reasons(events, "instances_wanted")


async def drops_of(rate: float, seed: int, *, is_beside: bool) -> int:
    """Return how often 120 people, so many a second, make layers be dropped, alone or beside documents."""
    rng = np.random.default_rng(seed)
    gaps_s, asked = rng.exponential(1 / rate, 120), []
    for i in range(120):
        prompt = rng.integers(300, 30_000, int(rng.integers(16, 64)))
        asked.append(SimRequest(f"chat-{i}", prompt, int(rng.integers(40, 160)), seed=i, qoe=READER))
    async with SimCluster(group_params(system="kunserve", num_pages=1000)) as cluster:
        events = await hear_events(cluster.broker.connect("watch"))
        await asyncio.sleep(1.0)
        reading = asyncio.create_task(ask_all(cluster, documents())) if is_beside else None
        await asyncio.sleep(1.0)
        chatting = []
        for gap_s, each in zip(gaps_s, asked, strict=True):
            await asyncio.sleep(gap_s)
            chatting.append(asyncio.create_task(cluster.ask(each)))
        await asyncio.gather(*chatting)
        if reading is not None:
            reading.cancel()
        return len(reasons(events, "plan_done"))


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "seed"), [(8, 2), (8, 11), (9, 4), (9, 9)])
async def test_people_whom_documents_slow_do_not_make_it_drop(rate: float, seed: int) -> None:
    """At their rate people need up to 80 of 84 blocks of a worker alone, and more beside documents."""
    assert await drops_of(rate, seed, is_beside=False) == 0
    assert await drops_of(rate, seed, is_beside=True) == 0


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_at_the_edge_layers_are_dropped_no_more_often_beside_documents() -> None:
    """A drop more or less is a matter of who comes to which worker; below the edge there is none for documents."""
    runs = {
        (rate, seed): [await drops_of(rate, seed, is_beside=is_beside) > 0 for is_beside in (False, True)]
        for rate in (7, 8, 9, 11, 12, 13)
        for seed in range(12)
    }
    only_beside = [run for run, (alone, beside) in runs.items() if beside and not alone]
    only_alone = [run for run, (alone, beside) in runs.items() if alone and not beside]
    print(f"{len(runs)} runs; only beside: {only_beside}; only alone: {only_alone}")
    assert all(rate > 9 for rate, _ in only_beside)
    assert len(only_beside) <= len(only_alone)


async def test_tiers_go_along_when_a_group_forms_and_when_it_dissolves() -> None:
    """Requests of three tiers run at two workers, then at the leader, then at both again."""
    tiers = {"doc": Tier.FLEX, "chat": Tier.DEFAULT, "urgent": Tier.PRIORITY}

    def told(cluster: SimCluster, number: int) -> set[tuple[str, int]]:
        table = cluster.workers[number].service.engine.table
        rows = np.flatnonzero(table.status).tolist()
        return {(table.sequence(row).key[0].partition("-")[0], int(table.tier[row])) for row in rows}

    async with SimCluster(group_params(system="kunserve-sluice", num_pages=1000)) as cluster:
        await asyncio.sleep(1.0)
        urgent = [replace(each, request_id=f"urgent-{i}", tier=Tier.PRIORITY) for i, each in enumerate(people(2))]
        asked = [replace(each, num_output=250) for each in (*documents(4), *people(2), *urgent)]
        asked = [replace(each, prompt=each.prompt[:32]) for each in asked]
        answers = asyncio.create_task(ask_all(cluster, asked))
        await asyncio.sleep(0.2)
        for verb in ("drop", "restore"):
            await ask_planner(cluster, verb, *(("w0", "w1") if verb == "drop" else ()))
            await asyncio.sleep(0.1)
            found = [told(cluster, number) for number in (0, 1)]
            assert found[0] | found[1] == set(tiers.items()), verb
            assert bool(found[1]) == (verb == "restore")
        assert not answers.done()
        await answers


@pytest.mark.slow
@pytest.mark.parametrize("by", ["ratio", "benefit"])
async def test_a_group_is_restored_although_documents_fill_what_it_has_dropped(by: str) -> None:
    """Whole instances have 168 blocks together, the group 210, and documents want all of them."""
    params = group_params(
        system="kunserve-sluice", num_pages=1000, planner={"restore_by": by, "restore_hold_s": 1.0, "ahead_wait_s": 1.0}
    )
    async with SimCluster(params) as cluster:
        events = await hear_events(cluster.broker.connect("watch"))
        await asyncio.sleep(1.0)
        reading = asyncio.create_task(ask_all(cluster, documents()))
        await ask_planner(cluster, "drop", "w0", "w1")
        await asyncio.sleep(0.5)
        engine = cluster.workers[0].service.engine
        assert engine.num_used_blocks > 168, "more than whole instances have"
        chatting = asyncio.create_task(ask_all(cluster, people(2)))
        async with asyncio.timeout(10):
            while any(status.report.num_stages > 1 for status in cluster.dispatcher.sessions.cluster.statuses):
                await asyncio.sleep(0.05)
        assert not reasons(events, "plan_failed") + reasons(events, "plan_aborted")
        assert not reading.done()
        assert cluster.dispatcher.sessions.num_queued > 0
        await asyncio.gather(chatting, reading)


@pytest.mark.parametrize("system", ["andes", "fcfs"])
async def test_a_worker_full_of_documents_sends_the_last_one_that_waits_back_for_a_chat(system: str) -> None:
    """Six rows, three of which run; of documents three may wait, or have tokens and go on. Chats take their rows."""
    async with lone_worker(system=system, num_blocks=64, max_sequences=6, max_batch_rows=3) as lone:
        make = lone.dispatcher.make

        def document(**changes: Any) -> Submit:
            return make([300] * 8, 100).model_copy(update={"tier": Tier.FLEX, **changes})

        documents = [await lone.accepted(document()) for _ in range(3)]
        await asyncio.sleep(5 * STEP_S)
        documents += [await lone.accepted(document()) for _ in range(3)]
        assert lone.stats.best_effort.num_waiting == 3
        for changes in ({}, {"generated": pack_token_ids([301])}):
            assert (await lone.refused(document(**changes))).reason is RefusalReason.FULL
        chats = [await lone.accepted(make([300] * 8, 5, qoe=READER)) for _ in range(3)]
        await asyncio.sleep(5 * STEP_S)
        assert [stream.finish for stream in documents[3:]] == [FinishReason.RELEASED] * 3
        await ended([*chats, *documents[:3]])
