"""Counts of one engine, for reports and logs."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from services.worker.contract.arrays import I32
from services.worker.engine.best_effort import count_best_effort
from services.worker.engine.demand import take_demand
from services.worker.engine.engine import Engine
from services.worker.engine.loop import StepPace
from services.worker.engine.totals import Totals
from services.worker.sequences.table import Hold, SequenceTable
from shared.api_keys import Tier
from shared.hot import hot_dataclass
from shared.messages.report import BestEffortPart, TierCounts

_HELD_BACK = Hold.CANCELLED | Hold.NO_ROOM | Hold.FORK | Hold.PAUSED | Hold.ENDED | Hold.LEAVING | Hold.PULLING
"""Who is none that steps are made for; a row in a step or copy is, and so is one that is to be tried again."""
MIN_WAITING: Final = 32
"""Sequences that may wait however few the memory holds: the first to come may be much longer than those that follow."""
REORDERED_BATCHES: Final = 4
"""Batches of which so many may wait for a policy that reorders, in half of the rows that those who run leave."""
MIN_PARKED: Final = 8
"""The same of best effort, whose place nobody else takes: a few, for a policy to choose from."""


@hot_dataclass(frozen=True, slots=True)
class EngineStats:
    """One moment of the engine: what is there now, and what has happened so far."""

    num_running: int
    num_runnable: int
    """Sequences that could be in a step now: running ones that nothing holds back, and parked ones while no step can be
    made; none while the scheduler finds nobody."""
    num_waiting: int
    num_preempted: int
    num_blocks: int
    """Usable blocks that the device has. Where memory is unlimited, what is held beyond counts as demanded."""
    num_used_blocks: int
    """Usable blocks that sequences hold or somebody pins; free ones whose contents are kept do not count."""
    num_demanded_blocks: int
    """Blocks that waiting and preempted sequences need for the tokens known so far, as if nothing were cached, beyond
    those in use."""
    num_uncomputed_blocks: int
    """Blocks of KV that is still to be computed for the tokens known so far, as if nothing were cached: of sequences
    that run what they do not hold yet, of the others all that is neither held, nor on the host, nor on its way."""
    num_head_blocks: int
    """Of these, the blocks that the next one in line lacks; where best effort gives way the next one without slack
    (`demand.py`)."""
    num_queued_for_memory: int
    """Waiting and preempted sequences for which there is a place among those that run, while the next one in line finds
    too few free blocks beside one more for each that runs; where best effort gives way those without slack, while
    the blocks of those with slack are too few as well."""
    num_slack_blocks: int
    """Of the used blocks, those of sequences that run and have slack: others may have them. 0 unless best effort
    gives way."""
    num_slowed_blocks: int
    """Of these, those of others than best effort that it has slowed (`demand.py`)."""
    num_slack_demanded_blocks: int
    """Of the demanded blocks, those that sequences with slack need. 0 unless best effort gives way."""
    max_waiting: int
    """Real-time sequences that may wait; who comes when so many do is refused."""
    num_coming_blocks: int
    """Blocks whose KV is on its way from another worker."""
    num_host_blocks: int
    """Blocks of host memory for KV of preempted sequences."""
    num_used_host_blocks: int
    tiers: tuple[TierCounts, ...]
    """Of each tier of which a sequence is here, the most urgent first; empty while all are of the default tier."""
    best_effort: BestEffortPart
    """Of all of these, what is best effort's."""
    totals: Totals
    """As they were at that moment."""


def take_stats(engine: Engine, pace: StepPace = StepPace.STEPPING) -> EngineStats:
    """Return the counts of this moment.

    Args:
        engine: to be counted.
        pace: what its step loop is at.
    """
    table, demand, host = engine.table, take_demand(engine), None if engine.swapping is None else engine.swapping.host
    used, demanded = count_blocks(engine)
    num_running, best_effort = len(table.running), count_best_effort(engine, most_parked(engine))
    num_slowed = 0 if engine.reorders else max(demand.num_slack_blocks - best_effort.num_used_blocks, 0)
    return EngineStats(
        num_running=num_running,
        num_runnable=_num_runnable(engine.table, pace),
        num_waiting=len(table.waiting),
        num_preempted=len(table.preempted),
        num_blocks=engine.capacity_blocks,
        num_used_blocks=used,
        num_demanded_blocks=demanded,
        num_uncomputed_blocks=_num_uncomputed_blocks(engine),
        num_head_blocks=demand.num_head_blocks,
        num_queued_for_memory=demand.num_queued,
        num_slack_blocks=demand.num_slack_blocks,
        num_slowed_blocks=num_slowed,
        num_slack_demanded_blocks=demand.num_slack_demanded_blocks,
        max_waiting=most_waiting(engine),
        num_coming_blocks=len(engine.sharing.coming),
        num_host_blocks=0 if host is None else host.num_usable,
        num_used_host_blocks=0 if host is None else host.num_used,
        tiers=_by_tier(table),
        best_effort=best_effort,
        totals=replace(engine.totals),
    )


def count_blocks(engine: Engine) -> tuple[int, int]:
    """Return `EngineStats.num_used_blocks` and `EngineStats.num_demanded_blocks`."""
    used = min(engine.num_used_blocks, engine.capacity_blocks)
    return used, engine.num_demanded_blocks + engine.num_used_blocks - used


def count_free_blocks(engine: Engine) -> int:
    """Return how many blocks nobody holds, asks for, or will as soon as what is known of the sequences is computed."""
    asked = max(engine.num_demanded_blocks, _num_uncomputed_blocks(engine))
    return max(engine.capacity_blocks - engine.num_used_blocks - asked, 0)


def most_waiting(engine: Engine) -> int:
    """Return `EngineStats.max_waiting`: one batch, or some if the policy reorders.

    Whoever waits here cannot go to another worker, nor be overtaken if the policy takes all as they came. One that
    reorders is to see those whom it may prefer, but tenants take turns in the dispatchers only.
    """
    if not engine.reorders:
        return _one_batch(engine, MIN_WAITING)
    one, config = _one_batch(engine, MIN_WAITING), engine.config
    left = config.max_sequences - config.max_batch_rows * config.num_lanes
    return min(max(min(REORDERED_BATCHES * one, left // 2), one), config.max_sequences)


def most_parked(engine: Engine) -> int:
    """Return how many sequences of best effort may wait here or have given way; the rest waits in dispatchers.

    One batch gives a policy enough to choose from; without one, others would wait behind it. Half of the rows stay with
    those that run, and real-time work.
    """
    knows_sizes = engine.best_effort_gives_way and engine.table.num_sequences
    wanted = _one_batch(engine, MIN_PARKED) if knows_sizes else MIN_PARKED
    return min(wanted, max(engine.config.max_sequences // 2, 1))


def _one_batch(engine: Engine, least: int) -> int:
    """Return how many sequences the memory holds that are as long as those here: who comes in within seconds."""
    most = engine.config.max_batch_rows * engine.config.num_lanes
    if not engine.table.num_sequences:
        return most
    wanted = max(engine.num_used_blocks + engine.num_demanded_blocks, 1)
    return min(max(engine.capacity_blocks * engine.table.num_sequences // wanted, least), most)


def count_awaiting_kv(engine: Engine) -> int:
    """Return how many waiting and preempted sequences are passed over until KV is here that is on its way."""
    if not len(engine.sharing.coming):
        return 0
    parked = (*engine.table.preempted.view.tolist(), *engine.table.waiting.view.tolist())
    return sum(map(engine.sharing.awaits_coming, parked))


def _by_tier(table: SequenceTable) -> tuple[TierCounts, ...]:
    """Return `EngineStats.tiers`."""
    num_running = len(table.running)
    rows: I32 = np.concatenate([table.running.view, table.preempted.view, table.waiting.view])
    tiers = table.tier[rows]
    if (tiers == Tier.DEFAULT).all():
        return ()
    running, every, blocks = (
        np.bincount(tiers[:num_running], minlength=len(Tier)).tolist(),
        np.bincount(tiers, minlength=len(Tier)).tolist(),
        np.bincount(tiers, table.held_blocks[rows], len(Tier)).astype(np.int64).tolist(),
    )
    return tuple(
        TierCounts(
            tier=tier.label,
            num_running=running[tier],
            num_waiting=every[tier] - running[tier],
            num_used_blocks=blocks[tier],
        )
        for tier in reversed(Tier)
        if every[tier]
    )


def _num_runnable(table: SequenceTable, pace: StepPace) -> int:
    """Return `EngineStats.num_runnable`."""
    if pace is StepPace.AT_REST:
        return 0
    queues = [table.running] if pace is StepPace.STEPPING else [table.running, table.preempted, table.waiting]
    return sum(int(np.count_nonzero((table.hold[queue.view] & _HELD_BACK) == 0)) for queue in queues)


def _num_uncomputed_blocks(engine: Engine) -> int:
    """Return `EngineStats.num_uncomputed_blocks`. The newest token of a row that decodes counts for nothing."""
    table, block_size = engine.table, engine.config.block_size
    rows, parked = table.running.view, table.preempted.view
    unheld = _ceil_div(table.num_known[rows] - 1, block_size) - table.held_blocks[rows]
    there = np.maximum(_ceil_div(table.host_tokens[parked], block_size), table.held_blocks[parked])
    waiting = table.num_parked_blocks - int(there.sum()) - engine.sharing.coming.num_kept_blocks
    return max(waiting, 0) + int(np.maximum(unheld, 0).sum())


def _ceil_div(counts: I32, size: int) -> I32:
    return -(-counts // size)
