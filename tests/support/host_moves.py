"""What tests of KV on the host do to an engine, and what they look at."""

from __future__ import annotations

import numpy as np

from services.worker.blocks.swapping import NOBODY
from services.worker.scheduling.view import PreemptHow
from services.worker.sequences.table import Hold
from tests.support.engine_harness import EngineHarness


def until_copy(harness: EngineHarness, *, to_host: bool) -> int:
    """Step until a copy in this direction has begun, and return the row that it moves."""
    for _ in range(200):
        harness.submit()
        if harness.flights:
            harness.land()
        if any(copy.to_host is to_host for copy in harness.host_copies):
            return int(np.flatnonzero(harness.engine.table.hold & Hold.SWAPPING)[0])
        harness.land_copies()
    raise AssertionError("no such copy began")


def sent(harness: EngineHarness) -> list[tuple[bool, int]]:
    """Run to the end; return of each copy for a row whether it went to the host, and its blocks."""
    copies: list[tuple[bool, int]] = []
    while harness.engine.table.num_sequences:
        harness.fill()
        harness.check_going_on()
        moves = {} if harness.engine.swapping is None else harness.engine.swapping._moves
        of_rows = [copy for copy in harness.host_copies if moves[copy.copy_id].row != NOBODY]
        copies += [(copy.to_host, int(copy.host.size)) for copy in of_rows]
        if harness.flights:
            harness.land()
        harness.land_copies()
    harness.judge()
    harness.check_empty()
    return copies


def preempt(harness: EngineHarness, row: int, num_kept: int = 0, how: PreemptHow = PreemptHow.SWAP) -> list[int]:
    """Have a row give up all but its first blocks; return which of them are copied to the host, in sequence order."""
    engine = harness.engine
    table = engine.blocks.block_table[row, : engine.table.held_blocks[row]].tolist()
    engine._transitions.preempt(row, how, num_kept)
    copies = [] if engine.swapping is None else engine.swapping.take_copies()
    for copy in copies:
        harness.kv.begin_copy(copy)
        harness.host_copies.append(copy)
    harness.settle()
    return [table.index(block) for copy in copies for block in copy.device.tolist()]
