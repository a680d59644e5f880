"""A worker dies, stands still, is stuck or is told to go, in the middle of prompts and of answers (rows 1, 3 to 6)."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

import pytest

from shared.transport.bus import BusError
from shared.transport.nats_bus import NatsBus
from tests.faults.conftest import SMALL_STEPS
from tests.support.fault_checks import StagedCluster, staged
from tests.support.fault_cluster import Cluster, Shape, until
from tests.support.fault_streams import COMPLETIONS, all_read, ask, longest_gap_s, mixed_load, reading
from tests.support.odd_worker import POISON
from tests.support.seeds import first_of
from tests.support.waiting import rounds

pytestmark = pytest.mark.timeout(180)

VICTIM = "worker-0"
LOSS_S = 3.0
"""After so long without an answer to renewals a worker is given up."""


async def in_mid_prompt(cluster: Cluster, bus: NatsBus, name: str) -> bool:
    """Return whether the worker has a prompt of which it has computed a part, and one that it has only accepted."""
    sequences = (await cluster.dump(bus, name))["sequences"]
    begun = [0 < seq["num_computed_tokens"] < seq["num_prompt_tokens"] for seq in sequences]
    untouched = [seq["num_computed_tokens"] == 0 for seq in sequences]
    return any(begun) and any(untouched)


async def num_recovered(cluster: Cluster) -> int:
    """Return how many requests have gone on at another worker since the dispatcher started."""
    async with cluster.bus() as bus:
        return int((await cluster.dump(bus, "dispatcher-0"))["num_recovered"])


async def losses_of(cluster: Cluster, worker_id: str) -> tuple[int, int, int]:
    """Return how many answers a worker has lost, and how many of these went on and failed."""
    async with cluster.bus() as bus:
        counts = (await cluster.dump(bus, "dispatcher-0"))["workers"].get(worker_id, {})
    return counts.get("num_lost", 0), counts.get("num_recovered", 0), counts.get("num_failed", 0)


async def num_lost(cluster: Cluster) -> dict[str, int]:
    """Return how many requests have lost their worker, by how; a worker that is about to stop loses none."""
    async with cluster.bus() as bus:
        counts: dict[str, int] = (await cluster.dump(bus, "dispatcher-0"))["num_lost"]
    return {how: count for how, count in counts.items() if how not in ("draining", "released")}


async def strike(cluster: StagedCluster, fault: str) -> None:
    if fault == "killed":
        cluster.kill(VICTIM)
    elif fault == "frozen":
        cluster.freeze(VICTIM)
    else:
        cluster.terminate(VICTIM)


@pytest.mark.parametrize("fault", ["killed", "frozen", "terminated"])
async def test_streams_of_a_lost_worker_go_on_with_the_same_text(cluster: StagedCluster, fault: str) -> None:
    """Rows 1, 3, 5, 6."""
    before, by_worker = await num_recovered(cluster), await losses_of(cluster, VICTIM)
    for _ in rounds("a request went on elsewhere"):
        async with cluster.unchanged(15) as readers:
            await strike(cluster, fault)
        assert longest_gap_s(readers) < LOSS_S + 5
        if await num_recovered(cluster) > before:
            break
    lost, recovered, failed = await losses_of(cluster, VICTIM)
    assert (recovered - by_worker[1], failed) == (lost - by_worker[0], by_worker[2])
    assert lost > by_worker[0]


@pytest.mark.parametrize("fault", first_of(["killed", "frozen", "terminated"], in_ci=1))
async def test_prompts_of_a_lost_worker_are_computed_elsewhere(cluster: StagedCluster, fault: str) -> None:
    """Rows 4, 5, 6: prompts that were accepted, begun and waiting."""
    before = await num_recovered(cluster)
    for _ in rounds("a prompt was computed elsewhere"):
        async with (
            cluster.bus() as bus,
            cluster.unchanged(load=[]),
            cluster.among_prompts(partial(in_mid_prompt, cluster, bus, VICTIM)),
        ):
            await strike(cluster, fault)
        if await num_recovered(cluster) > before:
            break


async def test_a_worker_that_stands_still_for_a_moment_keeps_its_requests(cluster: StagedCluster) -> None:
    """Row 5, below the limit."""
    for _ in rounds("it stood still for a moment, and not for so long that it is given up"):
        before = await num_recovered(cluster)
        async with cluster.unchanged(15):
            cluster.freeze(VICTIM)
            frozen_s = time.monotonic()
            await asyncio.sleep(0.5)
            cluster.thaw(VICTIM)
            frozen_s = time.monotonic() - frozen_s
        if frozen_s < LOSS_S / 2:
            break
    assert await num_recovered(cluster) == before


async def test_a_worker_told_to_stop_hands_over_and_ends_well(cluster: StagedCluster) -> None:
    """Row 6: nobody waits until a worker is given up: every request is moved before its worker ends, which is soon."""
    before = await num_lost(cluster)
    async with cluster.unchanged(15):
        cluster.terminate(VICTIM)
        started_s = time.monotonic()
        assert await cluster.ended(VICTIM) == 0
        assert time.monotonic() - started_s < 10
    assert await num_lost(cluster) == before


async def test_every_worker_in_turn_can_be_replaced_under_load(cluster: StagedCluster) -> None:
    """Row 6: a rolling restart. New requests come all the while."""
    async with cluster.unchanged(5):
        for name in cluster.workers:
            async with reading(cluster, mixed_load()[:3]) as more:
                cluster.terminate(name)
                assert await cluster.ended(name) == 0
                cluster.start(name)
                await cluster.check_texts(more)
            await cluster.wait_ready()


async def test_when_all_workers_die_streams_wait_for_one_that_comes_back(cluster: StagedCluster) -> None:
    """Row 1, with nobody left: the answers go on at the worker that was started anew."""
    async with cluster.unchanged(15):
        for name in cluster.workers:
            cluster.kill(name)
        await asyncio.sleep(1.0)
        cluster.start("worker-1")


async def test_a_step_that_never_ends_moves_the_requests(tmp_path: Path) -> None:
    """Row 5: the process answers, its device does not."""
    file = tmp_path / "stuck"
    shape = Shape(
        env={
            **SMALL_STEPS,
            "ODD_WORKER": "stuck",
            "STUCK_FILE": str(file),
            "SLUICE_WORKER_STEP_LIMIT_S": "3",
            "SLUICE_DISPATCHER_STEP_LIMIT_S": "3",
        },
        modules={VICTIM: "tests.support.odd_worker"},
    )
    with staged(tmp_path, shape) as cluster:
        for _ in rounds("a step was stuck"):
            async with cluster.bus() as bus, cluster.unchanged(15) as readers:
                file.touch()
                await all_read(readers)
                await until(partial(is_idle_or_gone, cluster, bus), "nothing else can free such a device", 20.0)
                code = cluster.processes[VICTIM].poll()
                file.unlink()
            assert longest_gap_s(readers) < 3 + 5
            if code is not None:
                break
        assert code != 0


async def is_idle_or_gone(cluster: Cluster, bus: NatsBus) -> bool:
    """Return whether the victim has ended, or had nothing to compute when its device was to be stuck."""
    if not cluster.is_running(VICTIM):
        return True
    try:
        return not (await cluster.dump(bus, VICTIM))["sequences"]
    except BusError:  # it is ending
        return False


@pytest.mark.parametrize("moment", first_of(["at-step", "at-accept"], in_ci=1))
async def test_a_request_that_kills_its_workers_is_blamed_after_two(tmp_path: Path, moment: str) -> None:
    """Row 31: it gets 500 `request_failed`, the others their text."""
    names = ("worker-0", "worker-1", "worker-2")
    shape = Shape(
        num_workers=3,
        env={**SMALL_STEPS, "ODD_WORKER": f"poison {moment}"},
        modules=dict.fromkeys(names, "tests.support.odd_worker"),
    )
    with staged(tmp_path, shape) as cluster:
        poison = ask("poison", COMPLETIONS, prompt=POISON)
        async with cluster.unchanged(5):
            async with reading(cluster, [poison]) as (poisoned,):
                await poisoned.task
            assert (poisoned.told.error or {}).get("code") == "request_failed"
            assert sum(not cluster.is_running(name) for name in names) == 2, "no third worker was harmed"
        await cluster.assert_nothing_left()
