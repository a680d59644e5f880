"""What it gains to serve each request, and so who comes first. Pure.

    gain = QoE if it is served - QoE if it is not, both at a horizon behind its own prompt

Source: Andes (arXiv 2404.16283), section 4.2. Deviations: who has long been without text counts for more the longer it
is (`aging_s`); who runs counts more (`keeps`); what a gain is divided by is more than a length (`packing.py`).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from services.worker.contract.arrays import AnyRows, Rows
from services.worker.scheduling.andes_settings import AndesSettings, Objective, Weighing
from services.worker.scheduling.best_effort import Remainder
from services.worker.scheduling.blocks_math import Places, num_known
from services.worker.scheduling.prediction import Readers, experience
from services.worker.scheduling.view import F64, I32, SchedulerView

LEAST_GAIN: Final = 1e-6
"""Of who gains nothing, so that among them too who takes least comes first."""
PERFECT: Final = 1 - 1e-9
_LATER: Final = 2.0**50
"""More than any number of a sequence."""


class Gains:
    """Of some rows, [n]: what it gains to serve each, at any pace of the steps.

    Args:
        view: of this moment.
        rows: [n] those that run, and behind them the parked ones.
        num_blocks: [n] that each takes.
        capacity: blocks that there are for them.
        settings: of the policy.
        left: who comes last, those that run first, then as they came; None: nobody.
    """

    def __init__(
        self,
        view: SchedulerView,
        rows: Rows,
        num_blocks: I32,
        capacity: int,
        settings: AndesSettings,
        left: Remainder | None = None,
    ) -> None:
        self._view, self._settings, self.rows, self.num_blocks = view, settings, rows, num_blocks
        self.is_last = None if left is None else left.last[rows]
        """[n] who comes last."""
        self._first = None if left is None else left.first
        self.known = num_known(view.columns, rows)
        """[n] tokens of each."""
        self._context = float(self.known.sum()) / max(rows.size, 1)
        self.readers = Readers.of(view, rows)
        resume_s = _resume_s(view, rows, self.known)
        self._now_s: F64 = view.now_s - view.columns.arrival_s.take(rows)
        self._first_s = self._now_s + resume_s
        self._at_s = self._first_s + settings.horizon_s
        self._due_s = _due_s(view, rows, self.readers.num) if settings.keeps_limits else None
        self._expected, self._shown = self.readers.expected(self._at_s), self.readers.displayed(self._at_s)
        self._waits = experience(self._shown, self._expected)
        self.late_s = self.readers.late_s(self._now_s)
        """[n] see `Readers.late_s`."""
        if self._due_s is not None:
            self.late_s = np.maximum(self.late_s, self._now_s - self._due_s)
        self._aged = np.minimum(np.maximum(self.late_s / settings.aging_s, 0.0), 1.0) + LEAST_GAIN
        self._size: F64 | None = None
        if settings.weighing is Weighing.DENSITY:
            self._size = num_blocks / max(capacity, 1) + resume_s / settings.horizon_s

    def period_s(self, num_rows: int) -> float:
        """Return how long a step takes in which so many of them decode; 0 if nobody knows."""
        cost = self._view.cost
        return 0.0 if cost is None else cost.step_s(num_rows, num_rows * self._context, 0)

    def gain(self, period_s: float) -> F64:
        """Return [n]: what it gains to serve each, as the objective counts it.

        Args:
            period_s: between two tokens.
        """
        objective, readers = self._settings.objective, self.readers
        if objective is Objective.MAX_MIN:
            gain: F64 = readers.qoe(self._now_s).min() - self._waits
        else:
            more = readers.served(self._at_s, self._first_s + period_s, period_s)
            serves = experience(self._shown + more, self._expected)
            gain = serves - self._waits
            if objective is Objective.PERFECT:
                is_kept = (serves >= PERFECT) & (self._waits < PERFECT) & (readers.qoe(self._now_s) >= PERFECT)
                gain = is_kept.astype(np.float64)
        if self._due_s is not None:
            is_kept = (self._due_s >= self._first_s + period_s) & (self._due_s < self._at_s)
            gain[is_kept] = 1.0
        return np.maximum(gain, 0.0, out=gain)

    def priority(self, gain: F64, weights: F64 | None = None) -> F64:
        """Return [n]: who comes first, given what each gains; below 0 those who come last.

        Args:
            gain: [n]
            weights: [rows of the table] by how much more each counts; None: all count alike.
        """
        priority: F64 = gain + self._aged
        priority[: self._view.running.size] *= self._settings.keeps
        if self._size is not None:
            priority = priority / self._size
        if weights is not None:
            priority = priority * weights[self.rows]
        if self.is_last is not None:
            number = self._view.columns.order.take(self.rows[self.is_last])
            is_parked = np.flatnonzero(self.is_last) >= self._view.running.size
            priority[self.is_last] = -1.0 - number - is_parked * _LATER
            priority[self.rows == self._first] = np.inf
        return priority

    def loss(self, places: Places, delay_s: float) -> float:
        """Return what these lose together if none of them gets anything for so long."""
        lost = self.readers.qoe(self._now_s) - self.readers.qoe(self._now_s + delay_s)
        return float(np.maximum(lost[places], 0.0).sum())


def _due_s(view: SchedulerView, rows: AnyRows, num_output: F64) -> F64:
    """Return [n]: when each has to have its next token, seconds after its arrival; infinite: nobody has said."""
    columns = view.columns
    last_s = columns.last_token_s.take(rows) - columns.arrival_s.take(rows)
    return np.where(num_output > 0, last_s + columns.slo_tpot_s.take(rows), columns.slo_ttft_s.take(rows))


def _resume_s(view: SchedulerView, rows: AnyRows, known: I32) -> F64:
    """Return [n]: what it takes to compute a row's prompt, or to bring its KV back, before its next token."""
    columns, cost = view.columns, view.cost
    resume_s: F64 = np.zeros(rows.size)
    if cost is not None:
        done = np.maximum(columns.num_computed.take(rows), columns.host_tokens.take(rows))
        left = (known - done).astype(np.float64)
        resume_s = left * (cost.token_s + cost.a_s * (done + (left + 1) / 2))
        resume_s[left <= 1] = 0.0
    if view.host is not None:
        resume_s = resume_s + view.host.block_copy_s * columns.host_tokens.take(rows) / view.block_size
    return resume_s
