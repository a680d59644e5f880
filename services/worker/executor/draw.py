"""Draws one token per row from weights: top-k, top-p, min-p, then inverse CDF over the ids in ascending order.

Weights are e^((logit - largest) / temperature), so the likeliest token has 1. Tokens that tie with the last one kept
are kept too: the choice does not depend on how a sort breaks ties. A filtered row is first looked at through its
largest logits; only where these cannot settle what is kept is the whole vocabulary sorted. Both give the same set.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import torch

from services.worker.engine.types import F64, I64, Bool

CANDIDATES: Final = 256
"""Largest logits of a filtered row that are looked at first."""
MAX_CANDIDATES: Final = 1024
"""With a larger top-k the whole row is sorted."""
BLOCK: Final = 256
"""Ids summed together where a whole row is drawn from: the CDF is searched block by block, then in the block."""
_BELOW_ONE: Final = 1 - 2**-53


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of some rows, as columns."""

    temperature: F64
    """[n] 0 is greedy"""
    top_p: F64
    """[n] in (0, 1]"""
    top_k: I64
    """[n] 0 keeps all"""
    min_p: F64
    """[n] in [0, 1]; 0 keeps all"""
    seed: I64
    """[n]"""

    @property
    def filtered(self) -> Bool:
        """Which rows may not draw every token, [n]."""
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)

    def select(self, rows: I64) -> RowSampling:
        """Return the parameters of some of the rows, in the order given."""
        return RowSampling(*(getattr(self, column.name)[rows] for column in fields(self)))


def draw(logits: torch.Tensor, sampling: RowSampling, points: F64) -> I64:
    """Return one id per row, drawn from what the filters leave.

    Args:
        logits: [n, vocab_size] float32; unchanged. Minus infinity excludes a token; one in each row is finite.
        sampling: of the same rows, none of them greedy.
        points: [n] in [0, 1), where the CDF is searched.
    """
    if not sampling.filtered.any():
        return draw_at(to_weights(logits, sampling.temperature), points)
    found = find_candidates(logits, sampling)
    tokens = _search(found.weights, found.ids, torch.from_numpy(points).to(logits.device).unsqueeze(1))
    rest = np.flatnonzero(~found.settled)
    if len(rest):
        left = logits if len(rest) == len(logits) else logits[torch.from_numpy(rest).to(logits.device)]
        tokens[rest] = draw_at(filter_all(left, sampling.select(rest)), points[rest])
    return tokens


def first_largest(logits: torch.Tensor) -> I64:
    """Return the id of the largest logit of each row [n, vocab_size], the lowest id on a tie."""
    ids: I64 = logits.argmax(dim=-1).cpu().numpy()
    return ids


def to_weights(logits: torch.Tensor, temperature: F64) -> torch.Tensor:
    """Return the weights [n, vocab_size] of logits of the same shape, the largest of each row 1."""
    # the largest logit becomes 0 before the division, so that no temperature can overflow
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(_column(np.maximum(temperature, 1e-30), logits)).exp_()


def draw_at(weights: torch.Tensor, points: F64) -> I64:
    """Return one id per row of `weights` [n, vocab_size], drawn at the points [n] in [0, 1) of the row's CDF."""
    blocks = _block_sums(weights)
    cdf = blocks.cumsum(dim=-1, dtype=torch.float64)
    # even the largest point, 1 - 2^-53, times the total rounds to less than the total
    target = torch.from_numpy(points).to(weights.device).unsqueeze(1) * cdf[:, -1:]
    block = torch.searchsorted(cdf, target, right=True).clamp_max_(cdf.shape[1] - 1)
    of_block = blocks.gather(1, block).double()
    share = ((target - (cdf.gather(1, block) - of_block)) / of_block).clamp_(0, _BELOW_ONE)
    ids = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(1, ids.clamp_max(weights.shape[1] - 1)).masked_fill_(ids >= weights.shape[1], 0)
    return _search(inside, ids, share)


def _search(weights: torch.Tensor, ids: torch.Tensor, share: torch.Tensor) -> I64:
    """Return the id in `ids` [n, m] at which the CDF of `weights` [n, m] passes the share [n, 1] in [0, 1)."""
    cdf = weights.cumsum(dim=-1, dtype=torch.float64)
    # a parallel device may round the CDF in another way than its total: never past the end
    index = torch.searchsorted(cdf, share * cdf[:, -1:], right=True).clamp_max_(cdf.shape[1] - 1)
    drawn: I64 = ids.gather(1, index).squeeze(1).cpu().numpy()
    return drawn


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Return the sums of `BLOCK` neighbours, [n, ceil(vocab_size / BLOCK)]; the last block may be shorter."""
    whole = weights.shape[1] // BLOCK * BLOCK
    sums: torch.Tensor = weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(dim=-1)
    if whole == weights.shape[1]:
        return sums
    return torch.cat([sums, weights[:, whole:].sum(dim=-1, keepdim=True)], dim=1)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The largest logits of some rows."""

    ids: torch.Tensor
    """[n, m] in ascending order"""
    weights: torch.Tensor
    """[n, m] float32, 0 where a filter takes the token away"""
    settled: Bool
    """[n] where no token beside these is kept: the last candidate is not, so nothing below it and no tie with it is."""


def find_candidates(logits: torch.Tensor, sampling: RowSampling) -> Candidates:
    """Return the largest logits of each row [n, vocab_size], filtered."""
    vocab_size, device = logits.shape[1], logits.device
    top_k = np.where(sampling.top_k < vocab_size, sampling.top_k, 0)
    few = top_k < MAX_CANDIDATES
    top_k[~few] = 0
    count = min(max(CANDIDATES, int(top_k.max()) + 1), vocab_size)
    largest, ids = logits.topk(count, dim=-1)
    weights = to_weights(largest, sampling.temperature)
    in_top_k = _in_top_k(weights, top_k)
    kept = in_top_k & (weights >= _column(sampling.min_p, weights))
    if (sampling.top_p < 1).any():
        counted = weights.masked_fill(~in_top_k, 0)
        cumulative = counted.cumsum(dim=-1, dtype=torch.float64)
        total = _top_p_total(logits, sampling, top_k, cumulative)
        kept &= weights >= _top_p_border(counted, cumulative, total, torch.from_numpy(sampling.top_p).to(device))
    last = torch.where(torch.from_numpy(top_k > 0).to(device), in_top_k[:, -1], kept[:, -1]).cpu().numpy()
    ids, order = ids.sort(dim=-1)
    return Candidates(ids, weights.masked_fill_(~kept, 0).gather(1, order), few & (~last | (count == vocab_size)))


def _in_top_k(weights: torch.Tensor, top_k: I64) -> torch.Tensor:
    """Return which of the weights [n, m], in descending order, top-k keeps: all where it is 0; ties are kept."""
    if not (top_k > 0).any():
        return torch.ones_like(weights, dtype=torch.bool)
    wanted = torch.from_numpy(top_k).to(weights.device).unsqueeze(1)
    return (wanted == 0) | (weights >= weights.gather(1, (wanted - 1).clamp_min(0)))


def _top_p_total(logits: torch.Tensor, sampling: RowSampling, top_k: I64, cumulative: torch.Tensor) -> torch.Tensor:
    """Return the sum of the weights that top-p counts, [n, 1] float64: of the row, or of what top-k keeps of it."""
    total = cumulative[:, -1:].clone()
    whole = np.flatnonzero((top_k == 0) & (sampling.top_p < 1))
    if len(whole):
        rows = torch.from_numpy(whole).to(logits.device)
        weights = to_weights(logits if len(whole) == len(logits) else logits[rows], sampling.temperature[whole])
        total[rows] = _block_sums(weights).sum(dim=-1, keepdim=True, dtype=torch.float64)
    return total


def filter_all(logits: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
    """Return the weights [n, vocab_size] with those set to 0 that a filter takes away; sorts whole rows."""
    weights = to_weights(logits, sampling.temperature)
    if (sampling.top_k > 0).any():
        weights = keep_top_k(weights, torch.from_numpy(sampling.top_k).to(logits.device))
    kept = weights
    if (sampling.top_p < 1).any():
        kept = keep_top_p(weights, torch.from_numpy(sampling.top_p).to(logits.device))
    return kept.masked_fill(kept < _column(sampling.min_p, kept), 0.0)


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
    border = _top_p_border(ordered, cumulative, cumulative[:, -1:], top_p)
    return weights.masked_fill(weights < border, 0.0)


def _top_p_border(
    ordered: torch.Tensor, cumulative: torch.Tensor, total: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Return the smallest weight that top-p keeps, [n, 1]; 0 where it keeps all.

    Args:
        ordered: [n, m] weights in descending order.
        cumulative: [n, m] float64, their running sums.
        total: [n, 1] float64, sum of all weights that top-p counts.
        top_p: [n] float64 in (0, 1].
    """
    before = cumulative - ordered
    count = (before < top_p.unsqueeze(1) * total).sum(dim=-1, keepdim=True).clamp_min(1)
    border = ordered.gather(1, count - 1)
    return torch.where(top_p.unsqueeze(1) < 1, border, torch.zeros_like(border))


def _column(values: F64, like: torch.Tensor) -> torch.Tensor:
    """Return [n] numbers as a column [n, 1] of the other tensor's type and device."""
    return torch.from_numpy(values).to(like.device, like.dtype).unsqueeze(1)
