"""Has requests that wait for memory go where there is some: asks who waits, decides, and tells the workers.

    view ─► find_overflow ─► ListQueued to those that are short ─► plan_moves ─► MoveQueued

Not a plan: nothing is written down, nobody waits for it, and a request that has begun meanwhile stays. Source: KunServe
v1, section 4.3; how requests travel is the project's own (they are released, and their dispatchers submit them again).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter

from services.planner.orders import LISTED, Orders
from services.planner.policy.overflow import Overflow, find_overflow, plan_moves
from services.planner.policy.rebalance import Requeue
from shared.ids import WorkerId
from shared.messages.errand import Errand, ErrandRefused
from shared.messages.queue import ListQueued, MoveQueued, QueuedPart, QueueList, QueueMove, QueueMoved
from shared.messages.report import ClusterView
from shared.process.log import get_logger
from shared.transport.bus import BusError
from shared.wire import WireError

_log = get_logger()
ANSWER_LIMIT_S = 0.5
"""For a worker to say who waits; nothing else is decided meanwhile."""
M = TypeVar("M", QueueList, QueueMoved)
_MOVED: TypeAdapter[QueueMoved | ErrandRefused] = TypeAdapter(
    Annotated[QueueMoved | ErrandRefused, Field(discriminator="kind")]
)


class Rebalancer:
    """One round at a time, and some time between two.

    Args:
        orders: to workers.
        batch_per_worker: requests that a worker runs well at a time.
        pause_s: between two rounds: reports have to show what the last one changed.
        announce: tells people the name of what happened, and the reason.
    """

    def __init__(
        self,
        orders: Orders,
        *,
        batch_per_worker: int,
        pause_s: float,
        announce: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._orders = orders
        self._batch_per_worker = batch_per_worker
        self._pause_s = pause_s
        self._announce = announce
        self._not_before_s = float("-inf")

    def look(self, view: ClusterView, now_s: float) -> Overflow | None:
        """Return what a round would be about; None: nothing, or not yet."""
        return None if now_s < self._not_before_s else find_overflow(view)

    async def run(self, overflow: Overflow) -> int:
        """Make a round, about what `look` has found; return how many requests have gone elsewhere.

        Raises:
            SupersededError: another planner has written.
        """
        try:
            queues = await self._ask(overflow)
            moves = plan_moves(overflow, queues, self._batch_per_worker)
            num_moved = await self._tell(moves, queues) if moves else 0
        finally:
            self._not_before_s = asyncio.get_running_loop().time() + self._pause_s
        if num_moved:
            sources, targets = sorted({move.source for move in moves}), sorted({move.target for move in moves})
            await self._announce(
                "requests_moved",
                f"{num_moved} waiting requests go from {', '.join(sources)} to {', '.join(targets)}, which have room",
            )
        return num_moved

    async def _ask(self, overflow: Overflow) -> dict[WorkerId, Sequence[QueuedPart]]:
        async def ask(worker_id: WorkerId) -> tuple[WorkerId, Sequence[QueuedPart]] | None:
            answer = await self._request(worker_id, ListQueued(epoch=self._orders.epoch), LISTED)
            return None if answer is None else (worker_id, answer.requests)

        answers = await asyncio.gather(*(ask(report.worker_id) for report in overflow.short))
        return dict(answer for answer in answers if answer is not None)

    async def _tell(self, moves: Sequence[Requeue], queues: dict[WorkerId, Sequence[QueuedPart]]) -> int:
        by_source: dict[WorkerId, list[QueueMove]] = {}
        for move in moves:
            source = WorkerId(move.source)
            attempt = next(part.attempt for part in queues[source] if part.request_id == move.request_id)
            part = QueueMove(request_id=move.request_id, attempt=attempt, target=WorkerId(move.target))
            by_source.setdefault(source, []).append(part)
        answers = await asyncio.gather(
            *(
                self._request(source, MoveQueued(epoch=self._orders.epoch, moves=tuple(parts)), _MOVED)
                for source, parts in by_source.items()
            )
        )
        return sum(answer.num_moved for answer in answers if answer is not None)

    async def _request(self, worker_id: WorkerId, errand: Errand, answers: TypeAdapter[M | ErrandRefused]) -> M | None:
        try:
            answer = await self._orders.ask(worker_id, errand, answers, ANSWER_LIMIT_S)
        except (BusError, WireError) as error:
            _log.warning("queue_not_known", worker=worker_id, error=str(error))
            return None
        if isinstance(answer, ErrandRefused):
            _log.warning("queue_not_known", worker=worker_id, error=answer.reason)
            return None
        return answer
