"""`sluice chaos` by hand, on a cluster of `sluice up`: what it does, says, and refuses."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from cli.processes import is_running
from tests.support.cluster import ROOT, Cluster, cluster
from tests.support.processes import sluice, state_of, wait_until
from tests.support.seeds import first_of

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def up() -> Iterator[Cluster]:
    """A supervised cluster: what is killed is started again."""
    with cluster("--workers", "2", "--threads", "1", "--memory", "256MiB") as found:
        yield found


def chaos(up: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    return sluice("chaos", *words, "--nats-url", up.nats_url)


def pid_said(text: str) -> int:
    found = re.search(r"process (\d+)", text)
    assert found is not None, text
    return int(found[1])


def wait_until_all_ready(up: Cluster) -> None:
    def ready() -> bool:
        workers = up.get("/v1/cluster")["workers"]
        usable = [w for w in workers if w["report"]["phase"] == "ready" and w["liveness"] == "alive"]
        return len(usable) == 2

    wait_until(ready, "both workers are ready", 60)


@pytest.mark.parametrize("name", first_of(["worker-0", "planner", "monitor"], in_ci=2))
def test_kill_ends_the_process_and_says_what_happens_next(up: Cluster, name: str) -> None:
    done = chaos(up, "kill", name)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith(f"killed {name} (process ")
    assert "`sluice up` starts it again" in done.stderr
    wait_until(lambda: not is_running(pid_said(done.stderr)), "it is gone")
    wait_until_all_ready(up)


@pytest.mark.parametrize("name", first_of(["worker-1", "nats"], in_ci=1))
def test_hang_stops_the_process_for_a_while(up: Cluster, name: str) -> None:
    pid = up.pids[name]
    looks_s = [time.monotonic()]

    def stands_still() -> bool:
        looks_s.append(time.monotonic())
        return state_of(pid) == "T"

    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "chaos", "hang", name, "--for", "1500ms", "--nats-url", up.nats_url],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(stands_still, "it stands still")
    going_s = looks_s[-2]
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert state_of(pid) != "T"
    assert time.monotonic() - going_s > 1.5
    assert f"kill -CONT {pid}" in said
    assert said.splitlines()[-1] == f"{name} goes on"
    wait_until_all_ready(up)


@pytest.mark.parametrize("name", first_of(["dispatcher-0", "worker-1", "nats"], in_ci=1))
def test_restart_returns_when_a_successor_is_there(up: Cluster, name: str) -> None:
    done = chaos(up, "restart", name)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == f"{name} is back"
    assert not is_running(pid_said(done.stderr))

    def ready() -> bool:
        try:
            return bool(up.get("/ready")["ready"])
        except OSError:
            return False

    wait_until(ready, "it serves again", 60)
    wait_until_all_ready(up)
