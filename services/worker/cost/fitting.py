"""Keeps a worker's cost model up to date with the steps that it does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from services.worker.contract.arrays import I32
from services.worker.contract.batch import Batch, BatchOutput
from services.worker.cost.estimate import CostEstimate
from services.worker.cost.steps import MeasuredStep, StepSample, shape_of
from services.worker.off_the_loop import off_the_loop
from shared.cost import CostModel

FIRST_STEPS: Final = 128
"""Steps after which the model is fitted again; twice as many each time, up to `MOST_STEPS`."""
MOST_STEPS: Final = 2048
"""A fit takes a thread 50 to 100 ms, so it is seldom; and it says little that the one before did not."""


class CostFitting:
    """The writer of a worker's estimate. Lives on the event loop, but for the arithmetic, which has a thread.

    When it fits depends on the number of steps and on nothing else. Where steps do not say enough, what was known
    stays.

    Args:
        known: steps that were run before the first request, the oldest first.
        keep: told the steps behind every fit, off the event loop; None: nothing is kept.
    """

    def __init__(self, known: Iterable[MeasuredStep], keep: Callable[[list[MeasuredStep]], None] | None = None) -> None:
        self.sample = StepSample(known)
        """What the newest fit is made from, and the next one; its own thread's while it fits."""
        self.estimate = CostEstimate(self.sample.fit())
        """Of the worker."""
        self._noted: deque[tuple[I32, I32, float]] = deque(maxlen=MOST_STEPS)
        self._num_due = FIRST_STEPS
        self._is_fitting = False
        self._keep = keep
        self._is_keeping = False

    def note(self, batch: Batch, output: BatchOutput) -> bool:
        """Remember a step of the whole model that succeeded; return whether the caller is to `fit` now."""
        if output.duration_s > 0:
            self._noted.append((batch.start, batch.num_tokens, output.duration_s))
        if len(self._noted) < self._num_due or self._is_fitting:
            return False
        self._is_fitting = True
        return True

    async def fit(self) -> None:
        """Take in the steps that were noted, fit the model to all that is known, and have that kept."""
        noted, self._noted = self._noted, deque(maxlen=MOST_STEPS)
        self._num_due = min(2 * self._num_due, MOST_STEPS)

        def fitted() -> CostModel | None:
            """Body of the thread."""
            for start, num_tokens, duration_s in noted:
                self.sample.add(MeasuredStep(shape_of(start, num_tokens), duration_s))
            return self.sample.fit()

        found = await asyncio.to_thread(fitted)
        self._is_fitting = False
        if found is None:
            return
        self.estimate.now = found
        if self._keep is None or self._is_keeping:  # a disk that hangs holds up no fit
            return
        self._is_keeping, steps = True, self.sample.steps
        await off_the_loop(partial(self._keep, steps), name="keep steps")
        self._is_keeping = False
