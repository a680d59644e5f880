"""What a scheduler sees of an engine: columns and queues, without copies, of the rows that may run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.worker.blocks.manager import BlockManager
from services.worker.blocks.sharing import Sharing
from services.worker.blocks.swapping import Swapping
from services.worker.contract.arrays import EMPTY_I32
from services.worker.cost.estimate import CostEstimate
from services.worker.engine.flights import Flights
from services.worker.scheduling.view import Limits, SchedulerView
from services.worker.sequences.table import SequenceTable


@dataclass(frozen=True, slots=True)
class Viewing:
    """Looks at the parts of an engine for its scheduler; changes nothing."""

    table: SequenceTable
    blocks: BlockManager
    sharing: Sharing
    swapping: Swapping | None
    flights: Flights
    cost: CostEstimate

    def view(self, now_s: float, limits: Limits) -> SchedulerView:
        """Return the view for the next step's decision."""
        table = self.table
        waiting, running, preempted = table.waiting.view, table.running.view, table.preempted.view
        if np.count_nonzero(table.hold):
            free = table.hold == 0
            waiting, running, preempted = waiting[free[waiting]], running[free[running]], preempted[free[preempted]]
        flights, host = self.flights, None
        if self.swapping is not None:
            is_copied = self._is_copied
            host = self.swapping.view(may_leave=self.may_leave, may_come=not is_copied)
            if is_copied:
                preempted = preempted[table.host_tokens[preempted] == 0]
        in_flight = flights.rows
        extensible = flights.extensible if limits.num_lanes > 1 else EMPTY_I32
        return SchedulerView(
            now_s=now_s,
            columns=table.columns,
            waiting=waiting,
            running=running,
            preempted=preempted,
            num_in_flight=in_flight.size,
            free_blocks=self.blocks.num_free,
            block_size=self.blocks.block_size,
            limits=limits,
            blocks=self.sharing,
            host=host,
            flights=tuple(flight.batch.rows for flight in flights),
            in_flight=in_flight,
            in_flight_ends=flights.ends(in_flight),
            extensible=extensible,
            extensible_begins=flights.ends(extensible),
            cost=self.cost.now,
        )

    @property
    def may_leave(self) -> bool:
        """Whether a copy beside the steps would read what blocks are said to hold: it is here, and is there by now."""
        return not (self._is_copied or self.sharing.attends_elsewhere)

    @property
    def _is_copied(self) -> bool:
        """Whether a batch in flight copies blocks: too late for copies beside it, there and back."""
        return any(flight.batch.copies.source.size for flight in self.flights)
