"""The newest sample of each row, for the step behind it: it may begin before the host knows the token.

    step 7 samples row 3   ── host has it at once  ──►  `put`, and step 8 is given the id
                           ── device alone has it  ──►  `put_on_device`, and step 8 is given -1 - row, which the device
                                                        looks up when it gets there

A sample belongs to a position. If the step before has failed, the row has none for the position at which the next one
begins, and that one cannot be computed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from services.worker.contract.arrays import I32, I64, Bool
from services.worker.contract.batch import OWN_SAMPLE, Batch
from services.worker.memory.host_link import is_beside, send


class OwnSamples:
    """Samples by row of the engine's table.

    Args:
        max_rows: rows of that table.
        vocab_size: ids are below; a row whose logits are no numbers counts as the last one until that is known.
        device: that samples.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._position: I64 = np.full(max_rows, -1, dtype=np.int64)
        self._token: I32 = np.zeros(max_rows, dtype=np.int32)
        self._is_here: Bool = np.zeros(max_rows, dtype=np.bool_)
        self.on_device = torch.zeros(max_rows, dtype=torch.int64, device=device) if is_beside(device) else None
        """[max_rows] int64"""

    def admit(self, row: int) -> None:
        """Forget what another sequence said in a row."""
        self._position[row] = -1

    def put(self, rows: I32, positions: I64, tokens: I64) -> None:
        """Take note of samples [n] of rows [n] for positions [n], which the host knows."""
        self._position[rows], self._token[rows], self._is_here[rows] = positions, tokens, True

    def put_on_device(self, rows: I32, positions: I64, tokens: torch.Tensor) -> None:
        """Take note of samples [n] that only the device has, or will have."""
        assert self.on_device is not None, "this device does not compute beside the host"
        self._position[rows], self._is_here[rows] = positions, False
        places = send(rows.astype(np.int64), self.on_device.device)
        self.on_device.index_copy_(0, places, tokens.clamp(max=self._vocab_size - 1))

    def fill_in(self, batch: Batch) -> Batch | None:
        """Return the batch with the tokens that it begins with, -1 - row for those that only the device has.

        Returns:
            None: some are missing, since the step before has failed.
        """
        places = np.flatnonzero(batch.tokens == OWN_SAMPLE)
        if not len(places):
            return batch
        rows = batch.rows[places]  # decodes come first, one token each
        if not np.array_equal(self._position[rows], batch.start[places]):
            return None
        tokens = batch.tokens.copy()
        tokens[places] = np.where(self._is_here[rows], self._token[rows], -1 - rows)
        return replace(batch, tokens=tokens)

    def look_up(self, tokens: torch.Tensor) -> None:
        """Put into `tokens` [t], on the device and in place, what stands there as -1 - row."""
        assert self.on_device is not None
        rows = (-1 - tokens).clamp_(min=0)
        tokens.copy_(torch.where(tokens < 0, self.on_device.index_select(0, rows), tokens))
