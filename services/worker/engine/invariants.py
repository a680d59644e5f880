"""What must hold between any two calls of the engine."""

from __future__ import annotations

import numpy as np

from services.worker.engine.engine import Engine
from services.worker.sequences.table import Hold, SequenceTable, Status
from services.worker.sequences.token_log import CHUNK


def check_engine(engine: Engine) -> None:
    """Raise AssertionError, naming the law, if the engine's state contradicts itself."""
    table = engine.table
    live = np.flatnonzero(table.status != Status.FREE).astype(np.int32)
    _check_queues(table)
    _check_counts(table, live, engine.config.block_size)
    _check_holds(engine)
    engine.blocks.check_invariants(live)
    for row in table.running.view.tolist():
        engine.blocks.check_writable(row, int(table.num_computed[row]))
    engine.sharing.check_invariants()
    if engine.swapping is not None:
        engine.swapping.check_invariants()
    chunks = -(-table.num_output[live] // CHUNK)
    assert engine.log.num_used_chunks == int(chunks.sum()), "chunks of the token log are lost or doubled"
    named = live[(table.hold[live] & Hold.ENDED) == 0]
    assert sorted(engine.registry.row_of.values()) == named.tolist(), (
        "each live row has one name, and each name one live row"
    )
    assert all(table.sequence(row).key == key for key, row in engine.registry.row_of.items()), (
        "a row has another's name"
    )


def _check_queues(table: SequenceTable) -> None:
    queues = ((Status.WAITING, table.waiting), (Status.RUNNING, table.running), (Status.PREEMPTED, table.preempted))
    for status, queue in queues:
        rows = np.flatnonzero(table.status == status)
        assert sorted(queue.view.tolist()) == rows.tolist(), f"the queue and the status {status.name} differ"
    for queue in (table.waiting, table.preempted):
        keys = [(table.arrival_s[row], table.order[row]) for row in queue.view.tolist()]
        assert keys == sorted(keys), "waiting and preempted rows are in order of arrival"
    assert table.num_sequences == sum(len(queue) for _, queue in queues), "rows are lost or doubled"


def _check_counts(table: SequenceTable, live: np.ndarray, block_size: int) -> None:
    known, computed = table.num_known[live], table.num_computed[live]
    assert (known == table.num_prompt[live] + table.num_output[live]).all(), "known tokens are prompt and outputs"
    assert (computed >= 0).all(), "computed tokens cannot be negative"
    assert (computed < known).all(), "a live row has a token left to compute"
    assert (computed <= table.held_blocks[live] * block_size).all(), "computed tokens have slots"
    assert (table.num_output[live] < table.max_output[live]).all(), "a sequence at its limit has ended"
    waiting, preempted = (live[table.status[live] == status] for status in (Status.WAITING, Status.PREEMPTED))
    assert not table.num_computed[waiting].any(), "a waiting row has no KV"
    assert not table.held_blocks[waiting].any(), "a waiting row holds no blocks"
    kept = table.held_blocks[preempted] * block_size
    assert (table.num_computed[preempted] == kept).all(), "a preempted row holds full blocks, and no others"
    cleared = table.hold[preempted] & (Hold.PAUSED | Hold.NO_ROOM), table.hold[preempted] & Hold.SWAPPING
    assert not kept[(cleared[0] != 0) & (cleared[1] == 0)].any(), "a row that cannot come back for now holds no blocks"
    parked = int((-(-known[table.status[live] != Status.RUNNING] // block_size)).sum())
    assert table.num_parked_blocks == parked, "blocks that parked rows ask for are counted wrongly"
    assert table.num_readers == int((~np.isnan(table.qoe_speed[live])).sum()), "readers are counted"
    thinkers = table.thinks[live] | table.may_think[live] | (table.num_thought[live] > 0)
    assert table.num_thinkers == int(thinkers.sum()), "rows that think are counted"


def _check_holds(engine: Engine) -> None:
    table = engine.table
    engine.flights.check_invariants()
    in_flight = engine.flights.rows.tolist()
    goes_ahead = engine.limits.num_lanes > 1 or engine.config.overlaps
    assert goes_ahead or len(in_flight) == sum(flight.rows.size for flight in engine.flights), (
        "with one lane a row is in at most one batch in flight"
    )
    ended = np.flatnonzero(table.hold & Hold.ENDED)
    assert set(ended.tolist()) <= set(in_flight), "a row that has ended is forgotten once no batch holds it"
    assert engine.registry.num_ended == ended.size, "rows that have ended are counted"
    cancelled = np.flatnonzero(table.hold & Hold.CANCELLED)
    assert set(cancelled.tolist()) <= set(in_flight), "a cancelled row outside a batch has ended"
    leaving = np.flatnonzero((table.hold & (Hold.LEAVING | Hold.ENDED)) == Hold.LEAVING)
    assert sorted(engine.registry.leaving.rows) == leaving.tolist(), "the bit LEAVING and the rows that leave differ"
    is_away = table.hold[leaving] & (Hold.IN_FLIGHT | Hold.SWAPPING)
    assert is_away.all(), "a row that leaves has left once it is in no batch and no copy"
    retried = np.flatnonzero(table.hold & Hold.RETRY).tolist()
    assert sorted(engine.retry.rows) == retried, "the bit RETRY and the rows to try again differ"
    assert (table.status[in_flight + retried] == Status.RUNNING).all(), "a row in a step is running"
    for flight in engine.flights:
        room = table.held_blocks[flight.rows] * engine.config.block_size
        assert (flight.end <= room).all(), "a row in flight has slots for all its tokens"
