"""What a worker adds to a step of decodes: scheduler, blocks, hand-off to the thread, stop rules, packing, the bus.

The worker's own step loop, thread executor and emitter run on a real NATS connection; only the model is missing: its
runner answers at once. So the time from one step to the next is Sluice's own.

    python -m benchmarks.step_overhead [--rows 1 64 1024] [--steps 3000]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time

import numpy as np
import uvloop

from benchmarks.engine_step import decoding_engine
from benchmarks.harness import broker, machine, percentiles, print_table
from services.worker.emitter import Emitter
from services.worker.engine.engine import Engine
from services.worker.engine.events import StepEvents
from services.worker.engine.gate import StepGate
from services.worker.engine.loop import StepLoop
from services.worker.engine.types import Batch, BatchOutput, KvCapacity
from services.worker.executor.thread import ThreadExecutor
from shared.ids import DispatcherId, WorkerId
from shared.nats_bus import NatsBus
from shared.subjects import Subjects

WARM_UP = 200


class NoModel:
    """A runner that samples token 7 everywhere, at once."""

    @property
    def capacity(self) -> KvCapacity:
        return KvCapacity(1, 16)

    def run(self, batch: Batch) -> BatchOutput:
        return BatchOutput(batch.step_id, np.full(len(batch.rows), 7, dtype=np.int32), 0.0)

    def close(self) -> None:
        pass


async def measure(url: str, num_rows: int, num_steps: int) -> list[float]:
    """Return the seconds from one step's tokens to the next step's."""
    loop = asyncio.get_running_loop()
    engine: Engine = decoding_engine("chunked", num_rows, num_steps + WARM_UP + 10)
    bus = await NatsBus.connect(url, name="worker")
    emitter = Emitter(WorkerId("bench"), Subjects(), bus)
    emitter.channel(DispatcherId("nobody"))
    executor = ThreadExecutor(NoModel(), loop)
    times: list[float] = []
    enough = asyncio.Event()

    def emit(events: StepEvents) -> None:
        emitter.emit(events)
        times.append(time.perf_counter())
        if len(times) >= num_steps + WARM_UP:
            enough.set()

    steps = StepLoop(engine, executor, emit, loop.time, StepGate())
    emitting = asyncio.ensure_future(emitter.run())
    gc.collect()
    running = asyncio.ensure_future(steps.run())
    await enough.wait()
    steps.close()
    await running
    emitting.cancel()
    await executor.close()
    await bus.close()
    gaps: list[float] = np.diff(times)[WARM_UP:].tolist()
    return gaps


async def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--steps", type=int, default=3000)
    chosen = parser.parse_args()
    async with broker() as url:
        rows = [[str(num), percentiles(await measure(url, num, chosen.steps), scale=1e6)] for num in chosen.rows]
    print_table(f"A step without a model ({machine()})", ["rows", "µs per step (p50 / p99)"], rows)


if __name__ == "__main__":
    uvloop.run(main())
