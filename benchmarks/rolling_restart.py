"""What readers see of a rolling restart: with their KV, and where it is computed again; live, in turns.

    python -m benchmarks.rolling_restart DIR [--streams 16] [--prompt 1024] [--answer 3000] [--rounds 3]

`sluice up` with three workers and a checkpoint of random weights (`benchmarks.peers_model`, made in DIR unless it is
there), whose prompts take seconds. Streams read all the while, each prompt another one, with answers that last longer
than the run: no new prompt holds anybody up. First nothing happens, for as long as a restart takes. Then each worker in
turn is told to stop (SIGTERM), drains, and is started again. *Without* is the same where blocks have no names (no
prefix caching), so that a request that moves is computed again, prompt and tokens.

A gap is the time between two chunks of a stream. A thread that only sleeps tells when the machine itself stood still,
and that is taken out. What moved, and what was computed again, is the dispatcher's word; the rate is the workers' own,
beside that of a plain socket on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.harness import end_children_on_sigterm, machine, print_table, read_stream
from benchmarks.live_cluster import LiveCluster
from benchmarks.peers_model import FIRST_ID, NUM_TOKENS, SHAPES, make_checkpoint
from shared.messages.fetch import FetchOutcome
from shared.messages.report import WorkerPhase, WorkerReport

NUM_WORKERS: Final = 3
MEMORY: Final = "3GiB"
MODES: Final = {"with KV": {}, "without": {"SLUICE_WORKER_PREFIX_CACHING": "false"}}
SETTLE_S: Final = 3.0
"""After each restart."""
CALM_S: Final = 45.0
"""Before the first one: about as long as a restart takes on two cores."""
PARTS: Final = ("before", "drain", "start")
AT_ONCE_S: Final = 0.1
"""Gaps that begin and end so close together are one, of many streams."""
RESTART_LIMIT_S: Final = 180.0
SLEEP_S: Final = 0.005
STOOD_STILL_S: Final = 0.05
"""A sleep that is longer by so much is a pause of the machine."""
SOCKET_BYTES: Final = 1 << 30


class Sleeper:
    """A thread that only sleeps, and notes when it was not woken."""

    def __init__(self) -> None:
        self.pauses: list[tuple[float, float]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sleep, daemon=True)
        self._thread.start()

    def _sleep(self) -> None:
        before_s = time.monotonic()
        while not self._is_over.is_set():
            time.sleep(SLEEP_S)
            now_s = time.monotonic()
            if now_s - before_s > SLEEP_S + STOOD_STILL_S:
                self.pauses.append((before_s, now_s))
            before_s = now_s

    def within(self, begin_s: float, end_s: float) -> float:
        """Return for how long the machine stood still then."""
        return sum(max(min(end_s, end) - max(begin_s, begin), 0.0) for begin, end in self.pauses)

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        self._thread.join()


@dataclass(slots=True)
class Turn:
    """One rolling restart."""

    gaps: list[tuple[float, float, float]] = field(default_factory=list)
    """When each began and ended, and how long it was without pauses of the machine."""
    restarts: list[tuple[float, float, float]] = field(default_factory=list)
    """Of each worker, when it was told to stop, had ended, and was ready again."""
    num_moved: int = 0
    num_recomputed: int = 0
    bytes_per_s: float = 0.0
    step_s: float = 0.0
    still_s: float = 0.0
    calm: tuple[float, float] = (0.0, 0.0)
    num_again: int = 0
    """Answers that ended within the run; their streams began anew, with a prompt."""

    def gaps_of(self, part: str) -> list[tuple[float, float, float]]:
        """Return the gaps that touched a drain or a start, or those that were over before."""
        if part == "before":
            return [gap for gap in self.gaps if gap[1] <= self.calm[1]]
        spans = [(told, ended) if part == "drain" else (ended, ready) for told, ended, ready in self.restarts]
        return [gap for gap in self.gaps if any(gap[0] < b and gap[1] > a for a, b in spans)]

    def longest_s(self, part: str) -> float:
        """Return the longest gap of this part."""
        return max((took for _, _, took in self.gaps_of(part)), default=0.0)

    def p99_s(self, part: str) -> float:
        """Return the gap that one in a hundred of this part exceeds."""
        return float(np.quantile([took for _, _, took in self.gaps_of(part)], 0.99))

    def describe_longest(self, part: str) -> str:
        """Return how long the longest was, of how many streams at once, and when."""
        begin, end, took = max(self.gaps_of(part), key=lambda gap: gap[2])
        streams = sum(abs(a - begin) < AT_ONCE_S and abs(b - end) < AT_ONCE_S for a, b, _ in self.gaps)
        since = [f"worker {k}: {begin - told:+.1f} s" for k, (told, _, _) in enumerate(self.restarts)]
        return f"{took:.2f} s, {streams} streams at once, since who was told to stop: {', '.join(since)}"


async def measure(setting: argparse.Namespace, mode: str) -> Turn:
    """Return what readers saw of one rolling restart."""
    cluster, sleeper, turn, random = LiveCluster(), Sleeper(), Turn(), np.random.default_rng(setting.seed)
    flags = ("--workers", str(NUM_WORKERS), "--model", str(setting.folder), "--memory", MEMORY)
    try:
        with tempfile.TemporaryDirectory() as logs:
            await cluster.serve(*flags, "--system", setting.system, log=Path(logs) / "up.log", env=MODES[mode])
            readings: list[list[float]] = []
            streams = [asyncio.create_task(_read(cluster, setting, random, readings)) for _ in range(setting.streams)]
            try:
                await _all_stream(readings, setting.streams, streams)
                await asyncio.sleep(SETTLE_S)
                calm_s, num_begun = time.monotonic(), len(readings)
                await asyncio.sleep(CALM_S)
                turn.calm = calm_s, time.monotonic()
                for report in await cluster.worker_reports():
                    turn.restarts.append(await _restart(cluster, report))
                    await asyncio.sleep(SETTLE_S)
                await _note(cluster, turn)
            finally:
                for stream in streams:
                    stream.cancel()
                await asyncio.gather(*streams, return_exceptions=True)
    finally:
        sleeper.close()
        await cluster.stop()
    found = [(a, b, b - a - sleeper.within(a, b)) for times in readings for a, b in pairwise(times)]
    turn.gaps, turn.num_again = [gap for gap in found if gap[1] > calm_s], len(readings) - num_begun
    turn.still_s = sleeper.within(calm_s, time.monotonic())
    return turn


async def _read(
    cluster: LiveCluster, setting: argparse.Namespace, random: np.random.Generator, readings: list[list[float]]
) -> None:
    """Read one answer after the other."""
    port = int(cluster.url.rpartition(":")[2])
    while True:
        prompt = random.integers(FIRST_ID + 256, NUM_TOKENS, setting.prompt).tolist()
        times: list[float] = []
        readings.append(times)
        reading = await read_stream(port, prompt, setting.answer, times=times, model=setting.folder.name)
        if not reading.done:
            raise RuntimeError("an answer broke off")


async def _all_stream(readings: list[list[float]], count: int, streams: Sequence[asyncio.Task[None]]) -> None:
    while sum(bool(times) for times in readings) < count:
        for stream in streams:
            if stream.done():
                stream.result()
        await asyncio.sleep(0.05)


async def _restart(cluster: LiveCluster, report: WorkerReport) -> tuple[float, float, float]:
    told_s = time.monotonic()
    os.kill(report.pid, signal.SIGTERM)
    ended_s = 0.0
    async with asyncio.timeout(RESTART_LIMIT_S):
        while True:
            await asyncio.sleep(0.05)
            now_s = time.monotonic()
            if not ended_s and not _lives(report.pid):
                ended_s = now_s
            found = {each.worker_id: each for each in await cluster.worker_reports()}.get(report.worker_id)
            if found is not None and found.pid != report.pid and found.phase is WorkerPhase.READY:
                return told_s, ended_s or now_s, now_s


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def _note(cluster: LiveCluster, turn: Turn) -> None:
    """Take what the newest processes say; those before are gone, and so is what came to them."""
    reports = await cluster.worker_reports()
    turn.step_s = statistics.median(report.step_time_s for report in reports)
    turn.bytes_per_s = max(report.migration.bytes_per_s for report in reports)
    for report in reports:
        turn.num_recomputed += report.migration.num_recomputed_total
        for each in report.migration.fetches_total:
            turn.num_moved += each.count if each.outcome == FetchOutcome.MOVED else 0


def socket_bytes_per_s() -> float:
    """Return the rate of a plain socket on this machine, a thread at each end."""
    listener = socket.create_server(("127.0.0.1", 0))
    data = bytes(4 << 20)

    def send() -> None:
        with socket.create_connection(listener.getsockname()) as sock:
            for _ in range(SOCKET_BYTES // len(data)):
                sock.sendall(data)

    sender = threading.Thread(target=send)
    sender.start()
    sock, _ = listener.accept()
    buffer, left, began_s = memoryview(bytearray(4 << 20)), SOCKET_BYTES, time.perf_counter()
    with sock, listener:
        while left > 0:
            left -= sock.recv_into(buffer)
    took_s = time.perf_counter() - began_s
    sender.join()
    return SOCKET_BYTES / took_s


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rolling_restart", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the checkpoint")
    parser.add_argument("--shape", choices=SHAPES, default="medium", help="of the checkpoint, if it is to be made")
    parser.add_argument("--system", default="sluice")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each")
    parser.add_argument("--answer", type=int, default=3000, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    setting = parser.parse_args()
    end_children_on_sigterm()
    make_checkpoint(setting.shape, setting.folder)
    turns: dict[str, list[Turn]] = {mode: [] for mode in MODES}
    for number in range(setting.rounds):
        for mode in MODES if number % 2 == 0 else reversed(MODES):
            turn = asyncio.run(measure(setting, mode))
            turns[mode].append(turn)
            for part in PARTS:
                print(f"# round {number}, {mode}, {part}: {turn.describe_longest(part)}", flush=True)
    _print(turns)


def _print(turns: dict[str, list[Turn]]) -> None:
    def medians(name: str) -> list[str]:
        return [f"{statistics.median(getattr(turn, name) for turn in found):.3g}" for found in turns.values()]

    def longest(part: str) -> list[str]:
        return [", ".join(f"{turn.longest_s(part):.2f}" for turn in found) for found in turns.values()]

    def p99(part: str) -> list[str]:
        return [", ".join(f"{turn.p99_s(part):.2f}" for turn in found) for found in turns.values()]

    def drains() -> list[str]:
        took = [[ended - told for turn in found for told, ended, _ in turn.restarts] for found in turns.values()]
        return [f"{statistics.median(each):.2f}; {max(each):.2f}" for each in took]

    rows = [
        *((f"longest gap, {part}, s, by round", *longest(part)) for part in PARTS),
        *((f"P99 of gaps, {part}, s, by round", *p99(part)) for part in PARTS),
        ("answers that ended meanwhile", *medians("num_again")),
        ("a step of decodes, s", *medians("step_s")),
        ("a worker drains, s: P50; most", *drains()),
        ("came to workers that are left: requests", *medians("num_moved")),
        ("of these more than two blocks computed again", *medians("num_recomputed")),
        ("machine stood still, s", *medians("still_s")),
    ]
    print(f"\n{machine()}")
    print_table("Rolling restart", ("", *turns), rows)
    ratios = [
        first.longest_s("drain") / second.longest_s("drain")
        for first, second in zip(*(turns[mode] for mode in MODES), strict=True)
    ]
    print(f"\nlongest gap at a drain, with KV over without, by round: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    rate = max((turn.bytes_per_s for turn in turns["with KV"]), default=0.0)
    plain = socket_bytes_per_s()
    print(f"KV came at up to {rate / 1e9:.2f} GB/s beside steps; a plain socket here, idle: {plain / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
