"""Fits the cost model's coefficients to measured steps. Pure arithmetic on columns; randomness is an argument.

    T = max(g0 + b0·N, g1 + b1·N) + d·KVdec + a·P        all coefficients at least 0

For a given side of the maximum per step this is linear, so the fit alternates: non-negative least squares of the
relative errors, then each step takes the side that is larger. It starts from several thresholds of N and keeps the best
end. Steps that took far too long (another process had the core) lose weight: Huber's function, with the scale taken
from the median error.

Source: the formula and its meaning are those of `shared.cost`; deviations: the overhead per step is part of g0 and g1.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from shared.cost import CostModel

F64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

MIN_STEPS = 40
"""Fewer do not say how good a fit is."""
HELD_OUT_SHARE = 0.25
"""Of the groups of steps."""
HUBER = 1.345
"""Errors beyond this many scales count linearly (95 % efficiency if all errors are normal)."""
_MIN_BRANCHED = 24
"""In fewer steps a second branch describes noise."""
_MAX_ROUNDS = 30
_MAX_STARTS = 12
_ONE_BRANCH_LEEWAY = 1.02
"""Two branches must beat one by this factor: else the second describes noise."""


@dataclass(frozen=True, slots=True)
class StepColumns:
    """Measured steps, one entry each; see `CostModel.step_s` for what the numbers mean."""

    num_tokens: F64
    kv_decode_tokens: F64
    prefill_pairs: F64
    duration_s: F64

    def __len__(self) -> int:
        return int(self.duration_s.size)

    def take(self, chosen: Bool) -> StepColumns:
        """Return the chosen steps."""
        return StepColumns(*(getattr(self, column.name)[chosen] for column in fields(self)))


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients, and how well they predict steps that they were not fitted to."""

    cost: CostModel
    mean_error_ratio: float
    p95_error_ratio: float
    num_fitted: int
    num_held_out: int


class TooFewStepsError(ValueError):
    """There are not enough steps, or not enough of different shapes, to fit anything."""


def predict_s(cost: CostModel, steps: StepColumns) -> F64:
    """Return [n] durations by the formula, seconds."""
    dense = np.maximum(cost.g0_s + cost.b0_s * steps.num_tokens, cost.g1_s + cost.b1_s * steps.num_tokens)
    found: F64 = dense + cost.d_s * steps.kv_decode_tokens + cost.a_s * steps.prefill_pairs + cost.era_s
    return found


def error_ratios(cost: CostModel, steps: StepColumns) -> F64:
    """Return [n] relative errors of the formula, |predicted - measured| / measured."""
    found: F64 = np.abs(predict_s(cost, steps) / steps.duration_s - 1)
    return found


def fit_held_out(steps: StepColumns, groups: NDArray[np.intp], rng: np.random.Generator) -> Fit:
    """Return the fit to some groups of steps, with its errors on the others.

    Args:
        steps: with durations above 0.
        groups: [n] steps of one group are alike (the decodes of one batch), so they are held out together.
        rng: chooses the groups that are held out.

    Raises:
        TooFewStepsError: fewer than `MIN_STEPS` steps or 8 groups.
    """
    names = np.unique(groups)
    if len(steps) < MIN_STEPS or names.size < 8:
        raise TooFewStepsError(f"{len(steps)} steps in {names.size} groups; at least {MIN_STEPS} in 8 are needed")
    held_out = np.isin(groups, rng.permutation(names)[: max(1, round(HELD_OUT_SHARE * names.size))])
    cost = fit_cost(steps.take(~held_out))
    tested = steps.take(held_out)
    errors = error_ratios(cost, tested)
    return Fit(
        cost=cost,
        mean_error_ratio=float(errors.mean()),
        p95_error_ratio=float(np.percentile(errors, 95)),
        num_fitted=len(steps) - len(tested),
        num_held_out=len(tested),
    )


def fit_cost(steps: StepColumns) -> CostModel:
    """Return the coefficients that predict the steps best; those of one branch if there are only a few."""
    one, one_loss = _fit_from(steps, np.ones(len(steps), dtype=np.bool_), can_change=False)
    if len(steps) < _MIN_BRANCHED:
        return one
    best, best_loss = one, one_loss
    for threshold in _thresholds(steps.num_tokens):
        cost, loss = _fit_from(steps, steps.num_tokens <= threshold, can_change=True)
        if loss < best_loss:
            best, best_loss = cost, loss
    return one if one_loss <= _ONE_BRANCH_LEEWAY * best_loss else best


def _thresholds(num_tokens: F64) -> F64:
    distinct = np.unique(num_tokens)[1:-1]
    if distinct.size <= _MAX_STARTS:
        return distinct
    return np.asarray(np.quantile(distinct, np.linspace(0.02, 0.98, _MAX_STARTS)), dtype=np.float64)


def _fit_from(steps: StepColumns, is_first: Bool, *, can_change: bool) -> tuple[CostModel, float]:
    """Return the coefficients that the alternation ends with, and their loss (mean Huber-like absolute error)."""
    weight = np.ones(len(steps))
    cost = CostModel(0, 0, 0, 0, 0, 0)
    for _ in range(_MAX_ROUNDS):
        previous = cost
        cost = _solve(steps, is_first, weight)
        error = error_ratios(cost, steps)
        scale = max(1.4826 * float(np.median(error)), 1e-9)
        weight = np.minimum(1.0, HUBER * scale / np.maximum(error, 1e-12))
        if can_change:
            n = steps.num_tokens
            is_first = cost.g0_s + cost.b0_s * n >= cost.g1_s + cost.b1_s * n
        if _is_close(cost, previous):
            break
    return cost, float(np.minimum(error, 10 * scale).mean())


def _is_close(one: CostModel, other: CostModel) -> bool:
    return all(abs(a - b) <= 1e-9 * abs(a) for a, b in zip(astuple(one), astuple(other), strict=True))


def _solve(steps: StepColumns, is_first: Bool, weight: F64) -> CostModel:
    """Return the weighted least squares of the relative errors, each step on its side of the maximum."""
    n = steps.num_tokens
    columns = np.stack(
        [is_first, is_first * n, ~is_first, ~is_first * n, steps.kv_decode_tokens, steps.prefill_pairs], axis=1
    )
    relative = columns / steps.duration_s[:, None]
    root = np.sqrt(weight)
    g0, b0, g1, b1, d, a = (float(x) for x in non_negative(relative * root[:, None], root))
    return CostModel(g0_s=g0, b0_s=b0, g1_s=g1, b1_s=b1, d_s=d, a_s=a)


def non_negative(matrix: F64, target: F64) -> F64:
    """Return the x >= 0 that minimises |matrix · x − target|², exactly; for at most some ten columns.

    The optimum is the plain least squares on those columns where it is positive, so sets of columns are tried: first
    all of them, and if that gives no negative number, it is the optimum. Columns of zeros get 0.
    """
    size = np.linalg.norm(matrix, axis=0)
    usable = np.flatnonzero(size > 0)
    scaled = matrix[:, usable] / size[usable]
    gram, projected = scaled.T @ scaled, scaled.T @ target
    best = np.zeros(matrix.shape[1])
    best_gain = 0.0
    for count in range(usable.size, 0, -1):
        for chosen in combinations(range(usable.size), count):
            index = list(chosen)
            solution = np.linalg.lstsq(gram[np.ix_(index, index)], projected[index], rcond=1e-12)[0]
            gain = float(2 * solution @ projected[index] - solution @ gram[np.ix_(index, index)] @ solution)
            if (solution >= 0).all() and gain > best_gain:
                best_gain = gain
                best = np.zeros(matrix.shape[1])
                best[usable[index]] = solution / size[usable[index]]
        if count == usable.size and best_gain > 0:
            return best
    return best
