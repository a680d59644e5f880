"""Rows that ran at another worker and have come with their KV: as good as decodes, they are not to wait for prompts."""

from __future__ import annotations

from typing import Final

from services.worker.scheduling.blocks_math import num_known
from services.worker.scheduling.plan import StepPlan
from shared.api_keys import Tier

MAX_LACKING_BLOCKS: Final = 2
"""Of such a row: its last one, which was not full, and one that was not there yet."""


def go_on(plan: StepPlan) -> None:
    """Let them come in, beside the decodes: their readers see a step's pause.

    Best effort waits for its turn, and all do while somebody gives way.
    """
    view, waiting = plan.view, plan.view.waiting
    if not waiting.size or plan.preempted.size:
        return
    rows = waiting[(view.columns.num_output.take(waiting) > 0) & (view.columns.tier.take(waiting) != Tier.FLEX)]
    if rows.size:
        lacking = num_known(view.columns, rows) - [view.blocks.cached(row).num_tokens for row in rows.tolist()]
        plan.admit(rows[lacking <= MAX_LACKING_BLOCKS * view.block_size], whole=True)
