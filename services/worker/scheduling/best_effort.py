"""What is left for best effort: it comes last, memory stays free for readers to come, and nobody waits for ever.

    readers that come ── blocks they need, over half a minute ──► blocks kept free, for as long as giving way is dear
    oldest of best effort here ── `patience_s`, or 20 times its prompt ──► comes first, until it ends

Who of best effort has given way has to be computed again, or copied there and back: so it comes in only beside memory
for the readers of the near future. How near follows from what giving way costs, and how much from the arrivals and
their spread (that of a compound Poisson process).
"""

from __future__ import annotations

from math import exp, inf, sqrt
from typing import Final, NamedTuple

import numpy as np

from services.worker.scheduling.blocks_math import num_known
from services.worker.scheduling.recompute_or_swap import again_s
from services.worker.scheduling.sluice_settings import SluiceSettings
from services.worker.scheduling.step_budget import LONGEST_STEP_S
from services.worker.scheduling.view import I32, Bool, SchedulerView
from shared.api_keys import Tier

MEMORY_S: Final = 30.0
"""Age at which an arrival counts 1/e of a new one."""
LEAST_BLOCKS: Final = 1e-2
"""Arrivals that have faded to less are none: no reader comes."""
MOST_KEPT_FREE: Final = 0.25
"""Of all blocks."""
PATIENCE_RATIO: Final = 20.0
"""A long prompt waits at least so many times as long as it takes, so that it takes a twentieth of the time at most."""


class Remainder(NamedTuple):
    """What is left for best effort in one step."""

    last: Bool
    """[rows of the table] who comes behind all others: best effort, but for `first`."""
    first: int | None
    """Row that comes before all others: it has waited enough."""
    num_kept_free: int
    """Blocks that stay free when one of them comes in."""
    step_s: float
    """A step takes their prompts until it takes so long."""


class Patience:
    """Follows who of best effort is the oldest.

    Args:
        patience_s: how long somebody may be that.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._oldest = -1
        self._row = 0
        self._since_s = 0.0

    def overdue(self, view: SchedulerView, rows: I32) -> int | None:
        """Return the row that has been the oldest one for too long, in flight or not; None: there is none.

        Args:
            view: of this moment.
            rows: of best effort, at least one.
        """
        columns, cost = view.columns, view.cost
        if columns.order[self._row] != self._oldest or columns.tier[self._row] != Tier.FLEX:
            self._row = int(rows[columns.order.take(rows).argmin()])
            self._oldest, self._since_s = int(columns.order[self._row]), view.now_s
        prompt_s = 0.0 if cost is None else cost.chunk_s(0, int(columns.num_prompt[self._row]))
        waited_s = view.now_s - self._since_s
        return self._row if waited_s >= max(self._patience_s, PATIENCE_RATIO * prompt_s) else None


class BestEffortRule:
    """Follows which readers come, and who of best effort is the oldest.

    Args:
        settings: of the policy.
    """

    def __init__(self, settings: SluiceSettings) -> None:
        self._settings = settings
        self._newest = -1  # sequence that was seen
        self._at_s = -inf
        self._blocks = self._squares = 0.0  # that readers who came need, and their squares; those of long ago for less
        self._patience = Patience(settings.patience_s)

    def left(self, view: SchedulerView) -> Remainder | None:
        """Return what is left for best effort in the next step; None: there is none."""
        self._count_arrivals(view)
        last = view.columns.tier == Tier.FLEX
        rows = np.concatenate([view.running, view.preempted, view.waiting])
        rows = rows[last[rows]]
        if not rows.size:
            return None
        first = self._patience.overdue(view, rows)
        if first is not None:
            last[first] = False
        step_s = self._settings.best_effort_step_s if self._blocks > LEAST_BLOCKS else LONGEST_STEP_S
        return Remainder(last, first, self._num_kept_free(view, rows), step_s)

    def _count_arrivals(self, view: SchedulerView) -> None:
        columns, waiting, fade = view.columns, view.waiting, exp((self._at_s - view.now_s) / MEMORY_S)
        self._blocks, self._squares, self._at_s = self._blocks * fade, self._squares * fade, view.now_s
        if not waiting.size:
            return
        order = columns.order.take(waiting)
        new = waiting[(order > self._newest) & (columns.tier.take(waiting) != Tier.FLEX)]
        need = num_known(columns, new) / view.block_size + 1.0
        self._blocks += float(need.sum())
        self._squares += float(np.square(need).sum())
        self._newest = max(self._newest, int(order.max()))

    def _num_kept_free(self, view: SchedulerView, rows: I32) -> int:
        """Return the blocks for readers who come while somebody who gave way would be back so many times.

        Args:
            view: of this moment.
            rows: of best effort.
        """
        settings = self._settings
        back_s = settings.reserve_ratio * float(again_s(view, num_known(view.columns, rows)).mean())
        ahead_s = min(back_s, settings.reserve_s) / MEMORY_S
        capacity = view.free_blocks + int(view.columns.held_blocks.take(view.running).sum())
        return int(min(self._blocks * ahead_s + sqrt(self._squares * ahead_s), MOST_KEPT_FREE * capacity))
