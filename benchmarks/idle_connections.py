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

import numpy as np
import uvloop

from benchmarks.harness import broker, cluster, cpu_s, machine, percentiles, print_table, read_stream, rss_bytes

RESERVED_FILES = 256
OPENING_AT_A_TIME = 100
PROMPT = "Once upon a time"
GET = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"


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


def count_open(port: int) -> int:
    """Return the dispatcher's own count of open connections."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/cluster", timeout=10) as answer:
        return int(json.load(answer)["dispatcher"]["num_connections"])


async def measure(pid: int, port: int, chosen: argparse.Namespace) -> list[list[str]]:
    """Return the rows of the table.

    Raises:
        RuntimeError: a text changed, or the connections were not there.
    """
    texts: list[list[str]] = []

    async def row_of(name: str) -> list[str]:
        cpu_before, started_s = cpu_s(pid), time.monotonic()
        asking = (read_stream(port, PROMPT, chosen.tokens, seed=seed) for seed in range(chosen.streams))
        readings = await asyncio.gather(*asking)
        share = (cpu_s(pid) - cpu_before) / (time.monotonic() - started_s)
        if not all(reading.done for reading in readings):
            raise RuntimeError("a stream broke off")
        texts.append([reading.text for reading in readings])
        gaps = np.concatenate([np.diff(reading.arrivals_s) for reading in readings]).tolist()
        memory = f"{rss_bytes(pid) / 2**20:.0f}"
        return [name, percentiles(gaps, scale=1e3), f"{max(gaps) * 1e3:.1f}", f"{100 * share:.1f}", memory]

    await row_of("warm-up")
    alone = await row_of("alone")
    meanwhile, idle = await asyncio.gather(row_of("while they are opened"), open_idle(port, chosen.connections))
    beside = await row_of(f"beside {chosen.connections} idle connections")
    num_open = await asyncio.to_thread(count_open, port)
    for writer in idle:
        writer.close()
    if num_open < chosen.connections:
        raise RuntimeError(f"only {num_open} connections were open")
    if any(said != texts[0] for said in texts):
        raise RuntimeError("a text changed")
    return [alone, meanwhile, beside]


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
