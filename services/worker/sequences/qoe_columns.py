"""The O(1) form of QoE in the table's columns, advanced by one token for a whole batch.

Source: Andes, section 2, kept as two sums (`sluice_client.qoe.QoeState`): deliver(d) sets last = max(d, last + 1/speed)
and adds last - ideal to the sum of delays; times are seconds since the request's arrival.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.worker.contract.arrays import F64, I32
from services.worker.sequences.table import SequenceTable


def slack_s(table: SequenceTable, rows: I32, now_s: float) -> F64:
    """Return for how long each row's reader can go on without another token, [n] seconds; may be negative.

    Who has no reader has none, and is due at once.

    Args:
        table: the sequence table.
        rows: [n]
        now_s: on this worker's clock.
    """
    due_s = table.arrival_s[rows] + table.qoe_last_s[rows] + table.qoe_gap_s[rows]
    return np.where(np.isnan(due_s), 0.0, due_s - now_s)


def deliver(table: SequenceTable, rows: NDArray[np.intp], first_index: I32, now_s: float) -> None:
    """Count one token as delivered now to each row's reader; rows without a reader keep their NaN.

    Args:
        table: the sequence table; the columns `qoe_last_s` and `qoe_delay_sum_s` change.
        rows: [n]
        first_index: [n] tokens that each row had before.
        now_s: when the tokens exist, on this worker's clock.
    """
    gap_s = table.qoe_gap_s[rows]
    last_s = np.maximum(now_s - table.arrival_s[rows], table.qoe_last_s[rows] + gap_s)
    table.qoe_last_s[rows] = last_s
    table.qoe_delay_sum_s[rows] += last_s - table.qoe_ttft_s[rows] - first_index * gap_s
