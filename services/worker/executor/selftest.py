"""Proves on the loaded model that a sequence's logits do not depend on what else is in its batches.

A stage of a pipeline that has no head proves it of its hidden states, one that has no embedding from made-up ones.

Fixed shapes make that so on the platforms that were tried; whether a platform's matrix library keeps its part cannot be
read off anywhere, so it is tried out on the model's own shapes before serving.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.worker.contract.arrays import I32
from services.worker.contract.batch import Batch, TableDelta
from services.worker.executor.model_runner import ModelRunner
from shared.errors import StartupError

MAX_TOKENS = 300
"""Length of the sequence that is tried: more than one split of attention."""
_ODD_CHUNKS = (1, 5, 33, 2, 64, 1, 7, 130)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A sequence of the proof: its row of the table, first block and tokens."""

    row: int
    first_block: int
    tokens: I32


def prove_deterministic(runner: ModelRunner, max_batch_tokens: int) -> None:
    """Compute one sequence by itself, and again in odd pieces beside another one; leaves garbage in the cache.

    Raises:
        StartupError: the logits differ in any bit.
    """
    info = runner.info
    blocks = info.capacity.num_blocks // 2
    length = min(MAX_TOKENS, info.max_model_len, blocks * info.capacity.block_size)
    if length < 2:
        return  # a sequence of one token has no context, and there is no room for a neighbour
    tokens = (np.arange(length, dtype=np.int64) * 7919 + 13) % info.vocab_size
    first = _Trial(0, 0, tokens.astype(np.int32))
    other = _Trial(1, blocks, ((tokens + 1) % info.vocab_size).astype(np.int32))
    alone = _run(runner, [first], (max_batch_tokens,), max_batch_tokens)
    beside = _run(runner, [other, first], _ODD_CHUNKS, max_batch_tokens)
    if not torch.equal(alone[-1].view(torch.int32), beside[-1].view(torch.int32)):
        raise StartupError(
            "deterministic mode is not possible here: the matrix library's results depend on the rest of the batch",
            "Start without it, or with other threads or another dtype",
        )


def _run(runner: ModelRunner, trials: list[_Trial], chunks: tuple[int, ...], max_tokens: int) -> torch.Tensor:
    """Compute the trials side by side, in chunks of the given sizes in turn; return the last step's results."""
    length, done, step = len(trials[0].tokens), 0, 0
    logits = torch.empty(0)
    while done < length:
        count = min(chunks[step % len(chunks)], length - done, max(max_tokens // len(trials), 1))
        logits = _results(runner, _batch(runner, trials, done, count, step))
        done += count
        step += 1
    return logits


def _results(runner: ModelRunner, batch: Batch) -> torch.Tensor:
    """Return [n, ..] float32: logits of each row's last token, or the hidden states behind the layers that are here."""
    hidden = runner.made_up_hidden(batch)
    if runner.info.is_last:
        return runner.logits(batch, hidden)
    last = torch.from_numpy(np.cumsum(batch.num_tokens, dtype=np.int64) - 1)
    behind = runner.advance(batch, hidden)
    return behind.index_select(0, last.to(behind.device)).float()


def _batch(runner: ModelRunner, trials: list[_Trial], start: int, count: int, step: int) -> Batch:
    num_blocks = -(-len(trials[0].tokens) // runner.info.capacity.block_size)
    index = np.arange(num_blocks, dtype=np.int32)
    rows = np.array([trial.row for trial in trials], dtype=np.int32)
    table = TableDelta(
        np.repeat(rows, num_blocks),
        np.tile(index, len(trials)),
        np.concatenate([index + np.int32(trial.first_block) for trial in trials]),
    )
    return Batch(
        step_id=step,
        rows=rows,
        num_tokens=np.full(len(trials), count, dtype=np.int32),
        start=np.full(len(trials), start, dtype=np.int32),
        tokens=np.concatenate([trial.tokens[start : start + count] for trial in trials]),
        sample=np.ones(len(trials), dtype=np.bool_),
        table_delta=table,
    )
