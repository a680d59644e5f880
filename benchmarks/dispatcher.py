"""The dispatcher's cost: CPU per token, SSE included, and the latency that it adds to a token.

A real dispatcher and monitor run as processes; this process plays the worker (it answers submissions and publishes one
token batch per step) and reads all SSE streams over bare sockets. CPU is the kernel's count for the dispatcher alone.
Latency is from the moment a step's tokens are handed to the bus to the moment the client's socket has the chunk.

    python -m benchmarks.dispatcher [--streams 32 256] [--steps 300] [--period-ms 50] [--profile]

With `--profile` the dispatcher runs under cProfile, which makes it several times slower, and the functions that took
most of its time in Python are shown: read their shares, not the table's figures.
"""

from __future__ import annotations

import argparse
import asyncio
import pstats
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from tokenizers import Tokenizer

from benchmarks.harness import (
    DEMO_MODEL,
    SseReading,
    broker,
    cpu_s,
    free_port,
    machine,
    percentiles,
    print_table,
    read_stream,
    service,
    wait_ready,
)
from shared.bus import Endpoint, Message, ServiceInfo
from shared.ids import DispatcherId, WorkerId
from shared.messages.report import WorkerPhase, WorkerReport
from shared.messages.request import Accepted, Cancel, Cancelled, Submit
from shared.nats_bus import NatsBus
from shared.subjects import Subjects
from shared.token_batch import TokenBatch
from shared.types import FinishReason
from shared.wire import decode, encode, encode_json

TEXT = "Once upon a time there was a small fox who lived beside a quiet river and dreamed of the sea. " * 200
WORKER = WorkerId("bench-worker")
WARMUP_STEPS = 20


@dataclass
class PlayedWorker:
    """Accepts everything, and publishes a token for every stream when told to."""

    bus: NatsBus
    subjects: Subjects
    token_ids: list[int]
    streams: list[Submit] = field(default_factory=list)
    counter: int = 0
    number: int = 0

    async def submit(self, message: Message) -> bytes:
        submit = decode(message.data, Submit)
        self.streams.append(submit)
        return encode(Accepted(request_id=submit.request_id, attempt=submit.attempt))

    async def cancel(self, message: Message) -> bytes:
        return encode(Cancelled(request_id=decode(message.data, Cancel).request_id, found=True))

    async def report_for_ever(self) -> None:
        while True:
            report = WorkerReport(
                worker_id=WORKER,
                sequence_number=self.number,
                phase=WorkerPhase.READY,
                model="model",
                max_model_len=1024,
                block_size=16,
                num_blocks=100_000,
                max_sequences=4096,
                num_running=len(self.streams),
                num_steps=self.counter,
            )
            self.number += 1
            await self.bus.publish(self.subjects.report(WORKER), encode_json(report))
            await asyncio.sleep(0.5)

    async def step(self, index: int, *, last: bool) -> None:
        count = len(self.streams)
        token = self.token_ids[index % len(self.token_ids)]
        batch = TokenBatch(
            worker_id=WORKER,
            counter=self.counter,
            stream=np.array([s.stream for s in self.streams], dtype=np.uint32),
            attempt=np.array([s.attempt for s in self.streams], dtype=np.uint16),
            first_index=np.full(count, index, dtype=np.uint32),
            count=np.ones(count, dtype=np.uint8),
            finish=np.full(count, FinishReason.LENGTH if last else FinishReason.NONE, dtype=np.uint8),
            tokens=np.full(count, token, dtype=np.uint32),
        )
        self.counter += 1
        await self.bus.publish(self.subjects.tokens(DispatcherId(self.streams[0].dispatcher_id)), batch.pack())


async def measure(worker: PlayedWorker, pid: int, port: int, streams: int, steps: int, period_s: float) -> list[str]:
    """Stream `steps` tokens to `streams` readers and return one row of the table."""
    worker.streams.clear()
    readings = [SseReading() for _ in range(streams)]
    body: dict[str, object] = {
        "model": "model",
        "prompt": "Hello",
        "max_tokens": steps,
        "stream": True,
        "ignore_eos": True,
    }
    readers = [asyncio.ensure_future(read_stream("127.0.0.1", port, "/v1/completions", body, r)) for r in readings]
    async with asyncio.timeout(30):
        while len(worker.streams) < streams:
            await asyncio.sleep(0.01)
    sent_s: list[float] = []
    cpu_before = time_before = 0.0
    for index in range(steps):
        if index == WARMUP_STEPS:
            cpu_before, time_before = cpu_s(pid), time.monotonic()
        started = time.monotonic()
        sent_s.append(started)
        await worker.step(index, last=index == steps - 1)
        await asyncio.sleep(max(0.002, period_s - (time.monotonic() - started)))
    elapsed_s = time.monotonic() - time_before
    used_s = cpu_s(pid) - cpu_before
    await asyncio.gather(*readers)
    delays = [
        arrival - sent
        for reading in readings
        for arrival, sent in zip(reading.arrivals_s[-steps:][WARMUP_STEPS:-1], sent_s[WARMUP_STEPS:-1], strict=False)
        if len(reading.arrivals_s) >= steps - 1
    ]
    tokens = streams * (steps - WARMUP_STEPS)
    latency = percentiles(delays, scale=1e3) if delays else "chunks were joined"
    return [str(streams), str(tokens), f"{1e6 * used_s / tokens:.1f}", f"{100 * used_s / elapsed_s:.1f}", latency]


async def idle_share(pid: int, seconds: float) -> float:
    """Return the dispatcher's CPU share without any stream: views, sweeps, timers."""
    before = cpu_s(pid)
    await asyncio.sleep(seconds)
    return (cpu_s(pid) - before) / seconds


def largest_shares(profile: Path, count: int) -> list[list[str]]:
    """Return the functions with the largest shares of the time in Python, and the shares; waiting is left out."""
    entries: dict[tuple[str, int, str], Any] = vars(pstats.Stats(str(profile)))["stats"]
    times = {name: own_s for name, (_, _, own_s, _, _) in entries.items() if "run_until_complete" not in name[2]}
    whole = sum(times.values())
    found = sorted(times.items(), key=lambda item: -item[1])[:count]
    return [[f"{Path(file).name}: {name}", f"{100 * own_s / whole:.0f}"] for (file, _, name), own_s in found]


async def main() -> None:
    """Run the measurement that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--period-ms", type=float, default=50.0)
    parser.add_argument("--profile", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        await run(chosen, Path(folder) / "profile" if chosen.profile else None)


async def run(chosen: argparse.Namespace, profile: Path | None) -> None:
    """Measure and print."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    port = free_port()
    async with broker() as url:
        bus = await NatsBus.connect(url, name="bench")
        worker = PlayedWorker(bus, Subjects(), token_ids)
        info = ServiceInfo("bench-worker", "0.0.0", "Plays a worker for a benchmark", {}, WORKER)
        await bus.serve(
            info,
            [
                Endpoint("submit", worker.subjects.submit(WORKER), worker.submit, max_in_flight=1024),
                Endpoint("cancel", worker.subjects.cancel(WORKER), worker.cancel),
            ],
        )
        reporting = asyncio.ensure_future(worker.report_for_ever())
        flags = ["--nats-url", url, "--port", str(port), "--model", str(DEMO_MODEL), "--served-model-name", "model"]
        async with (
            service("monitor", "--nats-url", url, "--instance-id", "monitor"),
            service("dispatcher", "--instance-id", "dispatcher", *flags, profile=profile) as dispatcher,
        ):
            await wait_ready(f"http://127.0.0.1:{port}")
            idle = await idle_share(dispatcher.pid, 3.0)
            rows = [
                await measure(worker, dispatcher.pid, port, streams, chosen.steps, chosen.period_ms / 1e3)
                for streams in chosen.streams
            ]
        reporting.cancel()
        await bus.close()
    print_table(
        f"Dispatcher, one token per stream every {chosen.period_ms:g} ms ({machine()})",
        ["streams", "tokens", "CPU per token, µs", "CPU share, %", "bus to client, ms (p50 / p99)"],
        rows,
    )
    print(f"\nWithout streams: {100 * idle:.2f} % of a core; it is contained in the figures above.")
    if profile is not None:
        print_table("Time in Python, by function", ["function", "share, %"], largest_shares(profile, 8))


if __name__ == "__main__":
    uvloop.run(main())
