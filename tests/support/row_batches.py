"""Sequences of a table, and the batches that an executor is given of them, without an engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.worker.contract.arrays import EMPTY_I32
from services.worker.contract.batch import Batch, RowInit
from shared.types import SamplingParams


@dataclass
class Sequence:
    """One sequence as the test knows it."""

    row: int
    sampling: SamplingParams
    num_prompt: int
    tokens: list[int]
    computed: int = 0
    new: bool = True

    def init(self) -> RowInit:
        tokens = np.array(self.tokens if self.sampling.follows_tokens else [], dtype=np.int32)
        return RowInit(self.row, self.sampling, self.num_prompt, tokens)


def batch_of(work: list[tuple[Sequence, int]], drops: list[int]) -> Batch:
    counts = [count for _, count in work]
    inputs = [token for s, count in work for token in s.tokens[s.computed : s.computed + count]]
    return Batch(
        step_id=0,
        rows=np.array([s.row for s, _ in work], dtype=np.int32),
        num_tokens=np.array(counts, dtype=np.int32),
        start=np.array([s.computed for s, _ in work], dtype=np.int32),
        tokens=np.array(inputs, dtype=np.int32),
        sample=np.array([s.computed + count == len(s.tokens) for s, count in work], dtype=np.bool_),
        admits=tuple(s.init() for s, _ in work if s.new),
        drops=np.array(drops, dtype=np.int32) if drops else EMPTY_I32,
    )


def advance(work: list[tuple[Sequence, int]], token: int) -> None:
    """The executor knows the rows now; with a token, the step went well, and this is what they say next."""
    for sequence, count in work:
        sequence.new = False
        sequence.computed += count if token else 0
        if sequence.computed == len(sequence.tokens):
            sequence.tokens.append(token)
