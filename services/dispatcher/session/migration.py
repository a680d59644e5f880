"""Sessions that leave a worker which is about to stop, or is lost: another worker fetches each, with its KV (`Fetch`).

Until their worker has released them they go on there; then they are placed as whatever is released, with the one that
has their KV first (`recovery.py`). The choices of one request, which share their prompt's KV, go to one worker as far
as it has room. Who has lost its worker stands still meanwhile, so it asks one other worker, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final
from weakref import WeakKeyDictionary

from services.dispatcher.policy.placement import Placed
from services.dispatcher.session.calls import WorkerCalls
from services.dispatcher.session.history import Attempt
from services.dispatcher.session.placing import Placing
from services.dispatcher.session.session import Session
from services.dispatcher.state import ClusterState
from shared.ids import WorkerId
from shared.messages.fetch import FETCH_LIMIT_S, Fetch, FetchOutcome, FetchReason

RELEASE_LIMIT_S: Final = 1.0
"""How long after the answer that a session has left its source's word may come."""
RELEASE_POLL_S: Final = 0.01
LOST_LIMIT_S: Final = 6.0
"""Longest time for which a session that has lost its worker waits for its KV: whoever fetches it may be lost, too."""


class SessionMigration:
    """Asks the workers where sessions would be placed.

    Args:
        calls: to workers.
        cluster: what is known of them.
        placing: says where they would be placed.
        now: the event loop's clock.
    """

    def __init__(self, calls: WorkerCalls, cluster: ClusterState, placing: Placing, now: Callable[[], float]) -> None:
        self._calls = calls
        self._cluster = cluster
        self._placing = placing
        self._now = now
        self._together: WeakKeyDictionary[Session, tuple[WorkerId, WorkerId]] = WeakKeyDictionary()
        """By the first choice of a request: from where one of its choices goes, and where to."""

    async def fetch_elsewhere(self, session: Session) -> bool:
        """Have another worker fetch a running session with its KV; return whether it has left where it is, or ended.

        It goes on there until its worker has released it, and is brought to the other one as whatever is released.
        """
        before, first = session.present, session.parent or session
        tried = {before.worker_id}
        while (target := self._next(session, first, tried)) is not None:
            tried.add(target)
            self._together[first] = before.worker_id, target
            address = self._cluster.address_for(target, before.worker_id)
            if address is None:
                continue
            outcome = await self._fetch(session, before, target, address, FetchReason.DRAIN)
            if outcome in {FetchOutcome.MOVED, FetchOutcome.GONE}:
                await self._until_left(session, before.number)
            if session.attempt != before.number or session.is_over:
                return True
            if outcome is FetchOutcome.BUSY:
                tried.discard(target)
                self._together.pop(first, None)
            if outcome is FetchOutcome.GONE:
                break
        return False

    def _next(self, session: Session, first: Session, tried: set[WorkerId]) -> WorkerId | None:
        """Return the worker to ask next: before all that to which others of its choices go from here."""
        source, target = self._together.get(first, (None, None))
        if source == session.worker_id and target is not None and target not in tried:
            return target
        found = self._placing.choice.find(session, tried)
        return None if found is None else found.worker_id

    async def fetch_lost(self, session: Session, before: Attempt) -> WorkerId | None:
        """Have another worker fetch the KV of a session whose worker is lost here, and may live.

        Args:
            session: runs nowhere.
            before: its last attempt.

        Returns:
            Who has it now; None: nobody.
        """
        if not session.tokens:
            return None
        found = self._placing.choice.find(session, {before.worker_id})
        if found is None:
            return None
        target = found.worker_id
        address = self._cluster.address_for(target, before.worker_id)
        if address is None:
            return None
        outcome = await self._fetch(session, before, target, address, FetchReason.RECOVERY)
        return target if outcome is FetchOutcome.MOVED else None

    async def _fetch(
        self, session: Session, before: Attempt, target: WorkerId, address: str, reason: FetchReason
    ) -> FetchOutcome:
        """Have a worker fetch a session, which counts there meanwhile."""
        request = session.request
        num_output, tier = len(session.tokens), request.tier
        counted = self._cluster.submitted(
            Placed(target, reason.value), request.num_prompt_tokens, num_output, self._now(), tier
        )
        fetch = Fetch(
            request_id=request.request_id,
            attempt=before.number,
            source=before.worker_id,
            source_address=address,
            reason=reason,
        )
        try:
            limit_s = LOST_LIMIT_S if reason is FetchReason.RECOVERY else FETCH_LIMIT_S
            return await self._calls.fetch(target, fetch, limit_s)
        finally:
            self._cluster.ended(counted, num_output, self._now())

    async def _until_left(self, session: Session, attempt: int) -> None:
        """Return once its worker's word has come that it has released this attempt, or should have come."""
        until_s = self._now() + RELEASE_LIMIT_S
        while session.attempt == attempt and not session.is_over and self._now() < until_s:
            await asyncio.sleep(RELEASE_POLL_S)
