"""Finds a worker for a session: offers it to one after the other, and lets it wait where none has room.

Three ways in: a new request (`place`), one whose worker is lost (`place_again`: it goes to the front of the queue), and
one whose worker is about to stop (`move`: it stays there unless another one takes it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from services.dispatcher.limits.waiting_room import RoomLimits
from services.dispatcher.policy.placement import Placed, Placement
from services.dispatcher.session.calls import SubmitAnswer, SubmitOutcome, WorkerCalls
from services.dispatcher.session.choice import WorkerChoice, claimant_of
from services.dispatcher.session.leases import WorkerPresence
from services.dispatcher.session.owners import Owners
from services.dispatcher.session.poison import Poison
from services.dispatcher.session.request import FailureCode, RequestFailedError
from services.dispatcher.session.session import Session
from services.dispatcher.session.submission import next_submit
from services.dispatcher.state import ClusterState
from shared.ids import WorkerId
from shared.messages.owner import Owner
from shared.process.tasks import TaskOwner


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """See `DispatcherSettings`."""

    max_requests: int = 4096
    queues: RoomLimits = field(default_factory=RoomLimits)
    queue_limit_s: float = 30.0
    silence_s: float = 2.0
    lost_after_s: float = 3.0


class Placing:
    """Owns the way of a submission to a worker and back."""

    def __init__(  # noqa: PLR0913  one argument per part that is joined here
        self,
        *,
        calls: WorkerCalls,
        cluster: ClusterState,
        leases: WorkerPresence,
        owners: Owners,
        placement: Placement,
        limits: SessionLimits,
        now: Callable[[], float],
        tasks: TaskOwner,
    ) -> None:
        self.choice = WorkerChoice(calls, cluster, leases, placement, limits.queues)
        self.waiting, self._lines = self.choice.waiting, self.choice.lines
        self.poison = Poison(calls, leases)
        self._calls = calls
        self._cluster = cluster
        self._leases = leases
        self._owners = owners
        self._limits = limits
        self._now = now
        self._tasks = tasks

    async def place(self, session: Session, parent: Session | None) -> None:
        """Return once a worker has accepted a new session.

        Raises:
            RequestFailedError: no room in time, or no worker can ever take it.
        """
        refused: set[WorkerId] = set()
        if session.request.resumable and await self._take_over(session, refused):
            return
        if parent is not None and await self._submit_fork(session, parent, refused):
            return
        if self.waiting.of(session.request.tier).first() is None and await self._submit_somewhere(session, refused):
            return
        request = session.request
        if not request.replaces and self.waiting.is_full(request.tier, request.tenant, request.max_tenant_queued):
            raise RequestFailedError(self.choice.crowded(request.tier))
        await self._wait_and_submit(session, has_begun=session.request.replaces)

    async def _take_over(self, session: Session, refused: set[WorkerId]) -> bool:
        """Ask the worker that may run the request for another dispatcher; return whether it goes on there."""
        left_s = session.request.arrival_s + session.request.limit_s - self._now()
        owner = await self._owners.find(session.request.request_id, max(left_s, 0.0))
        if owner is None:
            return False
        session.history.learn_number(owner.attempt)
        if owner.worker_id in self._leases.lost_workers:
            return False
        refused.add(owner.worker_id)
        return await self._submit(session, Placed(owner.worker_id, "has it")) is SubmitOutcome.ACCEPTED

    async def place_again(self, session: Session, lost: WorkerId | None, toward: WorkerId | None = None) -> None:
        """Return once a worker has accepted a session whose worker is lost, or the session has ended.

        Args:
            session: runs nowhere.
            lost: not asked at first; but second, if it has released the session toward another one.
            toward: has its KV, and is asked first.

        Raises:
            RequestFailedError: no room in time.
        """
        refused = set() if lost is None else {lost}
        named = () if toward is None else (toward, *refused)
        first = [each for each in named if each not in self._leases.lost_workers]
        if not await self._submit_somewhere(session, refused, first) and not session.ended.is_set():
            await self._wait_and_submit(session, has_begun=True)
        if session.ended.is_set():
            self.withdraw(session)

    async def move(self, session: Session) -> bool:
        """Offer a running session to another worker; return whether that one has it. If not, it runs on where it is."""
        before = session.present
        target = self.choice.find(session, {before.worker_id})
        if target is None:
            return False
        placed = replace(target, needs_room=False)
        accepted = await self._attempt(session, placed) is SubmitOutcome.ACCEPTED
        if accepted:
            self._cluster.ended(before.counted, len(session.tokens), self._now())
            self._leases.cancel(before.worker_id, session.request.request_id, before.number)
        else:
            session.stay(before, self._now())
        if session.ended.is_set():
            self.withdraw(session)
        return accepted

    def withdraw(self, session: Session) -> None:
        """Take a session from its worker, which may still run it."""
        if session.worker_id is None:
            return
        self.left(session)
        self._leases.cancel(session.worker_id, session.request.request_id, session.attempt)
        session.fence()

    def left(self, session: Session) -> None:
        """Count a session as no longer at its worker."""
        assert session.counted is not None, "it was at a worker"
        self._lines.leave(session.stream, self._now())
        self._cluster.ended(session.counted, len(session.tokens), self._now())

    def began(self, session: Session) -> None:
        """Its worker computes something for a session: another one may wait in its place."""
        if self._lines.leave(session.stream, self._now()):
            self.waiting.signal()

    async def _wait_and_submit(self, session: Session, *, has_begun: bool) -> None:
        request, waiting = session.request, self.waiting.of(session.request.tier)
        wait_s = request.limit_s if request.tier.is_best_effort else self._limits.queue_limit_s
        until_s = min(self._now() + wait_s, request.arrival_s + request.limit_s)
        ticket = waiting.enter(claimant_of(session, has_begun=has_begun))
        waiting.shrink(self.waiting.max_of(request.tier))
        try:
            while await waiting.turn(ticket, until_s):
                if session.ended.is_set() or await self._submit_somewhere(session, set()):
                    return
        finally:
            waiting.leave(ticket)
            self.waiting.signal()
        raise RequestFailedError(
            self.choice.crowded(request.tier) if self._cluster.num_ready else FailureCode.NO_CAPACITY
        )

    async def _submit_somewhere(self, session: Session, refused: set[WorkerId], first: Sequence[WorkerId] = ()) -> bool:
        """Offer the session to these workers, then to all but those that refused it; return whether one has it.

        Raises:
            RequestFailedError: no worker can ever take it.
        """
        for worker_id in first:
            if await self._submit(session, Placed(worker_id, "has its KV")) is SubmitOutcome.ACCEPTED:
                return True
            refused.add(worker_id)
        short = set[WorkerId]()
        while self._calls.connected and not session.ended.is_set():
            placed = self.choice.find(session, refused)
            if placed is None:
                return False
            found = placed.worker_id
            was_closing = self._cluster.is_closing(found)
            if found in short:
                placed = replace(placed, needs_room=False)
            outcome = await self._submit(session, placed)
            if outcome is SubmitOutcome.ACCEPTED:
                return True
            if outcome is SubmitOutcome.NO_ROOM:  # it is asked once more, to have it wait, if nobody has room
                short.add(found)
            elif was_closing or not self._cluster.is_closing(found):  # so is who is closing, as the last
                refused.add(found)
        return False

    async def _submit_fork(self, session: Session, parent: Session, refused: set[WorkerId]) -> bool:
        """Offer the session to its parent's worker, which has its prompt; return whether that one takes it."""
        worker_id = parent.worker_id
        if worker_id is None or parent.failure is not None:
            return False
        refused.add(worker_id)
        if worker_id in self._lines.crowded(claimant_of(session)):
            return False
        placed = Placed(worker_id, "has its prompt")
        return await self._submit(session, placed, shares_prompt=True) is SubmitOutcome.ACCEPTED

    async def _submit(self, session: Session, placed: Placed, *, shares_prompt: bool = False) -> SubmitOutcome:
        """Begin the next attempt on this worker, or on the one that it names because it is closing; see `_attempt`.

        Raises:
            RequestFailedError: no worker can ever take it.
        """
        if session.ended.is_set():  # whoever released it has found nothing to withdraw
            return SubmitOutcome.ELSEWHERE
        outcome = await self._attempt(session, placed, shares_prompt=shares_prompt)
        if outcome is SubmitOutcome.UNKNOWN and await self.poison.has_killed(session, placed.worker_id):
            raise RequestFailedError(FailureCode.REQUEST_FAILED)
        if outcome is SubmitOutcome.CLOSING:
            named = self._cluster.open_instead_of(placed.worker_id)
            return outcome if named is None else await self._submit(session, Placed(named, "is open"))
        if outcome is SubmitOutcome.OLD:  # another dispatcher, or this name's life before, has been there
            outcome = await self._attempt(session, placed, shares_prompt=shares_prompt)
        if session.admitted_s is not None:  # what began somewhere goes on wherever it can
            return outcome
        if outcome is SubmitOutcome.TOO_LONG:
            raise RequestFailedError(FailureCode.TOO_LONG)
        if outcome in {SubmitOutcome.FAILED, SubmitOutcome.OLD}:
            raise RequestFailedError(FailureCode.INTERNAL)
        return outcome

    async def _attempt(self, session: Session, placed: Placed, *, shares_prompt: bool = False) -> SubmitOutcome:
        """Return what came of offering a session; if it was accepted it may have ended meanwhile."""
        worker_id, now_s = placed.worker_id, self._now()
        reopens = self._cluster.is_closing(worker_id)  # and chosen all the same: nobody else has room, or its KV
        submit = next_submit(session, self._leases.sender, now_s, placed, reopens=reopens)
        request, num_output = session.request, len(session.tokens)
        num_prompt = 0 if shares_prompt else request.num_prompt_tokens
        counted = self._cluster.submitted(placed, num_prompt, num_output, now_s, request.tier)
        self._cluster.prefixes.sent(worker_id, placed.names, now_s)
        self._lines.leave(session.stream, self._now())  # of one that is moved
        session.offer(worker_id, submit.attempt, counted, self._now())
        self._lines.join(session.stream, worker_id, claimant_of(session))
        try:
            answer = await self._calls.submit(worker_id, submit)
        finally:
            session.answer()
        history = session.history
        history.learn_number(answer.newest_attempt)
        if answer.outcome is SubmitOutcome.CLOSING:
            self._cluster.note_closing(worker_id, answer.open_worker)
        may_run = answer.outcome in {SubmitOutcome.ACCEPTED, SubmitOutcome.UNKNOWN}
        if session.attempt != submit.attempt:  # it was given up meanwhile
            if may_run:
                self._leases.cancel(worker_id, submit.request_id, submit.attempt)
            return SubmitOutcome.ELSEWHERE
        if history.is_released:
            self.left(session)
            session.fence()
            return SubmitOutcome.ELSEWHERE
        if answer.outcome is SubmitOutcome.ACCEPTED or history.has_started:  # or a token overtook the answer
            self._accept(session, worker_id, answer)
            return SubmitOutcome.ACCEPTED
        self.left(session)
        session.fence()
        if may_run:
            self._leases.cancel(worker_id, submit.request_id, submit.attempt)
        else:
            self._cluster.prefixes.take_back(worker_id, placed.names)
        if answer.outcome is SubmitOutcome.NO_ROOM:
            self._cluster.note_room(worker_id, answer.num_free_blocks)
        return answer.outcome

    def _accept(self, session: Session, worker_id: WorkerId, answer: SubmitAnswer) -> None:
        if answer.outcome is SubmitOutcome.ACCEPTED:
            session.history.learn_preemptions(answer.num_preemptions)
            self._leases.heard(worker_id, answer.incarnation)
        session.accept(worker_id, self._now(), answer.incarnation)
        session.questions.accept(self._limits.silence_s, is_behind=answer.num_output > len(session.tokens))
        if session.request.resumable:
            owner = Owner(worker_id=worker_id, attempt=session.attempt)
            self._tasks.start(self._owners.note(session.request.request_id, owner), name="note-owner")
