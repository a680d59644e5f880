"""Two errands: who waits here and has not begun, told to the planner, and let go where it names a worker with room."""

from __future__ import annotations

from collections.abc import Callable

from services.worker.engine.engine import Engine
from services.worker.sequences.table import Hold, Status
from shared.api_keys import Tier
from shared.ids import WorkerId
from shared.messages.queue import ListQueued, MoveQueued, QueuedPart, QueueList, QueueMoved
from shared.process.log import get_logger

_log = get_logger()


class WaitingQueue:
    """The planner's view of the engine's waiting sequences.

    Args:
        worker_id: of this worker.
        engine: of this worker.
        flush: passes on what has happened to sequences.
        now: the worker's clock, seconds.
    """

    def __init__(
        self, worker_id: WorkerId, engine: Engine, flush: Callable[[], None], now: Callable[[], float]
    ) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._flush = flush
        self._now = now

    async def list(self, asked: ListQueued) -> QueueList:
        """Return who waits and has not begun, first in line first."""
        table, size = self._engine.table, self._engine.config.block_size
        rows = [row for row in table.waiting.view.tolist() if self._may_go(row)][: asked.limit]
        parts = []
        for row in rows:
            request_id, attempt = table.sequence(row).key
            parts.append(
                QueuedPart(
                    request_id=request_id,
                    attempt=attempt,
                    tier=Tier(int(table.tier[row])),
                    age_s=max(self._now() - float(table.arrival_s[row]), 0.0),
                    num_blocks=-(-int(table.num_known[row] + 1) // size),
                )
            )
        return QueueList(requests=tuple(parts))

    async def move(self, asked: MoveQueued) -> QueueMoved:
        """Release those that still wait; others stay."""
        num_moved = 0
        for move in asked.moves:
            row = self._engine.registry.row_of.get((move.request_id, move.attempt))
            if row is not None and self._may_go(row) and move.target != self._worker_id:
                self._engine.registry.release([row], move.target)
                num_moved += 1
        if num_moved:
            self._flush()
            _log.info("queued_moved", num_moved=num_moved, num_asked=len(asked.moves))
        return QueueMoved(num_moved=num_moved)

    def _may_go(self, row: int) -> bool:
        """Return whether a row waits for nothing but its turn and memory, and was never in a step."""
        table = self._engine.table
        is_held = bool(table.hold[row] & ~Hold.NO_ROOM)
        return bool(table.status[row] == Status.WAITING and not table.has_started[row]) and not is_held
