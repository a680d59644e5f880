"""Sessions that lost their worker go on elsewhere, from prompt, tokens and position; their readers see a pause.

A request may be what kills workers. Who lost its worker before it had a token there is on probation: such sessions are
placed one at a time, each until it has a token, so that a death has one suspect. Blamed twice in a row, a request ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Final

from services.dispatcher.session.gaps import GapHistogram
from services.dispatcher.session.history import Attempt
from services.dispatcher.session.leases import Loss, WorkerPresence
from services.dispatcher.session.migration import SessionMigration
from services.dispatcher.session.placing import Placing
from services.dispatcher.session.request import FailureCode, RequestFailedError
from services.dispatcher.session.session import Session
from shared.ids import WorkerId
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner

_log = get_logger()

MAX_MOVES: Final = 16
"""Sessions that are moved from draining workers at a time."""


@dataclass(slots=True)
class WorkerLosses:
    """Sessions that a worker no longer runs since the start, but for those that ended, and what became of them."""

    num_lost: int = 0
    num_recovered: int = 0
    """Another worker took them, or the next process of this one."""
    num_failed: int = 0
    """They ended with an error."""
    num_under_way: int = 0
    """A worker is looked for. Who is in none of these three was left by its client meanwhile."""

    def note_place(self, session: Session) -> None:
        """No worker is looked for any more: one has the session, or it has ended."""
        self.num_under_way -= 1
        self.num_recovered += session.worker_id is not None


class Recovery:
    """Owns the tasks that bring sessions to other workers.

    Args:
        placing: finds workers.
        migration: has them fetch sessions with their KV.
        leases: tells lost workers what is no longer theirs.
        tasks: owns the recoveries under way.
    """

    def __init__(self, placing: Placing, migration: SessionMigration, leases: WorkerPresence, tasks: TaskOwner) -> None:
        self.num_lost: Counter[Loss] = Counter()
        """Sessions that lost their worker since the start."""
        self.num_recovered = 0
        """Of these, the ones that another worker took."""
        self.by_worker: defaultdict[WorkerId, WorkerLosses] = defaultdict(WorkerLosses)
        """The same by worker, of those that have lost some."""
        self.gaps = GapHistogram()
        """Of sessions that went on at a worker that had fetched their KV: between their tokens before and after."""
        self._placing = placing
        self._migration = migration
        self._leases = leases
        self._tasks = tasks
        self._probation = asyncio.Lock()
        self._moves = asyncio.Semaphore(MAX_MOVES)
        self._moving: set[Session] = set()

    @property
    def num_poison(self) -> int:
        """Sessions that ended because they were blamed for their workers' deaths."""
        return self._placing.poison.num_convicted

    def lost(self, session: Session, loss: Loss, toward: WorkerId | None = None) -> None:
        """A running session's worker no longer runs it; `toward` has its KV, and is asked first."""
        if not session.is_running:
            return
        request_id, before = session.request.request_id, session.present
        worker_id = before.worker_id
        losses = self.by_worker[worker_id]
        self.num_lost[loss] += 1
        losses.num_lost += 1
        _log.info("request_lost_worker", rid=request_id, worker=worker_id, how=loss.value, tokens=len(session.tokens))
        self._placing.left(session)
        is_guilty = loss.may_be_fatal and session.history.lose_worker(has_progressed=session.has_progressed)
        session.fence()
        if is_guilty:
            self._leases.drop(worker_id, request_id, before.number)
            self._placing.poison.convict(session)
            session.fail(FailureCode.REQUEST_FAILED)
            losses.num_failed += 1
            return
        losses.num_under_way += 1
        self._tasks.start(self._recover(session, before, loss, toward), name=f"recover-{request_id}")

    def leave(self, session: Session) -> None:
        """Bring a session away from a worker that is about to stop, if another one takes it."""
        if session.is_running and session not in self._moving:
            self._moving.add(session)
            self._tasks.start(self._move(session), name=f"move-{session.request.request_id}")

    async def _recover(self, session: Session, before: Attempt, loss: Loss, toward: WorkerId | None) -> None:
        losses = self.by_worker[before.worker_id]
        try:
            toward = await self._bring_elsewhere(session, before, loss, toward)
        except RequestFailedError as error:
            _log.warning("not_recovered", rid=session.request.request_id, reason=error.code.value)
            losses.num_under_way -= 1
            losses.num_failed += 1
            session.fail(error.code)
            return
        if session.worker_id is not None:
            self._on_recovered(session)
            if loss is Loss.RELEASED and session.worker_id == toward:
                await session.until_progress()
                self._note_gap(session)

    async def _bring_elsewhere(
        self, session: Session, before: Attempt, loss: Loss, toward: WorkerId | None
    ) -> WorkerId | None:
        """Return once a worker has taken a session, or it has ended; and which worker had its KV, if one did.

        Raises:
            RequestFailedError: no worker takes it.
        """
        away_from = None if loss is Loss.UNKNOWN else before.worker_id
        try:
            if loss.may_live:
                toward = await self._migration.fetch_lost(session, before)
        finally:
            self._leases.drop(before.worker_id, session.request.request_id, before.number)
        losses = self.by_worker[before.worker_id]
        if session.history.on_probation:
            async with self._probation:
                await self._placing.place_again(session, away_from)
                losses.note_place(session)
                await session.until_progress()  # or it has ended, or has lost its worker again
        else:
            await self._placing.place_again(session, away_from, toward)
            losses.note_place(session)
        return toward

    async def _move(self, session: Session) -> None:
        try:
            async with self._moves:
                if not session.is_running:
                    return
                losses = self.by_worker[session.present.worker_id]
                if not await self._migration.fetch_elsewhere(session) and await self._placing.move(session):
                    self.num_lost[Loss.DRAINING] += 1
                    losses.num_lost += 1
                    losses.num_recovered += 1
                    self._on_recovered(session)
        finally:
            self._moving.discard(session)

    def _on_recovered(self, session: Session) -> None:
        self.num_recovered += 1
        session.history.recover()
        _log.info("request_goes_on", rid=session.request.request_id, worker=session.worker_id, attempt=session.attempt)

    def _note_gap(self, session: Session) -> None:
        """Count how long the first token of the present attempt came after the one before, if both came here."""
        token_s = session.token_s
        first = session.history.num_at_start - (len(session.tokens) - len(token_s))
        if 0 < first < len(token_s):
            self.gaps.add(token_s[first] - token_s[first - 1])
