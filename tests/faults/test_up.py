"""`sluice up` as a whole: its disk fills up, its file of keys goes, and processes die meanwhile (rows 12, 14, 35)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.api_keys import make_key
from shared.subjects import Subjects
from shared.transport.bus import BusError, KvEntry
from shared.transport.nats_bus import NatsBus
from tests.support.cluster import Cluster, cluster
from tests.support.dispatchers import write_keys
from tests.support.processes import child_of, wait_until

pytestmark = pytest.mark.timeout(240)

KEY = make_key()
LIMIT_S = 60.0
MOUNT = 'mount -t tmpfs -o size=16m sluice-test "$0" && exec "$@"'
SUBJECTS = Subjects("default")
FULL = "views and plans are not kept until there is room"


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    write_keys(path, {KEY: ("acme", "infer", "metrics")})
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def up(folder: Path, keys_file: Path) -> Iterator[Cluster]:
    """A cluster whose temporary folder is a small disk of its own, mounted where only it and its children see it."""
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNT, str(folder)]
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no disk can be mounted here: {tried.stderr.strip()}")
    flags = ("--workers", "2", "--deterministic", "--api-keys-file", str(keys_file))
    with cluster(*flags, env={"TMPDIR": str(folder)}, prefix=prefix) as running:
        running.key = KEY
        yield running


def text_of(up: Cluster) -> str:
    body = {"model": "sluice-demo", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    answer: dict[str, Any] = up.post("/v1/completions", body)
    return str(answer["choices"][0]["text"])


def kill(up: Cluster, word: str) -> None:
    """Kill the child with this word in its command line, and return when another one runs."""
    before = child_of(up.process.pid, word)
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: child_of(up.process.pid, word) not in (0, before), f"{word} runs again", LIMIT_S)


def is_served(up: Cluster, path: str) -> bool:
    try:
        up.get(path)
    except OSError:
        return False
    return True


async def last_written(up: Cluster) -> tuple[KvEntry | None, KvEntry | None]:
    """Return the plan and the view that the broker keeps, as soon as its store answers."""
    bus = await NatsBus.connect(up.nats_url, name="test")
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                with contextlib.suppress(BusError):  # it starts
                    plans, views = (
                        await bus.key_value(SUBJECTS.plan_bucket()),
                        await bus.key_value(SUBJECTS.view_bucket()),
                    )
                    return await plans.get("plan"), await views.get("cluster")
                await asyncio.sleep(0.1)
    finally:
        await bus.close()


def epoch(up: Cluster) -> int:
    plan, _ = asyncio.run(last_written(up))
    return 0 if plan is None else int(json.loads(plan.value or b"{}")["epoch"])


def revision(up: Cluster) -> int:
    _, view = asyncio.run(last_written(up))
    return 0 if view is None else view.revision


def test_a_file_of_keys_that_is_gone_changes_nothing_for_a_dispatcher_that_restarts(
    up: Cluster, keys_file: Path
) -> None:
    good, expected = keys_file.read_text(), text_of(up)
    keys_file.unlink()
    kill(up, "services.dispatcher")
    wait_until(lambda: is_served(up, "/ready"), "it is ready again", LIMIT_S)
    assert text_of(up) == expected
    up.key = ""
    assert not is_served(up, "/v1/models"), "it is not open to all"
    up.key = KEY
    assert "keys_not_read" in up.log.read_text()
    keys_file.write_text(good)


def fill(disk: Path) -> None:
    """Write until there is no room."""
    with (disk / "filling").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_disk_that_is_full_for_a_while_ends_nothing(up: Cluster, folder: Path) -> None:
    """The broker's store fails, processes die: served all the while, and whole again after.

    A broker that dies meanwhile finds room in what it tidies up as it starts, or none: its store holds, or fails again.
    """
    expected, disk = text_of(up), Path(f"/proc/{up.process.pid}/root{folder}")
    fill_until_it_is_told(up, disk)
    for word in ("services.planner", "services.monitor", "services.planner"):
        kill(up, word)
        assert text_of(up) == expected
    (disk / "filling").unlink()
    wait_until(lambda: "so the broker is started anew" in up.log.read_text(), "the broker is restarted", LIMIT_S)
    is_whole_again(up)
    fill_until_it_is_told(up, disk)
    kill(up, "nats-server")
    assert text_of(up) == expected
    (disk / "filling").unlink()
    is_whole_again(up)
    assert text_of(up) == expected
    assert up.process.poll() is None
    assert "no space left on device" in up.log.read_text(), "the cause is named"


def fill_until_it_is_told(up: Cluster, disk: Path) -> None:
    told = up.log.read_text().count(FULL)
    fill(disk)
    wait_until(lambda: up.log.read_text().count(FULL) > told, "it is told", LIMIT_S)


def is_whole_again(up: Cluster) -> None:
    """Wait until views are kept again, and the plan of a planner that follows."""
    written = revision(up)
    wait_until(lambda: revision(up) > written + 1, "views are kept again", LIMIT_S)
    before = epoch(up)
    kill(up, "services.planner")
    wait_until(lambda: epoch(up) > before, "plans are kept again", LIMIT_S)
