"""What a scheduler sees of an engine: columns and queues, without copies, of the rows that may run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from services.worker.contract.arrays import EMPTY_I32
from services.worker.scheduling.view import SchedulerView

if TYPE_CHECKING:
    from services.worker.engine.engine import Engine


def view_of(engine: Engine, now_s: float) -> SchedulerView:
    """Return the view for the next step's decision."""
    table = engine.table
    waiting, running, preempted = table.waiting.view, table.running.view, table.preempted.view
    if np.count_nonzero(table.hold):
        free = table.hold == 0
        waiting, running, preempted = waiting[free[waiting]], running[free[running]], preempted[free[preempted]]
    flights = engine.flights
    in_flight = flights.rows
    extensible = flights.extensible if engine.limits.num_lanes > 1 else EMPTY_I32
    return SchedulerView(
        now_s=now_s,
        columns=table.columns,
        waiting=waiting,
        running=running,
        preempted=preempted,
        num_in_flight=in_flight.size,
        free_blocks=engine.blocks.num_free,
        block_size=engine.config.block_size,
        limits=engine.limits,
        blocks=engine.sharing,
        host=None if engine.swapping is None else engine.swapping.view(),
        flights=tuple(flight.batch.rows for flight in flights),
        in_flight=in_flight,
        in_flight_ends=flights.ends(in_flight),
        extensible=extensible,
        extensible_begins=flights.ends(extensible),
    )
