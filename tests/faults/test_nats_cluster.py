"""Several hosts: three NATS servers as `sluice nats-config` describes them, two dispatchers, and one server that dies.

Each "host" is an address of the loopback network, so that the ports are those of a real deployment.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from cli.nats_config import write_nats_config
from shared.subjects import Subjects
from shared.transport.bus import BusTimeoutError
from shared.transport.nats_bus import NatsBus
from shared.transport.nats_config import BrokerConfig
from shared.transport.nats_roles import BrokerRole
from shared.transport.nats_server import accepts_connections, find_binary
from tests.support.chat_readers import read_all, texts_of
from tests.support.cluster import ROOT, Cluster, cluster
from tests.support.processes import sluice, wait_until
from tests.support.raw_nats import RawNats

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

NETWORK = f"127.{64 + os.getpid() % 128}.{os.getpid() // 128 % 256}"
"""Addresses that no other run uses now."""
HOSTS = {name: f"{NETWORK}.{number}" for number, name in enumerate("abc", start=1)}
URLS = {name: f"nats://{host}:4222" for name, host in HOSTS.items()}


NUM_TOKENS = 400


class Servers:
    """The three servers; each can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        log = (self._folder / f"{name}.log").open("ab")
        with log:
            # each has a store of its own: the relative path of the configuration, seen from its own folder
            place = self._folder / name
            place.mkdir(exist_ok=True)
            command = [find_binary(), "-c", str(self._folder / "nats" / f"{name}.conf")]
            self.processes[name] = subprocess.Popen(command, cwd=place, stdout=log, stderr=log)
        wait_until(lambda: accepts_connections(URLS[name]), f"server {name} listens")

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def password(self, role: BrokerRole) -> str:
        return (self._folder / role / "password").read_text().strip()

    def env(self) -> dict[str, str]:
        """What the processes of a cluster over these servers are told."""
        files = {role: str(self._folder / role / "password") for role in BrokerRole}
        env = {"NATS_URL": ",".join(URLS.values()), "SLUICE_NATS_REPLICAS": "3"}
        env |= {"SLUICE_NATS_USER": BrokerRole.OPERATOR.value, "SLUICE_NATS_PASSWORD_FILE": files[BrokerRole.OPERATOR]}
        for role in (BrokerRole.MONITOR, BrokerRole.PLANNER, BrokerRole.WORKER, BrokerRole.DISPATCHER):
            env[f"SLUICE_{role.upper()}_NATS_USER"] = role.value
            env[f"SLUICE_{role.upper()}_NATS_PASSWORD_FILE"] = files[role]
        return env


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("nats")
    write_nats_config(folder, BrokerConfig("0.0.0.0:4222", "store"), tuple(HOSTS.items()))
    found = Servers(folder)
    try:
        for name in HOSTS:
            found.start(name)
        setup = {"SLUICE_NATS_USER": "setup", "SLUICE_NATS_PASSWORD_FILE": str(folder / "setup" / "password")}
        done = sluice("nats-setup", env={**os.environ, **found.env(), **setup})
        assert (done.returncode, done.stdout.split()) == (0, list(Subjects().buckets())), done.stderr
        yield found
    finally:
        for process in found.processes.values():
            process.kill()
            process.wait()


@contextmanager
def second_dispatcher(servers: Servers, first: Cluster) -> Iterator[str]:
    """Another dispatcher of the same cluster, by hand; gives its URL."""
    url = f"http://{HOSTS['b']}:8000"
    flags = ["--instance-id", "dispatcher-1", "--host", HOSTS["b"], "--model", str(ROOT / "demo_model" / "model")]
    name = first.get("/v1/models")["data"][0]["id"]
    command = [sys.executable, "-m", "services.dispatcher", *flags, "--served-model-name", name]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **servers.env()}, stderr=subprocess.DEVNULL)
    other = Cluster(process, url, "", {}, first.log)  # type: ignore[arg-type]  # only its `get` is used
    try:
        wait_until(lambda: _is_ready(other), "the second dispatcher is ready", 60)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _is_ready(dispatcher: Cluster) -> bool:
    try:
        dispatcher.get("/ready")
    except OSError:
        return False
    return True


def test_one_of_three_servers_dies_and_comes_back_and_no_reader_notices(servers: Servers) -> None:
    flags = ("--workers", "2", "--deterministic", "--memory", "256MiB")
    with ExitStack() as stack:
        first = stack.enter_context(cluster(*flags, env=servers.env()))
        urls = [first.url, stack.enter_context(second_dispatcher(servers, first))]
        expected = texts_of(read_all(urls, max_tokens=NUM_TOKENS))
        for name in HOSTS:
            readers = read_all(urls, partial(servers.kill, name), max_tokens=NUM_TOKENS)
            assert texts_of(readers) == expected, f"without {name}"
            servers.start(name)
        wait_until(lambda: _is_ready(first), "the first dispatcher is ready", 30)
        assert texts_of(read_all(urls, max_tokens=NUM_TOKENS)) == expected


async def test_every_bucket_has_three_copies(servers: Servers) -> None:
    """So that it outlives any one server. Runs after the cluster made its buckets."""
    bus = await NatsBus.connect(
        URLS["c"], name="test", credentials=(BrokerRole.OPERATOR, servers.password(BrokerRole.OPERATOR))
    )
    try:
        for bucket in (Subjects().view_bucket(), Subjects().plan_bucket()):
            answer = await _stream_info(bus, f"KV_{bucket}")
            assert b'"num_replicas":3' in answer.replace(b" ", b"")
    finally:
        await bus.close()


async def _stream_info(bus: NatsBus, stream: str) -> bytes:
    """Return what the leader of a stream says of it; after a death the others may still be electing one."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await bus.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout_s=2)
            except BusTimeoutError:
                continue


def test_the_servers_let_nobody_in_without_a_password_neither_as_client_nor_as_server(servers: Servers) -> None:
    assert servers.password(BrokerRole.WORKER)
    with RawNats(URLS["a"]) as raw:
        raw.settle()
        assert raw.closed
    with RawNats(f"nats://{HOSTS['a']}:6222") as raw:
        raw.settle()
        assert raw.closed
        assert not any("INFO" in error for error in raw.errors)
