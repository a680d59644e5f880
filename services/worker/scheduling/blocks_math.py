"""Arithmetic of KV blocks that the scheduling policies share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.worker.contract.arrays import AnyRows
from services.worker.scheduling.view import I32, Bool, Columns, SchedulerView

Places = NDArray[np.intp]
"""Rows by where they stand in an order."""


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the quotient, rounded up."""
    return -(-numerator // denominator)


def num_known(columns: Columns, rows: AnyRows) -> I32:
    """Return the tokens of each row whose ids are known: prompt and outputs."""
    known: I32 = columns.num_prompt.take(rows) + columns.num_output.take(rows)
    return known


def among(view: SchedulerView, rows: AnyRows, others: AnyRows) -> Bool:
    """Return [n]: which rows are among some others; in a seventh of the time of `np.isin`."""
    found = np.zeros(view.columns.num_prompt.size, dtype=np.bool_)
    found[others] = True
    return found[rows]


def missing_blocks(view: SchedulerView, rows: AnyRows, ends: I32) -> I32:
    """Return the blocks that each row lacks for its tokens [0, end)."""
    missing: I32 = np.maximum(-(-ends // view.block_size) - view.columns.held_blocks.take(rows), 0)
    return missing


def num_kept(needs: I32, freeable: I32, free_blocks: int) -> int:
    """Return how many rows, from the first on, can go on if all the others give up their blocks: as many as possible.

    Args:
        needs: [n] blocks that each row lacks.
        freeable: [n] blocks that a row frees if it and all after it give up theirs, beyond those that the others free.
        free_blocks: blocks that nobody holds.
    """
    if int(needs.sum()) <= free_blocks:
        return int(needs.size)
    demand = np.concatenate([[0], np.cumsum(needs)])
    given_up = int(freeable.sum()) - np.concatenate([[0], np.cumsum(freeable)])
    return int(np.flatnonzero(demand <= free_blocks + given_up)[-1])


def blocks_taken(view: SchedulerView, rows: AnyRows) -> tuple[I32, int]:
    """Return the blocks that each row takes, and the most that they can have together.

    It takes those for its known tokens and one of headroom. What several share is counted once, for a parked one if it
    has a part in it: or else who comes in would take more than who waits, and they would change places for ever.

    Args:
        view: of this moment.
        rows: [n] those that run, and behind them the parked ones.
    """
    needed = -(-num_known(view.columns, rows) // view.block_size)
    missing = np.maximum(needed - view.columns.held_blocks.take(rows), 0)
    num_running, num_holding = view.running.size, view.running.size + view.preempted.size
    parked_first = np.concatenate([np.arange(num_running, num_holding), np.arange(num_running)])
    own = view.blocks.freeable(rows[parked_first])
    num_blocks: I32 = needed + 1
    num_blocks[parked_first] = own + missing[parked_first] + 1
    coming = 0 if view.host is None else view.host.leaving_blocks
    return num_blocks, view.free_blocks + coming + int(own.sum())
