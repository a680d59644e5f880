"""Draws one token per row from weights: top-k, top-p, min-p, then inverse CDF over the ids in ascending order.

Weights are e^((logit - largest) / temperature), so the likeliest token has 1. A filter is a border: what weighs less
goes. So tokens that tie with the last one kept are kept too, and the choice does not depend on how a sort breaks ties.
Borders are first looked for among the largest weights of a row, and only if that is not enough among all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import torch

from services.worker.engine.types import F64, I64, Bool

CANDIDATES: Final = 1024
"""Largest weights of a row that are sorted first."""
BLOCK: Final = 256
"""Neighbouring ids of a whole row that are reduced together: the row is searched block by block, then in the block."""
_SMALL_VOCABULARY: Final = 4096
"""Below, one CDF of the whole row costs less than blocks."""
_FEW_LOGITS: Final = 2**16
"""Below, one argmax costs less than blocks."""
_BELOW_ONE: Final = 1 - 2**-53
_LOG2_E: Final = math.log2(math.e)


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
    weights = to_weights(logits, sampling.temperature)
    if sampling.filtered.any():
        weights = filter_weights(weights, sampling)
    return draw_at(weights, points)


def first_largest(logits: torch.Tensor) -> I64:
    """Return the id of the largest logit of each row [n, vocab_size], the lowest id on a tie."""
    largest: I64 = _first_largest(logits).cpu().numpy()
    return largest


def finite_largest(logits: torch.Tensor) -> I64:
    """Return what `first_largest` does, but vocab_size for a row with a logit that is no number or infinitely large."""
    ids = _first_largest(logits)  # NaN counts as larger than every number
    values = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
    largest: I64 = ids.masked_fill_(~values.isfinite(), logits.shape[1]).cpu().numpy()
    return largest


def _first_largest(logits: torch.Tensor) -> torch.Tensor:
    if logits.numel() < _FEW_LOGITS or logits.shape[1] < BLOCK:
        return logits.argmax(dim=-1)
    # argmax looks at one number at a time, amax at a vector of them
    block = _reduce_blocks(logits, torch.amax).argmax(dim=-1, keepdim=True)
    ids, inside = _open_block(logits, block, -torch.inf)
    return ids.gather(1, inside.argmax(dim=-1, keepdim=True)).squeeze(1)


def to_weights(logits: torch.Tensor, temperature: F64) -> torch.Tensor:
    """Return the weights [n, vocab_size] of logits of the same shape, the largest of each row 1."""
    slope = _column(_LOG2_E / np.maximum(temperature, 1e-30), logits)
    # the largest logit becomes 0 before it is scaled, so that no temperature can overflow; 2^x is cheaper than e^x
    return (logits - logits.amax(dim=-1, keepdim=True)).mul_(slope).exp2_()


def draw_at(weights: torch.Tensor, points: F64) -> I64:
    """Return one id per row of `weights` [n, vocab_size], drawn at the points [n] in [0, 1) of the row's CDF."""
    share = torch.from_numpy(points).to(weights.device).unsqueeze(1)
    if weights.shape[1] < _SMALL_VOCABULARY:
        direct: I64 = _search(weights, share).squeeze(1).cpu().numpy()
        return direct
    blocks = _reduce_blocks(weights, torch.sum)
    cdf = blocks.cumsum(dim=-1, dtype=torch.float64)
    target = share * cdf[:, -1:]
    block = torch.searchsorted(cdf, target, right=True).clamp_max_(cdf.shape[1] - 1)
    of_block = blocks.gather(1, block).double()
    share = ((target - (cdf.gather(1, block) - of_block)) / of_block).clamp_(0, _BELOW_ONE)
    ids, inside = _open_block(weights, block, 0)
    drawn: I64 = ids.gather(1, _search(inside, share)).squeeze(1).cpu().numpy()
    return drawn


def _search(weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return where the CDF of each row of `weights` [n, m] passes the share [n, 1] in [0, 1), as an index [n, 1]."""
    cdf = weights.cumsum(dim=-1, dtype=torch.float64)
    # even the largest share, 1 - 2^-53, times the total rounds to less than the total; but a parallel device may round
    # the running sum in another way than its end: never past it
    return torch.searchsorted(cdf, share * cdf[:, -1:], right=True).clamp_max_(cdf.shape[1] - 1)


def _reduce_blocks(values: torch.Tensor, reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return `BLOCK` neighbours of each row reduced to one, [n, ceil(vocab_size / BLOCK)]; the last may be fewer."""
    whole = values.shape[1] // BLOCK * BLOCK
    blocks = reduce(values[:, :whole].unflatten(1, (-1, BLOCK)), dim=-1)
    if whole == values.shape[1]:
        return blocks
    return torch.cat([blocks, reduce(values[:, whole:], dim=-1, keepdim=True)], dim=1)


def _open_block(values: torch.Tensor, block: torch.Tensor, filler: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of one block of each row and their values, both [n, BLOCK]; `filler` behind the row's end."""
    ids = block * BLOCK + torch.arange(BLOCK, device=values.device)
    vocab_size = values.shape[1]
    return ids, values.gather(1, ids.clamp_max(vocab_size - 1)).masked_fill_(ids >= vocab_size, filler)


def filter_weights(weights: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
    """Set those weights [n, vocab_size] to 0, in place, that a filter takes away. The largest of each row is 1."""
    vocab_size, device = weights.shape[1], weights.device
    top_k = torch.from_numpy(np.where(sampling.top_k < vocab_size, sampling.top_k, 0)).to(device).unsqueeze(1)
    top_p = torch.from_numpy(sampling.top_p).to(device).unsqueeze(1)
    border = _column(sampling.min_p, weights)
    if (top_k > 0).any() or (top_p < 1).any():
        found = _find_border(weights, _largest(weights, min(CANDIDATES, vocab_size)), top_k, top_p)
        if found is None:
            found = _find_border(weights, _largest(weights, vocab_size), top_k, top_p)
        assert found is not None, "the whole row was not enough"
        border = border.maximum(found)
    return _drop_below(weights, border)


def _drop_below(weights: torch.Tensor, border: torch.Tensor) -> torch.Tensor:
    """Set the weights [n, vocab_size] below their row's border [n, 1] to 0, in place."""
    if weights.device.type != "cpu" or weights.shape[1] < _SMALL_VOCABULARY:
        return weights.masked_fill_(weights < border, 0.0)
    highest_dropped = torch.nextafter(border, torch.full_like(border, -1.0)).squeeze(1).tolist()
    for row, highest in zip(weights, highest_dropped, strict=True):
        torch.threshold_(row, highest, 0.0)  # one number for a row: ten times as fast as a mask
    return weights


def _largest(weights: torch.Tensor, count: int) -> torch.Tensor:
    """Return the largest weights of each row in descending order, [n, count]."""
    return _largest_on_host(weights, count) if weights.device.type == "cpu" else _largest_on_device(weights, count)


def _largest_on_host(weights: torch.Tensor, count: int) -> torch.Tensor:
    values = weights.numpy()  # numpy sorts with vector instructions, some thirty times as fast as torch
    if count < weights.shape[1]:
        values = np.partition(values, -count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def _largest_on_device(weights: torch.Tensor, count: int) -> torch.Tensor:
    if count < weights.shape[1]:
        return weights.topk(count, dim=-1).values
    return weights.sort(dim=-1, descending=True).values


def _find_border(
    weights: torch.Tensor, largest: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor | None:
    """Return the smallest weight that top-k and top-p keep, [n, 1]; None if that takes more of the largest weights.

    Args:
        weights: [n, vocab_size]
        largest: [n, m] of them, in descending order.
        top_k: [n, 1] below vocab_size; 0 keeps all.
        top_p: [n, 1] float64; counts within what top-k keeps.
    """
    is_part = largest.shape[1] < weights.shape[1]
    has_k = top_k > 0
    if (top_k > largest.shape[1]).any():
        return None
    border = torch.where(has_k, largest.gather(1, (top_k - 1).clamp_min(0)), 0.0)
    if not (top_p < 1).any():
        return border
    if is_part and (has_k & (largest[:, -1:] >= border)).any():
        return None  # some that tie with the border may be missing
    largest = largest.masked_fill(largest < border, 0.0)
    cumulative = largest.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    if not has_k.all():
        total = torch.where(has_k, total, weights.sum(dim=-1, keepdim=True, dtype=torch.float64))
    goal = top_p * total
    if is_part and (~has_k & (top_p < 1) & (cumulative[:, -1:] < goal)).any():
        return None
    count = (cumulative - largest < goal).sum(dim=-1, keepdim=True).clamp_min(1)
    return torch.where(top_p < 1, largest.gather(1, count - 1), 0.0).maximum(border)


def _column(values: F64, like: torch.Tensor) -> torch.Tensor:
    """Return [n] numbers as a column [n, 1] of the other tensor's type and device."""
    return torch.from_numpy(values).to(like.device, like.dtype).unsqueeze(1)
