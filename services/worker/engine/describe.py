"""A readable picture of the sequences in an engine, for operators. Never tokens or text."""

from __future__ import annotations

from math import isnan

import numpy as np

from services.worker.engine.engine import Engine
from services.worker.engine.readers import qoe_by_now
from services.worker.sequences import qoe_columns
from services.worker.sequences.table import Status
from shared.api_keys import Tier


def describe(engine: Engine, now_s: float) -> list[dict[str, object]]:
    """Return every sequence that the engine holds at this moment, in order of their rows: names, counts and times."""
    table = engine.table
    known = sorted(engine.registry.row_of.items(), key=lambda item: item[1])
    rows = np.array([row for _, row in known], dtype=np.int32)
    is_paused = (table.status == Status.RUNNING) & (table.hold == 0) & (table.paused_after == table.last_step)
    qoe, slack_s = qoe_by_now(engine, rows, now_s).tolist(), qoe_columns.slack_s(table, rows, now_s).tolist()
    return [
        {
            "request_id": request_id,
            "attempt": attempt,
            "status": Status(int(table.status[row])).name.lower(),
            "num_prompt_tokens": int(table.num_prompt[row]),
            "num_output_tokens": int(table.num_output[row]),
            "num_computed_tokens": int(table.num_computed[row]),
            "num_blocks": int(table.held_blocks[row]),
            "num_host_tokens": int(table.host_tokens[row]),
            "tier": Tier(int(table.tier[row])).label,
            "num_preemptions": int(table.num_preemptions[row]),
            # it holds KV and could be in a step, and was left out of the newest that were chosen
            "is_paused": bool(is_paused[row]),
            "token_age_s": round(now_s - float(table.last_token_s[row]), 3),
            # of its reader: for how long there is text, and the experience by now
            "slack_s": None if isnan(qoe[i]) else round(slack_s[i], 3),
            "qoe": None if isnan(qoe[i]) else round(qoe[i], 4),
            # it does not run because KV for it is on its way from another worker
            "awaits_kv": bool(table.status[row] != Status.RUNNING) and engine.sharing.awaits_coming(row),
        }
        for i, ((request_id, attempt), row) in enumerate(known)
    ]


def num_struck(engine: Engine) -> tuple[int, int]:
    """Return how many sequences a change between two steps strikes: in their prefill, and in their decode."""
    rows = engine.table.running.view
    left = engine.table.num_known[rows] - engine.table.num_computed[rows]
    return int((left > 1).sum()), int((left == 1).sum())
