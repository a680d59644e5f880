"""What a step takes by BROS's cost functions: one for prompts and one for decodes, over the totals of a batch.

    T = max(t_exec, t_swap)      t_exec = α0·N + α1·N·L + β of the prompts, the same of the decodes, and their sum
                                 t_swap = seconds of a block, times the blocks that are brought back from the host

N are the tokens that a phase computes, L the length of its contexts, its own tokens included. A prompt has nothing
cached, so its N·L is N²: of several prompts together it is more than the sum of their own. The joined policies use
`shared/cost.py`, which adds up what each row costs.

Source: BROS, section 4.1: linear models per phase, fitted to lengths at powers of two. Deviations: fitted to what the
worker knows of its own steps (`CostModel`), and not to runs before it serves; `sluice profile` fits both to the same
measured steps and says how far off they are. Coefficients are not below 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Final, TypeVar

import numpy as np

from shared.cost import CostModel, prefill_pairs
from shared.cost_fit import F64, non_negative

LARGEST_EXPONENT: Final = 13
"""Lengths are 1, 2, 4 and so on, up to 2 to this power."""
DECODE_BATCHES: Final = (1, 4, 16, 64, 256)
"""Rows of the batches of decodes that lengths are tried with."""


Totals = TypeVar("Totals", float, F64)
"""Of one batch, or [k] of several."""


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """Coefficients of one phase, seconds."""

    token_s: float
    """α0."""
    product_s: float
    """α1."""
    fixed_s: float
    """β."""

    def of(self, num_tokens: Totals, num_context: Totals) -> Totals:
        """Return what batches of this phase take, seconds; nothing without a token.

        Args:
            num_tokens: that each computes.
            num_context: lengths of its contexts together.
        """
        return self.token_s * num_tokens + self.product_s * num_tokens * num_context + self.fixed_s * (num_tokens > 0)

    def largest(self, num_tokens: float, num_context: float, limit_s: float) -> int:
        """Return how many tokens of a prompt that is begun now fit a batch of prompts until it takes so long.

        α0·(N + c) + α1·(N + c)·(L + c) + β ≤ limit.
        """
        rest = self.fixed_s + self.token_s * num_tokens + self.product_s * num_tokens * num_context - limit_s
        slope = self.token_s + self.product_s * (num_tokens + num_context)
        if rest >= 0:
            return 0
        return int(-2 * rest / (slope + sqrt(slope * slope - 4 * self.product_s * rest))) if slope > 0 else 2**30


@dataclass(frozen=True, slots=True)
class StepCost:
    """Both phases."""

    prefill: PhaseCost
    decode: PhaseCost

    def of(self, prompts: Totals, prompt_context: Totals, decodes: Totals, decode_context: Totals) -> Totals:
        """Return what steps of both take, seconds; the arguments are those of `PhaseCost.of`."""
        return self.prefill.of(prompts, prompt_context) + self.decode.of(decodes, decode_context)


def fit_phase(num_tokens: F64, num_context: F64, seconds: F64) -> PhaseCost:
    """Return the coefficients with the least squares of relative errors, none below 0.

    Args:
        num_tokens: [k]
        num_context: [k]
        seconds: [k] what the batches took.
    """
    shapes = np.stack([num_tokens, num_tokens * num_context, np.ones_like(num_tokens)], axis=1)
    return PhaseCost(*(float(each) for each in non_negative(shapes / seconds[:, None], np.ones_like(seconds))))


def fit_steps(cost: CostModel) -> StepCost:
    """Return both phases as they are nearest to what is known of steps, over lengths at powers of two."""
    lengths: F64 = np.exp2(np.arange(LARGEST_EXPONENT + 1, dtype=np.float64))
    prompts = np.array([cost.step_s(each, 0, prefill_pairs(0, int(each))) for each in lengths])
    rows: F64
    context: F64
    rows, context = (each.ravel() for each in np.meshgrid(np.array(DECODE_BATCHES, dtype=np.float64), lengths))
    decodes = np.array([cost.step_s(num, num * length, 0) for num, length in zip(rows, context, strict=True)])
    return StepCost(fit_phase(lengths, lengths, prompts), fit_phase(rows, rows * context, decodes))
