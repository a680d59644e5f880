"""What of one engine is best effort's, as reports say it: dispatchers and planners count it apart.

rows      wait │ gave way │ run          parked ones are few (`most_parked`): the rest waits in dispatchers
blocks    held, asked for, still to be computed
"""

from __future__ import annotations

import numpy as np

from services.worker.contract.arrays import I32
from services.worker.engine.engine import Engine
from services.worker.sequences.table import Hold
from shared.api_keys import Tier
from shared.messages.report import BestEffortPart


def count_best_effort(engine: Engine, max_parked: int) -> BestEffortPart:
    """Return the counts of this moment.

    Args:
        engine: to be counted.
        max_parked: see `stats.most_parked`.
    """
    table, size = engine.table, engine.config.block_size
    running, parked = _best_effort(engine, table.running.view), parked_best_effort(engine)
    num_waiting = _best_effort(engine, table.waiting.view).size
    rows: I32 = np.concatenate([running, parked])
    if not rows.size:
        return BestEffortPart(max_parked=max_parked, gives_way=engine.best_effort_gives_way)
    known, held = -(-table.num_known[parked] // size), table.held_blocks[parked]
    there = np.maximum(-(-table.host_tokens[parked] // size), held)
    unheld = -(-(table.num_known[running] - 1) // size) - table.held_blocks[running]
    holding = rows[table.held_blocks[rows] > 0]
    used = int(engine.sharing.freeable(holding).sum()) if holding.size else 0
    return BestEffortPart(
        num_running=running.size,
        num_waiting=num_waiting,
        num_preempted=parked.size - num_waiting,
        max_parked=max_parked,
        num_used_blocks=min(used, engine.num_used_blocks, engine.capacity_blocks),
        num_demanded_blocks=min(int((known - held).sum()), engine.num_demanded_blocks),
        num_uncomputed_blocks=int(np.maximum(known - there, 0).sum() + np.maximum(unheld, 0).sum()),
        gives_way=engine.best_effort_gives_way,
    )


def parked_best_effort(engine: Engine) -> I32:
    """Return the rows of best effort that wait or gave way, those first that came last."""
    table = engine.table
    rows: I32 = np.concatenate([table.preempted.view, table.waiting.view])
    return _best_effort(engine, rows)[::-1]


def may_be_sent_back(engine: Engine) -> int | None:
    """Return the row of best effort to be given up for real-time work without a row; None: all of them run."""
    rows = parked_best_effort(engine)
    rows = rows[(engine.table.hold[rows] & (Hold.IN_FLIGHT | Hold.SWAPPING)) == 0]
    return int(rows[0]) if rows.size else None


def num_waiting_real_time(engine: Engine) -> int:
    """Return how many real-time sequences wait."""
    waiting = engine.table.waiting.view
    return int(np.count_nonzero(engine.table.tier[waiting] != Tier.FLEX))


def _best_effort(engine: Engine, rows: I32) -> I32:
    found: I32 = rows[engine.table.tier[rows] == Tier.FLEX]
    return found
