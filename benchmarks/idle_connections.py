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

import numpy as np
import uvloop

from benchmarks.harness import broker, cluster, cpu_s, machine, percentiles, print_table, read_stream, rss_bytes

RESERVED_FILES = 256
OPENING_AT_A_TIME = 100
PROMPT = "Once upon a time"
GET = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"


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
        asking = (read_stream(self.port, PROMPT, self.num_tokens, seed=seed) for seed in range(self.num_streams))
        readings = await asyncio.gather(*asking)
        share = (cpu_s(self.pid) - cpu_before) / (time.monotonic() - started_s)
        if not all(reading.done for reading in readings):
            raise RuntimeError("a stream broke off")
        self.texts = [reading.text for reading in readings]
        gaps = np.concatenate([np.diff(reading.arrivals_s) for reading in readings]).tolist()
        memory = f"{rss_bytes(self.pid) / 2**20:.0f}"
        return [self.name, percentiles(gaps, scale=1e3), f"{max(gaps) * 1e3:.1f}", f"{100 * share:.1f}", memory]


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
    most = str(chosen.connections + RESERVED_FILES)
    limits = ["--max-connections", most, "--max-connections-per-address", most, "--idle-limit-s", "3600"]
    worker = ["--memory", "512MiB", "--threads", "1", "--deterministic"]
    async with broker() as url, cluster(url, {"worker": worker}, limits) as (port, processes):
        rows = await measure(processes["dispatcher"].pid, port, chosen)
    print_table(
        f"{chosen.streams} streams and {chosen.connections} idle connections ({machine()})",
        ["streams", "gap, ms (p50 / p99)", "longest gap, ms", "dispatcher's CPU, %", "its memory, MiB"],
        rows,
    )


if __name__ == "__main__":
    uvloop.run(main())
