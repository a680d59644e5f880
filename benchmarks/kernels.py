"""The native kernels beside something else, step by step in turn.

    python -m benchmarks.kernels --model FOLDER --against torch|small-pages|LIBRARY.so [--dtype bfloat16] [--threads 2]

Something else is torch's operators, the kernels without huge pages, or another build of them, such as one of an older
version's sources. Two runners over the same checkpoint are open in one process and compute the same steps alternately.
Times are the best of all rounds, since others may use the machine; the ratio is above 1 where the native kernels are
faster. Against torch a second table shows the largest product of the layers by itself, GFLOP/s: the part `mlp up` of
the native step, activation included, and torch's `linear` on the same matrices.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional

from benchmarks.harness import machine, print_table
from benchmarks.step_profile import make_batch, open_runner, runner_parser
from services.worker.executor.model_runner import ModelRunner
from services.worker.native.library import NativeLibrary
from services.worker.native.structures import PARTS

STEPS = ((1, 1), (8, 1), (32, 1), (64, 1), (1, 512))
"""(rows, tokens of each)"""
USERS_OF_HUGE_PAGES = ("services.worker.memory.kv_cache", "services.worker.models.weights")


def open_other(arguments: argparse.Namespace) -> ModelRunner:
    """Return what is compared with the native kernels."""
    if arguments.against == "torch":
        return open_runner(arguments, "torch")
    if arguments.against != "small-pages":
        library = NativeLibrary(Path(arguments.against).resolve(), "other")
        with patch("services.worker.executor.kernels.open_library", return_value=library):
            return open_runner(arguments, "native")
    with patch(f"{USERS_OF_HUGE_PAGES[0]}.advise_huge_pages"), patch(f"{USERS_OF_HUGE_PAGES[1]}.advise_huge_pages"):
        return open_runner(arguments, "native")


def best_ms(runners: list[ModelRunner], num_rows: int, num_tokens: int, context: int, rounds: int) -> list[float]:
    """Return the least milliseconds of a step for each runner, the runners taking turns."""
    start = context if num_tokens == 1 else 0
    times: list[list[float]] = [[] for _ in runners]
    for number in range(rounds):
        for runner, taken in zip(runners, times, strict=True):
            batch = make_batch(runner, num_rows, num_tokens, start, is_first=number == 0)
            began_s = time.perf_counter()
            runner.run(batch)
            taken.append(time.perf_counter() - began_s)
    return [min(taken) * 1e3 for taken in times]


def product_speeds(runner: ModelRunner, num_rows: int, num_tokens: int, rounds: int) -> list[float]:
    """Return the GFLOP/s of the layers' products from the hidden state to the MLP: native, and torch's."""
    forward: Any = vars(runner)["_forward"]
    layers = [layer["gate_up"] for layer in vars(forward)["_weights"].layers]
    hidden = torch.randn((num_rows * num_tokens, layers[0].shape[1])).to(layers[0].dtype)
    ours, others = [], []
    for number in range(rounds):
        forward.part_seconds = np.zeros(len(PARTS))
        runner.run(make_batch(runner, num_rows, num_tokens, 0, is_first=number == 0))
        ours.append(float(forward.part_seconds[PARTS.index("mlp up")]))
        began_s = time.perf_counter()
        for weight in layers:
            functional.linear(hidden, weight)
        others.append(time.perf_counter() - began_s)
    forward.part_seconds = None
    operations = 2.0 * len(hidden) * sum(weight.numel() for weight in layers)
    return [operations / min(times) / 1e9 for times in (ours, others)]


def main() -> None:
    """Measure and print."""
    parser = runner_parser(__doc__)
    parser.add_argument("--against", metavar="torch|small-pages|LIBRARY.so", required=True)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    runners = [open_runner(arguments, "native"), open_other(arguments)]
    lines = []
    for num_rows, num_tokens in STEPS:
        ours, others = best_ms(runners, num_rows, num_tokens, arguments.context, arguments.rounds)
        name = f"{num_rows} decodes" if num_tokens == 1 else f"prompt of {num_tokens}"
        lines.append([name, f"{ours:.2f}", f"{others:.2f}", f"{others / ours:.2f}"])
    print_table(
        f"A step, ms: {runners[0].info.kernels}, {arguments.dtype}, {arguments.threads} threads, "
        f"context {arguments.context} ({machine()})",
        ["step", "native", Path(arguments.against).name, "ratio"],
        lines,
    )
    if arguments.against == "torch":
        speeds = [
            (rows * tokens, *product_speeds(runners[0], rows, tokens, arguments.rounds)) for rows, tokens in STEPS
        ]
        print_table(
            "Products to the MLP, GFLOP/s",
            ["rows", "native", "torch"],
            [[str(rows), f"{ours:.0f}", f"{others:.0f}"] for rows, ours, others in speeds],
        )


if __name__ == "__main__":
    main()
