"""The worker's resident memory under load: its budget, and what the interpreter and its libraries take besides."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.worker.native.build import find_compiler
from tests.support.cluster import Cluster, cluster

MIB = 2**20
BUDGET = 192 * MIB
HOST_MEMORY = 16 * MIB
"""Beside the budget, for KV that gives way."""
BESIDES = 1024 * MIB
"""Beyond the budget: the interpreter, torch's and numpy's libraries and their heaps (docs/design/executor.md)."""
NUM_REQUESTS = 60
BY_TORCH = os.environ.get("SLUICE_WORKER_KERNELS", "auto") == "torch" or find_compiler() is None
NUM_TOKENS = 100
"""Of each answer."""

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.timeout(300),  # 120 long answers on two cores, by torch's operators too
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc"),
]


def status_bytes(pid: int, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None, field
    return int(found[1]) * 1024


def num_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def load(running: Cluster) -> None:
    """Send long prompts and long answers, more at once than the KV memory holds."""

    def ask(index: int) -> int:
        body = {
            "model": "sluice-demo",
            "prompt": f"Story {index}: " + "and then the fox went on " * (index % 80),
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "temperature": 1.0,
            "top_p": 0.9,
            "logprobs": 3 if index % 5 == 0 else None,
            "frequency_penalty": 0.5 if index % 7 == 0 else 0.0,
        }
        return int(running.post("/v1/completions", body, timeout_s=240)["usage"]["completion_tokens"])

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        assert list(pool.map(ask, range(NUM_REQUESTS))) == [NUM_TOKENS] * NUM_REQUESTS


@pytest.mark.slow
def test_a_loaded_worker_stays_within_its_budget_and_leaves_nothing_open() -> None:
    flags = ("--workers", "1", "--memory", "192MiB", "--host-memory", "16MiB", "--dtype", "bfloat16")
    with cluster(*flags, env={"SLUICE_WORKER_MAX_BLOCKS": "600"}) as running:
        pid = running.pids["worker-0"]
        (report,) = running.reports()
        taken = report["param_bytes"] + report["kv_bytes"] + report["reserve_bytes"]
        assert taken <= report["memory_bytes"] == BUDGET
        assert report["kernels"].startswith("torch" if BY_TORCH else "native")
        for _ in range(2):  # the first one also fills the allocator's arenas
            load(running)
            running.wait_until_idle()
        files, peak = num_files(pid), status_bytes(pid, "VmHWM")
        assert running.total("num_preemptions_total") > 0
        assert peak <= BUDGET + HOST_MEMORY + BESIDES, f"{peak / MIB:.0f} MiB"
        load(running)
        running.wait_until_idle()
        assert num_files(pid) <= files
        assert status_bytes(pid, "VmRSS") <= peak + 32 * MIB
