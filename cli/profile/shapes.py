"""Which requests show what a step costs: decodes of several batch sizes and contexts, prompts of all lengths. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shared.messages.report import WorkerReport

MAX_SHAPE_TOKENS = 16_384
"""Most prompt tokens of one shape: they have to be computed before its decodes begin."""
MAX_PROMPT = 4096
KV_SHARE = 0.8
"""Share of the worker's KV blocks that a shape may fill, so that nothing is preempted."""
PREFILL_REPEATS = 3


@dataclass(frozen=True, slots=True)
class ProfileShape:
    """Requests that are submitted together."""

    num_requests: int
    num_prompt: int
    """Tokens of each prompt."""
    num_output: int
    """Tokens of each answer; the first one comes from the prompt's own step."""


WARM_UP = ProfileShape(2, 16, 8)
"""Run before anything is measured."""


def plan_shapes(worker: WorkerReport, max_batch: int, num_decodes: int, rng: np.random.Generator) -> list[ProfileShape]:
    """Return the shapes that this worker can take, in an order that is useful however early it ends.

    Args:
        worker: a report of the ready worker.
        max_batch: most sequences that decode together.
        num_decodes: steps of decodes per batch.
        rng: shuffles the order.
    """
    room = min(worker.max_model_len, int(KV_SHARE * worker.num_blocks) * worker.block_size)
    longest = min(room - 1, MAX_PROMPT)
    prefills = [ProfileShape(1, length, 1) for length in _powers(4, longest) for _ in range(PREFILL_REPEATS)]
    decodes = [
        shape
        for size in _powers(1, min(worker.max_sequences, max_batch))
        for context in _contexts(longest - num_decodes)
        if _fits(shape := ProfileShape(size, context, num_decodes + 1), worker)
    ]
    shapes = prefills + decodes
    return [shapes[i] for i in rng.permutation(len(shapes))]


def _powers(first: int, last: int) -> list[int]:
    """Return first, 2 · first, … up to last, and last itself."""
    found = []
    value = first
    while value < last:
        found.append(value)
        value *= 2
    return [*found, last] if last >= first else []


def _contexts(longest: int) -> list[int]:
    """Return prompts of decoding sequences: from short ones to the longest, three in all if there is room."""
    if longest < 1:
        return []
    short = min(16, longest)
    return sorted({short, max(short, round((short * longest) ** 0.5)), longest})


def _fits(shape: ProfileShape, worker: WorkerReport) -> bool:
    blocks = -(-(shape.num_prompt + shape.num_output) // worker.block_size) * shape.num_requests
    return blocks <= KV_SHARE * worker.num_blocks and shape.num_requests * shape.num_prompt <= MAX_SHAPE_TOKENS
