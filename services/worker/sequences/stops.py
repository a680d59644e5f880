"""When a sequence ends by its own token: EOS ids, stop ids, and its length; for a whole batch at once."""

from __future__ import annotations

import numpy as np

from services.worker.contract.arrays import I32, U8, Rows
from shared.types import FinishReason, SamplingParams

MAX_STOP_IDS = 64
"""As many as `SamplingParams.stop_token_ids` may have."""
_LENGTH = np.uint8(FinishReason.LENGTH)
_MAX_I32 = 2**31 - 1


class StopRules:
    """Per row: the stop ids, whether EOS counts, and before which output neither does."""

    def __init__(self, num_rows: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._is_eos = np.zeros(vocab_size, dtype=np.bool_)
        self._is_eos[list(eos_token_ids)] = True
        self._ignore_eos = np.zeros(num_rows, dtype=np.bool_)
        self._stop_ids: I32 = np.full((num_rows, MAX_STOP_IDS), -1, dtype=np.int32)
        self._has_stop_ids = np.zeros(num_rows, dtype=np.bool_)
        self._num_with_stop_ids = 0
        self._min_output: I32 = np.zeros(num_rows, dtype=np.int32)

    def set(self, row: int, sampling: SamplingParams) -> None:
        """Take in a new row's rules."""
        ids = sampling.stop_token_ids
        self._ignore_eos[row] = sampling.ignore_eos
        self._stop_ids[row, : len(ids)] = ids
        self._stop_ids[row, len(ids) :] = -1
        self._has_stop_ids[row] = bool(ids)
        self._num_with_stop_ids += bool(ids)
        self._min_output[row] = min(sampling.min_tokens, _MAX_I32)

    def clear(self, row: int) -> None:
        """Forget a row's rules."""
        self._num_with_stop_ids -= int(self._has_stop_ids[row])
        self._has_stop_ids[row] = False

    def check(self, rows: Rows, tokens: I32, num_output: I32, max_output: I32) -> U8:
        """Return the `FinishReason` of each row after its newest token.

        Args:
            rows: [n]
            tokens: [n] the newest output of each row.
            num_output: [n] outputs, the newest included.
            max_output: [n] most outputs.
        """
        finish = np.zeros(rows.size, dtype=np.uint8)
        is_long = num_output >= max_output
        if np.count_nonzero(is_long):
            finish[is_long] = _LENGTH
        stopped = self._is_eos.take(tokens)
        if np.count_nonzero(stopped):
            stopped &= ~self._ignore_eos[rows]
        if self._num_with_stop_ids:
            stopped |= (self._stop_ids[rows] == tokens[:, None]).any(axis=1)
        if np.count_nonzero(stopped):
            stopped &= num_output > self._min_output[rows]  # a model without logits may say one all the same
        finish[stopped] = FinishReason.STOP
        return finish
