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
from services.worker.executor.model_runner import ModelRunner, RunnerSettings
from services.worker.executor.native_step import NativeForward
from services.worker.executor.runner import load_runner
from services.worker.native.structures import PARTS
from shared.types import SamplingParams

PREFILL_TOKENS = 512
COLUMNS = (*PARTS, "rest")
BLUES, WARM, COLD = ("#1b6ca8", "#66b2e0"), ("#e9a23b", "#c9761a"), ("#7b4ea3", "#dddddd")
COLOURS = ("#888888", "#bbbbbb", *BLUES, "#d1495b", "#2a9d8f", *WARM, "#555555", *COLD)


def main() -> None:
    """Measure, print the table, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=192, help="tokens before the decoded one")
    parser.add_argument("--memory-gib", type=float, default=2.0, help="for parameters and KV")
    parser.add_argument("--steps", type=int, default=40, help="of each kind")
    parser.add_argument("--svg", type=Path, help="file for the picture")
    arguments = parser.parse_args()
    settings = RunnerSettings(
        arguments.model,
        dtype=arguments.dtype,
        memory_bytes=int(arguments.memory_gib * 2**30),
        max_batch_rows=64,
        max_model_len=1024,
        num_threads=arguments.threads,
        kernels="native",
    )
    runner = load_runner(settings, lambda _done, _what: None)
    bars = {f"{rows} decodes": profile(runner, rows, 1, arguments.context, arguments.steps) for rows in (1, 8, 32, 64)}
    bars[f"prompt of {PREFILL_TOKENS}"] = profile(runner, 1, PREFILL_TOKENS, 0, arguments.steps)
    title = f"{runner.info.kernels}, {arguments.dtype}, {arguments.threads} threads, context {arguments.context}"
    print_table(
        f"Where a step's time goes, ms: {title} ({machine()})",
        ("step", "whole", *COLUMNS),
        [(name, f"{sum(bar) * 1e3:.2f}", *(f"{part * 1e3:.2f}" for part in bar)) for name, bar in bars.items()],
    )
    if arguments.svg:
        arguments.svg.write_text(picture(bars, title))


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


def picture(bars: dict[str, list[float]], title: str) -> str:
    """Return an SVG with one bar per kind of step, its parts as shares of the whole."""
    width, height, left = 860, 34, 130
    lines = [f'<text x="10" y="20" font-size="14">Share of a step by part: {title}</text>']
    for place, (name, bar) in enumerate(bars.items()):
        top, x = 36 + place * height, float(left)
        lines.append(f'<text x="10" y="{top + 17}">{name}</text>')
        for part, colour, column in zip(bar, COLOURS, COLUMNS, strict=True):
            size = part / sum(bar) * (width - left - 90)
            label = f"{column}: {part * 1e3:.2f} ms, {part / sum(bar):.0%}"
            place_and_size = f'x="{x:.1f}" y="{top}" width="{size:.1f}" height="24"'
            lines.append(f'<rect {place_and_size} fill="{colour}"><title>{label}</title></rect>')
            x += size
        lines.append(f'<text x="{x + 6:.0f}" y="{top + 17}">{sum(bar) * 1e3:.2f} ms</text>')
    below = 36 + len(bars) * height + 14
    for place, (column, colour) in enumerate(zip(COLUMNS, COLOURS, strict=True)):
        x, y = 10 + place % 6 * 140, below + place // 6 * 22
        lines.append(f'<rect x="{x}" y="{y - 11}" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 18}" y="{y}">{column}</text>')
    size_and_font = f'width="{width}" height="{below + 40}" font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size_and_font}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
