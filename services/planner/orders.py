"""How the planner speaks to workers: under its newest epoch, and where a worker's is far from it they come together.

    worker has taken a newer one      rise: claim one above it, and ask again; another planner has written: superseded
    worker is far behind              errands, each as far above the last as it takes; then ask again

So an epoch that somebody made up puts nobody out of office: whoever has written the plan key last is the planner. What
a worker says is believed step by step: to bring the planner to the largest number takes as many lies as orders would.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter

from services.planner.book import PlanBook
from shared.ids import WorkerId
from shared.messages.base import MAX_EPOCH_STEP, ControlMessage
from shared.messages.errand import ErrandRefused
from shared.messages.plan import PlanAnswer, PlanState
from shared.messages.queue import ListQueued, QueueList
from shared.subjects import Subjects
from shared.transport.bus import Bus, BusError
from shared.wire import decode_union_json, encode_json

A = TypeVar("A", bound=ControlMessage)
LISTED: TypeAdapter[QueueList | ErrandRefused] = TypeAdapter(
    Annotated[QueueList | ErrandRefused, Field(discriminator="kind")]
)


class Orders:
    """See the module.

    Args:
        bus: connected.
        subjects: of the cluster.
        book: claimed.
    """

    def __init__(self, bus: Bus, subjects: Subjects, book: PlanBook) -> None:
        self._bus = bus
        self._subjects = subjects
        self._book = book

    @property
    def epoch(self) -> int:
        """The newest one that the planner holds."""
        return self._book.epoch

    async def ask(self, worker_id: WorkerId, order: ControlMessage, answers: TypeAdapter[A], timeout_s: float) -> A:
        """Return what a worker says to an order, whose epoch is that of the book.

        Args:
            worker_id: is asked.
            order: idempotent.
            answers: that it may give.
            timeout_s: for all of it.

        Raises:
            SupersededError: another planner has written.
            BusError: no answer in time, or the broker fails.
            WireError: the answer is none of these.
        """
        until_s = _now_s() + timeout_s
        while True:
            epoch = self._book.epoch
            answer = await self._send(worker_id, order.model_copy(update={"epoch": epoch}), answers, until_s)
            if not isinstance(answer, PlanAnswer | ErrandRefused):
                return answer
            if answer.newest_epoch > self._book.epoch:
                await self._book.rise(answer.newest_epoch)
            elif answer.newest_epoch > epoch and _is_refusal(answer):
                continue  # this planner has written meanwhile
            elif answer.newest_epoch + MAX_EPOCH_STEP < epoch:
                await self._bring_near(worker_id, answer.newest_epoch, until_s)
            else:
                return answer

    async def _bring_near(self, worker_id: WorkerId, newest: int, until_s: float) -> None:
        """Let a worker take one epoch after the other until the planner's is within its reach."""
        while newest + MAX_EPOCH_STEP < self._book.epoch:
            newest += MAX_EPOCH_STEP
            await self._send(worker_id, ListQueued(epoch=newest, limit=1), LISTED, until_s)

    async def _send(self, worker_id: WorkerId, order: ControlMessage, answers: TypeAdapter[A], until_s: float) -> A:
        left_s = until_s - _now_s()
        if left_s <= 0:
            raise BusError("its epoch and the planner's did not come together in time")
        data = await self._bus.request(self._subjects.plan(worker_id), encode_json(order), timeout_s=left_s)
        return decode_union_json(data, answers)


def _is_refusal(answer: PlanAnswer | ErrandRefused) -> bool:
    return isinstance(answer, ErrandRefused) or answer.state is PlanState.REFUSED


def _now_s() -> float:
    return asyncio.get_running_loop().time()
