"""What each hop adds to a token's way, p50 and p99, with every service a process of its own and one idle stream.

The worker runs the modelled executor with steps of exactly STEP_MS, so that what a token takes beyond its step is
Sluice's own time. The dispatcher's hop is measured by `benchmarks.dispatcher`, at several loads.

    python -m benchmarks.hops [--rounds 200]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.harness import broker, cluster, machine, percentiles, print_table, read_stream
from shared.ids import DispatcherId, RequestId, StreamId, WorkerId
from shared.messages.request import Accepted, Submit, pack_token_ids
from shared.subjects import Subjects
from shared.token_batch import TokenBatch
from shared.transport.bus import Message
from shared.transport.nats_bus import NatsBus
from shared.types import SamplingParams
from shared.wire import decode, encode

STEP_MS = 5.0
WORKER = WorkerId("worker-0")
ME = DispatcherId("bench")
PROFILE = f"""
model = "constant"
gpu = "none"
tp = 1
source = "made up: every step takes the same time, so that the rest is overhead"
mean_error_percent = 0.0
[step_ms]
g0 = {STEP_MS}
b0 = 0.0
d = 0.0
a = 0.0
"""


async def one_message(url: str, rounds: int) -> list[float]:
    """Return the times from publish to handler for a token message of 64 bytes, two connections, in seconds."""
    there, back = await NatsBus.connect(url, name="there"), await NatsBus.connect(url, name="back")
    arrived: asyncio.Queue[float] = asyncio.Queue()
    await back.subscribe("bench.hop", lambda _: arrived.put_nowait(time.perf_counter()))
    await back.flush()
    delays = []
    for _ in range(rounds):
        started = time.perf_counter()
        await there.publish("bench.hop", bytes(64))
        delays.append(await arrived.get() - started)
    await there.close()
    await back.close()
    return delays


async def worker_hops(url: str, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Return submit-to-accept, submit-to-first-token beyond one step, and the gap between tokens beyond one step."""
    bus, subjects = await NatsBus.connect(url, name="bench"), Subjects()
    arrivals: list[float] = []
    ended = asyncio.Event()

    def on_tokens(message: Message) -> None:
        now_s, batch = time.perf_counter(), TokenBatch.unpack(message.data)
        if len(batch.tokens):  # not the news that the request has been begun
            arrivals.append(now_s)
        if batch.finish.any():
            ended.set()

    await bus.subscribe(subjects.tokens(ME), on_tokens)
    accepts, firsts, gaps = [], [], []
    for i in range(rounds):
        arrivals.clear()
        ended.clear()
        submit = Submit(
            request_id=RequestId(f"r{i}"),
            stream=StreamId(i),
            attempt=1,
            dispatcher_id=ME,
            prompt=pack_token_ids([300, 301, 302]),
            sampling=SamplingParams(max_tokens=20, ignore_eos=True),
        )
        started = time.perf_counter()
        decode(await bus.request(subjects.submit(WORKER), encode(submit), timeout_s=5), Accepted)
        accepts.append(time.perf_counter() - started)
        await ended.wait()
        firsts.append(arrivals[0] - started - STEP_MS / 1e3)
        gaps += (np.diff(arrivals) - STEP_MS / 1e3).tolist()
    await bus.close()
    return accepts, firsts, gaps


async def first_chunks(port: int, rounds: int) -> list[float]:
    """Return the times from connecting to the first chunk with text, less one step, in seconds."""
    delays = []
    for _ in range(rounds):
        started = time.monotonic()
        reading = await read_stream(port, "Once upon a time", 8)
        delays.append(reading.arrivals_s[0] - started - STEP_MS / 1e3)
    return delays


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=200)
    rounds: int = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "constant.toml"
        profile.write_text(PROFILE)
        leases = ["--lease-s", "3600", "--orphan-s", "7200"]
        worker = [*leases, "--executor", "modelled", "--profile", str(profile)]
        async with broker() as url, cluster(url, {WORKER: worker}) as (port, _):
            message = await one_message(url, rounds)
            accepts, firsts, gaps = await worker_hops(url, rounds)
            chunks = await first_chunks(port, rounds)
    print_table(
        f"Latency added by each hop, one stream, steps of {STEP_MS:g} ms ({machine()})",
        ["hop", "ms (p50 / p99)"],
        [
            ["one message through the broker, publish to handler", percentiles(message, scale=1e3)],
            ["dispatcher → worker: submit to accept, there and back", percentiles(accepts, scale=1e3)],
            ["worker: submit to first token on the bus, less the step", percentiles(firsts, scale=1e3)],
            ["worker: gap between two tokens on the bus, less the step", percentiles(gaps, scale=1e3)],
            ["client: connect to first chunk of text, all hops, less the step", percentiles(chunks, scale=1e3)],
        ],
    )


if __name__ == "__main__":
    uvloop.run(main())
