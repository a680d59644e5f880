"""What thousands of idle connections do to running streams: gaps between tokens, the dispatcher's CPU and memory.

A broker, a monitor, a dispatcher and a worker with the demo model run as processes. This process reads the streams over
bare sockets: first alone, then while it opens the idle connections (one `GET /live` each, then nothing), then beside
them. The answers are compared: idle connections must not change a text. Needs two open files per connection, one here
and one in the dispatcher (`ulimit -Hn`).

    python -m benchmarks.idle_connections [--connections 10000] [--streams 8] [--tokens 600]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from benchmarks.harness import DEMO_MODEL, broker, cpu_s, free_port, machine, percentiles, print_table, service
from benchmarks.harness import wait_ready as wait_for

RESERVED_FILES = 256
OPENING_AT_A_TIME = 100
GET = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass(slots=True)
class Reading:
    """What one stream gave."""

    text: str = ""
    arrivals_s: list[float] = field(default_factory=list)


async def read_stream(port: int, seed: int, num_tokens: int) -> Reading:
    """Return one streamed completion of exactly this many tokens.

    Raises:
        RuntimeError: the answer is not 200, or breaks off.
    """
    body = {"model": "demo", "prompt": "Once upon a time", "seed": seed, "max_tokens": num_tokens}
    data = json.dumps({**body, "ignore_eos": True, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(data) + data)
    reading = Reading()
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.read(2000)).decode(errors="replace"))
        while (line := await reader.readline()) != b"data: [DONE]\n":
            if not line:
                raise RuntimeError("a stream broke off")
            if line.startswith(b"data: "):
                reading.arrivals_s.append(time.monotonic())
                reading.text += json.loads(line[6:])["choices"][0]["text"]
    finally:
        writer.close()
    return reading


async def open_idle(port: int, count: int) -> list[asyncio.StreamWriter]:
    """Return connections on which one request has been answered."""
    room = asyncio.Semaphore(OPENING_AT_A_TIME)

    async def open_one() -> asyncio.StreamWriter:
        async with room:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
            writer.write(GET)
            await reader.readuntil(b"}")
            return writer

    return await asyncio.gather(*(open_one() for _ in range(count)))


@dataclass
class Phase:
    """One row of the table."""

    name: str
    pid: int
    port: int
    num_streams: int
    num_tokens: int
    texts: list[str] = field(default_factory=list)

    async def run(self) -> list[str]:
        """Read all streams, and return the row."""
        cpu_before, started_s = cpu_s(self.pid), time.monotonic()
        readings = await asyncio.gather(*(read_stream(self.port, i, self.num_tokens) for i in range(self.num_streams)))
        share = (cpu_s(self.pid) - cpu_before) / (time.monotonic() - started_s)
        self.texts = [reading.text for reading in readings]
        gaps = [b - a for reading in readings for a, b in zip(reading.arrivals_s, reading.arrivals_s[1:], strict=False)]
        return [self.name, percentiles(gaps, scale=1e3), f"{max(gaps) * 1e3:.1f}", f"{100 * share:.1f}", self._memory()]

    def _memory(self) -> str:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return f"{pages * resource.getpagesize() / 2**20:.0f}"


def count_open(port: int) -> int:
    """Return the dispatcher's own count of open connections."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/cluster", timeout=10) as answer:
        return int(json.load(answer)["dispatcher"]["num_connections"])


async def measure(pid: int, port: int, chosen: argparse.Namespace) -> list[list[str]]:
    """Return the rows of the table.

    Raises:
        RuntimeError: a text changed, or the connections were not there.
    """
    phases = [
        Phase(name, pid, port, chosen.streams, chosen.tokens)
        for name in ("alone", "while they are opened", f"beside {chosen.connections} idle connections")
    ]
    await Phase("warm-up", pid, port, chosen.streams, chosen.tokens).run()
    rows = [await phases[0].run()]
    row, idle = await asyncio.gather(phases[1].run(), open_idle(port, chosen.connections))
    rows += [row, await phases[2].run()]
    num_open = await asyncio.to_thread(count_open, port)
    for writer in idle:
        writer.close()
    if num_open < chosen.connections:
        raise RuntimeError(f"only {num_open} connections were open")
    if any(phase.texts != phases[0].texts for phase in phases):
        raise RuntimeError("a text changed")
    return rows


async def main() -> None:
    """Run the measurement that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=600)
    chosen = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    port, most = free_port(), str(chosen.connections + RESERVED_FILES)
    limits = ["--max-connections", most, "--max-connections-per-address", most, "--idle-limit-s", "3600"]
    async with broker() as url:
        flags = ["--nats-url", url, "--model", str(DEMO_MODEL), "--served-model-name", "demo"]
        worker = ["--instance-id", "worker", "--memory", "512MiB", "--threads", "1", "--deterministic"]
        async with (
            service("monitor", "--nats-url", url, "--instance-id", "monitor"),
            service("worker", *flags, *worker),
            service("dispatcher", "--instance-id", "dispatcher", "--port", str(port), *flags, *limits) as dispatcher,
        ):
            await wait_for(f"http://127.0.0.1:{port}")
            rows = await measure(dispatcher.pid, port, chosen)
    print_table(
        f"{chosen.streams} streams and {chosen.connections} idle connections ({machine()})",
        ["streams", "gap, ms (p50 / p99)", "longest gap, ms", "dispatcher's CPU, %", "its memory, MiB"],
        rows,
    )


if __name__ == "__main__":
    uvloop.run(main())
