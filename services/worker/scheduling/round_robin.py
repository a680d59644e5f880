"""Fair shares by quanta: who has had its quantum gives way to who waits.

A quantum is `quantum_tokens` output tokens. All sequences stand in one line: a new one joins it at its end, and so does
one whose quantum is over, once somebody needs its place. The first of the line comes in as soon as it fits; while it
does not, those running whose quantum is over are preempted, the one that came in first before the others, as few as
make it fit. Nobody is preempted for a quantum if everybody fits.

Source: the baseline Round-Robin of Andes, first version (arXiv 2404.16283v1, section 6.1): equal service by cyclic
preemption on top of vLLM, with a service interval of 50 iterations. (The second version compares with LQSF instead.)
So all else is as in `fcfs`. Deviations: the interval is counted per sequence, in its own tokens, and not for all at
once, so that one that came in lately keeps its whole quantum; a sequence that loses its KV within its quantum, because
memory ran out, keeps its place in the line. BROS calls another policy round-robin: alternating between two classes.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from services.worker.scheduling.blocks_math import num_known
from services.worker.scheduling.lanes import decode_lane
from services.worker.scheduling.plain import plain_decode
from services.worker.scheduling.plan import StepPlan
from services.worker.scheduling.view import F64, I32, Bool, Columns, SchedulerOutput, SchedulerView

QUANTUM_TOKENS = 50
"""Output tokens of a quantum (source: above)."""


class RoundRobinScheduler:
    """Quanta of equal length. Keeps for each sequence when it joined the line, and where its quantum began."""

    reorders: Final = True
    best_effort_gives_way: Final = False

    def __init__(self, quantum_tokens: int = QUANTUM_TOKENS) -> None:
        assert quantum_tokens >= 1, "a quantum is at least one token"
        self._quantum_tokens = quantum_tokens
        self._order = np.zeros(0, dtype=np.int64)
        """By row: whose the two values below are."""
        self._joined_s: F64 = np.zeros(0)
        self._begun: I32 = np.zeros(0, dtype=np.int32)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        """Choose the next step."""
        if (plain := plain_decode(view)) is not None:
            return plain
        plan, line = StepPlan(view), self._line(view)
        plan.prefill()
        plan.admit(line, whole=True)
        if plan.is_empty and not plan.resumes:
            head = plan.head(line)
            if head is not None and plan.preempt_for(head, self._over(view)):
                plan.admit(line, whole=True)
        if plan.is_empty:
            decode_lane(plan)
        plan.rescue()
        output = plan.output()
        self._remember(view, output)
        return output

    def _line(self, view: SchedulerView) -> I32:
        """Return the rows that do not run in the order of the line."""
        rows = np.concatenate([view.preempted, view.waiting]) if view.preempted.size else view.waiting
        if not rows.size:
            return rows
        self._meet(view.columns, rows)
        self._begun[view.waiting] = view.columns.num_output[view.waiting]  # outputs of earlier attempts
        line: I32 = rows[np.lexsort((self._order[rows], self._joined_s[rows]))]
        return line

    def _over(self, view: SchedulerView) -> I32:
        """Return the running rows whose quantum is over, in order of admission."""
        rows = view.running
        decodes = num_known(view.columns, rows) - view.columns.num_computed[rows] == 1
        over: I32 = rows[decodes & self._is_over(view.columns, rows)]
        return over

    def _is_over(self, columns: Columns, rows: I32) -> Bool:
        self._meet(columns, rows)
        over: Bool = columns.num_output[rows] - self._begun[rows] >= self._quantum_tokens
        return over

    def _remember(self, view: SchedulerView, output: SchedulerOutput) -> None:
        """Send those who leave after their quantum to the end of the line; who comes back for another one begins it."""
        gone, columns = output.preempt, view.columns
        if gone.size:
            self._joined_s[gone[self._is_over(columns, gone)]] = view.now_s
        if view.preempted.size:
            come = np.concatenate([output.rows[np.isin(output.rows, view.preempted)], output.resume])
            again = come[self._is_over(columns, come)]
            self._begun[again] = columns.num_output[again]

    def _meet(self, columns: Columns, rows: I32) -> None:
        """Begin anew with rows that hold another sequence than when they were met last."""
        known = self._order.size
        if known < columns.order.size:
            more = columns.order.size - known
            self._order = np.concatenate([self._order, np.full(more, -1, dtype=np.int64)])
            self._joined_s = np.concatenate([self._joined_s, np.zeros(more)])
            self._begun = np.concatenate([self._begun, np.zeros(more, dtype=np.int32)])
        new = rows[self._order[rows] != columns.order[rows]]
        self._order[new] = columns.order[new]
        self._joined_s[new] = columns.arrival_s[new]
        self._begun[new] = 0
