"""A cluster of real processes that a test may kill, freeze and start again one by one; nobody supervises them.

    test ── HTTP ──► dispatcher-0 ──[proxy]──► nats ◄──[proxy]── worker-0, worker-1 …, monitor, planner

Every process is known by its instance id. A proxy stands between a service and the broker only where the shape asks
for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp

from shared.subjects import Subjects
from shared.transport.nats_bus import NatsBus
from shared.transport.nats_server import accepts_connections, find_binary
from tests.support.fault_proxy import FaultProxy
from tests.support.peers import PASSWORD
from tests.support.ports import free_port

T = TypeVar("T")

ROOT: Final = Path(__file__).parents[2]
DEMO_MODEL: Final = ROOT / "demo_model" / "model"
MODEL_NAME: Final = "sluice-demo"
START_LIMIT_S: Final = 60.0
LOOK_S: Final = 0.03
NATS: Final = "nats"
WORKER_LOGIN: Final = {"SLUICE_NATS_USER": "worker", "SLUICE_NATS_PASSWORD": PASSWORD}
"""The broker lets everybody in; workers know each other by it."""

_BROKER_CONFIG: Final = """\
listen: "127.0.0.1:{port}"
max_payload: {max_payload}
max_pending: {max_pending}
ping_interval: "1s"
ping_max: 2
jetstream {{
  store_dir: {store}
  max_file_store: {max_file_store}
}}
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the cluster consists of."""

    num_workers: int = 2
    num_dispatchers: int = 1
    model: Path = DEMO_MODEL
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """More flags, by service (`worker`) or by instance id (`worker-1`)."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Of every service."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """What runs instead of `services.<service>`, by instance id."""
    proxied: tuple[str, ...] = ()
    """Instance ids that reach the broker through a proxy of their own."""
    max_payload_bytes: int = 1024 * 1024
    max_pending_bytes: int = 64 * 1024 * 1024
    """Bytes for one client at which the broker calls it a slow consumer and ends its connection."""
    max_store_bytes: int = 256 * 1024 * 1024


class Cluster:
    """The processes. Made by `running`, which ends every one of them."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.shape = shape
        self.folder = folder
        self.broker_port = free_port()
        self.http_ports = {name: free_port() for name in self.dispatchers}
        self.subjects = Subjects("default")
        self.proxies: dict[str, FaultProxy] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._frozen: set[str] = set()
        self._ending: set[str] = set()

    @property
    def workers(self) -> list[str]:
        """Instance ids of the workers."""
        return [f"worker-{index}" for index in range(self.shape.num_workers)]

    @property
    def dispatchers(self) -> list[str]:
        """Instance ids of the dispatchers."""
        return [f"dispatcher-{index}" for index in range(self.shape.num_dispatchers)]

    @property
    def services(self) -> list[str]:
        """Instance ids of all services, in the order of their start."""
        return ["monitor", "planner", *self.workers, *self.dispatchers]

    @property
    def nats_url(self) -> str:
        """The broker itself, past every proxy."""
        return f"nats://127.0.0.1:{self.broker_port}"

    def url(self, dispatcher: str = "dispatcher-0") -> str:
        """Return where the dispatcher listens."""
        return f"http://127.0.0.1:{self.http_ports[dispatcher]}"

    # -- processes

    def pid(self, name: str) -> int:
        """Return the process id of the newest process of this name."""
        return self.processes[name].pid

    def is_running(self, name: str) -> bool:
        """Return whether the process has not ended."""
        return name in self.processes and self.processes[name].poll() is None

    def start_broker(self) -> None:
        """Start the broker, on the same port and store as before, and wait until it accepts connections."""
        config = self.folder / "nats.conf"
        config.write_text(
            _BROKER_CONFIG.format(
                port=self.broker_port,
                max_payload=self.shape.max_payload_bytes,
                max_pending=self.shape.max_pending_bytes,
                max_file_store=self.shape.max_store_bytes,
                store=json.dumps(str(self.folder / "jetstream")),
            )
        )
        self._spawn(NATS, [find_binary(), "--config", str(config)], {})
        deadline_s = time.monotonic() + START_LIMIT_S
        while not accepts_connections(self.nats_url):
            assert time.monotonic() < deadline_s, self.log_of(NATS)
            time.sleep(LOOK_S)

    def start(self, name: str) -> None:
        """Start one service; it is not ready yet."""
        assert not self.is_running(name), f"{name} runs"
        self._ending.discard(name)
        service = name.split("-")[0]
        module = self.shape.modules.get(name, f"services.{service}")
        given = [*self.shape.flags.get(service, ()), *(self.shape.flags.get(name, ()) if name != service else ())]
        argv = [sys.executable, "-P", "-m", module, "--instance-id", name, "--nats-url", self._nats_url_of(name)]
        argv += ["--log-format", "json", *self._own_flags(name, service, given), *given]
        self._spawn(name, argv, (WORKER_LOGIN if service == "worker" else {}) | dict(self.shape.env))

    def _own_flags(self, name: str, service: str, given: Sequence[str]) -> list[str]:
        """Return the usual flags of a service, but for those that the shape gives."""
        flags: dict[str, str] = {}
        if service in ("worker", "dispatcher"):
            flags |= {"--model": str(self.shape.model), "--served-model-name": MODEL_NAME}
        if service == "worker":
            flags |= {"--threads": "1", "--memory": "256MiB"}
        if service == "dispatcher":
            flags |= {"--port": str(self.http_ports[name])}
        usual = [part for flag, value in flags.items() if flag not in given for part in (flag, value)]
        return [*usual, "--deterministic"] if service == "worker" else usual

    def _nats_url_of(self, name: str) -> str:
        if name not in self.shape.proxied:
            return self.nats_url
        return f"nats://127.0.0.1:{self.proxies[name].port}"

    def _spawn(self, name: str, argv: list[str], env: Mapping[str, str]) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLUICE_", "NATS_"))}
        path = os.pathsep.join(
            filter(None, [env.get("PYTHONPATH"), str(ROOT), str(ROOT / "client"), kept.get("PYTHONPATH")])
        )
        with self.log_path(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                argv,
                cwd=self.folder,
                env={**kept, "OMP_NUM_THREADS": "1", **env, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.processes[name].kill()
        self.processes[name].wait(10)
        self._frozen.discard(name)
        self._ending.discard(name)

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        self.processes[name].send_signal(signal.SIGSTOP)
        self._frozen.add(name)

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        self._frozen.discard(name)
        self.processes[name].send_signal(signal.SIGCONT)

    def terminate(self, name: str) -> None:
        """SIGTERM; the process ends when it has drained."""
        self._ending.add(name)
        self.processes[name].terminate()

    async def ended(self, name: str, limit_s: float = 20.0) -> int:
        """Return the exit code once the process has ended."""
        await until(lambda: not self.is_running(name), f"{name} has ended", limit_s)
        return self.processes[name].returncode

    def stop(self) -> None:
        """End every process, by force in the end."""
        for name in list(self._frozen):
            self.thaw(name)
        for names in (self.services, [NATS]):  # the broker last: services say goodbye
            for name in names:
                if self.is_running(name):
                    self.terminate(name)
            for name in names:
                if name in self.processes:
                    _reap(self.processes[name])

    # -- looking

    def log_path(self, name: str) -> Path:
        """Return where the process writes."""
        return self.folder / f"{name}.log"

    def log_of(self, name: str) -> str:
        """Return what the processes of this name have written so far."""
        path = self.log_path(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of the log that are events."""
        found: list[dict[str, Any]] = []
        for line in self.log_of(name).splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def told(self, event: str, *names: str) -> list[dict[str, Any]]:
        """Return the events of this name that some instances have logged; none: all workers."""
        return [each for name in names or self.workers for each in self.events(name) if each.get("event") == event]

    async def get(self, path: str, dispatcher: str = "dispatcher-0") -> tuple[int, Any]:
        """Return status and JSON of `GET path`; (0, None) if nothing answers."""
        try:
            async with http_session() as http, http.get(self.url(dispatcher) + path) as response:
                return response.status, await response.json()
        except (aiohttp.ClientError, TimeoutError):
            return 0, None

    @asynccontextmanager
    async def bus(self) -> AsyncIterator[NatsBus]:
        """Connect to the broker, past every proxy."""
        bus = await NatsBus.connect(self.nats_url, name="test")
        try:
            yield bus
        finally:
            await bus.close()

    async def dump(self, bus: NatsBus, name: str) -> dict[str, Any]:
        """Return what a worker or dispatcher says about its state."""
        subject = self.subjects.admin(name.split("-")[0], name, "dump")
        found: dict[str, Any] = json.loads(await bus.request(subject, b"", timeout_s=5))
        return found

    async def stats(self, bus: NatsBus, name: str) -> dict[str, Any]:
        """Return `$SRV.STATS` of one service."""
        subject = f"$SRV.STATS.sluice-{name.split('-')[0]}.{name}"
        found: dict[str, Any] = json.loads(await bus.request(subject, b"", timeout_s=5))
        return found

    async def wait_ready(self, names: list[str] | None = None) -> None:
        """Return when every dispatcher that runs is ready and sees the newest processes of these workers as ready."""
        names = self.workers if names is None else names

        async def ready() -> bool:
            for name in {*names, *self.dispatchers}:
                assert name not in self.processes or self.is_running(name), f"{name} ended: {self.log_of(name)[-2000:]}"
            views = [await self._ready_pids(name) for name in self.dispatchers if self.is_running(name)]
            wanted = {self.pid(name) for name in names}
            return all(wanted <= pids for pids in views)

        await until(ready, f"{names} are ready", START_LIMIT_S)

    async def _ready_pids(self, dispatcher: str) -> set[int]:
        """Return the workers that this dispatcher uses."""
        status, _ = await self.get("/ready", dispatcher)
        _, view = await self.get("/v1/cluster", dispatcher)
        if status != 200 or view is None:
            return set()
        usable = [worker for worker in view["workers"] if worker["liveness"] == "alive"]
        return {worker["report"]["pid"] for worker in usable if worker["report"]["phase"] == "ready"}

    async def restore(self) -> None:
        """Undo every fault: heal, go on, start again what has ended; return when all is ready."""
        for proxy in self.proxies.values():
            proxy.heal()
        for name in list(self._frozen):
            self.thaw(name)
        for name in self._ending:
            await self.ended(name)
        self._ending.clear()
        if not self.is_running(NATS):
            self.start_broker()
        for name in self.services:
            if not self.is_running(name):
                self.start(name)
        await self.wait_ready()


C = TypeVar("C", bound=Cluster)


def _reap(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def http_session(timeout_s: float = 10.0) -> aiohttp.ClientSession:
    """Return a session that keeps no connection."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True))


@contextmanager
def running(cluster: C, *, ready: list[str] | None = None) -> Iterator[C]:
    """Give the cluster when it is ready; show its logs if the body fails.

    Args:
        cluster: not started.
        ready: the workers that must be ready; None means all.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.stop)
        cluster.start_broker()
        for name in cluster.shape.proxied:
            cluster.proxies[name] = stack.enter_context(FaultProxy(cluster.broker_port))
        for name in cluster.services:
            cluster.start(name)
        run_apart(cluster.wait_ready(ready))
        try:
            yield cluster
        except BaseException:
            show_logs(cluster)
            raise


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Return what the coroutine returns, run on a loop in a thread of its own: also where a loop is running already."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def show_logs(cluster: Cluster) -> None:
    """Write the end of every log to stderr."""
    for name in [NATS, *cluster.services]:
        sys.stderr.write(f"--- {name}\n{cluster.log_of(name)[-1500:]}\n")


async def until(condition: Any, what: str, limit_s: float = 10.0) -> None:
    """Return when the condition (a function, or a coroutine function) holds.

    Raises:
        AssertionError: it does not within the limit.
    """
    deadline_s = time.monotonic() + limit_s
    while not await _result_of(condition):
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {what}"
        await asyncio.sleep(LOOK_S)


async def _result_of(condition: Any) -> Any:
    found = condition()
    return await found if inspect.isawaitable(found) else found
