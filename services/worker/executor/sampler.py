"""Chooses the next token of every row from its logits: the largest for greedy rows, else a draw (`draw.py`)."""

from __future__ import annotations

import numpy as np
import torch

from services.worker.engine.types import I32, I64
from services.worker.executor.draw import RowSampling, draw, first_largest
from services.worker.executor.random import uniforms
from shared.types import SamplingParams

DRAW_ELEMENTS = 2**20
"""Logits that are weighed and summed at a time, unless one row has more: bounds the workspace, and stays in caches."""


class SamplingTable:
    """Sampling parameters by row of the engine's table."""

    def __init__(self, max_rows: int) -> None:
        self._columns = RowSampling(
            temperature=np.zeros(max_rows),
            top_p=np.ones(max_rows),
            top_k=np.zeros(max_rows, np.int64),
            min_p=np.zeros(max_rows),
            seed=np.zeros(max_rows, np.int64),
        )

    def put(self, row: int, sampling: SamplingParams) -> None:
        """Take in a row's parameters."""
        columns = self._columns
        columns.temperature[row] = sampling.temperature
        columns.top_p[row] = sampling.top_p
        columns.top_k[row] = sampling.top_k
        columns.min_p[row] = sampling.min_p
        columns.seed[row] = sampling.seed

    def take(self, rows: I32) -> RowSampling:
        """Return the parameters of rows, in their order."""
        return self._columns.select(rows.astype(np.int64))


class Sampler:
    """Draws tokens.

    Args:
        row_by_row: compute each drawn row by itself, so that its bits do not depend on how many others are drawn.
    """

    def __init__(self, *, row_by_row: bool = False) -> None:
        self._row_by_row = row_by_row

    def sample(self, logits: torch.Tensor, sampling: RowSampling, positions: I64, largest: I64 | None = None) -> I64:
        """Return the chosen ids [n].

        Args:
            logits: [n, vocab_size] float32; unchanged.
            sampling: of the same rows.
            positions: [n] position in the sequence of the token that is chosen.
            largest: [n] id of the largest logit of each row, if it is known.
        """
        drawn = np.flatnonzero(sampling.temperature)
        if not len(drawn):
            return first_largest(logits) if largest is None else largest
        tokens: I64 = np.empty(len(logits), dtype=np.int64)
        greedy = np.flatnonzero(sampling.temperature == 0)
        if len(greedy):
            tokens[greedy] = first_largest(_rows(logits, greedy)) if largest is None else largest[greedy]
        points = uniforms(sampling.seed, positions)
        for part in self._parts(drawn, sampling, max(DRAW_ELEMENTS // logits.shape[1], 1)):
            tokens[part] = draw(_rows(logits, part), sampling.select(part), points[part])
        return tokens

    def _parts(self, drawn: I64, sampling: RowSampling, max_rows: int) -> list[I64]:
        """Split the drawn rows into those that keep every token and those that are filtered, `max_rows` at a time."""
        if self._row_by_row:
            return list(drawn[:, None])
        filtered = sampling.filtered[drawn]
        return [
            part[first : first + max_rows]
            for part in (drawn[~filtered], drawn[filtered])
            for first in range(0, len(part), max_rows)
        ]


def _rows(logits: torch.Tensor, rows: I64) -> torch.Tensor:
    """Return some rows of the logits, in ascending order; all of them without a copy."""
    return logits if len(rows) == len(logits) else logits[torch.from_numpy(rows).to(logits.device)]
