"""How long pipelines stand idle: microbatches by token count (Sarathi-Serve), and of equal cost, formed ahead.

Qwen2.5-14B on A800s by its cost profile, equal stages, steps of 2 048 tokens; no hardware is needed.

- Overload: requests come faster than they can be computed; a real engine and its scheduler, idle share meanwhile.
- Time of one call of the scheduler, with a new arrival before each, so that the shares are taken anew each time.

    python -m benchmarks.lookahead [--seconds 40] [--calls 300]
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from benchmarks.harness import machine, percentiles, print_table
from services.worker.cost.estimate import CostEstimate
from services.worker.engine.engine import Engine
from services.worker.engine.stats import take_stats
from services.worker.scheduling.chunked import ChunkedScheduler
from services.worker.scheduling.lookahead import LookaheadScheduler
from services.worker.scheduling.view import Scheduler, SchedulerOutput, SchedulerView
from services.worker.sequences.config import EngineConfig, NewSequence
from shared.cost import load_profile
from shared.ids import RequestId, StreamId
from shared.types import SamplingParams
from sim.workload.lengths import find_lengths
from tests.support.toy_pipeline import ToyPipeline

COST: Final = load_profile("qwen2.5-14b-tp1-a800").cost
LENGTHS: Final = ("burstgpt", "sharegpt", "longbench")
STAGES: Final = (2, 4)
MAX_TOKENS: Final = 2048
MAX_ROWS: Final = 512
DECODES: Final = 64
BLOCK_SIZE: Final = 16
KV_TOKENS: Final = {2: 560_000, 4: 1_270_000}
"""By stages: what the A800s hold together with one copy of the parameters (206 K each, and 150 K per copy dropped)."""
OVERLOAD_PER_S: Final = {"burstgpt": 20.0, "sharegpt": 7.0, "longbench": 2.0}
"""Requests per second and stage: about twice what a stage computes of such prompts."""
CONTEXT: Final = 40_000


@dataclass
class Timed:
    """A scheduler whose calls are timed."""

    scheduler: Scheduler
    seconds: list[float] = field(default_factory=list)

    @property
    def reorders(self) -> bool:
        return self.scheduler.reorders

    @property
    def best_effort_gives_way(self) -> bool:
        return self.scheduler.best_effort_gives_way

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        began_s = time.perf_counter()
        output = self.scheduler.schedule(view)
        self.seconds.append(time.perf_counter() - began_s)
        return output


def schedulers() -> dict[str, Scheduler]:
    """Return the two that are compared, fresh."""
    return {"token count": ChunkedScheduler(), "ahead": LookaheadScheduler()}


def engine_of(scheduler: Scheduler, num_stages: int) -> Engine:
    """Return an engine for a group of so many stages."""
    config = EngineConfig(
        max_sequences=4096,
        max_batch_tokens=MAX_TOKENS,
        max_batch_rows=MAX_ROWS,
        max_model_len=CONTEXT,
        vocab_size=32_000,
        eos_token_ids=(2,),
        block_size=BLOCK_SIZE,
        num_lanes=num_stages,
        prefix_caching=False,
    )
    return Engine(config, scheduler, KV_TOKENS[num_stages] // BLOCK_SIZE, cost=CostEstimate(COST))


def sequence(name: int, num_prompt: int, num_output: int, arrival_s: float = 0.0) -> NewSequence:
    """Return a request of this size."""
    prompt = np.full(num_prompt, 5, dtype=np.uint32)
    sampling = SamplingParams(max_tokens=num_output, ignore_eos=True)
    return NewSequence(RequestId(f"r{name}"), StreamId(name), 1, 0, prompt, sampling, arrival_s, 1e9)


def overload(lengths: str, num_stages: int, seconds: float) -> list[list[str]]:
    """Return the lines of the second table for one overload."""
    lines = []
    for name, scheduler in schedulers().items():
        random = np.random.default_rng(2)
        rate_per_s = OVERLOAD_PER_S[lengths] * num_stages
        prompts, outputs = find_lengths(lengths).sample(int(rate_per_s * seconds), random)
        arrivals_s = np.cumsum(random.exponential(1 / rate_per_s, size=prompts.size))
        pipeline = ToyPipeline(engine_of(scheduler, num_stages), COST, num_stages)
        columns = (prompts.tolist(), outputs.tolist(), arrivals_s.tolist())
        pipeline.run((sequence(i, *each) for i, each in enumerate(zip(*columns, strict=True))), until_s=seconds)
        begin_s = seconds / 4
        tokens = sum(int(batch.num_tokens.sum()) for batch in pipeline.batches) / seconds
        ttft_s = float(np.median([at - arrivals_s[i] for i, at in pipeline.first_token_s.items()]))
        idle = f"{100 * pipeline.idle_ratio(begin_s, seconds):.1f} %"
        waiting = take_stats(pipeline.engine).num_waiting
        case = [lengths, f"{rate_per_s:g}", str(num_stages), name]
        lines.append([*case, idle, f"{tokens:.0f}", f"{ttft_s:.2f}", str(waiting)])
    return lines


def call_times(lengths: str, num_stages: int, num_queued: int, num_calls: int) -> list[list[str]]:
    """Return the lines of the third table for one size of queue."""
    lines = []
    for name, scheduler in schedulers().items():
        timed = Timed(scheduler)
        pipeline = ToyPipeline(engine_of(timed, num_stages), COST, num_stages)
        pipeline.run([sequence(i, 50, 4000) for i in range(DECODES)], until_s=2.0)
        prompts, _ = find_lengths(lengths).sample(num_queued, np.random.default_rng(3))
        queue = [sequence(DECODES + i, int(n), 10) for i, n in enumerate(prompts)]
        for new in queue:
            pipeline.engine.registry.add(new)
        timed.seconds.clear()
        gc.collect()
        for i in range(num_calls):
            again = queue[i % num_queued]
            arrival_s = pipeline.now_s
            number = DECODES + num_queued + i
            arriving = replace(again, request_id=RequestId(f"r{number}"), stream=StreamId(number), arrival_s=arrival_s)
            pipeline.run([arriving], until_s=pipeline.next_s)
        lines.append([lengths, str(num_stages), str(num_queued), name, percentiles(timed.seconds, scale=1e6)])
    return lines


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=40.0, help="simulated, of overload")
    parser.add_argument("--calls", type=int, default=300, help="timed calls per line")
    chosen = parser.parse_args()
    cases = [(lengths, stages) for lengths in LENGTHS for stages in STAGES]
    print_table(
        "Overload: requests queue all the time",
        ["lengths", "requests/s", "stages", "scheduler", "idle", "tokens/s", "TTFT p50, s", "waiting at the end"],
        [line for case in cases for line in overload(*case, chosen.seconds)],
    )
    print_table(
        f"One call of the scheduler ({machine()})",
        ["lengths", "stages", "queued", "scheduler", "µs (p50 / p99)"],
        [line for case in cases for size in (100, 1000) for line in call_times(*case, size, chosen.calls)],
    )


if __name__ == "__main__":
    main()
