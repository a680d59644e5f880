"""Every request of this dispatcher, from admission to its end. No HTTP, no text: the simulator drives this class.

    admit ──► waiting room ──► submit to a worker ──► tokens … finish ──► release
                  ▲   refused: the next worker, or back        │ silence, lost numbers: replay
                  └──────────────────────────────────          │ worker dead or stuck: fail

A session ends exactly once: with a finish reason, or with a failure. Whoever was admitted must be released; releasing
one that still runs cancels it at its worker at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.dispatcher.limits.waiting_room import WaitingRoom
from services.dispatcher.policy.admission import Admission, AdmissionInput, decide_admission
from services.dispatcher.policy.placement import Placement
from services.dispatcher.session.calls import SubmitOutcome, WorkerCalls
from services.dispatcher.session.replays import Replays
from services.dispatcher.session.session import FailureCode, NewRequest, RequestFailedError, Session
from services.dispatcher.session.table import SessionTable
from services.dispatcher.state import ClusterState
from shared.api_keys import Tier
from shared.ids import DispatcherId, RequestId, WorkerId
from shared.log import get_logger
from shared.messages.report import ClusterView
from shared.tasks import TaskOwner
from shared.token_batch import TokenBatch
from shared.types import FinishReason

_log = get_logger()

SWEEP_PERIOD_S = 0.5
"""How often silent requests are looked for."""
MAX_SILENCE_FACTOR = 8.0
"""The pause between two questions about a silent request doubles up to this many times the first one."""

_REFUSED = {
    Admission.DRAINING: FailureCode.DRAINING,
    Admission.LOADING: FailureCode.MODEL_LOADING,
    Admission.NO_WORKER: FailureCode.NO_CAPACITY,
}
_ENDED_BY_WORKER = {FinishReason.CANCELLED: FailureCode.TIMED_OUT, FinishReason.ERROR: FailureCode.REQUEST_FAILED}


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """See `DispatcherSettings`."""

    max_requests: int = 4096
    max_queued: int = 256
    queue_limit_s: float = 30.0
    silence_s: float = 2.0


class Sessions:
    """Owns the sessions, the waiting room, and the tasks that talk to workers about them."""

    def __init__(  # noqa: PLR0913  one argument per part that is joined here
        self,
        *,
        dispatcher_id: DispatcherId,
        calls: WorkerCalls,
        cluster: ClusterState,
        placement: Placement,
        limits: SessionLimits,
        now: Callable[[], float],
        tasks: TaskOwner,
        first_stream: int = 0,
    ) -> None:
        self.cluster = cluster
        self.table = SessionTable(self._on_gap, first_stream)
        self.draining = False
        self._dispatcher_id = dispatcher_id
        self._calls = calls
        self._place = placement
        self._limits = limits
        self._now = now
        self._tasks = tasks
        self._waiting = WaitingRoom()
        self._replays = Replays(self.table, calls, limits.silence_s, now, tasks)

    @property
    def num_queued(self) -> int:
        """Requests that wait for room."""
        return len(self._waiting)

    @property
    def num_replays(self) -> int:
        """Questions for lost tokens since the start."""
        return self._replays.num_asked

    async def admit(self, request: NewRequest) -> Session:
        """Return the session once a worker has accepted the request.

        The caller attaches a reader, waits for `ended`, and must call `release`. If this call is cancelled or raises,
        nothing of the request is left.

        Raises:
            RequestFailedError: refused, or no room in time.
        """
        (session,) = self.open([request])
        await self.place(session)
        return session

    def open(self, requests: Sequence[NewRequest]) -> list[Session]:
        """Return sessions that no worker runs yet: all of them are admitted, or none. Each must be released.

        Raises:
            RequestFailedError: draining, no worker, or too many requests.
        """
        self.check_admission(len(requests), requests[0].tier)
        return [self.table.open(request) for request in requests]

    async def place(self, session: Session, parent: Session | None = None) -> None:
        """Return once a worker has accepted the session. If this call is cancelled or raises, it is released.

        Args:
            session: opened.
            parent: placed already, with the same prompt: its worker is asked first, and shares the prompt's KV.

        Raises:
            RequestFailedError: no room in time, or no worker can ever take it.
        """
        if session.failure is not None:  # while it waited for its turn
            self.release(session)
            raise RequestFailedError(session.failure)
        try:
            refused: set[WorkerId] = set()
            if parent is None or not await self._submit_fork(session, parent, refused):
                await self._queue_and_submit(session, refused)
        except BaseException:
            self.release(session)
            raise

    def check_admission(self, num_new: int = 1, tier: Tier = Tier.DEFAULT) -> None:
        """Refuse early what has no chance now; also worth a call before work is put into a request.

        Args:
            num_new: sessions that it needs.
            tier: of the request.

        Raises:
            RequestFailedError: draining, no worker, or too many requests.
        """
        decision = decide_admission(
            AdmissionInput(
                draining=self.draining,
                num_new=num_new,
                tier=tier,
                num_requests=len(self.table),
                max_requests=self._limits.max_requests,
                num_queued=len(self._waiting),
                max_queued=self._limits.max_queued,
                num_ready_workers=self.cluster.num_ready,
                num_loading_workers=self.cluster.num_loading,
            )
        )
        if decision is not Admission.ADMIT:
            raise RequestFailedError(_REFUSED.get(decision) or self._crowded())

    def _crowded(self) -> FailureCode:
        """Return why one more cannot wait: the clients' crowd, or, while the broker is away, our own failure."""
        return FailureCode.QUEUE_FULL if self._calls.connected else FailureCode.NO_CAPACITY

    async def _queue_and_submit(self, session: Session, refused: set[WorkerId]) -> None:
        if not len(self._waiting) and await self._submit_somewhere(session, refused):
            return
        request = session.request
        if self._is_queue_full(request):
            raise RequestFailedError(self._crowded())
        until_s = min(self._now() + self._limits.queue_limit_s, request.arrival_s + request.limit_s)
        ticket = self._waiting.enter(request.tier, request.tenant)
        try:
            while await self._waiting.turn(ticket, until_s):
                if await self._submit_somewhere(session, set()):
                    return
        finally:
            self._waiting.leave(ticket)
        raise RequestFailedError(self._crowded() if self.cluster.num_ready else FailureCode.NO_CAPACITY)

    def _is_queue_full(self, request: NewRequest) -> bool:
        """Return whether one more may not wait: others may have come while this one asked the workers."""
        most = request.max_tenant_queued
        if most is not None and self._waiting.num_of(request.tenant) >= most:
            return True
        return len(self._waiting) >= self._limits.max_queued

    async def _submit_somewhere(self, session: Session, refused: set[WorkerId]) -> bool:
        """Offer the request to one worker after the other but those that refused it; return whether one has it.

        Raises:
            RequestFailedError: no worker can ever take it.
        """
        while self._calls.connected:  # while the broker is away nobody can be asked, and nobody has refused
            placed = self._place(self.cluster.loads(), session.request.num_tokens, refused)
            if placed is None:
                return False
            if await self._submit(session, placed.worker_id):
                return True
            refused.add(placed.worker_id)
        return False

    async def _submit_fork(self, session: Session, parent: Session, refused: set[WorkerId]) -> bool:
        """Offer the request to its parent's worker, which has its prompt; return whether that one takes it."""
        worker_id = parent.worker_id
        if worker_id is None or parent.failure is not None:
            return False
        refused.add(worker_id)
        return await self._submit(session, worker_id, parent.request.request_id)

    async def _submit(self, session: Session, worker_id: WorkerId, fork_of: RequestId | None = None) -> bool:
        """Begin the next attempt on this worker; return whether it has the request.

        Raises:
            RequestFailedError: no worker can ever take it.
        """
        outcome = await self._attempt(session, worker_id, fork_of)
        if outcome is SubmitOutcome.TOO_LONG:
            raise RequestFailedError(FailureCode.TOO_LONG)
        if outcome is SubmitOutcome.FAILED:
            raise RequestFailedError(FailureCode.INTERNAL)
        return outcome is SubmitOutcome.ACCEPTED

    async def _attempt(self, session: Session, worker_id: WorkerId, fork_of: RequestId | None) -> SubmitOutcome:
        submit = session.next_submit(self._dispatcher_id, self._now(), fork_of)
        session.worker_id = worker_id
        session.num_placed_tokens = 0 if fork_of is not None else session.request.num_prompt_tokens
        self.cluster.submitted(worker_id, session.num_placed_tokens, self._now())
        outcome = await self._calls.submit(worker_id, submit)
        if outcome is SubmitOutcome.ACCEPTED or session.admitted_s is not None:
            session.accept(worker_id, self._now())
            session.silence_s = self._limits.silence_s
            return SubmitOutcome.ACCEPTED
        self._left(session)
        if outcome is SubmitOutcome.UNKNOWN:
            self._cancel(worker_id, session)
        session.worker_id = None
        return outcome

    def release(self, session: Session) -> None:
        """Forget the session; if a worker may still run it, cancel it there at once. Idempotent."""
        if not self.table.close(session):
            return
        if session.worker_id is not None:
            self._left(session)
            if not session.ended.is_set() or session.was_stopped or session.failure is not None:
                self._cancel(session.worker_id, session)
        session.fail(FailureCode.INTERNAL)  # wakes whoever still waits; nothing happens to one that has ended
        self._waiting.signal()

    def _left(self, session: Session) -> None:
        assert session.worker_id is not None
        self.cluster.ended(session.worker_id, session.num_placed_tokens, self._now())

    def _cancel(self, worker_id: WorkerId, session: Session) -> None:
        request_id, attempt = session.request.request_id, session.attempt
        self._tasks.start(self._calls.cancel(worker_id, request_id, attempt), name=f"cancel-{request_id}")

    def outcome(self, session: Session) -> FailureCode | None:
        """Return why an ended session has no whole answer; None if it has one."""
        return session.failure or _ENDED_BY_WORKER.get(session.finish)

    def on_tokens(self, batch: TokenBatch) -> None:
        """Take a worker's message."""
        self.table.apply(batch, self._now())

    def on_view(self, view: ClusterView) -> None:
        """Take the monitor's view: requests of lost workers fail, and waiting ones may find room."""
        for worker_id in self.cluster.apply(view, self._now()):
            for session in self.table.on_worker(worker_id):
                _log.warning("worker_lost", rid=session.request.request_id, worker=worker_id, attempt=session.attempt)
                session.fail(FailureCode.WORKER_LOST)
        for worker_id in self.cluster.restarted:  # the new process knows which requests it has: ask it about each
            for session in self.table.on_worker(worker_id):
                session.is_suspect = True
        self._waiting.signal()

    def fail_all(self, code: FailureCode) -> None:
        """End every request (the drain limit is reached)."""
        for session in self.table:
            session.fail(code)

    async def sweep_forever(self) -> None:
        """Look after silent requests until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            self.sweep()

    def sweep(self) -> None:
        """Ask for tokens that may have been lost: after silence, and after a gap in a worker's numbers."""
        now_s = self._now()
        longest_s = self._limits.silence_s * MAX_SILENCE_FACTOR
        for session in self.table:
            if not session.is_running:
                continue
            if session.progress_s > session.asked_s:
                session.silence_s = self._limits.silence_s
            if now_s - session.request.arrival_s > session.request.limit_s:
                session.fail(FailureCode.TIMED_OUT)
            elif session.is_suspect:
                session.is_suspect = not self._replays.ask(session)
            elif now_s - max(session.progress_s, session.asked_s) >= session.silence_s and self._replays.ask(session):
                session.silence_s = min(session.silence_s * 2, longest_s)

    def _on_gap(self, session: Session) -> None:
        session.is_suspect = not self._replays.ask(session)
