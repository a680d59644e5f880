"""Drives a `ModelRunner` without an engine: ragged batches, prompts in chunks, blocks in a shuffled order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from services.worker.contract.arrays import EMPTY_I32
from services.worker.contract.batch import NO_COPIES, Batch, CopyOps, RowInit, TableDelta
from services.worker.executor.model_runner import ModelRunner
from shared.stream_extras import TokenLogprob
from shared.types import SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass
class Driven:
    """One sequence under way."""

    row: int
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams = GREEDY
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class Driver:
    """Keeps blocks and rows as an engine would, in the simplest way.

    Args:
        seed: order of free blocks and of rows.
        from_right: share of the blocks that are filled from the right.
    """

    def __init__(
        self, runner: ModelRunner, *, seed: int = 0, num_blocks: int | None = None, from_right: float = 0.0
    ) -> None:
        self.runner = runner
        self.sequences: list[Driven] = []
        self._random, self._ends, self._from_right = random.Random(seed), random.Random(seed), from_right
        self._free = list(range(num_blocks or min(runner.capacity.num_blocks, 4096)))
        self._random.shuffle(self._free)
        self._steps = 0
        self._new: list[Driven] = []
        self._dropped: list[int] = []
        self._given: list[tuple[int, int, int]] = []

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        row: int | None = None,
        generated: Sequence[int] = (),
    ) -> Driven:
        known = [*prompt, *generated]
        sequence = Driven(len(self.sequences) if row is None else row, known, len(prompt), sampling)
        self.sequences.append(sequence)
        self._new.append(sequence)
        return sequence

    def preempt(self, sequence: Driven) -> None:
        """Take the KV away: the next batches compute the sequence again."""
        self._free.extend(max(entry, ~entry) for entry in sequence.blocks)
        sequence.blocks.clear()
        sequence.num_computed = 0

    def give(self, sequence: Driven, blocks: list[int], num_computed: int) -> None:
        """Let a preempted sequence go on with KV that is in these free blocks; below 0: see `TableDelta`."""
        self._free = [block for block in self._free if block not in blocks]
        sequence.blocks, sequence.num_computed = list(blocks), num_computed
        self._given += [(sequence.row, index, block) for index, block in enumerate(blocks)]

    def drop(self, sequence: Driven) -> None:
        self.preempt(sequence)
        self.sequences.remove(sequence)
        self._dropped.append(sequence.row)

    def batch(self, work: Sequence[tuple[Driven, int]], copies: CopyOps = NO_COPIES) -> Batch:
        """Lay out `count` tokens of each sequence, from where it stands."""
        delta = [*self._given, *self._grow(work)]
        self._given = []
        columns = [np.array(column, dtype=np.int32) for column in zip(*delta, strict=True)] or [EMPTY_I32] * 3
        new = tuple(self._row_init(sequence) for sequence in self._new)
        dropped = np.array(self._dropped, dtype=np.int32)
        self._new, self._dropped = [], []
        self._steps += 1
        return Batch(
            step_id=self._steps,
            rows=np.array([sequence.row for sequence, _ in work], dtype=np.int32),
            num_tokens=np.array([count for _, count in work], dtype=np.int32),
            start=np.array([sequence.num_computed for sequence, _ in work], dtype=np.int32),
            tokens=np.array([t for s, count in work for t in s.tokens[s.num_computed :][:count]], dtype=np.int32),
            sample=np.array([s.num_computed + count == len(s.tokens) for s, count in work], dtype=np.bool_),
            table_delta=TableDelta(*columns),
            copies=copies,
            admits=new,
            drops=dropped,
        )

    def _row_init(self, sequence: Driven) -> RowInit:
        tokens = np.array(sequence.tokens if sequence.sampling.follows_tokens else [], dtype=np.int32)
        return RowInit(sequence.row, sequence.sampling, sequence.num_prompt, tokens)

    def step(self, work: Sequence[tuple[Driven, int]], copies: CopyOps = NO_COPIES) -> None:
        """Run one batch and append what was sampled."""
        batch = self.batch(work, copies)
        output = self.runner.run(batch)
        for i, said in (output.logprobs or {}).items():
            work[i][0].logprobs.append(said)
        for (sequence, count), token, sample in zip(work, output.tokens.tolist(), batch.sample.tolist(), strict=True):
            sequence.num_computed += count
            assert (token >= 0) == sample
            if sample:
                sequence.tokens.append(token)

    def step_logits(self, work: Sequence[tuple[Driven, int]], following: Sequence[int | None]) -> None:
        """Run one batch, keep each row's logits, and append the given tokens (None: the chunk does not end the row)."""
        logits = self.runner.logits(self.batch(work))
        for index, ((sequence, count), token) in enumerate(zip(work, following, strict=True)):
            sequence.num_computed += count
            sequence.logits.append(logits[index].clone())
            if token is not None:
                sequence.tokens.append(token)

    def run(self, num_tokens: int, *, chunk: int, max_tokens: int) -> None:
        """Generate `num_tokens` for every sequence: random subsets, decodes first, prompts in random chunks."""
        while unfinished := [s for s in self.sequences if len(s.output) < num_tokens]:
            picked = [s for s in unfinished if self._random.random() < 0.8] or unfinished[:1]
            self._random.shuffle(picked)
            work, room = [], max_tokens
            for sequence in sorted(picked, key=lambda s: len(s.tokens) - s.num_computed > 1):
                count = min(len(sequence.tokens) - sequence.num_computed, self._random.randint(1, chunk), room)
                if count:
                    work.append((sequence, count))
                    room -= count
            self.step(work)

    def _grow(self, work: Sequence[tuple[Driven, int]]) -> Iterator[tuple[int, int, int]]:
        block_size = self.runner.capacity.block_size
        for sequence, count in work:
            while len(sequence.blocks) * block_size < sequence.num_computed + count:
                block = self._free.pop()
                sequence.blocks.append(~block if self._ends.random() < self._from_right else block)
                yield sequence.row, len(sequence.blocks) - 1, sequence.blocks[-1]
