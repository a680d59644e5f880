"""Measured steps, and the cost model that they say: pure arithmetic, the same for the same steps in the same order.

    steps ──► sample: of each kind of step the newest few ──► fit ──► CostModel, or None where they do not say enough

What a worker did last is often one kind of step: decodes of about as many sequences. So the sample keeps kinds apart,
and those that were tried before the first request stay until steps like them have been done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from services.worker.contract.arrays import I32
from shared.cost import CostModel
from shared.cost_fit import StepColumns, fit_cost

PER_KIND: Final = 6
"""Steps of one kind that are kept; raising it makes a fit less noisy, and later in following a change."""
MAX_KINDS: Final = 48
"""Kinds that are kept: beyond, the one goes that was not seen for longest."""
MIN_KINDS: Final = 6
"""Fewer say too little: a formula with five coefficients would fit whatever they are."""
MIN_TOKENS_RATIO: Final = 0.01
"""Of the time of the largest step: where its tokens seem to take less, the steps do not tell what a token costs."""
MOST_APART: Final = 3.0
"""Steps that take so many times what a model says, or that part of it, are of another device or of other days."""


class StepShape(NamedTuple):
    """What a step is, for `CostModel.step_s`."""

    num_tokens: int
    kv_decode_tokens: int
    prefill_pairs: int


class MeasuredStep(NamedTuple):
    """A step of the whole model, and how long it took."""

    shape: StepShape
    duration_s: float


def shape_of(start: I32, num_tokens: I32) -> StepShape:
    """Return the shape of a batch from the columns of that name: rows of one token count as decodes."""
    num_rows, total = num_tokens.size, int(np.add.reduce(num_tokens))
    if total == num_rows:
        return StepShape(total, int(np.add.reduce(start)) + num_rows, 0)
    start, num_tokens = start.astype(np.int64), num_tokens.astype(np.int64)
    is_chunk = num_tokens > 1
    prefix, size = start[is_chunk], num_tokens[is_chunk]
    pairs = int((prefix * size + (size * size + size) // 2).sum())
    return StepShape(total, int((start[~is_chunk] + 1).sum()), pairs)


class StepSample:
    """Of each kind of step the newest few. Steps are of a kind if their three numbers are, but for a factor of two.

    Args:
        steps: that are known from the beginning, the oldest first.
    """

    def __init__(self, steps: Iterable[MeasuredStep] = ()) -> None:
        self._steps: dict[tuple[int, ...], deque[MeasuredStep]] = {}
        for step in steps:
            self.add(step)

    def add(self, step: MeasuredStep) -> None:
        """Take a step in; it must have taken some time."""
        kind = tuple(number.bit_length() for number in step.shape)
        alike = self._steps.pop(kind, None) or deque(maxlen=PER_KIND)
        alike.append(step)
        self._steps[kind] = alike  # behind those that were seen before
        if len(self._steps) > MAX_KINDS:
            del self._steps[next(iter(self._steps))]

    @property
    def steps(self) -> list[MeasuredStep]:
        """Those that are kept, the kind that was seen last at the end."""
        return [step for alike in self._steps.values() for step in alike]

    def fit(self) -> CostModel | None:
        """Return the formula that fits these steps best; None: they say too little, or that a token costs nothing."""
        steps = self.steps
        if len(self._steps) < MIN_KINDS or not any(step.shape.prefill_pairs for step in steps):
            return None
        columns = np.array([(*step.shape, step.duration_s) for step in steps], dtype=np.float64)
        cost = fit_cost(StepColumns(*columns.T))
        largest = max(step.shape for step in steps)
        matters = cost.token_s * largest.num_tokens >= MIN_TOKENS_RATIO * cost.step_s(*largest)
        return cost if matters else None


def agree(cost: CostModel, steps: Sequence[MeasuredStep]) -> bool:
    """Return whether at least half of these steps took what a model says, but for a factor of `MOST_APART`."""
    said = [(cost.step_s(*step.shape), step.duration_s) for step in steps]
    return 2 * sum(one <= MOST_APART * other and other <= MOST_APART * one for one, other in said) >= len(said)
