"""What the benchmarks share: a broker and services as processes, CPU time, a frugal SSE reader, tables."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from cli.cluster.checks import find_port
from shared.transport.nats_server import EmbeddedNats

ROOT = Path(__file__).parents[1]
R = TypeVar("R")
DEMO_MODEL = ROOT / "demo_model" / "model"


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used so far, in seconds, with the resolution of the scheduler (ns)."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def num_open_files(pid: int) -> int:
    """Return how many descriptors a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that was free a moment ago, and is none that an outgoing connection may take."""
    return find_port("127.0.0.1", 0)


def end_children_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that what it has started ends with it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@asynccontextmanager
async def service(name: str, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `python -m services.<name>`; stop it with SIGTERM at the end."""
    end_children_on_sigterm()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"services.{name}",
        "--log-level",
        "warning",
        *flags,
        cwd=ROOT,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


@asynccontextmanager
async def broker() -> AsyncIterator[str]:
    """Run a nats-server of its own; gives its URL."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedNats()
        url = await asyncio.to_thread(server.start, Path(folder))
        try:
            yield url
        finally:
            await asyncio.to_thread(server.stop)


async def wait_ready(base_url: str, *, limit_s: float = 60.0) -> None:
    """Return when `GET /ready` answers 200.

    Raises:
        TimeoutError: it did not within the limit.
    """

    def ready() -> bool:
        try:
            with urllib.request.urlopen(f"{base_url}/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    async with asyncio.timeout(limit_s):
        while not await asyncio.to_thread(ready):
            await asyncio.sleep(0.1)


@asynccontextmanager
async def cluster(
    nats_url: str, workers: Mapping[str, Sequence[str]], dispatcher: Sequence[str] = ()
) -> AsyncIterator[tuple[int, dict[str, asyncio.subprocess.Process]]]:
    """Run a monitor, workers and a dispatcher with the demo model, called `model`; gives its port, and all by ids.

    Args:
        nats_url: of a running broker.
        workers: flags of each, by its id.
        dispatcher: further flags.
    """
    port, found = free_port(), dict[str, asyncio.subprocess.Process]()
    model = ["--model", str(DEMO_MODEL), "--served-model-name", "model"]
    async with AsyncExitStack() as stack:
        for kind, name, flags in (
            ("monitor", "monitor", []),
            *(("worker", name, [*model, *own]) for name, own in workers.items()),
            ("dispatcher", "dispatcher", [*model, "--port", str(port), *dispatcher]),
        ):
            process = service(kind, "--instance-id", name, "--nats-url", nats_url, *flags)
            found[name] = await stack.enter_async_context(process)
        await wait_ready(f"http://127.0.0.1:{port}")
        yield port, found


@dataclass(slots=True)
class SseReading:
    """What came of one stream."""

    events: list[bytes] = field(default_factory=list)
    """Every line of data, as it came."""
    arrivals_s: list[float] = field(default_factory=list)
    """`time.monotonic()` of each chunk with content."""
    done: bool = False

    @property
    def text(self) -> str:
        """What was said."""
        return "".join(json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in self.events)


async def read_stream(
    port: int, prompt: str | list[int], num_tokens: int, *, times: list[float] | None = None, **fields: object
) -> SseReading:
    """Ask for a streamed completion of so many tokens over a bare socket; note when each chunk of content comes.

    `times` is the list that these go into as they come, if they are looked at meanwhile. With `messages` it is a chat.

    Raises:
        RuntimeError: the answer is not 200.
    """
    body = {"model": "model", "max_tokens": num_tokens, "ignore_eos": True, "stream": True, **fields}
    is_chat = "messages" in body
    body |= {} if is_chat else {"prompt": prompt}
    payload, reading = json.dumps(body).encode(), SseReading(arrivals_s=[] if times is None else times)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    path = b"/v1/chat/completions" if is_chat else b"/v1/completions"
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" % path
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.read(2000)).decode(errors="replace"))
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                reading.done = True
                break
            if line.startswith(b"data: {"):
                reading.events.append(line)
                if b'"finish_reason":null' in line.replace(b" ", b""):
                    reading.arrivals_s.append(time.monotonic())
    finally:
        writer.close()
    return reading


class BestTimes:
    """The least time of each action.

    Args:
        settle: called before and after each; returns when everything that was begun has ended.
    """

    def __init__(self, settle: Callable[[], object] = lambda: None) -> None:
        self._settle = settle
        self.best_s: dict[str, float] = {}
        """By name, seconds."""

    def of(self, name: str, action: Callable[[], R]) -> R:
        """Act, and keep the time if it is the shortest of that name."""
        self._settle()
        began_s = time.perf_counter()
        result = action()
        self._settle()
        self.note(name, time.perf_counter() - began_s)
        return result

    def note(self, name: str, taken_s: float) -> None:
        """Keep a time if it is the shortest of that name."""
        self.best_s[name] = min(taken_s, self.best_s.get(name, taken_s))

    def texts(self, *names: str, scale: float = 1e3) -> list[str]:
        """Return the times of these names, or of all in the order in which they came, scaled."""
        return [f"{self.best_s[name] * scale:.2f}" for name in names or self.best_s]


def percentiles(values: Sequence[float], *, scale: float = 1.0) -> str:
    """Return `p50 / p99` of the values, scaled, with two digits."""
    p50, p99 = np.percentile(np.asarray(values), [50, 99]) * scale
    return f"{p50:.2f} / {p99:.2f}"


def machine() -> str:
    """Return one line about where the figures were taken."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return f"{os.cpu_count()} cores, {model}, Python {platform.python_version()}"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table, as the results pages show it."""
    print(f"\n{title}\n")
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)
