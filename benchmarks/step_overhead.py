"""What a worker adds to a step of decodes: scheduler, blocks, hand-off to the thread, stop rules, packing, the bus.

The worker's own step loop, thread executor and emitter run on a real NATS connection; only the model is missing: its
runner sleeps for STEP_MS, as a device that computes, with the interpreter's lock released. Three figures per size, and
then the parts of the gap:

- gap: from the end of one step on the device to the start of the next, which is what throughput loses; also where a
  step is launched before the one before it has ended (`--overlap` of a worker), which leaves nothing but a device's
  own, here the wake-up of a thread that stands in for one;
- CPU: of the event loop's thread per step, emitting included, which overlaps with the device;
- hand-off: the same gap for an executor that is given the next batch without any engine: two wake-ups of a thread, so
  the part of the gap that is the machine's.

    python -m benchmarks.step_overhead [--rows 1 64 1024] [--steps 1500]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import threading
import time
from itertools import pairwise
from queue import SimpleQueue

import numpy as np
import uvloop

from benchmarks.engine_step import decoding_engine
from benchmarks.harness import broker, machine, percentiles, print_table
from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import HostCopy, KvCapacity
from services.worker.engine.engine import Engine
from services.worker.engine.gate import StepGate
from services.worker.engine.loop import StepLoop
from services.worker.executor.launched import EndedStep, Launched
from services.worker.executor.thread import ThreadExecutor
from services.worker.sequences.events import StepEvents
from services.worker.serving.emitter import Emitter
from shared.ids import DispatcherId, WorkerId
from shared.subjects import Subjects
from shared.transport.nats_bus import NatsBus

WARM_UP = 200
STEP_MS = 2.0


class SleepingStep:
    """A step that another thread computes."""

    is_done = False

    def __init__(self, output: BatchOutput) -> None:
        self.ended = threading.Event()
        self._output = output

    def end(self) -> BatchOutput:
        self.ended.wait()
        return self._output


class SleepingModel:
    """A runner that takes STEP_MS and samples token 7 everywhere; notes when each step began and ended.

    Args:
        overlaps: it computes beside whoever launches its steps.
    """

    def __init__(self, *, overlaps: bool = False) -> None:
        self.times: list[tuple[float, float]] = []
        self.overlaps = overlaps
        self._queue: SimpleQueue[SleepingStep | None] = SimpleQueue()
        if overlaps:
            threading.Thread(target=self._work, name="device", daemon=True).start()

    @property
    def capacity(self) -> KvCapacity:
        return KvCapacity(1, 16)

    def launch(self, batch: Batch) -> Launched:
        output = BatchOutput(batch.step_id, np.full(len(batch.rows), 7, dtype=np.int32), STEP_MS / 1e3)
        if self.overlaps:
            step = SleepingStep(output)
            self._queue.put(step)
            return step
        self._compute()
        return EndedStep(output)

    def _compute(self) -> None:
        began_s = time.perf_counter()
        time.sleep(STEP_MS / 1e3)
        self.times.append((began_s, time.perf_counter()))

    def _work(self) -> None:
        while (step := self._queue.get()) is not None:
            self._compute()
            step.ended.set()

    copies_beside = False

    def copy(self, copy: HostCopy) -> None:
        raise AssertionError("nobody swaps here")

    def close(self) -> None:
        self._queue.put(None)

    def gaps_s(self) -> list[float]:
        """Return the seconds between each step's end and the next one's start, without the first ones."""
        times = np.array(self.times)
        gaps: list[float] = (times[1:, 0] - times[:-1, 1])[WARM_UP:].tolist()
        return gaps


class Stamps:
    """When the calls of a step began and ended, by name."""

    def __init__(self) -> None:
        self.times: dict[str, list[tuple[float, float]]] = {}

    def watch(self, owner: object, name: str) -> None:
        """Note the times of this method of this object."""
        method = getattr(owner, name)
        times = self.times.setdefault(name, [])

        def watched(*arguments: object) -> object:
            began_s = time.perf_counter()
            result = method(*arguments)
            times.append((began_s, time.perf_counter()))
            return result

        setattr(owner, name, watched)

    def parts_s(self, steps: list[tuple[float, float]]) -> list[list[float]]:
        """Return, per step: to the loop's thread, absorb, next_batch, submit, to the device's thread; seconds."""
        columns = {name: np.array(times) for name, times in self.times.items()}
        parts = []
        for (_, ended_s), (begins_s, _) in pairwise(steps[WARM_UP:]):
            calls = [columns[name][np.searchsorted(columns[name][:, 0], ended_s)] for name in ("absorb", "next_batch")]
            submit = columns["submit"][np.searchsorted(columns["submit"][:, 0], calls[1][1])]
            parts.append(
                [
                    calls[0][0] - ended_s,
                    calls[0][1] - calls[0][0],
                    calls[1][1] - calls[1][0],
                    submit[1] - submit[0],
                    begins_s - submit[1],
                ]
            )
        return parts


async def hand_offs(num_steps: int) -> list[float]:
    """Return the gaps when each finished step is answered with the next batch at once."""
    model = SleepingModel()
    executor = ThreadExecutor(model, asyncio.get_running_loop())
    engine = decoding_engine("chunked", 1, 8)
    batch = engine.next_batch(0.0)
    assert batch is not None
    for _ in range(num_steps + WARM_UP):
        await executor.submit(batch)
    await executor.close()
    return model.gaps_s()


async def measure(
    url: str, num_rows: int, num_steps: int, *, overlaps: bool = False
) -> tuple[list[float], float, list[list[float]]]:
    """Return the gaps between steps, the CPU seconds of this thread per step, and the parts of gaps without overlap."""
    loop = asyncio.get_running_loop()
    total = num_steps + WARM_UP
    engine: Engine = decoding_engine("chunked", num_rows, total + 10, overlaps=overlaps)
    bus = await NatsBus.connect(url, name="worker")
    emitter = Emitter(WorkerId("bench"), Subjects(), bus)
    emitter.channel(DispatcherId("nobody"))
    model = SleepingModel(overlaps=overlaps)
    executor = ThreadExecutor(model, loop)
    enough = asyncio.Event()
    cpu_before = 0.0

    def emit(events: StepEvents) -> None:
        nonlocal cpu_before
        emitter.emit(events)
        if len(model.times) == WARM_UP:
            cpu_before = time.thread_time()
        elif len(model.times) >= total:
            enough.set()

    stamps = Stamps()
    for owner, name in ((engine, "absorb"), (engine, "next_batch"), (executor, "submit")):
        stamps.watch(owner, name)
    steps = StepLoop(engine, executor, emit, loop.time, StepGate())
    emitting = asyncio.ensure_future(emitter.run())
    gc.collect()
    running = asyncio.ensure_future(steps.run())
    await enough.wait()
    cpu_s = (time.thread_time() - cpu_before) / num_steps
    steps.close()
    await running
    emitting.cancel()
    await executor.close()
    await bus.close()
    return model.gaps_s(), cpu_s, [] if overlaps else stamps.parts_s(model.times[:total])


async def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--steps", type=int, default=1500)
    chosen = parser.parse_args()
    table = [["no engine (hand-off)", percentiles(await hand_offs(chosen.steps), scale=1e6), "", ""]]
    parts = []
    async with broker() as url:
        for num_rows in chosen.rows:
            gaps, cpu_s, steps = await measure(url, num_rows, chosen.steps)
            ahead, _, _ = await measure(url, num_rows, chosen.steps, overlaps=True)
            said = [percentiles(each, scale=1e6) for each in (gaps, ahead)]
            table.append([str(num_rows), *said, f"{1e6 * cpu_s:.0f}"])
            parts.append([str(num_rows), *(f"{1e6 * median:.0f}" for median in np.median(steps, axis=0))])
    print_table(
        f"Between two steps of {STEP_MS:g} ms ({machine()})",
        ["rows", "gap, µs (p50 / p99)", "gap where steps overlap", "CPU of the loop's thread per step, µs"],
        table,
    )
    print_table(
        "The parts of the gap, µs (p50); the last one overlaps with sending the tokens of the step before",
        ["rows", "to the loop's thread", "absorb", "next_batch", "submit", "to the device's thread"],
        parts,
    )


if __name__ == "__main__":
    uvloop.run(main())
