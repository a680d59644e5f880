"""Which decodes open the other end of somebody's block, where blocks are shared and too few are free."""

from __future__ import annotations

import numpy as np

from services.worker.scheduling.blocks_math import Places
from services.worker.scheduling.making_room import KeptRunning
from services.worker.scheduling.view import I32, Bool, SchedulerView


def opening(view: SchedulerView, running: KeptRunning, decodes: Places, missing: I32) -> Bool:
    """Return [n] which decodes open somebody's block: as many as find no free one, or as can.

    Args:
        view: of this moment.
        running: rows of the step in the making.
        decodes: [n] places of rows among these.
        missing: [n] blocks that each lacks for one token.
    """
    opens = np.zeros(decodes.size, dtype=np.bool_)
    lacking = int(missing.sum()) - running.free_blocks
    if lacking > 0 and view.sides.from_right.size:
        rows = running.rows[decodes]
        begins = (missing == 1) & (view.columns.num_computed[rows] % view.block_size == 0)
        opens[_beside(view, running, rows, begins)[:lacking]] = True
    return opens


def shut(view: SchedulerView, running: KeptRunning, decodes: Places, opens: Bool) -> Bool:
    """Return [n] which decodes do not find a block that they could open any more: those who have them give way.

    Args:
        view: of this moment.
        running: rows of the step in the making.
        decodes: [n] places of rows among these.
        opens: [n] which of them were to open one.
    """
    found = opens.copy()
    if opens.any() and running.any_gone:
        found[_beside(view, running, running.rows[decodes], opens)] = False
        return found
    return np.zeros_like(found)


def _beside(view: SchedulerView, running: KeptRunning, rows: I32, wants: Bool) -> Places:
    """Return which of some rows [n], of those that want to, find somebody whose block they can open and who stays."""
    sides, gone, found = view.sides, running.gone()[0], list[Places]()
    for holders, side in ((sides.for_left, False), (sides.for_right, True)):
        num_open = int(np.isin(holders, gone, invert=True).sum())
        found.append((wants & (sides.from_right[rows] == side)).nonzero()[0][:num_open])
    return np.concatenate(found)
