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

from services.worker.transfer.exchange import Waiting, grants
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
from services.worker.transfer.move_target import MoveTarget
from services.worker.transfer.ports import BlockPort, KvPort
from services.worker.transfer.session import Blocks, MoveParams, MoveSpec, Outcome
from shared.errors import WireError
from shared.ids import Incarnation, RequestId, WorkerId
from shared.layers import LayerRange
from shared.log import get_logger
from shared.tasks import TaskOwner

MOVES_STREAM: Final = 0
"""Stream of the control messages."""
MAX_REMEMBERED: Final = 4096
"""Moves to this worker that are over, and that a late offer must not begin again."""
MAX_INCOMING: Final = 4096
"""Most moves to this worker at a time; more are refused."""


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
        self._targets: dict[SessionId, TargetRun] = {}
        self._by_stream: dict[tuple[WorkerId, int], TargetRun] = {}
        self._over: dict[SessionId, None] = {}
        self._pending: list[SourceRun] = []
        self._numbers = itertools.count(1)
        self._is_closing = False
        self._one_ended = asyncio.Event()
        self._is_granting = False
        self._grant_again = False

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
        for target in [run for run in self._targets.values() if run.peer_id == worker_id]:
            self._forget(target)

    def room_changed(self) -> None:
        """Blocks may have become free: give them to the moves that wait for room."""
        if self._is_granting:
            self._grant_again = True
            return
        self._is_granting = True
        try:
            self._grant_again = True
            while self._grant_again:
                self._grant_again = False
                self._grant()
        finally:
            self._is_granting = False

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
            for target in [run for run in self._targets.values() if run.peer_id == peer_id]:
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
        return len(self._sources) + len(self._targets)

    def check_invariants(self) -> None:
        """Check every move; raises AssertionError naming the law that is broken."""
        for run in self._runs():
            run.end.check_invariants()
        assert all(run.spec.session_id in self._sources for run in self._pending), "a move waits that is over"
        streams = {(run.peer_id, run.spec.stream): run for run in self._targets.values()}
        assert streams == self._by_stream, "streams and moves differ"

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
            run = self._by_stream.get((link.peer_id, arrival.stream))
            if run is not None and self._links.get(link.peer_id) is link:
                run.on_chunk(link, arrival)
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
        target = self._targets.get(message.session_id)
        if (run := source or target) is not None and run.peer_id != peer_id:
            self.num_bad_messages += 1  # it is not this peer's move
        elif source is not None and isinstance(
            message, MoveReserved | MoveRefused | MoveAck | MoveCommitted | MoveAbort
        ):
            source.do(source.end.on_message(message, now_s))
        elif target is not None and isinstance(message, MoveOffer | MoveFinal | MoveClosed | MoveAbort):
            target.do(target.end.on_message(message, now_s))
            if target.end.is_forgettable:
                self._forget(target)
        else:
            self._unknown(peer_id, message, now_s)

    def _unknown(self, peer_id: WorkerId, message: MoveMessage, now_s: float) -> None:
        """Answer what belongs to no move that is known here."""
        session_id = message.session_id
        if isinstance(message, MoveOffer):
            self._offered(peer_id, message, now_s)
        elif isinstance(message, MoveCommitted):
            self.say(peer_id, MoveClosed(session_id=session_id))
        elif isinstance(message, MoveReserved | MoveAck):
            self.say(peer_id, MoveAbort(session_id=session_id, by_source=True, reason="it is over"))
        elif isinstance(message, MoveFinal) or (isinstance(message, MoveAbort) and message.by_source):
            self.say(peer_id, MoveAbort(session_id=session_id, by_source=False, reason="it is not known here"))

    def _offered(self, peer_id: WorkerId, offer: MoveOffer, now_s: float) -> None:
        reason = self._reason_against(peer_id, offer)
        try:
            spec = MoveSpec.of_offer(offer, self.worker_id)
        except ValueError as error:
            reason = str(error)[:200]
        if reason:
            self.say(peer_id, MoveRefused(session_id=offer.session_id, reason=reason))
            return
        end = MoveTarget(spec, self._params, now_s)
        run = TargetRun(self, end, lambda _: self._target_ended(run))
        self._targets[spec.session_id] = run
        self._by_stream[peer_id, spec.stream] = run
        run.do(end.on_message(offer, now_s))

    def _reason_against(self, peer_id: WorkerId, offer: MoveOffer) -> str:
        if offer.epoch < self.epoch:
            return f"epoch {offer.epoch} is over, it is {self.epoch}"
        if offer.source_id != peer_id or (peer_id, offer.stream) in self._by_stream:
            return "it is not this peer's to offer"
        if offer.session_id in self._over or offer.num_acked:
            return "it is over"
        if self._is_closing or len(self._targets) >= MAX_INCOMING:
            return "no more moves are taken"
        return ""

    # Runs

    def _runs(self, peer_id: WorkerId | None = None) -> Iterator[SourceRun | TargetRun]:
        for run in [*self._sources.values(), *self._targets.values()]:
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

    def _target_ended(self, run: TargetRun) -> None:
        self._one_ended.set()
        if run.end.is_forgettable:
            self._forget(run)

    def _forget(self, run: TargetRun) -> None:
        if not run.has_ended:  # it still writes
            return
        run.stop()
        self._targets.pop(run.spec.session_id, None)
        self._by_stream.pop((run.peer_id, run.spec.stream), None)
        self._over[run.spec.session_id] = None
        while len(self._over) > MAX_REMEMBERED:
            del self._over[next(iter(self._over))]

    def _grant(self) -> None:
        runs = [run for run in self._targets.values() if run.spec.by_chunk and run.end.num_wanted]
        runs.sort(key=lambda run: run.spec.slack_s)
        for run in runs:
            free = self.blocks.num_reservable(run.spec)
            wanted, held = run.end.num_wanted, run.end.num_reserved
            count = grants(free, [Waiting(run.spec.slack_s, wanted, held, run.spec.chunk_blocks)])[0]
            blocks = self.blocks.reserve(run.spec, count) if count else None
            if blocks:
                run.grant(blocks)
