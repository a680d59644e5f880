"""Links of one machine: what they carry, and how long an activation takes while KV streams. Two processes.

    tcp         over loopback
    fd          over a Unix socket; the KV lies in pages that are lent, and is copied once, by the receiver
    fd-inline   the same socket, KV in memory that cannot be lent

The KV lands in place, in zones of 32 KiB pieces, as blocks of one layer lie. Beside it what memory carries, one copy
and its two checksums in one thread, what the socket itself carries, and how fast one core sums up: a link pays for
checksums at either end, and here both ends share the machine.

    python -m benchmarks.links [--seconds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import cpu_s, machine, percentiles, print_table
from services.worker.transfer.hello import Expected, Identity
from services.worker.transfer.link import Arrival, LinkParams, TrafficClass
from services.worker.transfer.socket_link import SocketLink
from shared.ids import Incarnation, WorkerId
from tests.support.link_child import echo
from tests.support.link_roads import ROADS, Bytes, Road, SharedBytes, dial

TOKEN = b"a token for this measurement"
PARENT, CHILD = WorkerId("parent"), WorkerId("child")
ECHO, BULK = 1, 2
CHUNK_BYTES = 16 * 2**20
PIECE_BYTES = 32 * 2**10
ACTIVATION_BYTES = 64 * 2**10
NUM_IN_FLIGHT = 4


def pieces(memory: Bytes) -> list[memoryview]:
    """Return a chunk's memory as blocks that lie apart: every other piece of it."""
    return [row.data for row in memory.reshape(-1, PIECE_BYTES)[::2]]


def identity(worker_id: WorkerId, rate_gb_per_s: float) -> Identity:
    """Return who one end is."""
    return Identity(worker_id, Incarnation(1), TOKEN, LinkParams(rate_bytes_per_s=rate_gb_per_s * 1e9))


# The other process


async def child(address: str, rate_gb_per_s: float) -> None:
    """Land KV in place and return activations."""
    link = await dial(address, identity(CHILD, rate_gb_per_s), Expected(PARENT))
    threading.Thread(target=echo, args=(link, link.inbox(ECHO)), daemon=True).start()
    zones = [pieces(np.ones(2 * CHUNK_BYTES, dtype=np.uint8)) for _ in range(NUM_IN_FLIGHT + 1)]
    ended = asyncio.Event()

    def take(arrival: Arrival) -> None:
        assert arrival.landed
        following = arrival.number + len(zones)
        link.post(BULK, following, zones[following % len(zones)])
        link.release(arrival)

    for number, zone in enumerate(zones):
        link.post(BULK, number, zone)
    link.start(take, lambda _: ended.set())
    await ended.wait()
    await link.close()


# Measuring


@asynccontextmanager
async def other_process(road: Road, rate_gb_per_s: float) -> AsyncIterator[tuple[SocketLink, int]]:
    """A started link to another process, and that process's id."""
    made: asyncio.Queue[SocketLink] = asyncio.Queue()
    listener, address = await road.listen(identity(PARENT, rate_gb_per_s), made.put_nowait)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.links", "--child", address, "--rate", str(rate_gb_per_s))
    )
    try:
        link = await made.get()
        link.inbox(ECHO)
        link.start(link.release, lambda _: None)
        await asyncio.to_thread(round_trips, link, 50, 0.0)
        yield link, process.pid
        await link.close()
    finally:
        await process.wait()
        await listener.close()


def round_trips(link: SocketLink, count: int, pause_s: float) -> list[float]:
    """Return how long activations take there and back, seconds, from a thread to a thread."""
    data, times = bytes(ACTIVATION_BYTES), []
    for number in range(count):
        began_s = time.perf_counter()
        link.send_from_thread(TrafficClass.ACTIVATION, ECHO, number, [data])
        link.inbox(ECHO).get(10.0)
        times.append(time.perf_counter() - began_s)
        if pause_s:
            time.sleep(pause_s)
    return times


async def stream(link: SocketLink, parts: list[memoryview], until: asyncio.Event, *, first: int) -> int:
    """Keep KV chunks on the way until the event; return how many have left."""
    number = first
    window = [link.send(TrafficClass.KV, BULK, number + i, parts) for i in range(NUM_IN_FLIGHT)]
    number += NUM_IN_FLIGHT
    while window:
        await window.pop(0).done
        if not until.is_set():
            window.append(link.send(TrafficClass.KV, BULK, number, parts))
            number += 1
    return number - first


@dataclass(frozen=True, slots=True)
class Measured:
    """One link."""

    gb_per_s: float
    cpu_s_per_gb: float
    """Both ends."""
    idle_s: list[float]
    """Round trips of activations."""
    busy_s: list[float]
    """The same beside KV."""

    def row(self, kind: str, rate_gb_per_s: float, tcp: Measured) -> list[str]:
        """Return a row of the table; ratios are to TCP at the same rate."""
        return [
            kind,
            f"{rate_gb_per_s:g}",
            f"{self.gb_per_s:.2f}",
            f"{self.gb_per_s / tcp.gb_per_s:.2f}",
            f"{self.cpu_s_per_gb:.2f}",
            f"{self.cpu_s_per_gb / tcp.cpu_s_per_gb:.2f}",
            percentiles(self.idle_s, scale=1e3),
            percentiles(self.busy_s, scale=1e3),
        ]


async def measure(kind: str, rate_gb_per_s: float, seconds: float) -> Measured:
    """Return throughput alone, its cost, and round trips idle and beside KV."""
    shared = SharedBytes(2 * 2**20, 2 * CHUNK_BYTES // (2 * 2**20)) if kind == "fd" else None
    memory = np.empty(2 * CHUNK_BYTES, dtype=np.uint8) if shared is None else shared.bytes
    memory[:] = np.random.default_rng(0).integers(0, 256, 2 * CHUNK_BYTES, dtype=np.uint8)
    parts, road = pieces(memory), Road(kind, shared)
    async with other_process(road, rate_gb_per_s) as (link, pid):
        idle = await asyncio.to_thread(round_trips, link, 300, 0.002)
        until = asyncio.Event()
        until.set()
        warm = await stream(link, parts, until, first=0)
        until.clear()
        began_s, began_cpu_s = time.perf_counter(), time.process_time() + cpu_s(pid)
        task = asyncio.create_task(stream(link, parts, until, first=warm))
        await asyncio.sleep(seconds)
        until.set()
        count = await task
        passed_s = time.perf_counter() - began_s
        used_s = time.process_time() + cpu_s(pid) - began_cpu_s
        until.clear()
        task = asyncio.create_task(stream(link, parts, until, first=warm + count))
        await asyncio.sleep(0.2)
        busy = await asyncio.to_thread(round_trips, link, int(seconds * 50), 0.01)
        until.set()
        await task
    del parts, memory
    road.close()
    gigabytes = count * CHUNK_BYTES / 1e9
    return Measured(gigabytes / passed_s, used_s / gigabytes, idle, busy)


def copy_rate(seconds: float) -> float:
    """Return how fast one thread sums up pieces, copies them and sums up the copies, GB/s."""
    source = pieces(np.random.default_rng(0).integers(0, 256, 2 * CHUNK_BYTES, dtype=np.uint8))
    target = pieces(np.ones(2 * CHUNK_BYTES, dtype=np.uint8))
    count, began_s = 0, time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        for one, other in zip(source, target, strict=True):
            zlib.crc32(one)
            np.copyto(np.frombuffer(other, dtype=np.uint8), np.frombuffer(one, dtype=np.uint8))
            zlib.crc32(other)
        count += 1
    return count * CHUNK_BYTES / (time.perf_counter() - began_s) / 1e9


def bare_socket(seconds: float) -> float:
    """Return what a socket of loopback carries between two threads, GB/s: neither checksums nor frames."""
    server = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(server.getsockname())
    other, _ = server.accept()
    server.close()
    data, place = bytes(2**20), bytearray(2**20)

    def drain() -> None:
        while other.recv_into(place):
            pass

    reader = threading.Thread(target=drain)
    reader.start()
    count, began_s = 0, time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        one.sendall(data)
        count += 1
    one.close()
    reader.join()
    passed_s = time.perf_counter() - began_s
    other.close()
    return count * len(data) / passed_s / 1e9


def checksum_rate(seconds: float) -> float:
    """Return how fast one core computes CRC-32, GB/s."""
    data = np.random.default_rng(0).integers(0, 256, 2**20, dtype=np.uint8).data
    count, began_s = 0, time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        zlib.crc32(data)
        count += 1
    return count * len(data) / (time.perf_counter() - began_s) / 1e9


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, default=3.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        await child(options.child, options.rate)
        return
    seconds: float = options.seconds
    print(
        f"memory, one copy and two checksums in one thread: {copy_rate(seconds):.2f} GB/s; "
        f"a bare socket: {bare_socket(seconds):.2f} GB/s; CRC-32: {checksum_rate(seconds / 3):.2f} GB/s"
    )
    rows = []
    for rate in (3.0, 1.0, 0.25):
        measured = {kind: await measure(kind, rate, seconds) for kind in ROADS}
        rows += [measured[kind].row(kind, rate, measured["tcp"]) for kind in ROADS]
    print_table(
        f"Links between two processes, chunks of {CHUNK_BYTES // 2**20} MiB of KV, activations of "
        f"{ACTIVATION_BYTES // 2**10} KiB there and back ({machine()})",
        [
            "link",
            "rate set, GB/s",
            "KV, GB/s",
            "of TCP",
            "CPU s per GB, both ends",
            "of TCP",
            "activation, idle, ms (p50 / p99)",
            "activation beside KV, ms (p50 / p99)",
        ],
        rows,
    )


if __name__ == "__main__":
    asyncio.run(main())
