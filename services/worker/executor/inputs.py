"""What torch's operators need of a `Batch` on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.worker.attention.base import RaggedRows
from services.worker.contract.arrays import I32, I64
from services.worker.contract.batch import Batch
from services.worker.contract.table_entries import slots_of
from services.worker.memory.host_link import PinnedRing
from services.worker.sampling.own_samples import OwnSamples


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tensors; views of buffers that the next step overwrites."""

    tokens: torch.Tensor
    """[t] int64"""
    positions: torch.Tensor
    """[t] int64, place of each token in its sequence"""
    slots: torch.Tensor
    """[t] int64, where its keys and values go"""
    last: torch.Tensor
    """[n] int64, index of each row's last token"""
    sampled: torch.Tensor
    """[k] int64, index of the last token of each row whose next token is wanted"""
    rows: RaggedRows
    """Of the same step, on the host."""


class InputBuffers:
    """Host and device buffers for one step of at most `max_tokens` tokens.

    Args:
        max_tokens: of one batch.
        block_size: token slots of a block.
        samples: the rows' newest ones, which stand for tokens below 0; may be left out where there are none.
    """

    def __init__(
        self, max_tokens: int, block_size: int, device: torch.device, samples: OwnSamples | None = None
    ) -> None:
        on_gpu = device.type == "cuda"
        self._block_size = block_size
        self._samples = samples
        columns = [torch.zeros(5 * max_tokens, dtype=torch.int64, pin_memory=on_gpu) for _ in range(1 + on_gpu)]
        self._columns = PinnedRing(columns, device)
        """Of t tokens, [5, t] of each: tokens, positions, slots; indices of last tokens, and of those that are sampled
        from. One behind the other, so that one copy sends them; the device may still read the last step's."""
        self._device = device
        self._on_device = torch.zeros_like(columns[0], device=device) if on_gpu else columns[0]

    def fill(self, batch: Batch, tables: I32, sampled: I64) -> StepInputs:
        """Lay out a batch. Valid until the next call; the device computes with it in the order of the calls.

        Args:
            batch: of at most `max_tokens` tokens.
            tables: [max_rows, max_blocks] block tables of all rows.
            sampled: [k] places in the batch of the rows whose next token is wanted.
        """
        num_tokens = len(batch.tokens)
        longest = int((batch.start + batch.num_tokens).max())
        num_blocks = -(-longest // self._block_size)
        rows = RaggedRows(batch.num_tokens, batch.start, tables[batch.rows, :num_blocks])
        columns, sent = (each[: 5 * num_tokens].view(5, -1) for each in (self._columns.take(), self._on_device))
        host: I64 = columns.numpy()
        tokens, positions, slots = host[:3]
        tokens[:] = batch.tokens
        row = np.arange(len(batch.rows))
        if num_tokens == len(row):  # decodes only
            positions[:] = batch.start
        else:
            row = np.repeat(row, batch.num_tokens)
            positions[:] = np.arange(num_tokens) + (batch.start - rows.first_token)[row]
        entries = rows.tables[row, positions // self._block_size]
        slots[:] = slots_of(entries, positions, self._block_size)
        num_rows, num_sampled = len(batch.rows), len(sampled)
        last = host[3, :num_rows]
        np.cumsum(batch.num_tokens, out=last)
        last -= 1
        host[4, :num_sampled] = last[sampled]
        if self._device.type == "cuda":
            sent.copy_(columns, non_blocking=True)
            self._columns.sent()
        if np.count_nonzero(batch.tokens < 0):
            assert self._samples is not None, "a token is not known, and nobody knows the samples"
            self._samples.look_up(sent[0])
        return StepInputs(sent[0], sent[1], sent[2], sent[3, :num_rows], sent[4, :num_sampled], rows)
