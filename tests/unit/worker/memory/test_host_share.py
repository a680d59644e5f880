"""Memory of the host that a worker takes: given, or a bounded share of what is free there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from services.worker.config import ExecutorKind, WorkerSettings
from services.worker.load import check_start, load_executor
from services.worker.memory import host_share as room
from services.worker.memory.host_share import HostShare, host_share
from shared.errors import StartupError
from shared.host import FreeMemory, free_memory, free_memory_here
from shared.systems import SYSTEMS
from tests.support.checkpoints import CheckpointShape, stored_checkpoint
from tests.support.loading import close_loaded

KEEPING = sorted(name for name, system in SYSTEMS.items() if system.keeps_on_host)
BLOCK = 8192
GIB = 2**30
SIZES = st.integers(0, 2**42)


def settings(system: str = "fcfs-chunked", **changes: Any) -> WorkerSettings:
    return WorkerSettings(**{"instance_id": "w0", "model": Path("model"), "system": system, **changes})


def share_of(free_bytes: int, chosen: WorkerSettings, block_kv_bytes: int = BLOCK) -> HostShare:
    """What a worker takes on a host with so much free."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "free_memory", lambda: free_bytes)
        return host_share(chosen, block_kv_bytes)


def test_all_systems_keep_kv_on_the_host_but_for_those_that_never_lack_memory_or_compute_again() -> None:
    assert sorted(set(SYSTEMS) - {"oracle", "andes-unlimited", "bros-recompute"}) == KEEPING
    assert [name for name, system in SYSTEMS.items() if system.swaps] == ["swap", "tokenflow", "bros", "bros-whole"]


@given(SIZES, st.integers(1, 2**41), st.integers(1, 64), st.integers(1, 2**24), st.sampled_from(["cpu", "cuda"]))
def test_by_default_all_workers_together_take_a_tenth_and_none_more_than_its_budget(
    free_bytes: int, memory: int, num_workers: int, block: int, device: str
) -> None:
    chosen = settings(memory=memory, host_workers=num_workers, device=device)
    share = share_of(free_bytes, chosen, block)
    left = max(0, free_bytes - (memory if device == "cpu" else 0))
    assert not share.is_given
    assert share.num_bytes == share.num_blocks * block <= memory
    assert share.num_bytes * num_workers <= left / 10 + 1
    assert share.num_bytes <= 16 * GIB
    nearly = min(left / 10 / num_workers, memory, 16 * GIB) - block - 1
    assert share.num_bytes >= nearly, "no more than a block is lost"


@given(SIZES, SIZES, st.sampled_from(["fcfs", "fcfs-chunked", "round-robin"]))
def test_what_is_given_is_taken_whatever_is_free(free_bytes: int, host_memory: int, system: str) -> None:
    chosen = settings(system, host_memory=host_memory)
    if 0 < host_memory < BLOCK:
        with pytest.raises(
            StartupError, match=r"host_memory holds no KV block of 8192 bytes\. Give at least 8192, or 0"
        ):
            share_of(free_bytes, chosen)
        return
    assert share_of(free_bytes, chosen) == HostShare(host_memory // BLOCK * BLOCK, host_memory // BLOCK, is_given=True)


def test_steps_that_are_modelled_take_no_memory_of_the_host() -> None:
    chosen = settings(memory=80 * GIB, executor=ExecutorKind.MODELLED)
    assert share_of(40 * GIB, chosen).num_bytes == 4 * GIB
    assert share_of(40 * GIB, settings(memory=80 * GIB)).num_blocks == 0


@pytest.mark.parametrize("system", sorted(set(SYSTEMS) - set(KEEPING)))
def test_who_cannot_use_it_takes_none_and_refuses_what_is_given(system: str) -> None:
    assert share_of(999 * GIB, settings(system)).num_blocks == 0
    assert share_of(999 * GIB, settings(system, host_memory=0)).num_blocks == 0
    with pytest.raises(StartupError, match=rf"system '{system}' keeps no KV on the host\. Leave it out"):
        share_of(999 * GIB, settings(system, host_memory=GIB))


@pytest.mark.parametrize("chosen", [{"host_memory": 0}, {}], ids=["given", "by default"])
def test_a_system_that_swaps_does_not_go_without(chosen: dict[str, Any]) -> None:
    with pytest.raises(
        StartupError, match=r"system 'swap' moves KV to the host, .* for a block of 8192 bytes\. Give som"
    ):
        share_of(0, settings("swap", **chosen))
    assert share_of(0, settings(**chosen)).num_blocks == 0
    assert share_of(0, settings("swap", host_memory=BLOCK)).num_blocks == 1


@pytest.mark.parametrize("free_bytes", [0, 40 * GIB])
@pytest.mark.parametrize("kind", [ExecutorKind.TORCH, ExecutorKind.MODELLED])
async def test_a_worker_says_once_what_it_takes(
    kind: ExecutorKind, free_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "free_memory", lambda: free_bytes)
    chosen = settings(model=stored_checkpoint(CheckpointShape())[0], executor=kind, memory=2**25)
    with capture_logs() as logs:
        loaded = await load_executor(chosen, check_start(chosen), lambda _done, _what: None)
    host, num_blocks = loaded.executor.capacity.host, 2**25 // BLOCK if free_bytes else 0
    assert (0 if host is None else host.num_blocks) == num_blocks
    (said,) = [log for log in logs if log["event"] == "host_memory"]
    assert (said["num_blocks"], said["num_bytes"], said["by"]) == (num_blocks, num_blocks * BLOCK, "default")
    await close_loaded(loaded)


# What is free


def tell(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal: 100 kB\nMemFree: 10 kB\nMemAvailable: 50 kB\n"}
V2 = {**MACHINE, "proc/self/cgroup": "0::/a/b\n"}
V1 = {**MACHINE, "proc/self/cgroup": "5:cpu:/x\n4:cpuacct,memory:/a\n0::/\n"}
OF_V1 = "sys/fs/cgroup/memory/"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 0),
        (MACHINE, 51_200),
        (V2, 51_200),
        ({**V2, "sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/b/memory.current": "7\n"}, 51_200),
        ({**V2, "sys/fs/cgroup/a/b/memory.max": "9000\n", "sys/fs/cgroup/a/b/memory.current": "7000\n"}, 2_000),
        ({**V2, "sys/fs/cgroup/a/memory.max": "9000\n", "sys/fs/cgroup/a/memory.current": "9500\n"}, 0),
        (
            {
                **V2,
                "sys/fs/cgroup/a/memory.max": "9000\n",
                "sys/fs/cgroup/a/memory.current": "8000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 500\nactive_file 3\n",
                "sys/fs/cgroup/a/b/memory.max": "60000\n",
                "sys/fs/cgroup/a/b/memory.current": "1\n",
            },
            1_500,
        ),
        ({**V1, f"{OF_V1}a/memory.limit_in_bytes": str(2**63 - 4096), f"{OF_V1}a/memory.usage_in_bytes": "9"}, 51_200),
        (
            {
                **V1,  # the host's path, which a container does not see: its own group is the top
                f"{OF_V1}memory.limit_in_bytes": "8000",
                f"{OF_V1}memory.usage_in_bytes": "6000",
                f"{OF_V1}memory.stat": "inactive_file 1\ntotal_inactive_file 100\n",
            },
            2_100,
        ),
    ],
    ids=[
        "not Linux",
        "none",
        "v2, none",
        "v2, no limit",
        "v2",
        "v2, full",
        "v2, outer",
        "v1, no limit",
        "v1, container",
    ],
)
def test_control_groups_bound_what_is_free(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert free_memory(tell(tmp_path, files)) == expected


def test_a_containers_own_limit_is_told_apart_from_the_machine(tmp_path: Path) -> None:
    limit = {"sys/fs/cgroup/memory.max": "9000\n", "sys/fs/cgroup/memory.current": "7000\n"}
    root = tell(tmp_path, {**V2, **limit})
    assert free_memory_here(root, is_alone=True) == FreeMemory(51_200, 2_000)
    assert free_memory_here(root, is_alone=False) == FreeMemory(2_000), "others may be in the same groups"


def test_this_machine_has_some_memory_free() -> None:
    if Path("/proc/meminfo").exists():
        assert free_memory() > 0
