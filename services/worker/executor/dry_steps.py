"""Steps of a few shapes, run for what they take: what a worker knows of its speed before its first request."""

from __future__ import annotations

import time
from typing import Final

import numpy as np
import structlog

from services.worker.contract.arrays import I32
from services.worker.contract.batch import Batch, RowInit
from services.worker.cost.steps import MeasuredStep, shape_of
from services.worker.executor.model_runner import ModelInfo, ModelRunner
from services.worker.executor.trial_batch import trial_batch
from shared.types import SamplingParams

BUDGET_S: Final = 0.2
"""No step begins later, but where the largest step takes longer than this: then the first one of each shape may."""
ROUNDS: Final = 4
"""Of each shape the fastest step counts: the first ones pay for what is made once, others for other processes."""
_ROWS: Final = 16
"""Decodes of a batch that is tried."""
_CONTEXT: Final = 1024
"""Tokens of KV of a long sequence that is tried."""


def try_steps(runner: ModelRunner, max_batch_rows: int) -> list[MeasuredStep]:
    """Run decodes and prefill chunks, few and many, with and without KV before them; return the fastest of each shape.

    Leaves garbage in the cache, and rows that the first batch which admits them makes new.

    Args:
        runner: of the whole model.
        max_batch_rows: of one step.
    """
    found: dict[int, MeasuredStep] = {}
    began_s = time.perf_counter()
    shapes = _shapes(runner.info, max_batch_rows)
    for number in range(ROUNDS * len(shapes)):
        is_first = number < len(shapes)
        if time.perf_counter() - began_s > max(BUDGET_S, runner.info.dry_step_s * is_first):
            break
        start, num_tokens = shapes[number % len(shapes)]
        batch = _batch(start, num_tokens, runner.capacity.block_size)
        step = MeasuredStep(shape_of(start, num_tokens), runner.run(batch).duration_s)
        best = found.setdefault(number % len(shapes), step)
        if step.duration_s < best.duration_s:
            found[number % len(shapes)] = step
    took_s = time.perf_counter() - began_s
    structlog.get_logger().info("steps tried", num_shapes=len(found), took_s=round(took_s, 3))
    return list(found.values())


def _shapes(info: ModelInfo, max_batch_rows: int) -> list[tuple[I32, I32]]:
    """Return (start, tokens) of the rows of each batch that is tried."""
    longest = min(info.max_model_len, info.capacity.num_blocks * info.capacity.block_size, _CONTEXT)
    chunk = max(min(info.max_batch_tokens, longest) // 4, 1)
    rows, behind = min(max_batch_rows, info.max_batch_tokens, _ROWS), longest - 1
    alone = [(0, chunk), (0, chunk // 4), (longest - chunk, chunk), (0, chunk // 16)]
    decodes = [(1, 0), (1, behind), (rows, 0), (rows, behind)]
    shapes = [(np.full(n, start, dtype=np.int32), np.ones(n, dtype=np.int32)) for n, start in decodes]
    shapes += [(np.array([start], dtype=np.int32), np.array([n], dtype=np.int32)) for start, n in alone if n > 1]
    return shapes


def _batch(start: I32, num_tokens: I32, block_size: int) -> Batch:
    """Return a batch of rows from 0 on, which share their blocks: what is computed does not matter."""
    num_blocks = -(-int((start + num_tokens).max()) // block_size)
    admits = tuple(RowInit(row, SamplingParams(max_tokens=1, temperature=0)) for row in range(start.size))
    return trial_batch(start, num_tokens, num_blocks, admits=admits)
