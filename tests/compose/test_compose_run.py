"""What runs after `docker-compose up`, on a real engine (`make test-compose`): its rights, its answers, and its losses.

The texts under load are compared with those of the same requests undisturbed, so the workers must be deterministic.
"""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.engine_api import Engine
from tests.support.processes import wait_until

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

URL = "http://127.0.0.1:8000"
START_LIMIT_S = 240.0
LASTING = {"nats", "monitor", "planner", "worker-0", "worker-1", "dispatcher"}
PROMPTS = [f"Tell me a story about {who}." for who in ("a fox", "a hare", "the sea", "a king", "snow", "a mill")]
MAX_TOKENS = 160
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
    try:
        workers = get("/v1/cluster")["workers"]
    except (OSError, ValueError):
        return 0
    return sum(one["liveness"] == "alive" and one["report"]["phase"] == "ready" for one in workers)


@dataclass
class Reader:
    """One streamed chat; runs in a thread of its own."""

    prompt: str
    index: int
    text: str = ""
    finish: str = ""
    error: str = ""
    num_chunks: int = 0
    longest_gap_s: float = 0.0
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name=f"reader {self.index}")
        self.thread.start()

    def _run(self) -> None:
        try:
            self._read()
        except (OSError, ValueError) as error:
            self.error = repr(error)

    def _read(self) -> None:
        body = {
            "model": get("/v1/models")["data"][0]["id"],
            "stream": True,
            "max_tokens": MAX_TOKENS,
            "min_tokens": 120,
        }
        body |= {"messages": [{"role": "user", "content": self.prompt}], "temperature": 0.8, "seed": self.index}
        request = urllib.request.Request(
            f"{URL}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        last_s = time.monotonic()
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                self.longest_gap_s = max(self.longest_gap_s, time.monotonic() - last_s)
                last_s = time.monotonic()
                self._take(json.loads(line[6:]))

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = chunk["error"]["message"]
            return
        self.num_chunks += 1
        for choice in chunk["choices"]:
            self.text += choice["delta"].get("content") or ""
            self.finish = choice["finish_reason"] or self.finish


def read_all(disturb: Callable[[list[Reader]], None] | None = None) -> list[Reader]:
    """Stream every prompt at once, disturb, and return the readers when all have ended."""
    readers = [Reader(prompt, index) for index, prompt in enumerate(PROMPTS)]
    try:
        if disturb is not None:
            wait_until(lambda: all(reader.num_chunks > 8 or reader.finish for reader in readers), "all stream", 60)
            disturb(readers)
    finally:
        for reader in readers:
            reader.thread.join(180)
    return readers


def check_equal(readers: list[Reader], expected: list[str]) -> None:
    assert [reader.error for reader in readers] == [""] * len(readers)
    assert all(reader.finish in ("stop", "length") for reader in readers)
    assert [reader.text for reader in readers] == expected


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[str]:
    """The texts of the undisturbed run."""
    assert engine.containers()
    readers = read_all()
    assert [reader.error for reader in readers] == [""] * len(readers)
    texts = [reader.text for reader in readers]
    assert len(set(texts)) == len(texts)
    assert min(map(len, texts)) > 100
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
    assert {mount["Destination"] for mount in found["Mounts"] if mount["RW"]} <= {"/data"}


def test_the_setup_has_done_its_work_and_nobody_sees_more_than_its_own_password(engine: Engine) -> None:
    state = engine.inspect("setup")["State"]
    assert (state["Status"], state["ExitCode"]) == ("exited", 0)
    for name in sorted(LASTING - {"nats"}):
        code, output = engine.run(name, "python", "-c", "import os; print(sorted(os.listdir('/keys')))")
        assert code == 0
        listed = [key for key in ("dispatcher", "monitor", "planner", "worker", "nats") if f"'{key}'" in output]
        readable = [key for key in listed if engine.run(name, "ls", f"/keys/{key}")[1]]
        assert readable == [name.split("-")[0]]


@pytest.mark.parametrize("name", ["dispatcher", "monitor", "planner"])
def test_images_without_a_model_have_no_torch(engine: Engine, name: str) -> None:
    code, output = engine.run(name, "python", "-c", "import importlib.util as u; print(u.find_spec('torch'))")
    assert (code, output) == (0, "None")


def test_the_workers_image_has_torch_for_cpus_and_no_package_of_nvidias(engine: Engine) -> None:
    names = "sorted(d.metadata['Name'].lower() for d in importlib.metadata.distributions())"
    code, output = engine.run("worker-0", "python", "-c", f"import importlib.metadata; print({names})")
    assert code == 0
    assert "'torch'" in output
    assert not [name for name in ("nvidia", "cuda", "triton") if f"'{name}" in output]
    kernels = {worker["report"]["kernels"] for worker in get("/v1/cluster")["workers"]}
    assert all(name.startswith("native") for name in kernels), kernels


def test_operators_can_look_inside(engine: Engine) -> None:
    """With the rights of the container they are in: a dispatcher may ask a worker, and nobody may list inboxes."""
    code, output = engine.run("dispatcher", "python", "-m", "cli.main", "tap", "_INBOX.>", "--count", "1")
    assert code == 1
    assert "refuses this process a subject" in output


def test_a_streamed_answer(expected: list[str]) -> None:
    assert all(expected)


def test_a_paused_worker_is_not_noticed_by_any_reader(engine: Engine, expected: list[str]) -> None:
    def pause(readers: list[Reader]) -> None:
        del readers
        engine.act("pause", "worker-0")
        try:
            time.sleep(PAUSE_S)
        finally:
            engine.act("unpause", "worker-0")

    check_equal(read_all(pause), expected)
    wait_until(lambda: num_ready() == 2, "the paused worker is back", 60)


def test_a_killed_worker_is_not_noticed_by_any_reader(engine: Engine, expected: list[str]) -> None:
    check_equal(read_all(lambda _readers: engine.act("kill", "worker-1")), expected)
    engine.act("start", "worker-1")
    wait_until(lambda: num_ready() == 2, "the killed worker is back", 120)
    check_equal(read_all(), expected)


def test_a_restarted_broker_is_not_noticed_by_any_reader(engine: Engine, expected: list[str]) -> None:
    def restart(readers: list[Reader]) -> None:
        del readers
        engine.act("kill", "nats")
        engine.act("start", "nats")

    check_equal(read_all(restart), expected)
    wait_until(lambda: num_ready() == 2, "the workers are back", 60)
