"""Questions for tokens that were lost on the way, and what becomes of a request when its worker has no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from services.dispatcher.session.calls import Silence, WorkerCalls
from services.dispatcher.session.leases import Loss
from services.dispatcher.session.session import Session
from services.dispatcher.session.table import FINISH_REASONS, SessionTable, extras_of
from shared.ids import WorkerId
from shared.messages.request import Replay, ReplayUnknown
from shared.process.tasks import TaskOwner
from shared.token_batch import TokenBatch

MAX_LOST_REPLIES: Final = 3
"""Unanswered questions in a row after which the worker counts as lost for this request."""
MAX_REPLAYS: Final = 64
"""Questions at a time."""
ROWS_AT_A_TIME: Final = 4
"""Of an answer; each has 255 tokens at most."""


class Replays:
    """Asks workers for the rest of an output.

    Args:
        table: where the answers go.
        calls: to workers.
        silence_s: see `SessionLimits`.
        now: the event loop's clock.
        tasks: owns the questions that are under way.
        on_lost: called with a session that its worker does not know, or that it does not answer about.
    """

    def __init__(
        self,
        table: SessionTable,
        calls: WorkerCalls,
        silence_s: float,
        now: Callable[[], float],
        tasks: TaskOwner,
        on_lost: Callable[[Session, Loss], None],
    ) -> None:
        self.num_asked = 0
        """Questions since the start."""
        self._table = table
        self._calls = calls
        self._silence_s = silence_s
        self._now = now
        self._tasks = tasks
        self._on_lost = on_lost
        self._num_open = 0

    def ask(self, session: Session) -> bool:
        """Ask the worker for everything after the last token that is here; return whether it could be asked."""
        if session.questions.is_open or session.worker_id is None or self._num_open >= MAX_REPLAYS:
            return False
        if not self._calls.connected:
            return False  # a broken broker says nothing about the worker
        session.questions.open(self._now())
        self._num_open += 1
        self.num_asked += 1
        self._tasks.start(self._replay(session, session.worker_id), name=f"replay-{session.request.request_id}")
        return True

    async def _replay(self, session: Session, worker_id: WorkerId) -> None:
        attempt = session.attempt
        question = Replay(request_id=session.request.request_id, attempt=attempt, first_index=len(session.tokens))
        try:
            answer = await self._calls.replay(worker_id, question)
        finally:
            session.questions.close()
            self._num_open -= 1
        if session.attempt != attempt or not session.is_running:
            return
        if isinstance(answer, TokenBatch):
            await self._take(session, answer)
        else:
            self._on_nothing(session, answer, question.first_index)

    async def _take(self, session: Session, batch: TokenBatch) -> None:
        """Hand the tokens on, some at a time: after another dispatcher's death it is a whole answer."""
        attempt, start = session.attempt, 0
        session.questions.answer()
        tokens = batch.tokens.tolist()
        columns = (batch.first_index.tolist(), batch.count.tolist(), batch.finish.tolist(), extras_of(batch))
        for number, (first_index, count, finish, extra) in enumerate(zip(*columns, strict=True), start=1):
            part = tokens[start : start + count]
            self._table.receive(session, first_index, part, FINISH_REASONS[finish], self._now(), extra)
            start += count
            if number % ROWS_AT_A_TIME == 0:
                await asyncio.sleep(0)
            if session.attempt != attempt or session.ended.is_set():
                return

    def _on_nothing(self, session: Session, answer: ReplayUnknown | Silence, first_index: int) -> None:
        if len(session.tokens) > first_index or not self._calls.connected:
            return  # the tokens came by themselves, or nobody could be asked
        num_lost = session.questions.miss()
        if isinstance(answer, ReplayUnknown):
            is_same = answer.incarnation == session.history.incarnation
            self._on_lost(session, Loss.UNKNOWN if is_same else Loss.RESTARTED)
        elif num_lost >= MAX_LOST_REPLIES:
            self._on_lost(session, Loss.SILENT)
        else:
            session.questions.hurry(self._silence_s)
