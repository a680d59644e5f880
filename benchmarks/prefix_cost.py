"""What it costs a dispatcher to know which worker holds which prefix: time of a decision, and bytes of a report.

    python -m benchmarks.prefix_cost [--workers 10 100 1000] [--blocks 20000] [--calls 200]

Thread time. Each worker holds conversations of its own and a system prompt that all share; a prompt goes on with one of
these conversations. A view brings sketches in which one block in a hundred has changed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.harness import machine, print_table
from services.dispatcher.policy.placement import PlacementLoad, place_least_loaded, place_prefix_aware
from services.dispatcher.policy.prefixes import HeldPrefixes
from shared.ids import WorkerId
from shared.messages.report_parts import DecodeCost, PrefixSketch
from shared.prefix_names import NUM_MARKS, following_names, mark_of, root_name
from shared.prefix_sketch import sketch_of

BLOCK_SIZE = 16
PROMPTS = (2_000, 32_000)
"""Tokens."""


def taken_us(call: Callable[[], object], num_calls: int) -> str:
    """Return the median of the calls in microseconds, and the 99th percentile."""
    times = []
    for _ in range(num_calls):
        began_s = time.thread_time()
        call()
        times.append(1e6 * (time.thread_time() - began_s))
    return f"{np.median(times):,.0f}, {np.percentile(times, 99):,.0f}"


def load_of(worker_id: WorkerId, random: np.random.Generator) -> PlacementLoad:
    """Return a worker that is busy."""
    return PlacementLoad(
        worker_id=worker_id,
        ready=True,
        num_sequences=int(random.integers(1, 64)),
        max_sequences=1024,
        num_waiting=0,
        max_waiting=64,
        num_demanded_blocks=int(random.integers(1000, 10_000)),
        waiting_s=float(random.random()),
        token_s=1e-4,
        num_blocks=20_000,
        block_size=BLOCK_SIZE,
        decode_cost=DecodeCost(),
        max_request_tokens=131_072,
    )


def row(num_workers: int, num_blocks: int, num_calls: int) -> list[str]:
    """Return a line of the table."""
    random, prefixes = np.random.default_rng(0), HeldPrefixes()
    workers = [WorkerId(f"worker-{number}") for number in range(num_workers)]
    loads = [load_of(worker_id, random) for worker_id in workers]
    prompts = [random.integers(0, 1000, length).astype("<u4").tobytes() for length in PROMPTS]
    named = [following_names(root_name(""), prompt, BLOCK_SIZE) for prompt in prompts]
    marks = []
    for number in range(num_workers):
        own = random.integers(0, NUM_MARKS, num_blocks, dtype=np.uint32)
        names = named[number % 2]
        of_prompt = np.array([mark_of(name) for name in names[: random.integers(0, len(names))]], dtype=np.uint32)
        marks.append(np.concatenate([own, of_prompt]))

    def sketches() -> list[PrefixSketch]:
        for each in marks:
            changed = random.integers(0, each.size, each.size // 100)
            each[changed] = random.integers(0, NUM_MARKS, changed.size, dtype=np.uint32)
        return [sketch_of(each) for each in marks]

    def take(told: list[PrefixSketch], now_s: float) -> None:
        for worker_id, sketch in zip(workers, told, strict=True):
            prefixes.take(worker_id, sketch, BLOCK_SIZE, now_s)

    take(sketches(), 0.0)
    views = [sketches() for _ in range(5)]
    taking = taken_us(lambda: take(views.pop(), 1.0), 5)
    cells = [f"{num_workers:,}", taking, taken_us(lambda: place_least_loaded(loads, 3000), num_calls)]
    for prompt, names in zip(prompts, named, strict=True):
        cells += [
            taken_us(partial(prefixes.names_of, prompt, ""), num_calls),
            taken_us(partial(prefixes.cached, names), num_calls),
        ]
        cells.append(taken_us(partial(prefixes.sent, workers[0], names, 2.0), num_calls))
    cached = prefixes.cached(named[0])
    return [*cells, taken_us(lambda: place_prefix_aware(loads, 3000, (), 2000, cached), num_calls)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="what it costs to place by prefixes")
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--blocks", type=int, default=20_000, help="that each worker holds [%(default)s]")
    parser.add_argument("--calls", type=int, default=200, help="of each figure [%(default)s]")
    arguments = parser.parse_args()
    marks = np.random.default_rng(0).integers(0, NUM_MARKS, arguments.blocks, dtype=np.uint32)
    num_bytes = len(sketch_of(marks).model_dump_json())
    names = [f"{what} ({length:,} tokens)" for length in PROMPTS for what in ("names", "who holds them", "sent")]
    head = ["workers", "a view's sketches", "least-loaded", *names, "prefix-aware"]
    title = f"{machine()}; µs: median, p99. A sketch of {arguments.blocks:,} blocks: {num_bytes:,} bytes"
    print_table(title, head, [row(count, arguments.blocks, arguments.calls) for count in arguments.workers])


if __name__ == "__main__":
    main()
