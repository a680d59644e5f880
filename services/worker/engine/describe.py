"""A readable picture of the sequences in an engine, for operators. Never tokens or text."""

from __future__ import annotations

from services.worker.engine.engine import Engine
from services.worker.sequences.table import Status


def describe(engine: Engine) -> list[dict[str, object]]:
    """Return every sequence that the engine holds, in order of their rows: names and counts."""
    table = engine.table
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
            # it does not run because KV for it is on its way from another worker
            "awaits_kv": bool(table.status[row] != Status.RUNNING) and engine.sharing.awaits_coming(row),
        }
        for (request_id, attempt), row in sorted(engine.registry.row_of.items(), key=lambda item: item[1])
    ]


def num_struck(engine: Engine) -> tuple[int, int]:
    """Return how many sequences a change between two steps strikes: in their prefill, and in their decode."""
    rows = engine.table.running.view
    left = engine.table.num_known[rows] - engine.table.num_computed[rows]
    return int((left > 1).sum()), int((left == 1).sum())
