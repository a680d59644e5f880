"""The O(1) form of QoE in the table's columns, advanced by one token for a whole batch.

Source: Andes, section 2, kept as two sums (`sluice_client.qoe.QoeState`): deliver(d) sets last = max(d, last + 1/speed)
and adds last - ideal to the sum of delays; times are seconds since the request's arrival. Of a row that thinks they
are those of its thinking, at the speed at which that is wanted (`reading.py`), and begin anew with the text.
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


def deliver(table: SequenceTable, rows: NDArray[np.intp], tokens: I32, first_index: I32, now_s: float) -> None:
    """Count one token as delivered now to each row's reader; rows without a reader keep their NaN.

    Args:
        table: the sequence table; the columns `qoe_last_s` and `qoe_delay_sum_s` change, and those of rows that think.
        rows: [n]
        tokens: [n]
        first_index: [n] tokens that each row had before.
        now_s: when the tokens exist, on this worker's clock.
    """
    gap_s, index = table.qoe_gap_s[rows], first_index
    if table.num_thinkers:
        index = first_index - table.num_thought[rows]
    last_s = np.maximum(now_s - table.arrival_s[rows], table.qoe_last_s[rows] + gap_s)
    table.qoe_last_s[rows] = last_s
    table.qoe_delay_sum_s[rows] += last_s - table.qoe_ttft_s[rows] - index * gap_s
    if table.num_thinkers:
        _decide(table, rows, tokens)
        _end_thinking(table, rows, tokens, first_index, now_s)


def _decide(table: SequenceTable, rows: NDArray[np.intp], tokens: I32) -> None:
    """Have rows think whose first token, which has been counted, is the opening tag."""
    for i in table.may_think[rows].nonzero()[0].tolist():
        row, thinking = int(rows[i]), table.sequence(int(rows[i])).sampling.thinking
        assert thinking is not None, "who may think knows the tags"
        table.may_think[row] = False
        if tokens[i] == thinking.opening_id:
            table.thinks[row], table.qoe_gap_s[row] = True, table.thinking_gap_s[row]
        else:
            table.num_thinkers -= 1


def _end_thinking(table: SequenceTable, rows: NDArray[np.intp], tokens: I32, first_index: I32, now_s: float) -> None:
    """Have the readers of rows that think, and whose token is the closing tag, expect the text from now on."""
    is_end = table.thinks[rows] & (tokens == table.closing_id[rows])
    if not np.count_nonzero(is_end):
        return
    ended = rows[is_end]
    gap_s = 1 / table.qoe_speed[ended]
    ttft_s = np.maximum(table.qoe_ttft_s[ended], now_s - table.arrival_s[ended] + gap_s)
    table.thinks[ended], table.num_thought[ended] = False, first_index[is_end] + 1
    table.qoe_gap_s[ended], table.qoe_ttft_s[ended] = gap_s, ttft_s
    table.qoe_last_s[ended], table.qoe_delay_sum_s[ended] = ttft_s - gap_s, 0.0
