"""What runs after `docker-compose up`, on a real engine (`make test-compose`): its rights, its answers, and its losses.

The texts under load are compared with those of the same requests undisturbed, so the workers must be deterministic.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_readers import read_all, texts_of
from tests.support.engine_api import Engine
from tests.support.fault_streams import longest_gap_s
from tests.support.processes import wait_until

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

URL = "http://127.0.0.1:8000"
START_LIMIT_S = 240.0
LASTING = {"nats", "buckets", "monitor", "planner", "worker-1", "worker-2", "dispatcher"}
BUCKETS = ["sluice_default_owners", "sluice_default_plan", "sluice_default_view"]
DISK_BYTES = 8 << 20
FILLER = "filler"
PAUSE_S = 5.0
"""Longer than the lease, so that the paused worker's requests are taken elsewhere."""


@pytest.fixture(scope="module")
def engine() -> Engine:
    found = Engine(os.environ.get("COMPOSE_PROJECT_NAME", "sluice"))
    wait_until(lambda: num_ready() == 2, "both workers are ready", START_LIMIT_S)
    return found


def get(path: str) -> Any:
    with urllib.request.urlopen(URL + path, timeout=10) as answer:
        return json.load(answer)


def num_ready() -> int:
    return len(reports())


def reports() -> dict[str, dict[str, Any]]:
    """What the workers that are ready say, by their ids."""
    try:
        workers = get("/v1/cluster")["workers"]
    except (OSError, ValueError):
        return {}
    ready = [one["report"] for one in workers if one["liveness"] == "alive" and one["report"]["phase"] == "ready"]
    return {report["worker_id"]: report for report in ready}


def fetches(report: dict[str, Any]) -> dict[str, int]:
    """What became of the requests that were to come to a worker with their KV."""
    return {each["outcome"]: each["count"] for each in report["migration"]["fetches_total"]}


def id_of(engine: Engine, name: str) -> str:
    """A worker is known by its container."""
    return engine.containers()[name][:12]


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[str]:
    """The texts of the undisturbed run."""
    assert engine.containers()
    texts = texts_of(read_all([URL], count=16))
    assert len(set(texts)) == len(texts)
    return texts


@pytest.mark.parametrize("name", sorted(LASTING))
def test_every_container_becomes_healthy_with_few_rights(engine: Engine, name: str) -> None:
    wait_until(lambda: engine.inspect(name)["State"]["Health"]["Status"] == "healthy", f"{name} is healthy", 60)
    found = engine.inspect(name)
    assert found["Config"]["User"] == "65534:65534"
    host = found["HostConfig"]
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert not host["Privileged"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    published = [bind for binds in (host["PortBindings"] or {}).values() for bind in binds]
    assert published == ([{"HostIp": "127.0.0.1", "HostPort": "8000"}] if name == "dispatcher" else [])
    image = {"nats": "broker", "worker-1": "worker", "worker-2": "worker"}.get(name, "service")
    assert found["Config"]["Image"] == f"sluice-{image}:latest"
    may_write = {"worker-1": {"/costs"}, "worker-2": {"/costs"}, "dispatcher": {"/api-keys-kept"}}.get(name, {"/data"})
    assert {mount["Destination"] for mount in found["Mounts"] if mount["RW"]} <= may_write


def test_the_setup_has_done_its_work_and_nobody_sees_more_than_its_own_password(engine: Engine) -> None:
    state = engine.inspect("setup")["State"]
    assert (state["Status"], state["ExitCode"]) == ("exited", 0)
    for name in sorted(LASTING - {"nats"}):
        code, output = engine.run(name, "python", "-c", "import os; print(sorted(os.listdir('/keys')))")
        assert code == 0
        keys = ("dispatcher", "monitor", "planner", "worker", "nats", "setup", "operator")
        listed = [key for key in keys if f"'{key}'" in output]
        readable = [key for key in listed if engine.run(name, "ls", f"/keys/{key}")[1]]
        assert readable == ["setup" if name == "buckets" else name.split("-")[0]]


@pytest.mark.parametrize("name", ["buckets", "dispatcher", "monitor", "planner"])
def test_images_without_a_model_have_no_torch(engine: Engine, name: str) -> None:
    code, output = engine.run(name, "python", "-c", "import importlib.util as u; print(u.find_spec('torch'))")
    assert (code, output) == (0, "None")


def test_the_workers_image_has_torch_for_cpus_and_no_package_of_nvidias(engine: Engine) -> None:
    names = "sorted(d.metadata['Name'].lower() for d in importlib.metadata.distributions())"
    code, output = engine.run("worker-1", "python", "-c", f"import importlib.metadata; print({names})")
    assert code == 0
    assert "'torch'" in output
    assert not [name for name in ("nvidia", "cuda", "triton") if f"'{name}" in output]
    kernels = {worker["report"]["kernels"] for worker in get("/v1/cluster")["workers"]}
    assert all(name.startswith("native") for name in kernels), kernels


@pytest.mark.parametrize(("headers", "status"), [({}, 200), ({"Host": "evil.example"}, 403)])
def test_another_container_asks_by_name_and_by_a_name_that_leads_here(
    engine: Engine, headers: dict[str, str], status: int
) -> None:
    ask = f"c.request('GET', '/v1/models', headers={headers}); print(c.getresponse().status)"
    program = f"import http.client; c = http.client.HTTPConnection('dispatcher', 8000, timeout=10); {ask}"
    assert engine.run("monitor", "python", "-c", program) == (0, str(status))


def test_operators_can_look_inside(engine: Engine) -> None:
    """With the rights of the container they are in: a dispatcher may ask a worker, and nobody may list inboxes."""
    code, output = engine.run("dispatcher", "python", "-m", "cli.main", "tap", "_INBOX.>", "--count", "1")
    assert code == 1
    assert "refuses this process a subject" in output


def test_a_paused_worker_is_a_pause_for_its_readers_and_no_more(engine: Engine, expected: list[str]) -> None:
    def pause() -> None:
        engine.act("pause", "worker-1")
        try:
            time.sleep(PAUSE_S)
        finally:
            engine.act("unpause", "worker-1")

    readers = read_all([URL], pause, count=16)
    assert texts_of(readers) == expected
    assert 1.0 < longest_gap_s(readers) < 30.0, "some reader was of the paused worker"
    wait_until(lambda: num_ready() == 2, "the paused worker is back", 60)


def test_a_killed_worker_is_a_pause_for_its_readers_and_no_more(engine: Engine, expected: list[str]) -> None:
    readers = read_all([URL], lambda: engine.act("kill", "worker-2"), count=16)
    assert texts_of(readers) == expected
    assert longest_gap_s(readers) < 30.0
    engine.act("start", "worker-2")
    wait_until(lambda: num_ready() == 2, "the killed worker is back", 120)
    assert texts_of(read_all([URL], count=16)) == expected


def test_a_worker_is_healthy_once_it_serves_and_keeps_its_id_over_a_restart(engine: Engine) -> None:
    told = engine.compose("logs", "--no-color", "monitor").count("worker_restarted")
    engine.act("kill", "worker-2")
    engine.act("start", "worker-2")
    assert not is_healthy(engine, "worker-2"), "it loads its model"
    wait_until(partial(is_healthy, engine, "worker-2"), "it is healthy", 120)
    since = engine.inspect("worker-2")["State"]["StartedAt"]
    log = engine.ask("GET", f"/containers/{engine.containers()['worker-2']}/logs?stderr=1&since={unix_s(since)}")
    assert b"worker_ready" in log
    wait_until(lambda: num_ready() == 2, "it is ready", 60)
    assert set(reports()) == {id_of(engine, "worker-1"), id_of(engine, "worker-2")}
    assert engine.compose("logs", "--no-color", "monitor").count("worker_restarted") == told + 1


def test_a_dispatcher_that_cannot_answer_is_unhealthy_and_goes_on(engine: Engine) -> None:
    before = engine.inspect("dispatcher")["State"]["StartedAt"]
    for name in ("worker-1", "worker-2"):
        engine.act("pause", name)
    try:
        wait_until(lambda: health(engine, "dispatcher") == "unhealthy", "it is unhealthy", 60)
    finally:
        for name in ("worker-1", "worker-2"):
            engine.act("unpause", name)
    wait_until(partial(is_healthy, engine, "dispatcher"), "it is healthy again", 60)
    found = engine.inspect("dispatcher")
    assert (found["State"]["StartedAt"], found["RestartCount"]) == (before, 0)


def test_workers_are_added_and_taken_away_while_it_runs(engine: Engine, expected: list[str]) -> None:
    """While the third one goes it is asked again and again: what runs there goes on at the others."""
    scale = ("up", "-d", "--no-build", "--no-recreate", "--scale")
    engine.compose(*scale, "worker=3")
    wait_until(lambda: num_ready() == 3, "the third is ready", 120)
    third = id_of(engine, "worker-3")
    assert third in reports()
    assert texts_of(read_all([URL], count=16)) == expected
    assert f'"worker": "{third}"' in engine.compose("logs", "--no-color", "dispatcher"), "it has served some"
    with ThreadPoolExecutor() as threads:
        scaling = threads.submit(engine.compose, *scale, "worker=2")
        while not scaling.done():
            assert texts_of(read_all([URL], count=16)) == expected
        scaling.result()
    assert set(reports()) == {id_of(engine, "worker-1"), id_of(engine, "worker-2")}
    assert "worker-3" not in engine.containers()


@pytest.fixture
def address() -> str:
    """An address of this machine that is not its own alone."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


def test_another_address_is_published_with_keys_only(engine: Engine, address: str) -> None:
    url = f"http://{address}:8017"
    place = {"SLUICE_ADDRESS": address, "SLUICE_PORT": "8017"}
    keys = ("run", "--rm", "-T", "operator", "keys")
    create = (*keys, "create", "--tenant", "me", "--scopes", "infer,metrics", "--file", "/api-keys/keys.toml")
    try:
        engine.compose("up", "-d", "--no-build", "dispatcher", **place)
        wait_until(lambda: "SLUICE_API_KEYS_FILE" in engine.compose("logs", "dispatcher"), "it says what to do", 60)
        assert f"{address} can be reached from other machines" in engine.compose("logs", "dispatcher")
        with pytest.raises(OSError, match=r"refused|reset|Remote end closed"):
            status_of(f"{url}/live")
        key, other = (engine.compose(*create).strip() for _ in range(2))
        engine.compose("up", "-d", "--no-build", "dispatcher", SLUICE_API_KEYS_FILE="/api-keys/keys.toml", **place)
        wait_until(lambda: is_answered(f"{url}/ready"), "the API answers", 60)
        assert [status_of(f"{url}/v1/models", each) for each in ("", key, other)] == [401, 200, 200]
        engine.compose(*keys, "revoke", key, "--file", "/api-keys/keys.toml")
        wait_until(lambda: status_of(f"{url}/v1/models", key) == 401, "the key is taken back", 30)
        assert status_of(f"{url}/v1/models", other) == 200
    finally:
        engine.compose("up", "-d", "--no-build", "dispatcher")
    wait_until(lambda: num_ready() == 2, "it is as it was", 60)


def status_of(url: str, key: str = "") -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def is_answered(url: str) -> bool:
    try:
        return status_of(url) == 200
    except OSError:
        return False


def unix_s(instant: str) -> int:
    """Seconds since 1970 of what the engine writes, with nanoseconds."""
    return int(datetime.fromisoformat(instant.partition(".")[0] + "+00:00").timestamp())


def test_a_stopped_worker_gives_its_requests_to_the_other_container_with_their_kv(
    engine: Engine, expected: list[str]
) -> None:
    try:
        readers = read_all([URL], lambda: engine.act("stop", "worker-2"), count=16)
        assert texts_of(readers) == expected
        moved = fetches(reports()[id_of(engine, "worker-1")])
        assert moved.get("moved", 0) > 0
        # lost: a worker that has nothing left stops, and with it the link of who asks for what has just ended there
        assert set(moved) <= {"moved", "gone", "lost"}
    finally:
        engine.act("start", "worker-2")
    wait_until(lambda: num_ready() == 2, "the stopped worker is back", 120)


def test_a_restarted_broker_is_a_pause_for_all_readers_and_no_more(engine: Engine, expected: list[str]) -> None:
    def restart() -> None:
        engine.act("kill", "nats")
        engine.act("start", "nats")

    assert texts_of(read_all([URL], restart, count=16)) == expected
    wait_until(lambda: num_ready() == 2, "the workers are back", 60)


def test_a_broker_that_lost_its_volume_gets_its_buckets_again(engine: Engine, expected: list[str]) -> None:
    engine.act("kill", "nats")
    empty_volume(engine)
    engine.act("start", "nats")
    wait_until(lambda: num_ready() == 2, "the workers are back", 60)
    assert texts_of(read_all([URL], count=16)) == expected
    assert has_buckets(engine)


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is mounted")
def test_a_disk_that_is_full_for_a_while_ends_nothing(engine: Engine, expected: list[str]) -> None:
    """The planner is killed meanwhile; once there is room the broker starts anew by itself."""
    with small_disk(engine) as disk:
        wait_until(lambda: num_ready() == 2 and has_buckets(engine), "all is whole on the small disk", 60)
        readers = read_all([URL], lambda: fill(engine, disk), count=16)
        assert texts_of(readers) == expected
        engine.act("kill", "planner")
        engine.act("start", "planner")
        assert not is_healthy(engine, "nats")
        assert texts_of(read_all([URL], count=16)) == expected, "what is published is enough for requests"
        (disk / FILLER).unlink()
        for name in ("nats", "planner"):
            wait_until(partial(is_healthy, engine, name), f"{name} is healthy", 120)
        assert texts_of(read_all([URL], count=16)) == expected
        assert has_buckets(engine)


def has_buckets(engine: Engine) -> bool:
    code, output = engine.run("buckets", "python", "-c", LIST_BUCKETS)
    return code == 0 and output.split()[-3:] == BUCKETS


def health(engine: Engine, name: str) -> str:
    return str(engine.inspect(name)["State"]["Health"]["Status"])


def is_healthy(engine: Engine, name: str) -> bool:
    return health(engine, name) == "healthy"


@contextmanager
def small_disk(engine: Engine) -> Iterator[Path]:
    """Give the broker an empty disk of a few MiB for a while: its folder on this machine."""
    (mount,) = [one for one in engine.inspect("nats")["Mounts"] if one["Destination"] == "/data"]
    engine.act("kill", "nats")
    options = f"size={DISK_BYTES},uid=65534,gid=65534,mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", mount["Source"]], check=True)
    try:
        engine.act("start", "nats")
        yield Path(mount["Source"])
    finally:
        engine.act("kill", "nats")
        subprocess.run(["umount", mount["Source"]], check=True)
        engine.act("start", "nats")


def fill(engine: Engine, disk: Path) -> None:
    """Leave no room, and return when the broker has missed it: a view is written each second."""
    with suppress(OSError), (disk / FILLER).open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    wait_until(lambda: health(engine, "nats") == "unhealthy", "the broker lacks its store", 60)


LIST_BUCKETS = """
import asyncio
from shared.subjects import Subjects
from shared.transport.nats_bus import NatsBus

async def main():
    login = ("setup", open("/keys/setup/password").readline().strip())
    bus = await NatsBus.connect("nats://nats:4222", name="test", inbox_prefix="_INBOX.setup.test", credentials=login)
    for bucket in sorted(Subjects().buckets()):
        answer = await bus.request(f"$JS.API.STREAM.INFO.KV_{bucket}", b"", timeout_s=5)
        print(bucket if b'"config"' in answer else answer)
    await bus.close()

asyncio.run(main())
"""


def empty_volume(engine: Engine) -> None:
    """Remove all that the broker has stored, in a container made for it: the broker's own has no shell."""
    (volume,) = [mount["Name"] for mount in engine.inspect("nats")["Mounts"] if mount["Destination"] == "/data"]
    host = {"Binds": [f"{volume}:/data"], "NetworkMode": "none"}
    command = {
        "Image": engine.inspect("setup")["Image"],
        "Entrypoint": ["sh", "-c", "rm -rf /data/*"],
        "HostConfig": host,
    }
    made = engine.ask("POST", "/containers/create", command)["Id"]
    try:
        engine.ask("POST", f"/containers/{made}/start")
        assert engine.ask("POST", f"/containers/{made}/wait")["StatusCode"] == 0
    finally:
        engine.ask("DELETE", f"/containers/{made}?force=1")
