"""A dispatcher is killed, or told to go (rows 17, 18)."""

from __future__ import annotations

import pytest

from tests.faults.conftest import FORGOTTEN_S, ORPHAN_S, TWO_DISPATCHERS
from tests.support.fault_checks import StagedCluster
from tests.support.fault_cluster import Cluster, until
from tests.support.fault_streams import CHAT, Ask, all_read, ask, mixed_load, reading, seen, undisturbed
from tests.support.waiting import rounds

pytestmark = pytest.mark.timeout(180)

SHAPE = TWO_DISPATCHERS


async def test_a_killed_dispatcher_breaks_its_own_streams_only_and_workers_forget_them(cluster: StagedCluster) -> None:
    """Row 17: no clean end of an unfinished stream; the other dispatcher's go on; KV is free after the lease."""
    for _ in rounds("no stream had ended before its dispatcher was killed"):
        async with (
            cluster.unchanged() as others,
            reading(cluster, mixed_load(), dispatcher="dispatcher-1") as own,
        ):
            await seen([*own, *others], 10)
            cluster.kill("dispatcher-1")
            await all_read(own)
            for reader in own:
                assert bool(reader.told.broken_by) is not reader.told.is_whole, (reader.asked.name, reader.told)
        if all(reader.told.broken_by for reader in own if reader.asked.is_streamed):
            break
    await cluster.assert_nothing_left(FORGOTTEN_S)
    await until(lambda: _has_no_lease(cluster), "no worker has a lease any more", ORPHAN_S + 10)


async def _has_no_lease(cluster: Cluster) -> bool:
    async with cluster.bus() as bus:
        return not any([(await cluster.dump(bus, name))["leases"] for name in cluster.workers])


async def test_a_stream_of_a_killed_dispatcher_is_resumed_by_another(cluster: StagedCluster) -> None:
    """Row 17: the same request with the same key, and the number of the last event that was seen."""
    headers = {"Idempotency-Key": "a key of its own"}
    cat = next(asked for asked in mixed_load() if asked.name == "cat")
    asked = Ask("long cat", cat.path, {**cat.body, "max_tokens": 900})
    expected = (await undisturbed(cluster, [asked]))[asked.name]
    async with reading(cluster, [asked], dispatcher="dispatcher-1", headers=headers) as (first,):
        await seen([first], 20)
        cluster.kill("dispatcher-1")
        await first.task
    last = {"Last-Event-ID": first.told.last_event_id}
    async with reading(cluster, [asked], headers={**headers, **last}) as (second,):
        await second.task
    assert second.told.is_whole, second.told
    assert first.told.texts[0] + second.told.texts[0] == expected["texts"][0]
    assert second.told.finish == expected["finish"]
    await cluster.restore()
    await cluster.assert_nothing_left(FORGOTTEN_S)


async def test_a_dispatcher_told_to_stop_refuses_new_requests_and_finishes_its_own(cluster: StagedCluster) -> None:
    """Row 18: `/ready` 503, `/live` 200, new requests 503 `draining` with Retry-After; then it ends by itself.

    Workers stand still until all that has been seen: it cannot end before.
    """
    name = "dispatcher-1"
    async with reading(cluster, mixed_load(), dispatcher=name) as readers:
        await seen(readers, 5)
        for worker in cluster.workers:
            cluster.freeze(worker)
        cluster.terminate(name)
        await until(lambda: _is_draining(cluster, name), "it drains")
        async with reading(cluster, [ask("late", CHAT)], dispatcher=name) as (late,):
            await late.task
        assert late.told.status == 503
        assert (late.told.error or {})["code"] == "draining"
        assert int(late.told.headers["Retry-After"]) >= 1
        assert (await cluster.get("/live", name))[0] == 200
        assert cluster.is_running(name)
        for worker in cluster.workers:
            cluster.thaw(worker)
        await cluster.check_texts(readers)
        assert all(reader.told.is_whole for reader in readers)
        assert await cluster.ended(name) == 0
    await cluster.restore()
    await cluster.assert_nothing_left()


async def _is_draining(cluster: Cluster, name: str) -> bool:
    status, body = await cluster.get("/ready", name)
    return status == 503 and body["reason"] == "draining"
