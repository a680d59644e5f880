"""Moves of KV between this worker and others: carries out what the two ends of each move want, over links.

    owner ──move()──► MoveSource ─┐ effects ┌─► KvPort, BlockPort
    owner ◄──done─────────────────┤         ├─► link: control messages, chunks ──► the peer's agent
    link ──arrivals, its end─────►├─ agent ─┤
    link ──offers──► MoveTarget  ─┘         └─► timers on the event loop's clock

The same code runs live, over TCP links, and in simulation. It decides nothing but the order: of the moves to one peer a
few run at a time, those with the least slack first. A link that breaks may be replaced (`attach`): moves go on where
they were, if the process at the other end is the same; else they end.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from services.worker.transfer.incoming import IncomingMoves
from services.worker.transfer.link import Arrival, Link, LinkError, TrafficClass
from services.worker.transfer.move_messages import (
    MoveAbort,
    MoveAck,
    MoveClosed,
    MoveCommitted,
    MoveFinal,
    MoveMessage,
    MoveOffer,
    MoveRefused,
    MoveReserved,
    SessionId,
    decode_move,
    encode_move,
)
from services.worker.transfer.move_run import SourceRun, TargetRun
from services.worker.transfer.move_source import MoveSource
from services.worker.transfer.ports import BlockPort, KvPort
from services.worker.transfer.session import Blocks, MoveParams, MoveSpec, Outcome
from shared.errors import WireError
from shared.ids import Incarnation, RequestId, WorkerId
from shared.layers import LayerRange
from shared.log import get_logger
from shared.tasks import TaskOwner

MOVES_STREAM: Final = 0
"""Stream of the control messages."""


@dataclass(frozen=True, slots=True)
class MoveRequest:
    """What an owner wants moved."""

    request_id: RequestId
    target_id: WorkerId
    layers: LayerRange
    blocks: Blocks
    """Full blocks in sequence order; the last one may be partly filled if there will be no more."""
    epoch: int
    """Of the plan that this belongs to."""
    chunk_blocks: int
    is_whole: bool = True
    """There will be no more blocks than these; else `Move.add` follows."""
    by_chunk: bool = False
    """See `MoveSpec`."""
    slack_s: float = 0.0
    """How long the reader can do without: the least goes first."""


class Move:
    """A move away from this worker, as its owner sees it."""

    def __init__(self, run: SourceRun, done: asyncio.Future[Outcome]) -> None:
        self.done = done
        """How it ended; then its blocks are not pinned any more. Not to be cancelled."""
        self._run = run

    @property
    def spec(self) -> MoveSpec:
        """What is moved."""
        return self._run.spec

    def add(self, blocks: Blocks, *, is_whole: bool = False) -> None:
        """Add blocks behind the others; with `is_whole` there will be no more."""
        self._run.do(self._run.end.add(blocks, asyncio.get_running_loop().time(), is_whole=is_whole))

    def cancel(self, reason: str) -> None:
        """Give it up; `done` says when that is, and whether it was too late."""
        self._run.do(self._run.end.abort(reason))


class MoveAgent:
    """All moves of one worker. Used on one event loop.

    Args:
        worker_id: this worker.
        incarnation: this process.
        kv: its memory.
        blocks: its bookkeeping.
        params: limits of moves.
        on_failure: called if a port raised anything but a `KvPortError`: the process cannot be trusted any more.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        incarnation: Incarnation,
        kv: KvPort,
        blocks: BlockPort,
        params: MoveParams | None = None,
        *,
        on_failure: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.kv = kv
        self.blocks = blocks
        self.tasks = TaskOwner(on_failure)
        self.epoch = 0
        """Of the newest plan that this worker knows; see `raise_epoch`."""
        self.num_bad_messages = 0
        self._incarnation = incarnation
        self._params = params or MoveParams()
        self._links: dict[WorkerId, Link] = {}
        self._peers: dict[WorkerId, Incarnation] = {}
        self._sources: dict[SessionId, SourceRun] = {}
        self._incoming = IncomingMoves(self, worker_id, self._params)
        self._pending: list[SourceRun] = []
        self._numbers = itertools.count(1)
        self._is_closing = False
        self._one_ended = self._incoming.one_ended

    # For the owner

    def move(self, request: MoveRequest) -> Move:
        """Begin a move; its blocks are pinned from now on.

        Raises:
            ValueError: it makes no sense (no blocks, to this worker itself, chunks of nothing).
        """
        if self._is_closing:
            raise ValueError("the agent is closing")
        if not request.blocks and request.is_whole:
            raise ValueError(f"a move of nothing, of {request.request_id}")
        number = next(self._numbers)
        spec = MoveSpec(
            session_id=SessionId(f"{self.worker_id}.{self._incarnation:x}.{number}"),
            request_id=request.request_id,
            source_id=self.worker_id,
            target_id=request.target_id,
            layers=request.layers,
            epoch=request.epoch,
            stream=number % 2**32,
            chunk_blocks=request.chunk_blocks,
            by_chunk=request.by_chunk,
            slack_s=request.slack_s,
        )
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        run = SourceRun(self, MoveSource(spec, self._params), partial(self._source_ended, spec.session_id, done))
        self._sources[spec.session_id] = run
        run.do(run.end.start(request.blocks, is_whole=request.is_whole))
        self._pending.append(run)
        self._open_pending(request.target_id)
        return Move(run, done)

    def raise_epoch(self, epoch: int) -> None:
        """Give up the moves of older plans, and refuse them from now on. Idempotent."""
        if epoch <= self.epoch:
            return
        self.epoch = epoch
        for run in self._runs():
            if run.spec.epoch < epoch:
                run.do(run.end.abort(f"epoch {run.spec.epoch} is over, it is {epoch}"))

    def peer_died(self, worker_id: WorkerId) -> None:
        """A worker is gone for good, as the cluster has decided: no move waits for it."""
        for run in self._runs(worker_id):
            run.do(run.end.peer_died())
        for target in self._incoming.of_peer(worker_id):
            self._incoming.forget(target)

    def room_changed(self) -> None:
        """Blocks may have become free: give them to the moves that wait for room."""
        self._incoming.share_room()

    def attach(self, link: Link, on_other: Callable[[Arrival], None] | None = None) -> None:
        """Use a link, and start it; an older one to the same worker is closed.

        Args:
            link: not started yet.
            on_other: takes what is no business of moves (activations without an inbox, parameters), and releases it;
                None: it is thrown away.
        """
        peer_id = link.peer_id
        old = self._links.pop(peer_id, None)
        if old is not None:
            for target in self._incoming.of_peer(peer_id):
                old.withdraw(target.spec.stream)
            self._link_down(peer_id)
            self.tasks.start(old.close(), name=f"close the old link to {peer_id}")
        if self._peers.setdefault(peer_id, link.peer_incarnation) != link.peer_incarnation:
            self.peer_died(peer_id)
            self._peers[peer_id] = link.peer_incarnation
        self._links[peer_id] = link
        link.start(partial(self._on_arrival, link, on_other), partial(self._on_end, link))
        now_s = asyncio.get_running_loop().time()
        for run in self._runs(peer_id):
            run.do(run.end.link_up(now_s))

    async def close(self) -> None:
        """Give up all moves, and return when nothing is read or written any more. Links stay. Idempotent."""
        self._is_closing = True
        for run in self._runs():
            run.do(run.end.abort("the worker is closing"))
            run.do(run.end.peer_died())  # in FINAL: nobody is left here who could act on the answer
        while any(not run.has_ended for run in self._runs()):
            self._one_ended.clear()
            await self._one_ended.wait()
        for run in self._runs():
            run.stop()
        await self.tasks.close()

    @property
    def num_moves(self) -> int:
        """Moves that have not ended, or of which the other end has not heard."""
        return len(self._sources) + len(self._incoming.runs)

    def check_invariants(self) -> None:
        """Check every move; raises AssertionError naming the law that is broken."""
        for run in self._sources.values():
            run.end.check_invariants()
        self._incoming.check_invariants()
        assert all(run.spec.session_id in self._sources for run in self._pending), "a move waits that is over"

    # For the runs

    def link_to(self, peer_id: WorkerId) -> Link | None:
        """See `Office`."""
        return self._links.get(peer_id)

    def say(self, peer_id: WorkerId, message: MoveMessage) -> None:
        """See `Office`."""
        link = self._links.get(peer_id)
        if link is None:
            return
        try:
            link.send(TrafficClass.CONTROL, MOVES_STREAM, 0, [encode_move(message)])
        except LinkError as error:  # it is said again
            get_logger().debug("a message of a move was not sent", peer=peer_id, reason=error.reason)

    # Links

    def _on_arrival(self, link: Link, on_other: Callable[[Arrival], None] | None, arrival: Arrival) -> None:
        if arrival.traffic is TrafficClass.KV:
            if self._incoming.take_chunk(link, arrival):
                return
        elif arrival.traffic is TrafficClass.CONTROL and arrival.stream == MOVES_STREAM:
            assert arrival.body is not None, "control messages have a body"
            self.hear(link.peer_id, arrival.body)
        elif on_other is not None:
            on_other(arrival)
            return
        link.release(arrival)

    def _on_end(self, link: Link, error: LinkError) -> None:
        get_logger().info("link ended", peer=link.peer_id, reason=error.reason)
        if self._links.get(link.peer_id) is link:
            del self._links[link.peer_id]
            self._link_down(link.peer_id)

    def _link_down(self, peer_id: WorkerId) -> None:
        for run in [run for run in self._sources.values() if run.peer_id == peer_id]:
            run.do(run.end.link_down())

    # Messages

    def hear(self, peer_id: WorkerId, data: bytes | memoryview) -> None:
        """Take in a control message, by whatever way it came."""
        try:
            message = decode_move(data)
        except WireError as error:
            self.num_bad_messages += 1
            get_logger().warning("a message of a move was not understood", peer=peer_id, reason=error.reason)
            return
        now_s = asyncio.get_running_loop().time()
        source = self._sources.get(message.session_id)
        target = self._incoming.runs.get(message.session_id)
        if (run := source or target) is not None and run.peer_id != peer_id:
            self.num_bad_messages += 1  # it is not this peer's move
        elif source is not None and isinstance(
            message, MoveReserved | MoveRefused | MoveAck | MoveCommitted | MoveAbort
        ):
            source.do(source.end.on_message(message, now_s))
        elif target is not None and isinstance(message, MoveOffer | MoveFinal | MoveClosed | MoveAbort):
            target.do(target.end.on_message(message, now_s))
            self._incoming.forget_if_settled(target)
        else:
            self._unknown(peer_id, message)

    def _unknown(self, peer_id: WorkerId, message: MoveMessage) -> None:
        """Answer what belongs to no move that is known here."""
        session_id = message.session_id
        if isinstance(message, MoveOffer):
            closing = "no more moves are taken" if self._is_closing else ""
            reason = closing or self._incoming.offered(peer_id, message, self.epoch)
            if reason:
                self.say(peer_id, MoveRefused(session_id=session_id, reason=reason[:300]))
        elif isinstance(message, MoveCommitted):
            self.say(peer_id, MoveClosed(session_id=session_id))
        elif isinstance(message, MoveReserved | MoveAck):
            self.say(peer_id, MoveAbort(session_id=session_id, by_source=True, reason="it is over"))
        elif isinstance(message, MoveFinal) or (isinstance(message, MoveAbort) and message.by_source):
            self.say(peer_id, MoveAbort(session_id=session_id, by_source=False, reason="it is not known here"))

    # Runs

    def _runs(self, peer_id: WorkerId | None = None) -> Iterator[SourceRun | TargetRun]:
        runs: list[SourceRun | TargetRun] = [*self._sources.values(), *self._incoming.runs.values()]
        for run in runs:
            if peer_id in {None, run.peer_id}:
                yield run

    def _open_pending(self, peer_id: WorkerId) -> None:
        """Offer the moves whose turn it is."""
        waiting = [run for run in self._pending if run.peer_id == peer_id]
        active = sum(run.peer_id == peer_id for run in self._sources.values()) - len(waiting)
        waiting.sort(key=lambda run: run.spec.slack_s)  # of equal ones the older first
        for run in waiting[: max(self._params.max_active - active, 0)]:
            self._pending.remove(run)
            run.do(run.end.open(asyncio.get_running_loop().time()))

    def _source_ended(self, session_id: SessionId, done: asyncio.Future[Outcome], outcome: Outcome) -> None:
        run = self._sources.pop(session_id)
        run.stop()
        if run in self._pending:
            self._pending.remove(run)
        done.set_result(outcome)
        self._one_ended.set()
        if not self._is_closing:
            self._open_pending(run.peer_id)
