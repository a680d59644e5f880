"""Joins attention over parts of a context into attention over the whole.

Every part has an output and the log-sum-exp of its scores, in base 2 throughout (log2 of the sum of exp(score)), so
that parts from different kernels can be joined without conversion.
"""

from __future__ import annotations

import torch


def merge_states(
    first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp over two disjoint parts of the context.

    A part without any key has a log-sum-exp of -inf and leaves the other part as it is, bit by bit. Two such parts give
    zeros and -inf.

    Args:
        first: [..., head_dim] output of one part.
        first_lse: [...] base 2, float32.
        second: as `first`.
        second_lse: as `first_lse`.
    """
    top = torch.maximum(first_lse, second_lse)
    base = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    weight = torch.exp2(first_lse - base)
    other = torch.exp2(second_lse - base)
    total = weight + other
    whole = (first * weight.unsqueeze(-1) + second * other.unsqueeze(-1)) / total.clamp_min(1e-30).unsqueeze(-1)
    return whole, base + torch.log2(total)
