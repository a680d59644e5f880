"""Every request of this dispatcher, from admission to its end. No HTTP, no text: the simulator drives this class.

    admit ──► waiting room ──► submit to a worker ──► tokens … finish ──► release
                  ▲   refused: the next worker, or back        │ silence, lost numbers: replay
                  └────────────────────────────────────────────┘ worker lost or about to stop: the next attempt

A session ends exactly once: with a finish reason, or with a failure. Whoever was admitted must be released; releasing
one that still runs cancels it at its worker at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from services.dispatcher.policy.admission import AdmissionInput, decide_admission
from services.dispatcher.policy.placement import Placement
from services.dispatcher.session.calls import WorkerCalls
from services.dispatcher.session.leases import Loss, WorkerPresence
from services.dispatcher.session.migration import SessionMigration
from services.dispatcher.session.owners import Owners
from services.dispatcher.session.placing import Placing, SessionLimits
from services.dispatcher.session.recovery import Recovery
from services.dispatcher.session.replays import Replays
from services.dispatcher.session.request import FailureCode, NewRequest, RequestFailedError, Sender
from services.dispatcher.session.session import Session
from services.dispatcher.session.table import SessionTable
from services.dispatcher.state import ClusterState
from shared.api_keys import Tier
from shared.ids import NOBODY, Incarnation, WorkerId
from shared.messages.report import ClusterView, WaitingRequests
from shared.process.tasks import TaskOwner
from shared.token_batch import TokenBatch
from shared.types import FinishReason

__all__ = ["SessionLimits", "Sessions"]

SWEEP_PERIOD_S = 0.5
"""How often silent requests are looked for."""
MAX_SILENCE_FACTOR = 8.0
"""The pause between two questions about a silent request doubles up to this many times the first one."""

_ENDED_BY_WORKER = {
    FinishReason.CANCELLED: FailureCode.TIMED_OUT,
    FinishReason.ERROR: FailureCode.REQUEST_FAILED,
    FinishReason.SUPERSEDED: FailureCode.SUPERSEDED,
}


class Sessions:
    """Owns the sessions, the waiting room, and the tasks that talk to workers about them."""

    def __init__(  # noqa: PLR0913  one argument per part that is joined here
        self,
        *,
        sender: Sender,
        calls: WorkerCalls,
        owners: Owners,
        cluster: ClusterState,
        placement: Placement,
        limits: SessionLimits,
        now: Callable[[], float],
        tasks: TaskOwner,
    ) -> None:
        self.cluster = cluster
        self.table = SessionTable(
            self._on_gap, self._on_disowned, self._on_released, self._on_began, first_stream=sender.incarnation
        )
        self.draining = False
        self._owners = owners
        self._limits = limits
        self._now = now
        self._tasks = tasks
        self._leases = WorkerPresence(
            sender=sender,
            calls=calls,
            table=self.table,
            lost_after_s=limits.lost_after_s,
            now=now,
            tasks=tasks,
            on_lost=self._on_lost,
            on_back=self._on_room,
        )
        self._placing = Placing(
            calls=calls,
            cluster=cluster,
            leases=self._leases,
            owners=owners,
            placement=placement,
            limits=limits,
            now=now,
            tasks=tasks,
        )
        migration = SessionMigration(calls, self.cluster, self._placing, now)
        self.recovery = Recovery(self._placing, migration, self._leases, tasks)
        self.replays = Replays(self.table, calls, limits.silence_s, now, tasks, self.recovery.lost)

    @property
    def num_queued(self) -> int:
        """Requests that wait for room."""
        return len(self._placing.waiting)

    def waiting(self) -> tuple[WaitingRequests, ...]:
        """Return what waits for room, by tier."""
        return tuple(
            WaitingRequests(model=self.cluster.model, tier=tier.label, num_requests=number, num_tokens=tokens)
            for tier, (number, tokens) in sorted(self._placing.waiting.tiers().items())
        )

    @property
    def num_drops(self) -> int:
        """Sequences that some worker has yet to be told to give up."""
        return self._leases.num_drops

    def run(self) -> None:
        """Look after sessions and workers from now on."""
        self._tasks.start(self._sweep_forever(), name="sweep")
        self._tasks.start(self._leases.run(), name="leases")

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
        if not requests[0].replaces:
            self.check_admission(len(requests), requests[0].tier, requests[0].tenant)
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
        session.belong_to(parent)
        try:
            await self._placing.place(session, parent)
        except BaseException:
            self.release(session)
            raise

    def check_admission(self, num_new: int = 1, tier: Tier = Tier.DEFAULT, tenant: str = "") -> None:
        """Refuse early what has no chance now; also worth a call before work is put into a request.

        Args:
            num_new: sessions that it needs.
            tier: of the request.
            tenant: whose it is.

        Raises:
            RequestFailedError: draining, no worker, or too many requests.
        """
        decision = decide_admission(
            AdmissionInput(
                draining=self.draining,
                num_new=num_new,
                num_requests=self.table.num_real_time,
                max_requests=None if tier.is_best_effort else self._limits.max_requests,
                num_queued=self._placing.waiting.of(tier).num_before(tier, tenant),
                max_queued=self._placing.waiting.max_of(tier),
                has_memory=self._placing.waiting.has_memory(tier),
                num_ready_workers=self.cluster.num_ready,
                num_loading_workers=self.cluster.num_loading,
            )
        )
        if decision is not None:
            raise RequestFailedError(
                self._placing.choice.crowded(tier) if decision is FailureCode.QUEUE_FULL else decision
            )

    def release(self, session: Session) -> None:
        """Forget the session; if a worker may still run it, cancel it there at once. Idempotent."""
        if not self.table.close(session):
            return
        self._count_service(session)
        if not session.ended.is_set() or session.was_stopped or session.failure is not None:
            self._placing.withdraw(session)
        elif session.worker_id is not None:
            self._placing.left(session)
        session.fail(FailureCode.INTERNAL)  # wakes whoever still waits; nothing happens to one that has ended
        if session.request.resumable and session.failure is not FailureCode.SUPERSEDED:
            self._tasks.start(self._owners.forget(session.request.request_id), name="forget-owner")
        self._on_room()

    def outcome(self, session: Session) -> FailureCode | None:
        """Return why an ended session has no whole answer; None if it has one."""
        return session.failure or _ENDED_BY_WORKER.get(session.finish)

    def on_tokens(self, batch: TokenBatch) -> None:
        """Take a worker's message."""
        self.table.apply(batch, self._now())

    def on_view(self, view: ClusterView) -> None:
        """Take the monitor's view: requests of lost workers go on elsewhere, and waiting ones may find room."""
        for worker_id in self.cluster.apply(view, self._now()):
            if not (worker_id in self.cluster.silent and self._leases.is_fresh(worker_id)):  # it may answer us
                self._lose(worker_id, Loss.GONE)
        for worker_id in self.cluster.restarted:  # the new process knows which requests it has: ask it about each
            for session in self.table.on_worker(worker_id):
                session.questions.suspect()
        for worker_id in self.cluster.draining:
            for session in self.table.on_worker(worker_id):
                self.recovery.leave(session)
        self._on_room()

    def _on_lost(self, worker_id: WorkerId, loss: Loss, incarnation: Incarnation) -> None:
        """A worker no longer runs what it accepted, but for what its present process accepted."""
        kept = {NOBODY, incarnation} if loss is Loss.RESTARTED else set()
        for session in self.table.on_worker(worker_id):
            if session.history.incarnation not in kept:
                self.recovery.lost(session, loss)

    def _on_disowned(self, session: Session) -> None:
        self.recovery.lost(session, Loss.UNKNOWN)

    def _on_released(self, session: Session, moved_to: str) -> None:
        session.history.release()  # if its submission has not been answered, who waits for that sees to it
        self.recovery.lost(session, Loss.RELEASED, WorkerId(moved_to) if moved_to else None)

    def _on_began(self, session: Session) -> None:
        """Its worker computes something for it: the prompt counts as service to its tenant."""
        assert session.counted is not None, "it was counted where it began"
        request = session.request
        self._placing.waiting.of(request.tier).serve(request.tenant, session.counted.num_prompt, 0)
        self._placing.began(session)

    def _count_service(self, session: Session) -> None:
        request = session.request
        self._placing.waiting.of(request.tier).serve(request.tenant, 0, session.take_served())

    def _lose(self, worker_id: WorkerId, loss: Loss) -> None:
        for session in self.table.on_worker(worker_id):
            self.recovery.lost(session, loss)

    def _on_room(self) -> None:
        self._placing.waiting.signal()

    def fail_all(self, code: FailureCode) -> None:
        """End every request (the drain limit is reached)."""
        for session in self.table:
            session.fail(code)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            self.sweep()

    def sweep(self) -> None:
        """Ask for tokens that may have been lost: after silence, and after a gap in a worker's numbers."""
        self._on_room()  # the broker may be back
        now_s = self._now()
        longest_s = self._limits.silence_s * MAX_SILENCE_FACTOR
        for session in self.table.all_but_waiting_flex():
            self._count_service(session)
            if now_s - session.request.arrival_s > session.request.limit_s:
                session.fail(FailureCode.TIMED_OUT)  # also while it is between two workers
            if not session.is_running:
                continue
            questions = session.questions
            if session.progress_s > questions.asked_s:
                questions.hurry(self._limits.silence_s)
            if questions.is_suspect:
                self.replays.ask(session)
            elif now_s - max(session.progress_s, questions.asked_s) >= questions.silence_s and self.replays.ask(
                session
            ):
                questions.slow_down(longest_s)

    def _on_gap(self, session: Session) -> None:
        if not self.replays.ask(session):
            session.questions.suspect()
