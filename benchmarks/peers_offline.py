"""Our engine and runner in one process, without bus and HTTP, as a child of `benchmarks.peers`.

Speaks as `benchmarks/peers_child.py` does.

    python -m benchmarks.peers_offline CHECKPOINT float32|bfloat16 THREADS MAX_LEN MEMORY
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.peers_child import Run, serve
from services.worker.engine.engine import Engine
from services.worker.executor.first_look import RunnerSettings
from services.worker.executor.model_runner import ModelRunner
from services.worker.executor.runner import load_runner
from services.worker.scheduling.registry import make_scheduler
from services.worker.sequences.config import AddRefusal, EngineConfig, NewSequence
from shared.ids import RequestId, StreamId
from shared.process.config_fields import parse_size
from shared.types import SamplingParams


def load(checkpoint: str, dtype: str, threads: int, max_len: int, memory: str) -> Run:
    """Return what generates with one engine and one runner, called in turn as the step loop does."""
    settings = RunnerSettings(
        model_dir=Path(checkpoint),
        dtype=dtype,
        memory_bytes=parse_size(memory),
        max_model_len=max_len,
        num_threads=threads,
    )
    runner = load_runner(settings, lambda _ratio, _text: None)
    info = runner.info
    config = EngineConfig(
        max_sequences=settings.max_rows,
        max_batch_tokens=settings.max_batch_tokens,
        max_batch_rows=settings.max_batch_rows,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        block_size=info.capacity.block_size,
    )
    engine = Engine(config, make_scheduler("chunked"), info.capacity.num_blocks)
    runs = 0

    def run(prompts: list[list[int]], num_output: int) -> dict[str, float]:
        nonlocal runs
        runs += 1
        return _generate(engine, runner, prompts, num_output, runs)

    return run


def _generate(
    engine: Engine, runner: ModelRunner, prompts: list[list[int]], num_output: int, run: int
) -> dict[str, float]:
    sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    began_s = time.perf_counter()
    for i, ids in enumerate(prompts):
        prompt = np.asarray(ids, dtype=np.uint32)
        new = NewSequence(RequestId(f"{run}-{i}"), StreamId(i), 1, 0, prompt, sampling, began_s, began_s + 3600)
        outcome = engine.registry.add(new)
        assert not isinstance(outcome, AddRefusal), outcome
    first_s, last_s = np.zeros(len(prompts)), np.zeros(len(prompts))
    num_tokens = 0
    while engine.table.num_sequences:
        batch = engine.next_batch(time.perf_counter())
        assert batch is not None, "somebody can always run"
        events = engine.absorb(batch, runner.run(batch), time.perf_counter())
        now_s = time.perf_counter() - began_s
        first_s[events.stream[events.first_index == 0]] = now_s
        last_s[events.stream] = now_s
        num_tokens += len(events)
    assert num_tokens == len(prompts) * num_output, "an answer ended early"
    return {
        "tokens_per_s": num_tokens / (time.perf_counter() - began_s),
        "ttft_s": float(first_s.mean()),
        "itl_s": float((last_s - first_s).mean() / max(num_output - 1, 1)),
    }


if __name__ == "__main__":
    folder, number_type, num_threads, longest, budget = sys.argv[1:]
    serve(lambda: load(folder, number_type, int(num_threads), int(longest), budget))
