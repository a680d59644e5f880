"""The source's end of a move. Pure; see `session`."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from services.worker.transfer.move_messages import (
    MoveAbort,
    MoveAck,
    MoveClosed,
    MoveCommitted,
    MoveFinal,
    MoveOffer,
    MoveRefused,
    MoveReserved,
    ToSource,
)
from services.worker.transfer.session import (
    Blocks,
    Effect,
    End,
    Free,
    MoveParams,
    MoveSpec,
    MoveState,
    Outcome,
    Pin,
    Revoke,
    Send,
    SendChunk,
    Unpin,
)


@dataclass(slots=True)
class _Flight:
    """A chunk between `SendChunk` and its acknowledgement."""

    is_reading: bool = True
    sent_s: float = 0.0
    checksum: int = 0
    acked: int | None = None
    """Checksum of an acknowledgement."""


class MoveSource:
    """One move, as the worker that has the KV sees it. Each method returns what is to be done, in order."""

    def __init__(self, spec: MoveSpec, params: MoveParams) -> None:
        self.spec = spec
        self.state = MoveState.OFFERED
        self._params = params
        self._blocks: Blocks = ()
        self._is_whole = False
        self._granted = 0
        self._target_knows_whole = False
        self._flights: dict[int, _Flight] = {}
        self._acked: set[int] = set()
        self._next = 0
        self._again: list[int] = []
        """Chunks that have to be sent once more; a heap."""
        self._pinned: dict[int, None] = {}
        """Indices of blocks that are pinned."""
        self._num_freed = 0
        self._link_is_up = True
        self._is_open = False
        """The move has been offered."""
        self._is_synced = True
        """The target has answered over the present link: its zones are there."""
        self._began_s = self._heard_s = self._tried_s = 0.0
        self._reason = ""
        self._has_ended = False

    @property
    def next_tick_s(self) -> float | None:
        """When `tick` is due; None: not any more."""
        if self.state.is_over or not self._is_open:
            return None
        due_s = self._tried_s + self._params.retry_s
        if self.state is MoveState.FINAL:
            return due_s
        return min(due_s, self._heard_s + self._params.silent_s, self._began_s + self._params.limit_s)

    @property
    def num_acked(self) -> int:
        """Chunks that have arrived."""
        return len(self._acked)

    @property
    def num_reading(self) -> int:
        """Chunks that are being read and sent."""
        return sum(flight.is_reading for flight in self._flights.values())

    def start(self, blocks: Blocks, *, is_whole: bool = True) -> list[Effect]:
        """Pin what is to be moved; `open` follows when it is this move's turn.

        Args:
            blocks: full ones, in sequence order; if `is_whole`, the last may be partly filled.
            is_whole: there will be no more; else `add` follows.
        """
        assert blocks or not is_whole, "a move of nothing"
        return self._take_in(blocks, is_whole=is_whole)

    def open(self, now_s: float) -> list[Effect]:
        """Offer the move."""
        if self.state.is_over:
            return []
        self._is_open = True
        self._began_s = self._heard_s = now_s
        return self._offer(now_s)

    def add(self, blocks: Blocks, now_s: float, *, is_whole: bool = False) -> list[Effect]:
        """Add blocks behind the others, while the request goes on; full ones, but for the last of all."""
        if self.state.is_over:
            return []
        assert not self._is_whole, "nothing follows the last blocks"
        effects = self._take_in(blocks, is_whole=is_whole)
        return [*effects, *self._offer(now_s), *self._go_on(now_s)] if self._is_open else effects

    def _take_in(self, blocks: Blocks, *, is_whole: bool) -> list[Effect]:
        self._pinned.update(dict.fromkeys(range(len(self._blocks), len(self._blocks) + len(blocks))))
        self._blocks += blocks
        self._is_whole = is_whole
        return [Pin(blocks)] if blocks else []

    def on_message(self, message: ToSource, now_s: float) -> list[Effect]:
        """Take in what the target says."""
        if isinstance(message, MoveCommitted):
            return self._committed()
        if self.state.is_over:
            return []
        self._heard_s = now_s
        if isinstance(message, MoveAbort):
            return self._give_up(f"the target gave up: {message.reason}", tell=False)
        if isinstance(message, MoveRefused):
            # in FINAL a late answer to an early offer; the target answers MoveFinal
            return [] if self.state is MoveState.FINAL else self._give_up(f"refused: {message.reason}", tell=False)
        if isinstance(message, MoveReserved):
            return self._reserved(message, now_s)
        return self._ack(message, now_s)

    def _reserved(self, message: MoveReserved, now_s: float) -> list[Effect]:
        self._granted = max(self._granted, message.num_blocks)
        self._target_knows_whole |= message.is_whole
        self._is_synced = True
        if self.state is MoveState.OFFERED and self._granted:
            self.state = MoveState.RESERVED
        return self._go_on(now_s)

    def _ack(self, message: MoveAck, now_s: float) -> list[Effect]:
        flight = self._flights.get(message.chunk)
        if flight is None:
            return []
        flight.acked = message.checksum
        return self._settle(message.chunk, now_s)

    def chunk_sent(self, chunk: int, checksum: int, now_s: float) -> list[Effect]:
        """The chunk has been read and sent; its blocks are not being read any more."""
        flight = self._flights[chunk]
        flight.is_reading, flight.sent_s, flight.checksum = False, now_s, checksum
        return self._close() if self.state.is_over else self._settle(chunk, now_s)

    def chunk_unsent(self, chunk: int) -> list[Effect]:
        """The chunk was not sent: it was taken back, or there is no link. Its blocks are not being read any more."""
        self._flights.pop(chunk)
        heapq.heappush(self._again, chunk)
        return self._close() if self.state.is_over else []

    def read_failed(self, chunk: int, reason: str) -> list[Effect]:
        """The chunk cannot be read or sent, now or later."""
        self._flights.pop(chunk)
        return self._close() if self.state.is_over else self._give_up(reason)

    def _settle(self, chunk: int, now_s: float) -> list[Effect]:
        """Count a chunk as arrived when it has been both sent and acknowledged."""
        flight = self._flights[chunk]
        if flight.is_reading or flight.acked is None:
            return []
        if flight.acked != flight.checksum:
            return self._give_up(f"chunk {chunk} arrived as {flight.acked:08x}, and was sent as {flight.checksum:08x}")
        del self._flights[chunk]
        self._acked.add(chunk)
        effects: list[Effect] = []
        if self.spec.by_chunk:
            first = chunk * self.spec.chunk_blocks
            effects += self._let_go(range(first, min(first + self.spec.chunk_blocks, len(self._blocks))), free=True)
        return effects + self._go_on(now_s)

    def _go_on(self, now_s: float) -> list[Effect]:
        """Send what may be sent; say that this was all when it was."""
        if self.state is MoveState.FINAL or self.state.is_over:
            return []
        if self._is_whole and len(self._acked) == self.spec.num_chunks(len(self._blocks)):
            self.state = MoveState.FINAL
            self._tried_s = now_s
            return [Send(MoveFinal(session_id=self.spec.session_id, num_blocks=len(self._blocks)))]
        effects: list[Effect] = []
        while (
            self.state is not MoveState.OFFERED
            and self._link_is_up
            and self._is_synced
            and len(self._flights) < self._params.window_chunks
            and (chunk := self._take_next()) is not None
        ):
            self._flights[chunk] = _Flight()
            self.state = MoveState.COPYING
            effects.append(SendChunk(chunk, self.spec.chunk(self._blocks, chunk)))
        return effects

    def _take_next(self) -> int | None:
        if self._again:
            return heapq.heappop(self._again)
        end = (self._next + 1) * self.spec.chunk_blocks
        if end > len(self._blocks):  # the last one goes when nothing can be added to it
            end = len(self._blocks) if self._is_whole and self._target_knows_whole else end
        if end > min(self._granted, len(self._blocks)) or end <= self._next * self.spec.chunk_blocks:
            return None
        self._next += 1
        return self._next - 1

    def link_down(self) -> list[Effect]:
        """There is no link to the target. What was sent and not acknowledged has to be sent again."""
        self._link_is_up = self._is_synced = False
        for chunk in [chunk for chunk, flight in self._flights.items() if not flight.is_reading]:
            del self._flights[chunk]
            heapq.heappush(self._again, chunk)
        return []

    def link_up(self, now_s: float) -> list[Effect]:
        """There is a link to the same process of the target again."""
        self._link_is_up = True
        return self._say_again(now_s) if self._is_open and not self.state.is_over else []

    def peer_died(self) -> list[Effect]:
        """The target is gone for good, as the cluster has decided."""
        return [] if self.state.is_over else self._give_up("the target died", tell=False)

    def abort(self, reason: str) -> list[Effect]:
        """Give the move up, if it is not too late: in FINAL the target decides."""
        if self.state is MoveState.FINAL:
            return [self._say_abort(reason)]
        return [] if self.state.is_over else self._give_up(reason)

    def tick(self, now_s: float) -> list[Effect]:
        """Do what is due by now."""
        if self.state.is_over or not self._is_open:
            return []
        if self.state is not MoveState.FINAL:
            if now_s >= self._began_s + self._params.limit_s:
                return self._give_up(f"not done within {self._params.limit_s:g} s")
            if now_s >= self._heard_s + self._params.silent_s:
                return self._give_up(f"the target was silent for {self._params.silent_s:g} s")
        if now_s < self._tried_s + self._params.retry_s:
            return []
        return self._say_again(now_s)

    def _say_again(self, now_s: float) -> list[Effect]:
        if self.state is MoveState.FINAL:
            self._tried_s = now_s
            return [Send(MoveFinal(session_id=self.spec.session_id, num_blocks=len(self._blocks)))]
        effects = self._offer(now_s)
        for chunk, flight in list(self._flights.items()):
            if not flight.is_reading and now_s >= flight.sent_s + self._params.retry_s:
                del self._flights[chunk]
                heapq.heappush(self._again, chunk)
        return effects + self._go_on(now_s)

    def _offer(self, now_s: float) -> list[Effect]:
        self._tried_s = now_s
        spec = self.spec
        offer = MoveOffer(
            session_id=spec.session_id,
            source_id=spec.source_id,
            request_id=spec.request_id,
            epoch=spec.epoch,
            stream=spec.stream,
            first_layer=spec.layers.first,
            end_layer=spec.layers.end,
            chunk_blocks=spec.chunk_blocks,
            num_blocks=len(self._blocks),
            is_whole=self._is_whole,
            by_chunk=spec.by_chunk,
            slack_s=spec.slack_s,
            num_acked=len(self._acked),
        )
        return [Send(offer)]

    def _committed(self) -> list[Effect]:
        closed = Send(MoveClosed(session_id=self.spec.session_id))
        if self.state is not MoveState.FINAL:  # heard twice, or of a target that was declared dead
            return [closed] if self.state.is_over else []
        self.state = MoveState.COMMITTED
        return [*self._let_go(list(self._pinned), free=True), closed, *self._close()]

    def _give_up(self, reason: str, *, tell: bool = True) -> list[Effect]:
        self.state = MoveState.ABORTED
        self._reason = reason
        effects: list[Effect] = [self._say_abort(reason)] if tell and self._is_open else []
        effects += [Revoke(chunk) for chunk, flight in self._flights.items() if flight.is_reading]
        return effects + self._close()

    def _say_abort(self, reason: str) -> Send:
        return Send(MoveAbort(session_id=self.spec.session_id, by_source=True, reason=reason[:300]))

    def _close(self) -> list[Effect]:
        """Let go of everything when nothing is being read any more."""
        if self._has_ended or self.num_reading:
            return []
        self._has_ended = True
        self._flights.clear()
        effects = self._let_go(list(self._pinned), free=False)
        outcome = Outcome(self.state is MoveState.COMMITTED, self._reason, self._num_freed)
        return [*effects, End(outcome)]

    def _let_go(self, indices: list[int] | range, *, free: bool) -> list[Effect]:
        blocks = tuple(self._blocks[index] for index in indices)
        for index in indices:
            del self._pinned[index]
        if not blocks:
            return []
        if not free:
            return [Unpin(blocks)]
        self._num_freed += len(blocks)
        return [Unpin(blocks), Free(blocks)]

    def check_invariants(self) -> None:
        """Check that chunks and pins agree; raises AssertionError naming the law that is broken."""
        on_way = [*self._flights, *self._again]
        assert len(on_way) == len(set(on_way)), "a chunk is on its way twice"
        assert not self._acked & set(on_way), "a chunk that has arrived is on its way"
        if not self.state.is_over:
            assert self._acked | set(on_way) == set(range(self._next)), "a chunk was forgotten"
            held = {index for index in range(len(self._blocks)) if index // self.spec.chunk_blocks not in self._acked}
            assert held <= set(self._pinned), "a block that has not arrived is not pinned"
        for chunk, flight in self._flights.items():
            if flight.is_reading:
                first = chunk * self.spec.chunk_blocks
                blocks = range(first, min(first + self.spec.chunk_blocks, len(self._blocks)))
                assert set(blocks) <= set(self._pinned), "a block is read that is not pinned"
        assert not (self._has_ended and self._pinned), "a move that has ended pins blocks"
