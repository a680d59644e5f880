"""Moves to this worker: which are known, which are refused, and who gets room that came free."""

from __future__ import annotations

import asyncio
from typing import Final

from services.worker.transfer.exchange import Waiting, grants
from services.worker.transfer.link import Arrival, Link
from services.worker.transfer.move_messages import MoveOffer, SessionId
from services.worker.transfer.move_run import Office, TargetRun
from services.worker.transfer.move_target import MoveTarget
from services.worker.transfer.session import MoveParams, MoveSpec
from shared.ids import WorkerId

MAX_REMEMBERED: Final = 4096
"""Moves to this worker that are over, and that a late offer must not begin again."""
MAX_INCOMING: Final = 4096
"""Most moves to this worker at a time; more are refused."""


class IncomingMoves:
    """The target's ends of moves. The agent owns it.

    Args:
        office: the agent.
        worker_id: this worker.
        params: limits of moves.
    """

    def __init__(self, office: Office, worker_id: WorkerId, params: MoveParams) -> None:
        self.runs: dict[SessionId, TargetRun] = {}
        """By session, also those whose source has not said that it knows of the commit."""
        self.one_ended = asyncio.Event()
        self._office = office
        self._worker_id = worker_id
        self._params = params
        self._by_stream: dict[tuple[WorkerId, int], TargetRun] = {}
        self._over: dict[SessionId, None] = {}
        self._is_granting = False
        self._grant_again = False

    def of_peer(self, peer_id: WorkerId) -> list[TargetRun]:
        """Return the moves from one worker, the oldest first."""
        return [run for run in self.runs.values() if run.peer_id == peer_id]

    def take_chunk(self, link: Link, arrival: Arrival) -> bool:
        """Give a chunk to its move, which releases it; False if there is none."""
        run = self._by_stream.get((link.peer_id, arrival.stream))
        if run is None or self._office.link_to(link.peer_id) is not link:
            return False
        run.on_chunk(link, arrival)
        return True

    def offered(self, peer_id: WorkerId, offer: MoveOffer, epoch: int) -> str:
        """Begin a move that is not known; return why not, if it is refused.

        Args:
            peer_id: who said it.
            offer: what it said.
            epoch: of the newest plan that this worker knows.
        """
        reason = self._reason_against(peer_id, offer, epoch)
        if reason:
            return reason
        try:
            spec = MoveSpec.of_offer(offer, self._worker_id)
        except ValueError as error:
            return str(error)
        now_s = asyncio.get_running_loop().time()
        run = TargetRun(self._office, MoveTarget(spec, self._params, now_s), lambda _: self._ended(run))
        self.runs[spec.session_id] = run
        self._by_stream[peer_id, spec.stream] = run
        run.do(run.end.on_message(offer, now_s))
        return ""

    def _reason_against(self, peer_id: WorkerId, offer: MoveOffer, epoch: int) -> str:
        if offer.epoch < epoch:
            return f"epoch {offer.epoch} is over, it is {epoch}"
        if offer.source_id != peer_id or (peer_id, offer.stream) in self._by_stream:
            return "it is not this peer's to offer"
        if offer.session_id in self._over or offer.num_acked:
            return "it is over"
        return "no more moves are taken" if len(self.runs) >= MAX_INCOMING else ""

    def _ended(self, run: TargetRun) -> None:
        self.one_ended.set()
        self.forget_if_settled(run)

    def forget_if_settled(self, run: TargetRun) -> None:
        """Forget a move if nobody will ask how it ended."""
        if run.end.is_forgettable:
            self.forget(run)

    def forget(self, run: TargetRun) -> None:
        """Forget a move that has ended, but that it is over."""
        if not run.has_ended:  # it still writes
            return
        run.stop()
        self.runs.pop(run.spec.session_id, None)
        self._by_stream.pop((run.peer_id, run.spec.stream), None)
        self._over[run.spec.session_id] = None
        while len(self._over) > MAX_REMEMBERED:
            del self._over[next(iter(self._over))]

    def share_room(self) -> None:
        """Give blocks that are free to the moves that wait for room, the thinnest slack first."""
        self._grant_again = True
        if self._is_granting:  # what is granted may free something: once more, when this round is over
            return
        self._is_granting = True
        try:
            while self._grant_again:
                self._grant_again = False
                for run in sorted(self.runs.values(), key=lambda run: run.spec.slack_s):
                    if run.spec.by_chunk and run.end.num_wanted:
                        self._grant(run)
        finally:
            self._is_granting = False

    def _grant(self, run: TargetRun) -> None:
        blocks = self._office.blocks
        waiting = Waiting(run.spec.slack_s, run.end.num_wanted, run.end.num_reserved, run.spec.chunk_blocks)
        (count,) = grants(blocks.num_reservable(run.spec), [waiting])
        reserved = blocks.reserve(run.spec, count) if count else None
        if reserved is not None:
            run.grant(reserved)

    def check_invariants(self) -> None:
        """Check every move; raises AssertionError naming the law that is broken."""
        for run in self.runs.values():
            run.end.check_invariants()
        streams = {(run.peer_id, run.spec.stream): run for run in self.runs.values()}
        assert streams == self._by_stream, "streams and moves differ"
