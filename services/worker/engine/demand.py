"""Who asks for KV memory that is not there, as reports say it, and by what a worker counts as short of it.

Under a policy that takes who waits in order of arrival everybody does who waits, but for best effort if that gives way,
and for whom it has slowed: who shared steps with it would be further on without it, or gone. He is counted again once
`SLOWED_TIMES` as long has passed without it. One that reorders lets rows wait while their readers have text. A row
with *slack* asks for nothing: it is best effort that gives way, or its reader has text for longer than `SLACK_S` and
than its KV takes to be there again, or nobody reads it. If it runs, others may have its blocks.

    parked, in order    slack · slack · late · slack · late        the head of the line is the first that is late
    blocks              free │ of rows with slack │ of others      short: those who are late do not fit the first two

Best effort has slack for ever, so whatever of it runs, waits or has given way presses for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from services.worker.contract.arrays import I32, Bool
from services.worker.engine.engine import Engine
from services.worker.sequences import qoe_columns
from shared.api_keys import Tier

SLACK_S: Final = 1.0
"""As far as the monitor looks ahead (`throttling.py`): who has text for longer is not short within that time."""
SLOWED_TIMES: Final = 4
"""Lower: sooner is memory taken to be short because best effort has slowed the others."""


@dataclass(frozen=True, slots=True)
class KvDemand:
    """What of the demand for KV memory presses, and what does not."""

    num_head_blocks: int = 0
    """See `EngineStats`; so the others."""
    num_queued: int = 0
    num_slack_blocks: int = 0
    num_slack_demanded_blocks: int = 0


def take_demand(engine: Engine) -> KvDemand:
    """Return what is asked for at the moment when the engine was last asked for a step."""
    if not engine.best_effort_gives_way:
        return KvDemand(_num_head_blocks(engine), count_queued_for_memory(engine))
    parked, slack = _parked(engine)
    late, idle = parked[~slack], parked[slack]
    asked = _num_blocks(engine, idle) - engine.table.held_blocks[idle]
    return KvDemand(
        _head_blocks_of(engine, late),
        count_queued_for_memory(engine),
        _num_slack_blocks(engine),
        min(int(np.maximum(asked, 0).sum()), engine.num_demanded_blocks),
    )


def count_promised_blocks(engine: Engine) -> int:
    """Return the free blocks that are those of running rows already: what is known of them lacks, and one each."""
    table, rows = engine.table, engine.table.running.view
    lacking = -(-table.num_known[rows] // engine.config.block_size) - table.held_blocks[rows]
    return int(rows.size + np.maximum(lacking, 0).sum())


def count_queued_for_memory(engine: Engine) -> int:
    """Return `EngineStats.num_queued_for_memory`; cheap enough for every step."""
    table = engine.table
    num_running, num_queued = len(table.running), len(table.waiting) + len(table.preempted)
    if not num_queued:
        return 0
    num_free = engine.blocks.num_free - num_running
    if engine.best_effort_gives_way:
        num_queued = _num_late(engine, num_free)
    elif _num_head_blocks(engine) <= num_free:
        return 0
    return min(num_queued, max(engine.config.max_batch_rows * engine.config.num_lanes - num_running, 0))


def _num_late(engine: Engine, num_free: int) -> int:
    """Return how many parked rows without slack do not fit together, were all blocks theirs that rows with slack hold.

    Of a policy that keeps to the order of arrival it is all of them if the first one does not fit.

    Args:
        engine: best effort gives way.
        num_free: blocks that are free beside one for each row that runs.
    """
    parked, slack = _parked(engine)
    late = parked[~slack]
    asked = np.maximum(_num_blocks(engine, late) - engine.table.held_blocks[late], 0).cumsum()
    num_free += engine.sharing.coming.num_kept_blocks
    if not late.size or asked[-1 if engine.reorders else 0] <= num_free:
        return 0
    num_fit = int(np.searchsorted(asked, num_free + _num_slack_blocks(engine), side="right"))
    return int(late.size) - num_fit if engine.reorders or not num_fit else 0


def _parked(engine: Engine) -> tuple[I32, Bool]:
    """Return the rows that are parked, who comes next first, and which of them have slack."""
    table = engine.table
    rows: I32 = np.concatenate([table.preempted.view, table.waiting.view])
    there = np.maximum(table.num_computed[rows], table.host_tokens[rows])
    return rows, _have_slack(engine, rows, there)


def _num_slack_blocks(engine: Engine) -> int:
    """Return the blocks that are free once all rows with slack that run, or gave way and hold some, lose their KV."""
    table = engine.table
    holding = table.preempted.view[table.held_blocks[table.preempted.view] > 0]
    rows: I32 = np.concatenate([table.running.view, holding])
    idle = rows[_have_slack(engine, rows, np.zeros(rows.size, dtype=np.int32))]
    return int(engine.sharing.freeable(idle).sum()) if idle.size else 0


def _have_slack(engine: Engine, rows: I32, there: I32) -> Bool:
    """Return [n] which rows have slack.

    Args:
        engine: has the rows.
        rows: [n]
        there: [n] tokens that need not be computed again: copies from the host are not counted.
    """
    table, cost = engine.table, engine.cost.now
    if not engine.reorders:
        last: Bool = table.tier[rows] == Tier.FLEX
        return last | _are_slowed(engine, rows)
    slack_s = qoe_columns.slack_s(table, rows, engine.noted_s)
    if cost is not None:
        missing = (table.num_known[rows] - there).astype(np.float64)
        slack_s = slack_s - cost.token_s * missing - cost.a_s * missing * (there + (missing + 1) / 2)
    found: Bool = np.isnan(table.qoe_speed[rows]) | (slack_s > SLACK_S)
    return found


def _are_slowed(engine: Engine, rows: I32) -> Bool:
    """Return [n] which rows were there for so long while best effort was in steps that it may be why they still are."""
    last_s = engine.beside_best_effort_s
    slowed: Bool = SLOWED_TIMES * (last_s - engine.table.arrival_s[rows]) > engine.noted_s - last_s
    return slowed


def _num_blocks(engine: Engine, rows: I32) -> I32:
    """Return [n] the blocks that rows need for the tokens known so far."""
    return -(-engine.table.num_known[rows] // engine.config.block_size)


def _head_blocks_of(engine: Engine, rows: I32) -> int:
    """Return the blocks that the first of some parked rows needs; 0 without one."""
    if not rows.size:
        return 0
    lacks = int(_num_blocks(engine, rows[:1])[0] - engine.table.held_blocks[rows[0]])
    return max(lacks - engine.sharing.coming.num_kept_blocks, 0)


def _num_head_blocks(engine: Engine) -> int:
    """Return the blocks that the next one in line needs; those that are kept for KV on its way are there."""
    return max(engine.table.num_head_blocks - engine.sharing.coming.num_kept_blocks, 0)
