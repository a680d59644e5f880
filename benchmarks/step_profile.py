"""Where a step's time goes on the CPU: the parts of the forward pass, and the rest, which is Python; as a picture.

    python -m benchmarks.step_profile --model FOLDER [--dtype bfloat16] [--threads 2] [--svg FILE]

The kernels time their parts themselves, on their first thread. Rows are greedy, so that the choice of the token is part
of the head. Medians would not add up, so the mean of the faster half of the steps is shown.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import machine, print_table
from services.worker.contract.batch import NO_TABLE_DELTA, Batch, RowInit, TableDelta
from services.worker.executor.first_look import RunnerSettings
from services.worker.executor.model_runner import ModelRunner
from services.worker.executor.native_step import NativeForward
from services.worker.executor.runner import load_runner
from services.worker.native.structures import PARTS
from shared.types import SamplingParams

PREFILL_TOKENS = 512
COLUMNS = (*PARTS, "rest")


def main() -> None:
    """Measure, print the table, and draw it."""
    parser = runner_parser(__doc__)
    parser.add_argument("--steps", type=int, default=40, help="of each kind")
    parser.add_argument("--svg", type=Path, help="file for the picture")
    arguments = parser.parse_args()
    runner = open_runner(arguments, "native")
    bars = {f"{rows} decodes": profile(runner, rows, 1, arguments.context, arguments.steps) for rows in (1, 8, 32, 64)}
    bars[f"prompt of {PREFILL_TOKENS}"] = profile(runner, 1, PREFILL_TOKENS, 0, arguments.steps)
    title = f"{runner.info.kernels}, {arguments.dtype}, {arguments.threads} threads, context {arguments.context}"
    print_table(
        f"Where a step's time goes, ms: {title} ({machine()})",
        ("step", "whole", *COLUMNS),
        [(name, f"{sum(bar) * 1e3:.2f}", *(f"{part * 1e3:.2f}" for part in bar)) for name, bar in bars.items()],
    )
    if arguments.svg:
        draw(bars, title, arguments.svg)


def runner_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of what `open_runner` is told; the description is shown as it is."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=192, help="tokens before the decoded one")
    parser.add_argument("--memory-gib", type=float, default=2.0, help="for parameters and KV, of each runner")
    return parser


def open_runner(arguments: argparse.Namespace, kernels: str) -> ModelRunner:
    """Return a runner with room for all of the steps."""
    settings = RunnerSettings(
        arguments.model,
        dtype=arguments.dtype,
        memory_bytes=int(arguments.memory_gib * 2**30),
        max_batch_rows=64,
        max_model_len=1024,
        num_threads=arguments.threads,
        kernels=kernels,
    )
    return load_runner(settings, lambda _done, _what: None)


def profile(runner: ModelRunner, num_rows: int, num_tokens: int, start: int, num_steps: int) -> list[float]:
    """Return the seconds of each of `COLUMNS` for steps of some shape."""
    forward: Any = vars(runner)["_forward"]
    assert isinstance(forward, NativeForward)
    steps = []
    for number in range(num_steps):
        forward.part_seconds = np.zeros(len(PARTS))
        batch = make_batch(runner, num_rows, num_tokens, start, is_first=number == 0)
        began = time.perf_counter()
        runner.run(batch)
        whole = time.perf_counter() - began
        known = forward.part_seconds.tolist()
        steps.append([*known, whole - sum(known)])
    steps.sort(key=sum)
    return [float(part) for part in np.mean(steps[: max(num_steps // 2, 1)], axis=0)]


def make_batch(runner: ModelRunner, num_rows: int, num_tokens: int, start: int, *, is_first: bool) -> Batch:
    """Return a step in which every row computes `num_tokens` tokens from `start` on."""
    rows = np.arange(num_rows, dtype=np.int32)
    blocks = -(-(start + num_tokens) // runner.capacity.block_size)
    index = np.arange(blocks, dtype=np.int32)
    every = np.random.default_rng(0).permutation(num_rows * blocks).astype(np.int32)
    delta = TableDelta(np.repeat(rows, blocks), np.tile(index, num_rows), every)
    sampling = SamplingParams(max_tokens=1, temperature=0)
    return Batch(
        step_id=0,
        rows=rows,
        num_tokens=np.full(num_rows, num_tokens, dtype=np.int32),
        start=np.full(num_rows, start, dtype=np.int32),
        tokens=np.full(num_rows * num_tokens, 7, dtype=np.int32),
        sample=np.ones(num_rows, dtype=np.bool_),
        table_delta=delta if is_first else NO_TABLE_DELTA,
        admits=tuple(RowInit(int(row), sampling) for row in rows) if is_first else (),
    )


def draw(bars: dict[str, list[float]], title: str, path: Path) -> None:
    """Draw one bar per kind of step, its parts as shares of the whole."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    names = [f"{name}\n{sum(bar) * 1e3:.2f} ms" for name, bar in bars.items()]
    shares = np.array([np.array(bar) / sum(bar) for bar in bars.values()])
    begins = shares.cumsum(axis=1) - shares
    for place, column in enumerate(COLUMNS):
        colour = colormaps["tab20"](place)
        axes.barh(names, 100 * shares[:, place], left=100 * begins[:, place], label=column, color=colour)
    axes.invert_yaxis()
    axes.set_xlabel(f"share of a step by part, %: {title}")
    figure.legend(loc="outside lower center", ncols=6)
    figure.savefig(path)


if __name__ == "__main__":
    main()
