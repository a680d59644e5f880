"""The dispatcher's side of the leases: tells each worker that it is still wanted, and notices when one is not there.

Every half second each worker that runs something of this dispatcher is asked to renew. From the answer, or its lack:

    another process answers      what ran there is gone
    a number is missing          messages of the worker were lost: ask for what was in them
    nobody is connected, twice   the worker is gone
    no answer for `lost_after_s` the worker hangs or is cut off

Silence counts only while the broker answers, and only from when this process was connected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from services.dispatcher.session.calls import Silence, WorkerCalls
from services.dispatcher.session.request import Sender
from services.dispatcher.session.table import SessionTable
from shared.ids import NOBODY, Incarnation, RequestId, WorkerId
from shared.messages.lease import MAX_DROPS, Renew, Renewed
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner

_log = get_logger()

RENEW_PERIOD_S: Final = 0.5
RECONNECT_GRACE_S: Final = 2.0
"""After the broker was away workers may need this long to come back."""
NUM_NOBODY: Final = 2
"""Renewals in a row that met nobody, after which a worker is gone."""
KEEP_DROPS_S: Final = 120.0
"""How long a worker that is not there is told what it shall give up; then it has given up everything by itself."""
MAX_KEPT_DROPS: Final = 65_536


class Loss(StrEnum):
    """Why a worker no longer runs a request."""

    GONE = "gone"  # its process has ended, or is not connected
    RESTARTED = "restarted"  # another process has its name
    SILENT = "silent"  # it hangs, or is cut off
    UNKNOWN = "unknown"  # it is there, and does not know the request
    DRAINING = "draining"  # it is about to stop
    RELEASED = "released"  # it has given it up: it has no place for it any more

    @property
    def may_be_fatal(self) -> bool:
        """Whether the request itself may have caused it."""
        return self in {Loss.GONE, Loss.RESTARTED, Loss.SILENT}

    @property
    def may_live(self) -> bool:
        """Whether its process may be there, merely cut off from here, or with a step that does not end."""
        return self in {Loss.GONE, Loss.SILENT}


@dataclass(slots=True)
class _Peer:
    """One worker, as far as leases go."""

    heard_s: float
    incarnation: Incarnation = NOBODY
    counter: int = 0
    """From the answer before: by now everything below it should have arrived."""
    num_nobody: int = 0
    is_asking: bool = False
    is_lost: bool = False
    drops: dict[tuple[RequestId, int], None] = field(default_factory=dict)


class WorkerPresence:
    """Owns what is known of each worker's presence, and what workers shall give up.

    Args:
        sender: this process.
        calls: to workers.
        table: who runs where.
        lost_after_s: see the module.
        now: the event loop's clock.
        tasks: owns the questions under way.
        on_lost: called with a worker that no longer runs what it had of us, why, and with the process that it is now,
            as often as that is noticed.
        on_back: called when a worker that was lost answers again.
    """

    def __init__(  # noqa: PLR0913  one argument per part that is joined here
        self,
        *,
        sender: Sender,
        calls: WorkerCalls,
        table: SessionTable,
        lost_after_s: float,
        now: Callable[[], float],
        tasks: TaskOwner,
        on_lost: Callable[[WorkerId, Loss, Incarnation], None],
        on_back: Callable[[], None],
    ) -> None:
        self.sender = sender
        self._calls = calls
        self._table = table
        self._lost_after_s = lost_after_s
        self._now = now
        self._tasks = tasks
        self._on_lost = on_lost
        self._on_back = on_back
        self._peers: dict[WorkerId, _Peer] = {}
        self._connected_s: float | None = now()

    @property
    def lost_workers(self) -> set[WorkerId]:
        """Workers that do not answer: nothing is placed there."""
        return {worker_id for worker_id, peer in self._peers.items() if peer.is_lost}

    @property
    def num_drops(self) -> int:
        """Sequences that workers have not yet been told to give up."""
        return sum(len(peer.drops) for peer in self._peers.values())

    def is_fresh(self, worker_id: WorkerId) -> bool:
        """Return whether the worker has answered just now, whatever others say about it."""
        peer = self._peers.get(worker_id)
        return peer is not None and not peer.is_lost and self._now() - peer.heard_s < self._lost_after_s / 2

    def heard(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """A worker has accepted something."""
        self._take(worker_id, self._peer(worker_id), incarnation)

    def drop(self, worker_id: WorkerId, request_id: RequestId, attempt: int) -> None:
        """Have the worker give a sequence up, as soon as it can be reached."""
        drops = self._peer(worker_id).drops
        if len(drops) < MAX_KEPT_DROPS:
            drops[request_id, attempt] = None

    def cancel(self, worker_id: WorkerId, request_id: RequestId, attempt: int) -> None:
        """Have the worker end an attempt, at once or as soon as it can be reached."""
        self._tasks.start(self._cancel(worker_id, request_id, attempt), name=f"cancel-{request_id}")

    async def _cancel(self, worker_id: WorkerId, request_id: RequestId, attempt: int) -> None:
        if not await self._calls.cancel(worker_id, request_id, attempt):
            self.drop(worker_id, request_id, attempt)

    def question(self, drops: tuple[tuple[RequestId, int], ...] = ()) -> Renew:
        """Return what asks a worker whether it is there, and tells it what to give up."""
        return Renew(dispatcher_id=self.sender.dispatcher_id, incarnation=self.sender.incarnation, drop=drops)

    async def run(self) -> None:
        """Renew until cancelled."""
        while True:
            await asyncio.sleep(RENEW_PERIOD_S)
            self.tick()

    def tick(self) -> None:
        """Ask every worker that matters, unless it is being asked."""
        now_s = self._now()
        if not self._calls.connected:
            self._connected_s = None
            return
        if self._connected_s is None:
            self._connected_s = now_s
        busy = {session.worker_id for session in self._table if session.worker_id is not None}
        for worker_id in sorted(busy | set(self._peers)):
            peer = self._peer(worker_id)
            if worker_id not in busy and not self._is_needed(peer, now_s):
                del self._peers[worker_id]
            elif not peer.is_asking:
                peer.is_asking = True
                self._tasks.start(self._renew(worker_id, peer), name=f"renew-{worker_id}")

    def _is_needed(self, peer: _Peer, now_s: float) -> bool:
        """A worker without sessions is asked for as long as it may hold some, or is to be used again."""
        return bool(peer.drops or peer.is_lost) and now_s - peer.heard_s < KEEP_DROPS_S

    def _peer(self, worker_id: WorkerId) -> _Peer:
        peer = self._peers.get(worker_id)
        if peer is None:
            peer = self._peers[worker_id] = _Peer(self._now())
        return peer

    async def _renew(self, worker_id: WorkerId, peer: _Peer) -> None:
        drops = tuple(peer.drops)[:MAX_DROPS]
        try:
            answer = await self._calls.renew(worker_id, self.question(drops))
            if isinstance(answer, Renewed):
                self._on_renewed(worker_id, peer, answer, drops)
            else:
                await self._on_silence(worker_id, peer, answer)
        finally:
            peer.is_asking = False

    def _on_renewed(
        self, worker_id: WorkerId, peer: _Peer, answer: Renewed, drops: Iterable[tuple[RequestId, int]]
    ) -> None:
        for name in drops:
            peer.drops.pop(name, None)
        was_same = self._take(worker_id, peer, answer.incarnation)
        if was_same:
            self._table.on_counter(worker_id, peer.counter)
        peer.counter = answer.counter

    def _take(self, worker_id: WorkerId, peer: _Peer, incarnation: Incarnation) -> bool:
        """The worker is there. Return whether it is the process that it was before."""
        was_lost, before = peer.is_lost, peer.incarnation
        peer.heard_s, peer.num_nobody, peer.is_lost, peer.incarnation = self._now(), 0, False, incarnation
        is_same = before in (NOBODY, incarnation)
        if not is_same:
            peer.counter = 0
            peer.drops.clear()
            self._table.new_process(worker_id)
            self._on_lost(worker_id, Loss.RESTARTED, incarnation)
        if was_lost:
            _log.info("worker_back", worker=worker_id)
            self._on_back()
        return is_same

    async def _on_silence(self, worker_id: WorkerId, peer: _Peer, silence: Silence) -> None:
        if silence is Silence.NOBODY:
            peer.num_nobody += 1
            if peer.num_nobody >= NUM_NOBODY and self._silent_s(peer, RECONNECT_GRACE_S) >= 0:
                self._lose(worker_id, peer, Loss.GONE)
            return
        peer.heard_s = max(peer.heard_s, self._table.heard_s(worker_id))  # it may be too busy to answer
        if self._silent_s(peer, 0) >= self._lost_after_s and await self._calls.broker_answers():
            self._lose(worker_id, peer, Loss.SILENT)

    def _silent_s(self, peer: _Peer, grace_s: float) -> float:
        """Return for how long the worker could have been heard and was not; negative if it could not have been."""
        if self._connected_s is None or not self._calls.connected:
            return -1.0
        since_s = self._connected_s + grace_s if self._connected_s > peer.heard_s else peer.heard_s
        return self._now() - since_s

    def _lose(self, worker_id: WorkerId, peer: _Peer, loss: Loss) -> None:
        if not peer.is_lost:
            silent_s = round(self._now() - peer.heard_s, 2)
            _log.warning("worker_lost", worker=worker_id, how=loss.value, silent_s=silent_s)
        peer.is_lost = True
        self._on_lost(worker_id, loss, peer.incarnation)
