"""What choosing tokens costs per row: `python -m benchmarks.sampling`.

CPU time of one thread in microseconds per row, median over a few steps, from random logits: `peaked` ones as a trained
model's, `flat` ones where top-p keeps most of the vocabulary. `penalties` are repetition and frequency over 500 known
tokens of each row, a greedy choice included; `logprobs` are 5 alternatives beside a greedy choice.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.harness import machine, print_table
from services.worker.contract.arrays import EMPTY_I32
from services.worker.contract.batch import Batch, RowInit
from services.worker.sampling.logit_rules import LogitRules
from services.worker.sampling.logprobs import LogprobTable
from services.worker.sampling.sampler import SamplingTable, TokenSampler
from shared.types import SamplingParams

CASES: tuple[tuple[str, float, dict[str, Any]], ...] = (
    ("greedy", 6.0, {"temperature": 0}),
    ("temperature", 6.0, {}),
    ("top-p, peaked", 6.0, {"top_p": 0.9}),
    ("top-p, flat", 1.0, {"top_p": 0.9}),
    ("top-k and top-p", 6.0, {"top_p": 0.9, "top_k": 50}),
    ("min-p", 6.0, {"min_p": 0.05}),
    ("penalties", 6.0, {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.5}),
    ("logprobs", 6.0, {"temperature": 0, "logprobs": 5}),
)
KNOWN = 500


def step(num_rows: int, vocab_size: int, scale: float, values: dict[str, Any]) -> Callable[[], None]:
    """Return a function that chooses one token for each row."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * scale
    rows, positions = np.arange(num_rows, dtype=np.int32), np.full(num_rows, KNOWN, dtype=np.int64)
    table, sampler = SamplingTable(num_rows), TokenSampler()
    rules, asked = LogitRules(num_rows, (), vocab_size), LogprobTable(num_rows)
    known = np.random.default_rng(0).integers(0, vocab_size, KNOWN).astype(np.int32)
    inits = [RowInit(row, SamplingParams(max_tokens=1, seed=row, **values), 250, known) for row in range(num_rows)]
    for init in inits:
        table.put(init.row, init.sampling)
        asked.put(init)
    nothing = np.zeros(0, dtype=np.bool_)
    rules.take_in(Batch(0, EMPTY_I32, EMPTY_I32, EMPTY_I32, EMPTY_I32, nothing, admits=tuple(inits)))

    def choose() -> None:
        put_back = rules.apply(logits, rows, positions)
        chosen = sampler.sample(logits, table.take(rows), positions)
        put_back()
        asked.of_tokens(logits, rows, chosen)

    return choose


def cpu_us_per_row(choose: Callable[[], None], num_rows: int, num_steps: int) -> float:
    """Return the median over some steps, after two that are not counted."""
    times = []
    with torch.inference_mode():
        for _ in range(num_steps + 2):
            began_s = time.process_time()
            choose()
            times.append(time.process_time() - began_s)
    return float(np.median(times[2:])) * 1e6 / num_rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="CPU time of choosing tokens, per row.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[8192, 151_936])
    parser.add_argument("--steps", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    sizes = [(vocab_size, num_rows) for vocab_size in arguments.vocabulary for num_rows in arguments.rows]
    lines = [
        (
            name,
            *(
                f"{cpu_us_per_row(step(num_rows, vocab_size, scale, values), num_rows, arguments.steps):.0f}"
                for vocab_size, num_rows in sizes
            ),
        )
        for name, scale, values in CASES
    ]
    print_table(
        "CPU time per row, µs",
        ("choice", *(f"{vocab_size} ids, {num_rows} rows" for vocab_size, num_rows in sizes)),
        lines,
    )


if __name__ == "__main__":
    main()
