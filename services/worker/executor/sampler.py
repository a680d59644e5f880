"""Chooses the next token of every row from its logits.

Order: temperature, then top-k, then top-p over what top-k left, then one draw by inverse CDF over the ids in ascending
order. Tokens that tie with the last one kept are kept as well, so the choice does not depend on how a sort breaks ties.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.worker.engine.types import F64, I32, I64
from services.worker.executor.random import uniforms
from shared.types import SamplingParams

DRAW_ELEMENTS = 2**22
"""Logits that are sorted and summed at a time, unless one row has more: bounds the workspace for a large vocabulary."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of some rows, as columns."""

    temperature: F64
    """[n] 0 is greedy"""
    top_p: F64
    """[n] in (0, 1]"""
    top_k: I64
    """[n] 0 keeps all"""
    seed: I64
    """[n]"""


class SamplingTable:
    """Sampling parameters by row of the engine's table."""

    def __init__(self, max_rows: int) -> None:
        self._columns = RowSampling(
            np.zeros(max_rows), np.ones(max_rows), np.zeros(max_rows, np.int64), np.zeros(max_rows, np.int64)
        )

    def put(self, row: int, sampling: SamplingParams) -> None:
        """Take in a row's parameters."""
        columns = self._columns
        columns.temperature[row] = sampling.temperature
        columns.top_p[row] = sampling.top_p
        columns.top_k[row] = sampling.top_k
        columns.seed[row] = sampling.seed

    def take(self, rows: I32) -> RowSampling:
        """Return the parameters of rows, in their order."""
        columns = self._columns
        return RowSampling(columns.temperature[rows], columns.top_p[rows], columns.top_k[rows], columns.seed[rows])


class Sampler:
    """Draws tokens.

    Args:
        row_by_row: compute each drawn row by itself, so that its bits do not depend on how many others are drawn.
    """

    def __init__(self, *, row_by_row: bool = False) -> None:
        self._row_by_row = row_by_row

    def sample(self, logits: torch.Tensor, sampling: RowSampling, positions: I64) -> I64:
        """Return the chosen ids [n].

        Args:
            logits: [n, vocab_size] float32.
            sampling: of the same rows.
            positions: [n] position in the sequence of the token that is chosen.
        """
        tokens: I64 = logits.argmax(dim=-1).cpu().numpy()
        drawn = np.flatnonzero(sampling.temperature > 0)
        if not len(drawn):
            return tokens
        points = uniforms(sampling.seed[drawn], positions[drawn])
        for part in self._parts(drawn, sampling, max(DRAW_ELEMENTS // logits.shape[1], 1)):
            of_drawn = np.searchsorted(drawn, part)
            tokens[part] = _draw(
                logits[torch.from_numpy(part).to(logits.device)],
                sampling.temperature[part],
                sampling.top_k[part],
                sampling.top_p[part],
                points[of_drawn],
            )
        return tokens

    def _parts(self, drawn: I64, sampling: RowSampling, max_rows: int) -> list[I64]:
        """Split the drawn rows into those that keep every token and those that need a sort, `max_rows` at a time."""
        if self._row_by_row:
            return list(drawn[:, None])
        filtered = (sampling.top_k[drawn] > 0) | (sampling.top_p[drawn] < 1)
        return [
            part[first : first + max_rows]
            for part in (drawn[~filtered], drawn[filtered])
            for first in range(0, len(part), max_rows)
        ]


def _draw(logits: torch.Tensor, temperature: F64, top_k: I64, top_p: F64, points: F64) -> I64:
    """Return one id per row of `logits` [n, vocab_size], drawn at the points [n] of the distribution's CDF."""
    device = logits.device
    heat = torch.from_numpy(np.maximum(temperature, 1e-30)).to(device, logits.dtype).unsqueeze(1)
    # the largest logit becomes 0 before the division, so that no temperature can overflow
    weights = ((logits - logits.amax(dim=-1, keepdim=True)) / heat).exp_()
    if bool((top_k > 0).any()):
        weights = keep_top_k(weights, torch.from_numpy(top_k).to(device))
    if bool((top_p < 1).any()):
        weights = keep_top_p(weights, torch.from_numpy(top_p).to(device))
    cdf = weights.cumsum(dim=-1, dtype=torch.float64)
    # even the largest point, 1 - 2^-53, times the total rounds to less than the total
    target = torch.from_numpy(points).to(device).unsqueeze(1) * cdf[:, -1:]
    drawn: I64 = torch.searchsorted(cdf, target, right=True).squeeze(1).cpu().numpy()
    return drawn


def keep_top_k(weights: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Return the weights [n, vocab_size] with all but the k largest of each row set to 0.

    Args:
        weights: not negative.
        top_k: [n] int64; 0 keeps all.
    """
    vocab_size = weights.shape[1]
    wanted = torch.where(top_k > 0, top_k, vocab_size).clamp_max(vocab_size)
    largest = weights.topk(int(wanted[top_k > 0].max()), dim=-1).values
    border = largest.gather(1, wanted.sub(1).clamp_max(largest.shape[1] - 1).unsqueeze(1))
    border = torch.where(top_k.unsqueeze(1) > 0, border, torch.zeros_like(border))
    return weights.masked_fill(weights < border, 0.0)


def keep_top_p(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the weights with all set to 0 but the largest ones whose share of the row reaches p.

    Args:
        weights: [n, vocab_size], not negative, not normalised.
        top_p: [n] float64 in (0, 1].
    """
    ordered = weights.sort(dim=-1, descending=True).values
    cumulative = ordered.cumsum(dim=-1, dtype=torch.float64)
    before = cumulative - ordered
    kept = (before < top_p.unsqueeze(1) * cumulative[:, -1:]).sum(dim=-1, keepdim=True).clamp_min(1)
    border = ordered.gather(1, kept - 1)
    border = torch.where(top_p.unsqueeze(1) < 1, border, torch.zeros_like(border))
    return weights.masked_fill(weights < border, 0.0)
