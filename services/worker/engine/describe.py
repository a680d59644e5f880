"""A readable picture of the sequences in an engine, for operators. Never tokens or text."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.engine.engine import Engine
from services.worker.engine.table import Status
from shared.ids import RequestId


@dataclass(frozen=True, slots=True)
class SequenceDescription:
    """One sequence: names and counts."""

    request_id: RequestId
    attempt: int
    status: str
    """`waiting`, `running` or `preempted`."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_blocks: int


def describe(engine: Engine) -> list[SequenceDescription]:
    """Return every sequence that the engine holds, in order of their rows."""
    table = engine.table
    return [
        SequenceDescription(
            request_id=request_id,
            attempt=attempt,
            status=Status(int(table.status[row])).name.lower(),
            num_prompt_tokens=int(table.num_prompt[row]),
            num_output_tokens=int(table.num_output[row]),
            num_computed_tokens=int(table.num_computed[row]),
            num_blocks=int(table.held_blocks[row]),
        )
        for (request_id, attempt), row in sorted(engine.row_of.items(), key=lambda item: item[1])
    ]
