"""What it brings to launch a step of decodes before the one before it has ended: tokens per second of a worker's loop.

    python -m benchmarks.overlap --model FOLDER [--device cuda] [--dtype bfloat16] [--memory-gib 60]
                                 [--rows 1 16 64 256]

The worker's own engine, step loop and executor on one loaded model, without a broker. All sequences decode, half of
them greedily and half drawn; with overlap and without by turns, the median of the rounds and of their ratios counts.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import uvloop

from benchmarks.harness import print_table
from benchmarks.on_device import model_parser, name_of, parse, settings_of
from services.worker.contract.batch import Batch
from services.worker.engine.engine import Engine
from services.worker.engine.gate import StepGate
from services.worker.engine.loop import StepLoop
from services.worker.engine.stats import take_stats
from services.worker.executor.launched import Launched
from services.worker.executor.model_runner import ModelRunner
from services.worker.executor.runner import load_runner
from services.worker.executor.thread import ThreadExecutor
from services.worker.scheduling.registry import make_scheduler
from services.worker.sequences.config import AddRefusal, EngineConfig, NewSequence
from shared.ids import RequestId, StreamId
from shared.types import SamplingParams

PROMPT = 32


def engine_of(runner: ModelRunner, num_rows: int, num_tokens: int, *, overlaps: bool) -> Engine:
    """Return an engine with so many sequences that wait; each says `num_tokens` tokens."""
    info, capacity = runner.info, runner.capacity
    config = EngineConfig(
        max_sequences=num_rows,
        max_batch_tokens=2048,
        max_batch_rows=num_rows,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        block_size=capacity.block_size,
        prefix_caching=False,
        overlaps=overlaps,
    )
    engine = Engine(config, make_scheduler("chunked"), capacity.num_blocks)
    random = np.random.default_rng(0)
    for row in range(num_rows):
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.8 * (row % 2), seed=row)
        prompt = random.integers(0, info.vocab_size, PROMPT).astype(np.uint32)
        new = NewSequence(RequestId(f"r{row}"), StreamId(row), 1, 0, prompt, sampling, 0.0, 1e12)
        assert not isinstance(engine.registry.add(new), AddRefusal), "the memory does not hold one sequence"
    return engine


async def tokens_per_s(executor: ThreadExecutor, engine: Engine) -> float:
    """Return what the loop reaches once all prompts are computed."""
    loop = asyncio.get_running_loop()
    totals, began, ended = engine.totals, asyncio.Event(), asyncio.Event()

    def look() -> None:
        if not take_stats(engine).num_waiting and not (engine.table.num_output[engine.table.running.view] == 0).any():
            began.set()
        if not engine.table.num_sequences:
            ended.set()

    steps = StepLoop(engine, executor, lambda _: None, loop.time, StepGate(), on_step=lambda *_: look())
    running = asyncio.create_task(steps.run())
    await began.wait()
    first, began_s = totals.num_generated_tokens, time.perf_counter()
    await ended.wait()
    taken_s = time.perf_counter() - began_s
    steps.close()
    await running
    return (totals.num_generated_tokens - first) / taken_s


async def measure(arguments: argparse.Namespace) -> list[list[str]]:
    """Return the rows of the table."""
    max_rows = max(arguments.rows)
    settings = settings_of(arguments, max_batch_rows=max_rows, max_rows=max_rows)
    runner = load_runner(settings, lambda _done, what: print(f"# {what}", flush=True))
    table = []
    for num_rows in arguments.rows:
        rates: list[tuple[float, float]] = []
        for _ in range(arguments.rounds + 1):  # the first one warms up
            pair = []
            for overlaps in (False, True):
                # the rows of the one before are known no more: batches of another engine admit theirs anew
                executor = ThreadExecutor(Lent(runner, overlaps=overlaps), asyncio.get_running_loop())
                pair.append(
                    await tokens_per_s(executor, engine_of(runner, num_rows, arguments.tokens, overlaps=overlaps))
                )
                await executor.close()
            rates.append((pair[0], pair[1]))
        apart, ahead = (median(column) for column in zip(*rates[1:], strict=True))
        ratio = median(second / first for first, second in rates[1:])
        table.append([str(num_rows), f"{apart:.0f}", f"{ahead:.0f}", f"{ratio:.3f}"])
    runner.close()
    return table


class Lent:
    """A runner that does not close when its executor does."""

    def __init__(self, runner: ModelRunner, *, overlaps: bool) -> None:
        self.capacity = runner.capacity
        self.copies_beside = runner.copies_beside
        self.overlaps = overlaps
        self.launch: Callable[[Batch], Launched] = runner.launch
        self.copy = runner.copy

    def close(self) -> None:
        """Stay open."""


def main() -> None:
    """Measure and print."""
    parser = model_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=200, help="of each sequence")
    parser.add_argument("--rounds", type=int, default=5)
    arguments, device = parse(parser)
    table = uvloop.run(measure(arguments))
    print_table(
        f"Tokens per second of decodes ({name_of(device)}, {arguments.dtype})",
        ["rows", "one step after the other", "steps overlap", "ratio (median of rounds)"],
        table,
    )


if __name__ == "__main__":
    main()
