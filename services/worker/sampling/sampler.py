"""Chooses the next token of every row from its logits: the largest for greedy rows, else a draw (`draw.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch

from services.worker.contract.arrays import F64, I32, I64
from services.worker.memory.host_link import fetch, is_beside, send
from services.worker.memory.reserve import DRAW_ELEMENTS
from services.worker.sampling.draw import RowSampling, begin_draw, draw, first_largest
from services.worker.sampling.random import uniforms
from shared.types import SamplingParams

DRAW_ELEMENTS_CUDA = 2**22
"""The same on a GPU: each part is some twenty kernels, and sorting a part takes some fifty bytes for each logit."""


Choose = Callable[[torch.Tensor, RowSampling, F64], torch.Tensor]
"""Takes logits [n, vocab_size], their rows' parameters and points [n], and returns the chosen ids [n], greedy and drawn
ones, on the device: what `draw.py` draws, without waiting. See `services/worker/fused/drawing.py`."""


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
        for column in fields(self._columns):
            getattr(self._columns, column.name)[row] = getattr(sampling, column.name)

    def take(self, rows: I32) -> RowSampling:
        """Return the parameters of rows, in their order."""
        return self._columns.select(rows.astype(np.int64))


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """Tokens that are being chosen.

    Attributes:
        columns: on the device, whose numbers `end` wants.
        is_final: what `columns` says is right for every row.
    """

    _logits: torch.Tensor | None
    _sampling: RowSampling
    _points: F64
    _parts: list[I64]
    columns: tuple[torch.Tensor, ...]
    is_final: bool

    def on_device(self) -> torch.Tensor | None:
        """Return the chosen ids [n] where they will be; None: some may have to be drawn again, by `end`."""
        if not self.is_final:
            return None
        largest, *drawn = self.columns
        tokens = largest.clone()
        for part, ids in zip(self._parts, drawn[::2], strict=True):
            tokens.index_copy_(0, send(part, tokens.device), ids)
        return tokens

    def end(self, largest: I64, *drawn: I64) -> I64:
        """Return the chosen ids [n], from the fetched columns. Rows whose filters reach far are drawn once more."""
        tokens: I64 = largest.copy()
        for part, ids, is_short in zip(self._parts, drawn[::2], drawn[1::2], strict=True):
            tokens[part] = ids
            if is_short.any():
                assert self._logits is not None, "what is final is not drawn again"
                again = part[is_short.astype(np.bool_)]
                tokens[again] = draw(_rows(self._logits, again), self._sampling.select(again), self._points[again])
        return tokens


class TokenSampler:
    """Draws tokens.

    Args:
        row_by_row: compute each drawn row by itself, so that its bits do not depend on how many others are drawn.
        choose: chooses for all rows at once; None: torch's operators do it.
    """

    def __init__(self, *, row_by_row: bool = False, choose: Choose | None = None) -> None:
        self._row_by_row = row_by_row
        self._choose = choose

    def sample(self, logits: torch.Tensor, sampling: RowSampling, positions: I64) -> I64:
        """Return the chosen ids [n]; see `begin`."""
        choice = self.begin(logits, sampling, positions)
        return choice.end(*fetch(*choice.columns))

    def begin(
        self, logits: torch.Tensor, sampling: RowSampling, positions: I64, largest: torch.Tensor | None = None
    ) -> TokenChoice:
        """Begin to choose, without waiting for the device.

        Args:
            logits: [n, vocab_size] float32; unchanged until the choice has ended.
            sampling: of the same rows.
            positions: [n] position in the sequence of the token that is chosen.
            largest: [n] id of the largest logit of each row, if it is known.
        """
        drawn = np.flatnonzero(sampling.temperature)
        if self._choose is not None and (len(drawn) or largest is None):
            ids = self._choose(logits, sampling, uniforms(sampling.seed, positions))
            return TokenChoice(None, sampling, np.zeros(0), [], (ids,), is_final=True)
        if largest is None:
            is_asked = len(drawn) < len(logits)
            largest = first_largest(logits) if is_asked else logits.new_zeros(len(logits), dtype=torch.int64)
        if not len(drawn):
            return TokenChoice(None, sampling, np.zeros(0), [], (largest,), is_final=True)
        points = uniforms(sampling.seed, positions)
        parts = self._parts(drawn, sampling, max(_draw_elements(logits.device) // logits.shape[1], 1))
        waits = not is_beside(logits.device)
        columns, is_final = [largest], True
        for part in parts:
            ids, is_short = begin_draw(_rows(logits, part), sampling.select(part), points[part], waits=waits)
            columns += [ids, torch.zeros_like(ids) if is_short is None else is_short]
            is_final &= is_short is None
        kept = None if is_final else logits  # by whoever has yet to end the choice
        return TokenChoice(kept, sampling, points, parts, tuple(columns), is_final)

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


def _draw_elements(device: torch.device) -> int:
    return DRAW_ELEMENTS_CUDA if device.type == "cuda" else DRAW_ELEMENTS


def _rows(logits: torch.Tensor, rows: I64) -> torch.Tensor:
    """Return some rows of the logits, in ascending order; all of them without a copy."""
    return logits if len(rows) == len(logits) else logits[send(rows, logits.device)]
