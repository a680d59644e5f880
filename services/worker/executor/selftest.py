"""Proves on the loaded model that a sequence's logits do not depend on what else is in its batches.

A stage of a pipeline that has no head proves it of its hidden states, one that has no embedding from made-up ones.

Fixed shapes make that so on the platforms that were tried; whether a platform's matrix library keeps its part cannot be
read off anywhere, so it is tried out on the model's own shapes before serving.
"""

from __future__ import annotations

import numpy as np
import torch

from services.worker.contract.arrays import I32
from services.worker.contract.batch import Batch
from services.worker.executor.model_runner import ModelRunner
from services.worker.executor.trial_batch import trial_batch
from shared.errors import StartupError

MAX_TOKENS = 300
"""Length of the sequence that is tried: more than one split of attention."""
_ODD_CHUNKS = (1, 5, 33, 2, 64, 1, 7, 130)


def prove_deterministic(runner: ModelRunner, max_batch_tokens: int) -> None:
    """Compute one sequence by itself, and again in odd pieces beside another one; leaves garbage in the cache.

    The second time its blocks are filled from the right: neither may the logits depend on where keys lie.

    Raises:
        StartupError: the logits differ in any bit.
    """
    info = runner.info
    blocks = info.capacity.num_blocks // 2
    length = min(MAX_TOKENS, info.max_model_len, blocks * info.capacity.block_size)
    if length < 2:
        return  # a sequence of one token has no context, and there is no room for a neighbour
    tokens = (np.arange(length, dtype=np.int64) * 7919 + 13) % info.vocab_size
    first, other = tokens.astype(np.int32), ((tokens + 1) % info.vocab_size).astype(np.int32)
    alone = _run(runner, [(0, first)], (max_batch_tokens,), max_batch_tokens)
    beside = _run(runner, [(blocks, other), (~0, first)], _ODD_CHUNKS, max_batch_tokens)
    if not torch.equal(alone[-1].view(torch.int32), beside[-1].view(torch.int32)):
        raise StartupError(
            "deterministic mode is not possible here: the matrix library's results depend on the rest of the batch",
            "Start without it, or with other threads or another dtype",
        )


def _run(runner: ModelRunner, trials: list[tuple[int, I32]], chunks: tuple[int, ...], max_tokens: int) -> torch.Tensor:
    """Compute sequences side by side, in chunks of the given sizes in turn; return the last step's results.

    Args:
        runner: of the model.
        trials: of each the first entry of its table, and its tokens, as many as the others have.
        chunks: tokens of each in a step.
        max_tokens: of a step.
    """
    first_block = np.array([block for block, _ in trials], dtype=np.int32)
    tokens = np.stack([tokens for _, tokens in trials])
    num_rows, length = tokens.shape
    num_blocks = -(-length // runner.info.capacity.block_size)
    done, step, results = 0, 0, torch.empty(0)
    while done < length:
        count = min(chunks[step % len(chunks)], length - done, max(max_tokens // num_rows, 1))
        start, counts = (np.full(num_rows, each, dtype=np.int32) for each in (done, count))
        chosen = tokens[:, done : done + count].ravel()
        batch = trial_batch(start, counts, num_blocks, tokens=chosen, first_block=first_block)
        results = _results(runner, batch)
        done += count
        step += 1
    return results


def _results(runner: ModelRunner, batch: Batch) -> torch.Tensor:
    """Return [n, ..] float32: logits of each row's last token, or the hidden states behind the layers that are here."""
    hidden = runner.made_up_hidden(batch)
    if runner.info.is_last:
        return runner.logits(batch, hidden)
    last = torch.from_numpy(np.cumsum(batch.num_tokens, dtype=np.int64) - 1)
    behind = runner.advance(batch, hidden)
    return behind.index_select(0, last.to(behind.device)).float()
