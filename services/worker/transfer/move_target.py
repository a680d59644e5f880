"""The target's end of a move. Pure; see `session`."""

from __future__ import annotations

from services.worker.transfer.move_messages import (
    MoveAbort,
    MoveAck,
    MoveClosed,
    MoveCommitted,
    MoveFinal,
    MoveOffer,
    MoveRefused,
    MoveReserved,
    ToTarget,
)
from services.worker.transfer.session import (
    Blocks,
    Commit,
    Effect,
    End,
    GiveBack,
    MoveParams,
    MoveSpec,
    MoveState,
    Outcome,
    Post,
    Reserve,
    Send,
    Withdraw,
    Write,
)


class MoveTarget:
    """One move, as the worker that gets the KV sees it. Each method returns what is to be done, in order."""

    def __init__(self, spec: MoveSpec, params: MoveParams, now_s: float) -> None:
        self.spec = spec
        self.state = MoveState.OFFERED
        self._params = params
        self._total = 0
        self._is_whole = False
        self._blocks: Blocks = ()
        self._num_posted = 0
        self._writing: dict[int, int] = {}
        """Chunks that have landed, and the checksum of each."""
        self._arrived: dict[int, int] = {}
        """Chunks that are where they belong, and the checksum of each."""
        self._heard_s = now_s
        self._reason = ""
        self._has_ended = False
        self._is_closed = False

    @property
    def num_wanted(self) -> int:
        """Blocks that room has to be found for."""
        return 0 if self.state.is_over else max(0, self._total - len(self._blocks))

    @property
    def num_reserved(self) -> int:
        """Blocks that room was found for."""
        return len(self._blocks)

    @property
    def next_tick_s(self) -> float | None:
        """When `tick` is due; None: not any more."""
        return None if self.is_forgettable or self.state is MoveState.ABORTED else self._heard_s + self._params.silent_s

    @property
    def is_forgettable(self) -> bool:
        """Nobody will ask how it ended, or "I do not know it" is a right answer."""
        return self._is_closed or (self.state is MoveState.ABORTED and self._has_ended)

    def on_message(self, message: ToTarget, now_s: float) -> list[Effect]:
        """Take in what the source says."""
        self._heard_s = now_s
        if isinstance(message, MoveOffer):
            return self._offered(message)
        if isinstance(message, MoveFinal):
            return self._final(message)
        if isinstance(message, MoveAbort):
            return self._answer_end() if self.state.is_over else self._give_up(f"the source gave up: {message.reason}")
        assert isinstance(message, MoveClosed), "every message has its place"
        self._is_closed = self.state is MoveState.COMMITTED
        return []

    def _offered(self, offer: MoveOffer) -> list[Effect]:
        if self.state.is_over:
            return self._answer_end()
        self._total = max(self._total, offer.num_blocks)
        self._is_whole |= offer.is_whole
        if self.num_wanted:
            return [Reserve(self.num_wanted)]
        return [*self._post(), self._say_reserved()]

    def reserved(self, blocks: Blocks) -> list[Effect]:
        """Room was found, or none yet; by chunks or for all that is wanted.

        Args:
            blocks: whole chunks, unless they are the last.
        """
        assert not self.state.is_over, "room for a move that is over"
        assert len(blocks) <= self.num_wanted, "room that nobody wanted"
        whole_chunks = (len(self._blocks) + len(blocks)) % self.spec.chunk_blocks == 0
        assert not blocks or whole_chunks or len(blocks) == self.num_wanted, "room for a part of a chunk"
        self._blocks += blocks
        if self._blocks and self.state is MoveState.OFFERED:
            self.state = MoveState.RESERVED
        return [*self._post(), self._say_reserved()]

    def refused(self, reason: str) -> list[Effect]:
        """No room will be found. If there was some already, the move is off."""
        if self.state is not MoveState.OFFERED:
            return [] if self.state.is_over else self._give_up(reason)
        self.state = MoveState.ABORTED
        self._reason = reason
        return [Send(MoveRefused(session_id=self.spec.session_id, reason=reason[:300])), *self._close()]

    def chunk_arrived(self, chunk: int, checksum: int, *, landed: bool, now_s: float) -> list[Effect]:
        """A chunk has been received whole.

        Args:
            chunk: which.
            checksum: of what arrived.
            landed: it lies where `Post` said; else it was thrown away, because there was no zone for it any more.
            now_s: present time.
        """
        self._heard_s = now_s
        if chunk in self._arrived:  # its acknowledgement was lost
            return [self._say_ack(chunk)]
        if self.state.is_over or not landed or chunk in self._writing:
            return []
        if self.state is not MoveState.FINAL:
            self.state = MoveState.COPYING
        self._writing[chunk] = checksum
        return [Write(chunk, self.spec.chunk(self._blocks, chunk))]

    def chunk_written(self, chunk: int) -> list[Effect]:
        """What landed is where it belongs."""
        checksum = self._writing.pop(chunk)
        if self.state.is_over:
            return self._close()
        self._arrived[chunk] = checksum
        return [self._say_ack(chunk)]

    def write_failed(self, chunk: int, reason: str) -> list[Effect]:
        """What landed cannot be put where it belongs."""
        del self._writing[chunk]
        return self._close() if self.state.is_over else self._give_up(reason)

    def _final(self, message: MoveFinal) -> list[Effect]:
        if self.state.is_over:
            return self._answer_end()
        self.state = MoveState.FINAL
        num_blocks = message.num_blocks
        if self._writing or any(chunk not in self._arrived for chunk in range(self.spec.num_chunks(num_blocks))):
            # the source has every acknowledgement: it speaks of another life of this worker
            return self._give_up("not every chunk is here")
        self.state = MoveState.COMMITTED
        self._has_ended = True
        effects: list[Effect] = [Withdraw(), Commit(self._blocks[:num_blocks])]
        if self._blocks[num_blocks:]:
            effects.append(GiveBack(self._blocks[num_blocks:]))
        outcome = Outcome(is_committed=True, reason="", num_freed_blocks=0)
        return [*effects, *self._answer_end(), End(outcome)]

    def link_up(self, now_s: float) -> list[Effect]:
        """There is a link to the same process of the source again; zones have to be made anew."""
        if self.state.is_over:
            return []
        self._heard_s = now_s
        missing = [c for c in range(self._num_posted) if c not in self._arrived and c not in self._writing]
        return [Post(chunk, self.spec.chunk(self._blocks, chunk)) for chunk in missing]

    def peer_died(self) -> list[Effect]:
        """The source is gone for good."""
        return [] if self.state.is_over else self._give_up("the source died", tell=False)

    def abort(self, reason: str) -> list[Effect]:
        """Give the move up, unless it is committed."""
        return [] if self.state.is_over else self._give_up(reason)

    def tick(self, now_s: float) -> list[Effect]:
        """Do what is due by now."""
        if self.state is MoveState.ABORTED or now_s < self._heard_s + self._params.silent_s:
            return []
        if self.state is MoveState.COMMITTED:  # the source has not said that it knows
            self._heard_s = now_s
            return self._answer_end()
        return self._give_up(f"the source was silent for {self._params.silent_s:g} s")

    def _post(self) -> list[Effect]:
        """Make zones for the chunks that there is room for and whose size is known."""
        num_chunks = len(self._blocks) // self.spec.chunk_blocks
        if self._is_whole and len(self._blocks) == self._total:
            num_chunks = self.spec.num_chunks(self._total)
        new = range(self._num_posted, num_chunks)
        self._num_posted = num_chunks
        return [Post(chunk, self.spec.chunk(self._blocks, chunk)) for chunk in new]

    def _give_up(self, reason: str, *, tell: bool = True) -> list[Effect]:
        self.state = MoveState.ABORTED
        self._reason = reason
        return [Withdraw(), *(self._answer_end() if tell else []), *self._close()]

    def _close(self) -> list[Effect]:
        """Give the room back when nothing is being written any more."""
        if self._has_ended or self._writing:
            return []
        self._has_ended = True
        effects: list[Effect] = [GiveBack(self._blocks)] if self._blocks else []
        return [*effects, End(Outcome(is_committed=False, reason=self._reason, num_freed_blocks=0))]

    def _answer_end(self) -> list[Effect]:
        """Say how it ended."""
        if self.state is MoveState.COMMITTED:
            return [Send(MoveCommitted(session_id=self.spec.session_id))]
        return [Send(MoveAbort(session_id=self.spec.session_id, by_source=False, reason=self._reason[:300]))]

    def _say_reserved(self) -> Send:
        is_whole = self._is_whole and len(self._blocks) == self._total
        return Send(
            MoveReserved(session_id=self.spec.session_id, num_blocks=len(self._blocks), is_whole=is_whole),
        )

    def _say_ack(self, chunk: int) -> Send:
        return Send(MoveAck(session_id=self.spec.session_id, chunk=chunk, checksum=self._arrived[chunk]))

    def check_invariants(self) -> None:
        """Check that chunks and room agree; raises AssertionError naming the law that is broken."""
        assert not self._arrived.keys() & self._writing.keys(), "a chunk is written that has arrived"
        for chunk in (*self._arrived, *self._writing):
            assert chunk < self._num_posted, "a chunk arrived for which there is no room"
        assert self._num_posted <= self.spec.num_chunks(len(self._blocks)), "a zone without room"
        assert not (self._has_ended and self._writing), "a move that has ended writes"
