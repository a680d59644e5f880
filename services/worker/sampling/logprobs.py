"""Log-probabilities of chosen tokens and of the likeliest ones, from the model's own logits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.contract.arrays import I32, I64, Bool
from services.worker.contract.batch import RowInit
from shared.stream_extras import TokenLogprob

LOGPROB_ELEMENTS = 2**20
"""Logits that are normalised at a time, unless one row has more: bounds the workspace."""
_NOT_ASKED = -1


class LogprobTable:
    """Who asks for log-probabilities, by row of the engine's table.

    Args:
        max_rows: rows of that table.
        row_by_row: normalise each row by itself, so that its bits do not depend on how many others ask.
    """

    def __init__(self, max_rows: int, *, row_by_row: bool = False) -> None:
        self._num_top: I32 = np.full(max_rows, _NOT_ASKED, dtype=np.int32)
        self._row_by_row = row_by_row

    def put(self, init: RowInit) -> None:
        """Take in what a new row asks for."""
        asked = init.sampling.logprobs
        self._num_top[init.row] = _NOT_ASKED if asked is None else asked

    def asking(self, rows: I32) -> Bool:
        """Return which of the rows [n] ask."""
        wanted: Bool = self._num_top[rows] != _NOT_ASKED
        return wanted

    def of_tokens(self, logits: torch.Tensor, rows: I32, tokens: I64) -> dict[int, TokenLogprob]:
        """Return the log-probabilities of those rows that ask, by their place in `rows`.

        Args:
            logits: [n, vocab_size] float32, as the model gave them.
            rows: [n]
            tokens: [n] the ids that were chosen.
        """
        found: dict[int, TokenLogprob] = {}
        asking = np.flatnonzero(self.asking(rows))
        step = 1 if self._row_by_row else max(LOGPROB_ELEMENTS // logits.shape[1], 1)
        for first in range(0, len(asking), step):
            part = asking[first : first + step]
            num_top = self._num_top[rows[part]].tolist()
            found |= zip(part.tolist(), _logprobs(logits, part, tokens[part], num_top), strict=True)
        return found


def _logprobs(logits: torch.Tensor, part: I64, tokens: I64, num_top: list[int]) -> list[TokenLogprob]:
    device = logits.device
    normal = logits[torch.from_numpy(part).to(device)].log_softmax(dim=-1)
    chosen = normal.gather(1, torch.from_numpy(tokens).to(device).unsqueeze(1)).squeeze(1).tolist()
    values, ids = normal.topk(min(max(num_top) + 1, normal.shape[1]), dim=-1)
    best: list[tuple[NDArray[np.float32], I64]] = list(zip(values.cpu().numpy(), ids.cpu().numpy(), strict=True))
    return [
        TokenLogprob(chosen[i], _top(*best[i], normal[i], count) if count else ()) for i, count in enumerate(num_top)
    ]


def _top(values: NDArray[np.float32], ids: I64, row: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """Return the best (id, value) of a row, lowest ids first on a tie.

    Args:
        values: the best of the row, one more than `count` if there are so many, in descending order.
        ids: theirs; of tokens that tie, any.
        row: [vocab_size] all values.
        count: how many to return, or as many as there are.
    """
    count = min(count, len(row))
    if count < len(values) and values[count] == values[count - 1]:  # the last place is shared: whose are the ids?
        border = float(values[count - 1])
        above = int((values > border).sum())
        tied = (row == border).nonzero()[: count - above, 0].cpu().numpy()
        ids = np.concatenate([ids[:above], tied])
    values, ids = values[:count], ids[:count]
    order = np.lexsort((ids, -values))
    return tuple(zip(ids[order].tolist(), values[order].tolist(), strict=True))
