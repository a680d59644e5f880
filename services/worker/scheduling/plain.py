"""The step that most steps are: everybody who runs decodes, nobody waits, and memory is no question."""

from __future__ import annotations

import numpy as np

from services.worker.scheduling.view import EMPTY_ROWS, NO_WAYS, SchedulerOutput, SchedulerView

MAX_BLOCKS_PER_ROW = 2
"""Blocks that a row can lack for its next two tokens; policies that copy KV to the host look two tokens ahead."""


def plain_decode(view: SchedulerView) -> SchedulerOutput | None:
    """Return the step in which all running rows decode, if nothing else is possible; None if there is more to decide.

    Every policy that lets who runs go on while there is room decides so, and may ask here first: it takes a fifth of
    the time of a `StepPlan`.
    """
    rows, limits, columns = view.running.astype(np.intp), view.limits, view.columns
    num_rows = rows.size
    if view.waiting.size or view.preempted.size or not num_rows or limits.num_lanes > 1:
        return None
    if num_rows > min(limits.max_batch_rows, limits.max_batch_tokens):
        return None
    if MAX_BLOCKS_PER_ROW * num_rows > view.free_blocks:
        return None
    num_next = columns.num_computed[rows] + _ONE
    if np.count_nonzero(num_next == columns.num_prompt[rows] + columns.num_output[rows]) < num_rows:
        return None
    num_tokens = np.empty(num_rows, dtype=np.int32)
    num_tokens.fill(1)
    return SchedulerOutput(view.running.copy(), num_tokens, EMPTY_ROWS, NO_WAYS, EMPTY_ROWS, "decode")


_ONE = np.array(1, dtype=np.int32)
