"""What a worker's step log says, in the columns that a fit takes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.cost import prefill_pairs
from shared.cost_fit import F64, StepColumns
from shared.messages.steps import StepRecord


def columns_of(steps: Sequence[StepRecord]) -> StepColumns:
    """Return the steps as the fit takes them."""
    pairs = [sum(prefill_pairs(*chunk) for chunk in step.chunks) for step in steps]
    rows = [(step.num_tokens, step.kv_decode_tokens, step.duration_s) for step in steps]
    num_tokens, kv_decode_tokens, duration_s = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    return StepColumns(num_tokens, kv_decode_tokens, np.array(pairs, dtype=np.float64), duration_s)


def phases_of(steps: Sequence[StepRecord]) -> tuple[F64, F64]:
    """Return of the steps with prompts alone, and of those with decodes alone, [k, 3] each.

    Columns: tokens, lengths of the contexts with them, seconds.
    """
    prompts = [
        (step.num_tokens, sum(sum(chunk) for chunk in step.chunks), step.duration_s)
        for step in steps
        if not step.num_decodes
    ]
    decodes = [(step.num_decodes, step.kv_decode_tokens, step.duration_s) for step in steps if not step.chunks]
    first, second = (np.array(rows, dtype=np.float64).reshape(-1, 3) for rows in (prompts, decodes))
    return first, second


def groups_of(steps: Sequence[StepRecord]) -> NDArray[np.intp]:
    """Return [n] group numbers: a group is a run of steps with equal numbers of decodes and chunks."""
    sizes = np.array([(step.num_decodes, len(step.chunks)) for step in steps]).reshape(-1, 2)
    return np.concatenate(([0], np.cumsum((sizes[1:] != sizes[:-1]).any(axis=1)))).astype(np.intp)


def overheads_s(steps: Sequence[StepRecord]) -> F64:
    """Return what the step loop took around each step that followed another without waiting for work, seconds.

    A sequence that decodes was in the step before, so a step with decodes began as soon as the loop could: its period
    less its duration is scheduling, bookkeeping and the ways to the executor and back. A live worker's loop tells whole
    milliseconds, so one entry may be off by one, and below 0; their mean is right, since the periods of steps in a row
    add up to the time that has passed.
    """
    return np.array(
        [step.period_s - step.duration_s for step in steps if step.num_decodes and step.period_s is not None],
        dtype=np.float64,
    )
