"""Planner and monitor are gone, the wall clock jumps, the disk is full, versions differ, weights are bad.

Rows 12, 13, 26, 34, 35, 36.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.messages.base import PROTOCOL_VERSION
from shared.transport.bus import BusError, KeyValue
from tests.faults.conftest import SMALL_STEPS
from tests.support.fault_checks import StagedCluster, assert_no_errors, staged
from tests.support.fault_cluster import DEMO_MODEL, ROOT, Cluster, Shape, until
from tests.support.fault_streams import CHAT, all_read, ask, long_prompts, mixed_load, reading
from tests.support.group_changes import service_answers
from tests.support.wall_clock import WallClock

pytestmark = pytest.mark.timeout(180)

HOUR_S = 3600.0


async def test_without_a_planner_a_burst_is_served_or_refused_politely(tmp_path: Path) -> None:
    """Row 12, its ten minutes shortened: what does not fit the queue gets 429 with Retry-After at once."""
    env = {**SMALL_STEPS, "SLUICE_WORKER_MAX_SEQUENCES": "4", "SLUICE_DISPATCHER_MAX_QUEUED": "8"}
    with staged(tmp_path, Shape(env=env), mixed_load()[:4]) as cluster:
        async with cluster.unchanged(5):
            cluster.kill("planner")
            async with reading(cluster, [ask(f"burst {n}", CHAT, max_tokens=40) for n in range(60)]) as burst:
                await all_read(burst)
        told = [reader.told for reader in burst]
        served, refused = [one for one in told if one.is_whole], [one for one in told if one.status == 429]
        assert len(served) + len(refused) == len(told), [one for one in told if one.status not in (200, 429)]
        assert len(served) >= 8
        assert refused
        assert all(int(one.headers["Retry-After"]) >= 1 for one in refused)


async def test_without_a_monitor_everything_goes_on(cluster: StagedCluster) -> None:
    """Row 13: running streams, and new ones long after the last view."""
    async with cluster.unchanged(5) as readers:
        cluster.kill("monitor")
        await all_read(readers)
        await asyncio.sleep(4.0)
        await cluster.check_answers()


async def test_a_worker_that_dies_without_a_monitor_is_missed_just_the_same(cluster: StagedCluster) -> None:
    """Rows 1 and 13 together: the dispatcher's own renewals notice it."""
    async with cluster.unchanged(15):
        cluster.kill("monitor")
        cluster.kill("worker-0")


async def test_a_frozen_monitor_is_excused(cluster: StagedCluster) -> None:
    """Row 13: when it goes on after 5 s it does not give up workers that it has not listened to."""
    async with cluster.unchanged(5):
        cluster.freeze("monitor")
        num_events = len(cluster.events("monitor"))
        await asyncio.sleep(5.0)
        cluster.thaw("monitor")
        await asyncio.sleep(1.0)
        async with cluster.bus() as bus:
            await service_answers(cluster, bus, "monitor")  # it goes on
        said = {event.get("event") for event in cluster.events("monitor")[num_events:]}
        assert not said & {"worker_dead", "worker_gone"}


async def test_jumps_of_the_wall_clock_change_nothing(tmp_path: Path) -> None:
    """Row 26: an hour ahead, an hour back, for every process of the cluster; only `created` shows it."""
    clock = WallClock(tmp_path)
    shape = Shape(env={**SMALL_STEPS, "PYTHONPATH": str(clock.folder)})
    with staged(tmp_path, shape) as cluster:
        for offset_s in (HOUR_S, -HOUR_S):
            async with cluster.unchanged(5):
                clock.jump(offset_s)
                await asyncio.sleep(1.0)
                async with reading(cluster, mixed_load()[-1:]) as (whole,):
                    await whole.task
                assert abs(whole.told.created_unix_s - time.time() - offset_s) < 60, "the jump was real"
            clock.jump(0.0)
        assert_no_errors(cluster)


async def test_logs_without_a_disk_stop_nothing(tmp_path: Path) -> None:
    """Row 35: every write of every log fails."""
    for name in ("monitor", "planner", "worker-0", "worker-1", "dispatcher-0"):
        (tmp_path / f"{name}.log").symlink_to("/dev/full")
    with staged(tmp_path, Shape(env={**SMALL_STEPS, "SLUICE_LOG_LEVEL": "debug"})) as cluster:
        async with cluster.unchanged(15):
            cluster.kill("worker-0")


async def test_a_full_store_of_the_broker_stops_nothing(tmp_path: Path) -> None:
    """Row 35: no view can be written any more; workers die and come back all the same."""
    shape = Shape(env=SMALL_STEPS, max_store_bytes=2 * 1024 * 1024)
    with staged(tmp_path, shape) as cluster:
        async with cluster.bus() as bus, cluster.unchanged(5):
            filling = await bus.key_value("filling", history=64)
            with pytest.raises(BusError):
                await fill(filling)
            cluster.kill("worker-0")
            await asyncio.sleep(2.0)
            await cluster.check_answers()
        await until(lambda: any(e.get("event") == "view_not_written" for e in cluster.events("monitor")), "it is told")


async def fill(bucket: KeyValue) -> None:
    """Write until the store has no room.

    Raises:
        BusError: it has none.
    """
    for size_bytes in (60_000, 600):  # large values first, then what is left
        for number in range(1000):
            try:
                await bucket.put(f"key-{size_bytes}-{number}", bytes(size_bytes))
            except BusError:
                if size_bytes == 600:
                    raise
                break


async def test_a_worker_of_another_major_version_is_shown_and_not_used(tmp_path: Path) -> None:
    """Row 36."""
    shape = Shape(env={**SMALL_STEPS, "ODD_WORKER": "other-major"}, modules={"worker-1": "tests.support.odd_worker"})
    with staged(tmp_path, shape, ready=["worker-0"]) as cluster:
        await until(lambda: _is_shown_as_incompatible(cluster), "the view says so")
        await cluster.check_answers()
        async with cluster.bus() as bus:
            assert (await cluster.dump(bus, "worker-0"))["sequences"] == []
        assert cluster.is_running("worker-1")


async def _is_shown_as_incompatible(cluster: Cluster) -> bool:
    _, view = await cluster.get("/v1/cluster")
    shown = {w["report"]["worker_id"]: w["incompatible"] for w in view["workers"]}
    return shown == {"worker-0": "", "worker-1": str(PROTOCOL_VERSION + 1)}


async def test_fields_of_a_newer_minor_version_are_ignored(tmp_path: Path) -> None:
    """Row 36: one worker says more in every message than the others know."""
    shape = Shape(env={**SMALL_STEPS, "ODD_WORKER": "newer-minor"}, modules={"worker-1": "tests.support.odd_worker"})
    with staged(tmp_path, shape) as cluster:
        async with cluster.unchanged(10, [*mixed_load(), *long_prompts()]):
            cluster.kill("worker-0")


def damaged_model(folder: Path, damage: str) -> Path:
    """Return a copy of the demo model whose weights are not as they should be."""
    shutil.copytree(DEMO_MODEL, folder)
    weights = folder / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "cut short":
        weights.write_bytes(weights.read_bytes()[:-1000])
    else:
        config = folder / "config.json"
        config.write_text(config.read_text().replace('"intermediate_size": 448', '"intermediate_size": 449'))
    return folder


@pytest.mark.parametrize("damage", ["missing", "cut short", "of another shape"])
def test_bad_weights_are_refused_in_seconds_with_one_line(cluster: StagedCluster, tmp_path: Path, damage: str) -> None:
    """Row 34."""
    folder = damaged_model(tmp_path / "model", damage)
    started_s = time.monotonic()
    flags = ["--model", str(folder), "--nats-url", cluster.nats_url, "--instance-id", "bad", "--cluster", "other"]
    ended = subprocess.run(
        [sys.executable, "-m", "services.worker", *flags, "--log-format", "json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert time.monotonic() - started_s < 20
    *_, line = ended.stderr.splitlines()
    assert line.startswith("sluice: ")
    assert "model" in line
    assert "Traceback" not in ended.stderr
