"""Time that the engine itself takes per step of decodes: `python -m benchmarks.engine_step [--host-blocks 4096]`.

The executor is left out: its output is the same array each time. `next_batch` includes the scheduler and the blocks,
`absorb` the stop rules, the QoE columns and the events. With host memory the copies that a step begins are asked for
in its first half. Numbers are microseconds, median and 99th percentile.
"""

from __future__ import annotations

import argparse
import gc
import time

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import print_table
from services.worker.contract.batch import BatchOutput
from services.worker.contract.executor import HostMemory
from services.worker.cost.estimate import CostEstimate
from services.worker.engine.engine import Engine
from services.worker.engine.stats import take_stats
from services.worker.scheduling.registry import SCHEDULERS, make_scheduler
from services.worker.sequences.config import AddRefusal, EngineConfig, NewSequence
from shared.cost import load_profile
from shared.ids import RequestId, StreamId
from shared.types import ReaderTarget, SamplingParams

ROWS = (1, 64, 1024)
WARM_UP = 200
PROMPT = 64
BLOCK_SIZE = 16
PROFILE = "qwen2.5-14b-tp1-a800"


def decoding_engine(
    scheduler: str, num_rows: int, num_steps: int, *, overlaps: bool = False, num_host_blocks: int = 0
) -> Engine:
    """Return an engine whose sequences have all been prefilled and decode for at least `num_steps` more steps."""
    max_len = PROMPT + num_steps + 8
    config = EngineConfig(
        max_sequences=num_rows,
        max_batch_tokens=max(num_rows, 2048),
        max_batch_rows=num_rows,
        max_model_len=max_len,
        vocab_size=32_000,
        eos_token_ids=(2,),
        block_size=BLOCK_SIZE,
        overlaps=overlaps,
    )
    num_blocks, host = num_rows * (max_len // BLOCK_SIZE + 2), HostMemory(num_host_blocks, BLOCK_SIZE * 2**17, 1e-4)
    memory = host if num_host_blocks else None
    engine = Engine(config, make_scheduler(scheduler), num_blocks, memory, CostEstimate(load_profile(PROFILE).cost))
    for i in range(num_rows):
        prompt = np.arange(3, 3 + PROMPT - i % BLOCK_SIZE, dtype=np.uint32)  # block borders spread over the steps
        new = NewSequence(
            RequestId(f"r{i}"),
            StreamId(i),
            1,
            0,
            prompt,
            SamplingParams(max_tokens=max_len),
            0.0,
            1e9,
            qoe=ReaderTarget(),
        )
        assert not isinstance(engine.registry.add(new), AddRefusal)
    while take_stats(engine).num_waiting or (engine.table.num_known - engine.table.num_computed > 1).any():
        step(engine, 0.0)
    return engine


def step(engine: Engine, now_s: float) -> tuple[float, float]:
    """Do one step and return the seconds of its two halves."""
    began_s = time.perf_counter()
    batch = engine.next_batch(now_s)
    assert not engine.take_copies(), "memory suffices"
    made_s = time.perf_counter()
    assert batch is not None
    tokens = np.where(batch.sample, np.int32(7), np.int32(-1))
    output = BatchOutput(batch.step_id, tokens, 0.0)
    back_s = time.perf_counter()
    engine.absorb(batch, output, now_s)
    return made_s - began_s, time.perf_counter() - back_s


def measure(scheduler: str, num_rows: int, num_steps: int, num_host_blocks: int) -> NDArray[np.float64]:
    """Return [num_steps, 2] seconds of `next_batch` and `absorb`."""
    engine = decoding_engine(scheduler, num_rows, num_steps + WARM_UP, num_host_blocks=num_host_blocks)
    for i in range(WARM_UP):
        step(engine, i * 0.02)
    gc.collect()
    gc.disable()
    times = np.array([step(engine, (WARM_UP + i) * 0.02) for i in range(num_steps)])
    gc.enable()
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Time of the engine per step of decodes.")
    parser.add_argument("--steps", type=int, default=3000, help="measured steps per line")
    parser.add_argument("--host-blocks", type=int, default=0, help="of host memory [none]")
    arguments = parser.parse_args()
    rows = []
    for scheduler in SCHEDULERS:
        for num_rows in ROWS:
            times = measure(scheduler, num_rows, arguments.steps, arguments.host_blocks) * 1e6
            both = times.sum(axis=1)
            figures = [*np.median(times, axis=0), np.median(both), np.percentile(both, 99)]
            rows.append([scheduler, str(num_rows), *(f"{figure:.1f}" for figure in figures)])
    head = ["scheduler", "rows", "next_batch p50", "absorb p50", "together p50", "together p99"]
    print_table("Time of the engine per step, µs", head, rows)


if __name__ == "__main__":
    main()
