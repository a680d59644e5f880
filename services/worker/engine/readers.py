"""What the readers of an engine's sequences have at one moment, for reports and dumps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.worker.contract.arrays import F64, I32
from services.worker.engine.engine import Engine
from services.worker.scheduling.prediction import Readers
from services.worker.sequences import qoe_columns
from shared.messages.report import SLACK_EDGES_S


@dataclass(frozen=True, slots=True)
class ReadersNow:
    """Of one moment."""

    slack_rows: tuple[int, ...]
    """[len(SLACK_EDGES_S) + 1] sequences that run and have a reader, by how long it has text for."""
    slack_blocks: tuple[int, ...]
    """[len(SLACK_EDGES_S) + 1] KV blocks that these hold; a block that several hold counts for each."""
    qoe: float | None
    """Mean of what all readers have experienced by now, waiting ones included; None without any."""


def look_at_readers(engine: Engine, now_s: float) -> ReadersNow:
    """Return what the readers have.

    Args:
        engine: whose sequences they follow.
        now_s: on this worker's clock.
    """
    table = engine.table
    rows = table.running.view
    rows = rows[~np.isnan(table.qoe_speed[rows])]
    bucket = np.searchsorted(SLACK_EDGES_S, qoe_columns.slack_s(table, rows, now_s), side="right")
    size = len(SLACK_EDGES_S) + 1
    blocks = np.bincount(bucket, table.held_blocks[rows], size)
    all_rows: I32 = np.concatenate([table.running.view, table.preempted.view, table.waiting.view])
    known = qoe_by_now(engine, all_rows, now_s)
    known = known[~np.isnan(known)]
    return ReadersNow(
        tuple(np.bincount(bucket, minlength=size).tolist()),
        tuple(blocks.astype(np.int64).tolist()),
        float(known.mean()) if known.size else None,
    )


def qoe_by_now(engine: Engine, rows: I32, now_s: float) -> F64:
    """Return [n]: what the reader of each row has experienced by now, in [0, 1]; NaN without one, 1 while it thinks.

    Args:
        engine: has the rows.
        rows: [n]
        now_s: on this worker's clock.
    """
    table = engine.table
    readers = Readers(
        (table.num_output[rows] - table.num_thought[rows]).astype(np.float64),
        table.qoe_last_s[rows],
        table.qoe_delay_sum_s[rows],
        table.qoe_ttft_s[rows],
        table.qoe_gap_s[rows],
    )
    found = np.where(table.thinks[rows], 1.0, readers.qoe(now_s - table.arrival_s[rows]))
    return np.where(np.isnan(table.qoe_speed[rows]), np.nan, found)
