"""How long scheduling policies take to decide, where memory is short and requests wait.

    python -m benchmarks.decisions [--schedulers chunked andes lqsf] [--calls 300]

Thread time. Contexts, how long requests have waited and how much text readers have still are drawn at random.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np

from benchmarks.harness import machine, print_table
from services.worker.scheduling.registry import make_scheduler
from services.worker.scheduling.view import SchedulerView
from shared.cost import load_profile
from tests.support.engine_views import decoding, make_view, parked

PROFILE = "qwen2.5-14b-tp1-a800"
NOW_S = 100.0
READER = (1.0, 4.8)
"""First token after a second, then tokens per second."""


def moment(random: np.random.Generator, num_running: int, num_waiting: int) -> SchedulerView:
    """Return a view with little memory free."""
    count = num_running + num_waiting
    context = random.integers(100, 2000, count).tolist()
    view = make_view(
        running=[decoding(tokens, block_size=16) for tokens in context[:num_running]],
        waiting=[parked(tokens) for tokens in context[num_running:]],
        free_blocks=50,
        block_size=16,
        max_batch_tokens=2048,
        max_batch_rows=1024,
        now_s=NOW_S,
        cost=load_profile(PROFILE).cost,
    )
    waited_s, num, (ttft_s, speed) = random.uniform(0, 90, count), view.columns.num_output, READER
    shown_s = np.maximum(waited_s + random.uniform(-5, 30, count), ttft_s + (num - 1) / speed)
    columns = replace(
        view.columns,
        arrival_s=NOW_S - waited_s,
        qoe_ttft_s=np.full(count, ttft_s),
        qoe_speed=np.full(count, speed),
        qoe_last_s=np.where(num == 0, ttft_s - 1 / speed, shown_s),
        qoe_delay_sum_s=np.zeros(count),
    )
    return replace(view, columns=columns)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedulers", nargs="+", default=["chunked", "andes", "lqsf"])
    parser.add_argument("--calls", type=int, default=300, help="of each line [%(default)s]")
    chosen, lines = parser.parse_args(), list[list[str]]()
    for num_running, num_waiting in ((64, 16), (256, 64), (512, 512), (900, 124)):
        view = moment(np.random.default_rng(0), num_running, num_waiting)
        for name in chosen.schedulers:
            policy, taken_us = make_scheduler(name), []
            for _ in range(chosen.calls):
                began_ns = time.thread_time_ns()
                policy.schedule(view)
                taken_us.append((time.thread_time_ns() - began_ns) / 1e3)
            p50, p99 = np.percentile(taken_us, [50, 99])
            lines.append([f"{num_running} + {num_waiting}", name, f"{p50:.0f}", f"{p99:.0f}"])
    print_table(f"{machine()}; us of thread time", ["run + wait", "policy", "P50", "P99"], lines)


if __name__ == "__main__":
    main()
