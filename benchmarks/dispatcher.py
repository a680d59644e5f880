"""The dispatcher's cost: CPU per token, SSE included, memory, and the latency that it adds to a token.

A real dispatcher and monitor run as processes; this process plays the workers (each answers submissions and publishes
one token batch per step) and reads all SSE streams over bare sockets. CPU is the kernel's count for the dispatcher
alone. Latency is from the moment a step's tokens are handed to the bus to the moment the client's socket has the chunk.

    python -m benchmarks.dispatcher [--streams 32 256] [--steps 300] [--period-ms 50] [--workers 1]
                                    [--ways completions chat tools]

The demo model's template has think tags and reads tools: with `tools` each token goes through the search for calls.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import uvloop
from tokenizers import Tokenizer

from benchmarks.harness import (
    DEMO_MODEL,
    SseReading,
    broker,
    cluster,
    cpu_s,
    machine,
    percentiles,
    print_table,
    read_stream,
    rss_bytes,
)
from shared.token_batch import TokenBatch
from shared.transport.nats_bus import NatsBus
from shared.types import FinishReason
from shared.wire import encode_json
from tests.support.fake_worker import FakeWorker, make_status

TEXT = "Once upon a time there was a small fox who lived beside a quiet river and dreamed of the sea. " * 200
WARMUP_STEPS = 20
MAX_SEQUENCES = 4096
CONNECTS_AT_ONCE = 100


TOOL: Final = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
HELLO: Final = [{"role": "user", "content": "Hello"}]
WAYS: Final[dict[str, dict[str, Any]]] = {
    "completions": {},
    "chat": {"messages": HELLO},
    "tools": {"messages": HELLO, "tools": [TOOL]},
}
"""Further fields of the requests."""


class PlayedWorker(FakeWorker):
    """Accepts everything, and publishes a token for every stream when told to."""

    def __init__(self, bus: NatsBus, name: str, token_ids: list[int]) -> None:
        super().__init__(bus, name)
        self._token_ids = token_ids
        self.sent_s: list[float] = []
        """When the tokens of each step were handed to the bus."""

    async def report_for_ever(self) -> None:
        for number in itertools.count():
            status = make_status(
                self.worker_id,
                sequence_number=number,
                model="model",
                max_model_len=1024,
                num_blocks=100_000,
                max_sequences=MAX_SEQUENCES,
            )
            await self.bus.publish(self._subjects.report(self.worker_id), encode_json(status.report))
            await asyncio.sleep(0.5)

    async def step(self, index: int, *, last: bool) -> None:
        count = len(self.submits)
        token = self._token_ids[index % len(self._token_ids)]
        batch = TokenBatch(
            worker_id=self.worker_id,
            counter=self._counter,
            stream=np.array([s.stream for s in self.submits], dtype=np.uint32),
            attempt=np.array([s.attempt for s in self.submits], dtype=np.uint16),
            first_index=np.full(count, index, dtype=np.uint32),
            count=np.ones(count, dtype=np.uint8),
            finish=np.full(count, FinishReason.LENGTH if last else FinishReason.NONE, dtype=np.uint8),
            tokens=np.full(count, token, dtype=np.uint32),
        )
        await self.publish(batch, self.submits[0].dispatcher_id)

    async def run_steps(self, steps: int, period_s: float, delay_s: float) -> None:
        """Publish a token per stream and period, beginning after a delay."""
        self.sent_s.clear()
        next_s = time.monotonic() + delay_s
        for index in range(steps):
            await asyncio.sleep(max(0.002, next_s - time.monotonic()))
            next_s = max(next_s + period_s, time.monotonic())
            self.sent_s.append(time.monotonic())
            if self.submits:
                await self.step(index, last=index == steps - 1)


@dataclass(frozen=True, slots=True)
class Load:
    """How many readers get how many tokens, how fast, and what they ask for."""

    way: str
    streams: int
    steps: int
    period_s: float


async def measure(workers: list[PlayedWorker], pid: int, port: int, load: Load) -> list[str]:
    """Stream tokens to the readers and return one row of the table."""
    streams, steps, period_s = load.streams, load.steps, load.period_s
    for worker in workers:
        worker.submits.clear()
    readers: list[asyncio.Task[SseReading]] = []
    while len(readers) < streams:
        count = min(CONNECTS_AT_ONCE, streams - len(readers))
        readers += [asyncio.create_task(read_stream(port, "Hello", steps, **WAYS[load.way])) for _ in range(count)]
        async with asyncio.timeout(30):
            while sum(len(worker.submits) for worker in workers) < len(readers):
                await asyncio.sleep(0.01)
    stepping = [
        asyncio.ensure_future(worker.run_steps(steps, period_s, period_s * number / len(workers)))
        for number, worker in enumerate(workers)
    ]
    await asyncio.sleep(WARMUP_STEPS * period_s)
    cpu_before, time_before = cpu_s(pid), time.monotonic()
    await asyncio.sleep((steps - WARMUP_STEPS - 2) * period_s)
    elapsed_s, used_s = time.monotonic() - time_before, cpu_s(pid) - cpu_before
    memory_mb = rss_bytes(pid) / 1e6
    await asyncio.gather(*stepping)
    readings = await asyncio.gather(*readers)
    tokens = streams * elapsed_s / period_s
    delays = _delays(workers, readings, steps)
    latency = percentiles(delays, scale=1e3) if delays else "chunks were joined"
    shares = [f"{1e6 * used_s / tokens:.1f}", f"{100 * used_s / elapsed_s:.1f}", f"{memory_mb:.0f}"]
    return [load.way, str(streams), f"{1 / period_s:g}", *shares, latency]


def _delays(workers: list[PlayedWorker], readings: list[SseReading], steps: int) -> list[float]:
    """Return how long each token was on its way. A reader does not know its worker: it is the one whose clock fits."""
    delays: list[float] = []
    for reading in readings:
        if len(reading.arrivals_s) < steps - 1:
            continue  # an event held two tokens
        arrivals = np.array(reading.arrivals_s[-steps:][WARMUP_STEPS : steps - 1])
        sent = [np.array(worker.sent_s[WARMUP_STEPS : steps - 1])[: len(arrivals)] for worker in workers]
        ways = [arrivals[: len(one)] - one for one in sent]
        fitting = [way for way in ways if way.min() > 0]
        delays += min(fitting, key=lambda way: float(np.median(way))).tolist()
    return delays


async def idle_share(pid: int, seconds: float) -> float:
    """Return the dispatcher's CPU share without any stream: views, sweeps, timers."""
    before = cpu_s(pid)
    await asyncio.sleep(seconds)
    return (cpu_s(pid) - before) / seconds


async def main() -> None:
    """Run the measurement that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--period-ms", type=float, nargs="+", default=[50.0])
    parser.add_argument("--workers", type=int, default=1, help="played; their steps lie evenly in a period")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=["completions"])
    chosen = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    async with broker() as url, AsyncExitStack() as stack:
        workers = []
        for number in range(chosen.workers):
            bus = await NatsBus.connect(url, name=f"bench-{number}")
            stack.push_async_callback(bus.close)
            workers.append(PlayedWorker(bus, f"bench-{number}", token_ids))
            await workers[-1].start()
        reporting = [asyncio.ensure_future(worker.report_for_ever()) for worker in workers]
        async with cluster(url, {}) as (port, processes):
            pid = processes["dispatcher"].pid
            idle = await idle_share(pid, 3.0)
            rows = [
                await measure(workers, pid, port, Load(way, streams, chosen.steps, period_ms / 1e3))
                for streams in chosen.streams
                for period_ms in chosen.period_ms
                for way in chosen.ways
            ]
        for task in reporting:
            task.cancel()
    print_table(
        f"Dispatcher, {chosen.workers} played workers ({machine()})",
        [
            "way",
            "streams",
            "tokens/s each",
            "CPU per token, µs",
            "CPU share, %",
            "memory, MB",
            "to client, ms (p50 / p99)",
        ],
        rows,
    )
    print(f"\nWithout streams: {100 * idle:.2f} % of a core; it is contained in the figures above.")


if __name__ == "__main__":
    uvloop.run(main())
