"""One thread against two on the CPU, in pairs: with nothing beside them, and beside a process that computes.

    python -m benchmarks.threads [--pairs 30] [--busy 0,1] [--niceness 0] [--against LIBRARY.so] [--shapes shipped,8,26]

Models of several sizes, made at random but for the one that ships: decodes of one row and of eight, and a prompt.
Runners of the native kernels over one checkpoint take turns of some steps, in an order that rotates. `ratio` is the
median over the turns of (mean time with two threads / with one): below 1 where the second thread gains; `chosen` is
that of a runner that chooses by itself. The slowest of a hundred steps is shown too: a wait for a thread without a core
is seen there first. `--niceness` is that of the processes beside: a worker that starts has 5. `--against` computes with
another build of the kernels, such as one of an older version's sources. The machine's own load is printed: read ratios,
and those of a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest.mock import patch

import numpy as np

from benchmarks.harness import DEMO_MODEL, machine, print_table
from benchmarks.peers_model import make_llama
from benchmarks.step_profile import make_batch
from services.worker.executor.first_look import RunnerSettings
from services.worker.executor.model_runner import ModelRunner
from services.worker.executor.runner import load_runner
from services.worker.native.library import NativeLibrary

STEPS: Final = ((1, 1), (8, 1), (1, 256))
"""(rows, tokens of each)"""
SIZES: Final = {"8": (384, 1024, 4), "26": (512, 1408, 8), "110": (1024, 2816, 9)}
"""Hidden, inner and layers of the random models, by about how many millions of parameters multiply."""
CONTEXT: Final = 192
BURST_S: Final = 0.04
"""Of a turn; one step at least."""


@dataclass(frozen=True, slots=True)
class Threads:
    """A runner, by the name of its column."""

    name: str
    given: int | None


KINDS: Final = (Threads("1", 1), Threads("2", 2), Threads("chosen", None))


def open_runner(folder: Path, threads: Threads, against: str) -> ModelRunner:
    """Return a runner that may take two cores."""
    settings = RunnerSettings(
        folder,
        memory_bytes=700 * 2**20,
        max_batch_rows=8,
        max_batch_tokens=256,
        max_model_len=512,
        num_threads=threads.given,
        num_cores=2,
        kernels="native",
    )
    if not against:
        return load_runner(settings, lambda _done, _what: None)
    library = NativeLibrary(Path(against).resolve(), "other")
    with patch("services.worker.executor.kernels.open_library", return_value=library):
        return load_runner(settings, lambda _done, _what: None)


@contextmanager
def busy_processes(count: int, niceness: int) -> Iterator[None]:
    """Have so many processes compute meanwhile."""
    spin = [sys.executable, "-c", f"import os; os.nice({niceness})\nwhile True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def burst(runner: ModelRunner, num_rows: int, num_tokens: int) -> list[float]:
    """Return the seconds of each step of a turn."""
    batch = make_batch(runner, num_rows, num_tokens, CONTEXT if num_tokens == 1 else 0, is_first=False)
    taken, began_s = list[float](), time.perf_counter()
    last_s = began_s
    while not taken or last_s - began_s < BURST_S:
        runner.run(batch)
        now_s = time.perf_counter()
        taken.append(now_s - last_s)
        last_s = now_s
    return taken


def compare(runners: Sequence[ModelRunner], num_rows: int, num_tokens: int, num_pairs: int) -> list[str]:
    """Return, for each runner, median and 99th percentile of its steps, ms, and the ratio to the first one."""
    for runner in runners:
        start = CONTEXT if num_tokens == 1 else 0
        runner.run(make_batch(runner, num_rows, num_tokens, start, is_first=True))
    steps: list[list[float]] = [[] for _ in runners]
    means = np.empty((num_pairs, len(runners)))
    for pair in range(num_pairs):
        for place in np.roll(np.arange(len(runners)), pair).tolist():
            taken = burst(runners[place], num_rows, num_tokens)
            steps[place] += taken
            means[pair, place] = np.mean(taken)
    ratios = np.median(means[:, 1:] / means[:, :1], axis=0)
    shown = [f"{np.median(taken) * 1e3:.2f}, {np.percentile(taken, 99) * 1e3:.1f}" for taken in steps]
    return [*shown, *(f"{ratio:.2f}" for ratio in ratios)]


def measure(name: str, folder: Path, arguments: argparse.Namespace) -> list[list[str]]:
    """Return the rows of a model."""
    runners = [open_runner(folder, kind, arguments.against) for kind in KINDS]
    rows: list[list[str]] = []
    for count in map(int, arguments.busy.split(",")):
        with busy_processes(count, arguments.niceness):
            for num_rows, num_tokens in STEPS:
                step = f"{num_rows} decodes" if num_tokens == 1 else f"prompt of {num_tokens}"
                load = os.getloadavg()[0]
                found = compare(runners, num_rows, num_tokens, arguments.pairs)
                rows.append([name, step, str(count), *found, f"{load:.1f}"])
    for runner in runners:
        runner.close()
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--busy", default="0,1", help="processes beside, with commas")
    parser.add_argument("--niceness", type=int, default=0, help="of these processes")
    parser.add_argument("--shapes", default="shipped,8,26", help=f"of shipped, {', '.join(SIZES)}, with commas")
    parser.add_argument("--against", metavar="LIBRARY.so", default="")
    arguments = parser.parse_args()
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.shapes.split(","):
            model = DEMO_MODEL if name == "shipped" else Path(folder) / name
            if name != "shipped":
                make_llama(model, *SIZES[name])
            rows += measure(name if name == "shipped" else f"{name} M", model, arguments)
    header = ["model", "step", "busy", *(f"{kind.name}: p50, p99 ms" for kind in KINDS)]
    print_table(
        f"Steps by one thread and by two, float32, medians of {arguments.pairs} pairs ({machine()})",
        [*header, "ratio 2 / 1", "ratio chosen / 1", "load"],
        rows,
    )


if __name__ == "__main__":
    main()
