"""What a scheduler sees of an engine: columns and queues, without copies, of the rows that may run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from services.worker.blocks.manager import BlockManager
from services.worker.blocks.sharing import Sharing
from services.worker.blocks.swapping import Swapping
from services.worker.contract.arrays import EMPTY_I32, I32
from services.worker.cost.estimate import CostEstimate
from services.worker.engine.flights import Flights
from services.worker.scheduling.view import NO_SIDES, Limits, SchedulerView
from services.worker.sequences.table import Hold, SequenceTable

NEAR_TOKENS: Final = 2
"""As far as policies look that copy KV to the host."""


@dataclass(frozen=True, slots=True)
class Viewing:
    """Looks at the parts of an engine for its scheduler; changes nothing."""

    table: SequenceTable
    blocks: BlockManager
    sharing: Sharing
    swapping: Swapping | None
    flights: Flights
    cost: CostEstimate
    shares_blocks: bool = False
    """See `EngineConfig`."""

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
        in_flight, columns, sides = flights.rows, table.columns, NO_SIDES
        if self.shares_blocks:
            decoding = self.decoding
            near = self.blocks.near(NEAR_TOKENS, decoding)
            if near:  # one of them may have to go to another block
                held = table.held_blocks.copy()
                held[near] -= 1
                columns = replace(columns, held_blocks=held)
            sides = self.blocks.sides(decoding)
        extensible = flights.extensible if limits.num_lanes > 1 else EMPTY_I32
        return SchedulerView(
            now_s=now_s,
            columns=columns,
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
            sides=sides,
        )

    @property
    def decoding(self) -> I32:
        """Rows that hold blocks and, once what is in flight is back, lack one token; none if blocks are not shared."""
        if not self.shares_blocks:
            return EMPTY_I32
        table, running = self.table, self.table.running.view
        ends = np.maximum(table.num_computed[running], self.flights.ends(running))
        is_there = (table.hold[running] & Hold.SWAPPING) == 0
        found: I32 = running[is_there & (table.num_known[running] - ends <= 1)]
        return found

    @property
    def may_leave(self) -> bool:
        """Whether a copy beside the steps would read what blocks are said to hold: it is here, and is there by now."""
        return not (self._is_copied or self.sharing.coming.remote is not None)

    @property
    def _is_copied(self) -> bool:
        """Whether a batch in flight copies blocks: too late for copies beside it, there and back."""
        return any(flight.batch.copies.source.size for flight in self.flights)
