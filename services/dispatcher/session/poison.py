"""Requests that end because of the deaths of their workers: tried once more, they would end the next ones."""

from __future__ import annotations

from services.dispatcher.session.calls import Silence, WorkerCalls
from services.dispatcher.session.leases import WorkerPresence
from services.dispatcher.session.session import Session
from shared.ids import WorkerId
from shared.process.log import get_logger

_log = get_logger()


class Poison:
    """See the module.

    Args:
        calls: to workers.
        leases: on what runs there.
    """

    def __init__(self, calls: WorkerCalls, leases: WorkerPresence) -> None:
        self.num_convicted = 0
        """Since the start."""
        self._calls = calls
        self._leases = leases

    async def has_killed(self, session: Session, worker_id: WorkerId) -> bool:
        """Return whether taking this session has now been the end of so many workers that it is to blame.

        A worker that neither answers a submission nor is there any more has died of it, or with it. One that hangs, or
        is cut off, says nothing about the session.
        """
        if await self._calls.renew(worker_id, self._leases.question()) is not Silence.NOBODY:
            return False
        if not session.history.blame():
            return False
        self.convict(session)
        return True

    def convict(self, session: Session) -> None:
        """Count a session that ends because of the deaths of its workers, and say so."""
        self.num_convicted += 1
        _log.error("poison_request", rid=session.request.request_id, deaths=session.history.num_blames)
