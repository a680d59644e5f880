"""Both ends of one move without links or clocks: everything that may happen to them does, in any order, by seed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from services.worker.transfer.move_messages import MoveAbort, MoveMessage, MoveOffer, SessionId
from services.worker.transfer.move_source import MoveSource
from services.worker.transfer.move_target import MoveTarget
from services.worker.transfer.session import (
    Blocks,
    Commit,
    Effect,
    End,
    Free,
    GiveBack,
    MoveParams,
    MoveSpec,
    Outcome,
    Pin,
    Post,
    Reserve,
    Revoke,
    Send,
    SendChunk,
    Unpin,
    Withdraw,
    Write,
)
from shared.ids import RequestId, WorkerId
from shared.layers import LayerRange

PARAMS = MoveParams(window_chunks=2, retry_s=0.5, silent_s=5.0, limit_s=60.0)


def make_spec(*, by_chunk: bool = False, chunk_blocks: int = 3) -> MoveSpec:
    return MoveSpec(
        SessionId("a.1.1"),
        RequestId("r"),
        WorkerId("a"),
        WorkerId("b"),
        LayerRange(2, 4),
        epoch=1,
        stream=1,
        chunk_blocks=chunk_blocks,
        by_chunk=by_chunk,
    )


@dataclass
class Ledger:
    """What the effects have done to both sides' blocks; every law is checked as it is broken."""

    pinned: set[int] = field(default_factory=set)
    ever_pinned: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    reading: dict[int, Blocks] = field(default_factory=dict)
    revoked: set[int] = field(default_factory=set)
    reserved: set[int] = field(default_factory=set)
    ever_reserved: list[int] = field(default_factory=list)
    committed: Blocks | None = None
    given_back: list[int] = field(default_factory=list)
    zones: dict[int, Blocks] = field(default_factory=dict)
    writing: dict[int, Blocks] = field(default_factory=dict)
    contents: dict[int, int] = field(default_factory=dict)
    """Target block: source block whose bytes it has."""
    source_outcomes: list[Outcome] = field(default_factory=list)
    target_outcomes: list[Outcome] = field(default_factory=list)


class World:
    """One move and its surroundings."""

    def __init__(self, seed: int, *, by_chunk: bool, is_whole: bool = True, num_blocks: int = 10) -> None:
        self.random = np.random.default_rng(seed)
        self.now_s = 0.0
        self.spec = make_spec(by_chunk=by_chunk, chunk_blocks=int(self.random.integers(1, 5)))
        self.source = MoveSource(self.spec, PARAMS)
        self.target: MoveTarget | None = None
        self.ledger = Ledger()
        self.to_source: list[MoveMessage] = []
        self.to_target: list[MoveMessage] = []
        self.wire: list[tuple[int, int, Blocks]] = []
        self.link = 0
        """Grows with each link; odd: there is none."""
        self.left: set[int] = set()
        """Chunks that are on the wire, and the source has not heard so."""
        self.died = False
        self.refuses = False
        self.room = 1000
        self.next_block = 100
        self.all_blocks: Blocks = tuple(range(num_blocks))
        self.rest: Blocks = ()
        if not is_whole:
            cut = int(self.random.integers(0, num_blocks))
            self.all_blocks, self.rest = self.all_blocks[:cut], self.all_blocks[cut:]
        self.do_source(self.source.start(self.all_blocks, is_whole=is_whole))
        self.do_source(self.source.open(self.now_s))

    # Effects

    def do_source(self, effects: list[Effect]) -> None:
        ledger = self.ledger
        for effect in effects:
            match effect:
                case Send(message):
                    self.to_target.append(message)
                case Pin(blocks):
                    assert not ledger.pinned & set(blocks)
                    ledger.pinned.update(blocks)
                    ledger.ever_pinned += blocks
                case Unpin(blocks):
                    assert set(blocks) <= ledger.pinned, "unpinned twice"
                    assert not set(blocks) & {b for read in ledger.reading.values() for b in read}, "still read"
                    ledger.pinned -= set(blocks)
                case Free(blocks):
                    assert not ledger.pinned & set(blocks), "freed while pinned"
                    assert not set(ledger.freed) & set(blocks), "freed twice"
                    ledger.freed += blocks
                case SendChunk(chunk, blocks):
                    assert chunk not in ledger.reading
                    assert set(blocks) <= ledger.pinned, "read without a pin"
                    assert ledger.ever_reserved, "a byte before the reservation"
                    ledger.reading[chunk] = blocks
                case Revoke(chunk):
                    assert chunk in ledger.reading
                    ledger.revoked.add(chunk)
                case End(outcome):
                    ledger.source_outcomes.append(outcome)
                case _:
                    raise AssertionError(effect)
        self.source.check_invariants()

    def do_target(self, effects: list[Effect]) -> None:
        assert self.target is not None
        ledger = self.ledger
        for effect in effects:
            match effect:
                case Send(message):
                    self.to_source.append(message)
                case Reserve(num_blocks):
                    self._reserve(num_blocks)
                case Post(chunk, blocks):
                    assert set(blocks) <= ledger.reserved
                    ledger.zones[chunk] = blocks
                case Write(chunk, blocks):
                    assert chunk not in ledger.writing
                    ledger.writing[chunk] = blocks
                case Withdraw():
                    ledger.zones.clear()
                case Commit(blocks):
                    assert ledger.committed is None, "committed twice"
                    self._check_quiet(blocks)
                    ledger.committed = blocks
                    ledger.reserved -= set(blocks)
                case GiveBack(blocks):
                    assert set(blocks) <= ledger.reserved, "given back twice, or never reserved"
                    self._check_quiet(blocks)
                    ledger.given_back += blocks
                    ledger.reserved -= set(blocks)
                case End(outcome):
                    ledger.target_outcomes.append(outcome)
                case _:
                    raise AssertionError(effect)
        self.target.check_invariants()

    def _check_quiet(self, blocks: Blocks) -> None:
        busy = {b for group in (self.ledger.writing, self.ledger.zones) for ids in group.values() for b in ids}
        assert not busy & set(blocks), "still written"

    def _reserve(self, num_blocks: int) -> None:
        target = self.target
        assert target is not None
        if self.spec.by_chunk:
            self.do_target(target.reserved(()))
        elif self.refuses:
            self.do_target(target.refused("no room"))
        else:
            self.do_target(target.reserved(self._take(num_blocks)))

    def _take(self, count: int) -> Blocks:
        blocks = tuple(range(self.next_block, self.next_block + count))
        self.next_block += count
        self.ledger.reserved.update(blocks)
        self.ledger.ever_reserved += blocks
        return blocks

    # What may happen

    @property
    def is_linked(self) -> bool:
        return self.link % 2 == 0

    def deliver_to_target(self, message: MoveMessage) -> None:
        if self.target is None:
            if not isinstance(message, MoveOffer):
                if isinstance(message, MoveAbort):
                    answer = MoveAbort(session_id=message.session_id, by_source=False, reason="unknown")
                    self.to_source.append(answer)
                return
            self.target = MoveTarget(MoveSpec.of_offer(message, self.spec.target_id), PARAMS, self.now_s)
        self.do_target(self.target.on_message(message, self.now_s))  # type: ignore[arg-type]

    def deliver(self, *, chaos: bool) -> None:
        """One message arrives; with chaos any, perhaps once more later, or it is lost."""
        bags = [bag for bag in (self.to_source, self.to_target) if bag]
        if not bags:
            return
        bag = bags[int(self.random.integers(len(bags)))]
        index = int(self.random.integers(len(bag))) if chaos else 0
        message = bag[index]
        if not (chaos and self.random.random() < 0.2):  # else it comes again
            del bag[index]
        if chaos and self.random.random() < 0.1:
            return
        if bag is self.to_source:
            self.do_source(self.source.on_message(message, self.now_s))  # type: ignore[arg-type]
        else:
            self.deliver_to_target(message)

    def end_read(self) -> None:
        """A chunk leaves, or the source hears that it has left, or that it cannot."""
        if not self.ledger.reading:
            return
        chunk = int(self.random.choice(sorted(self.ledger.reading)))
        blocks = self.ledger.reading[chunk]
        if (
            chunk not in self.left
            and self.is_linked
            and not (chunk in self.ledger.revoked and self.random.random() < 0.7)
        ):
            self.wire.append((self.link, chunk, blocks))
            self.left.add(chunk)
            return
        del self.ledger.reading[chunk]
        if chunk in self.left:
            self.left.remove(chunk)
            self.do_source(self.source.chunk_sent(chunk, hash(blocks) % 2**32, self.now_s))
        else:
            self.do_source(self.source.chunk_unsent(chunk))

    def carry_chunk(self) -> None:
        if not self.wire:
            return
        link, chunk, blocks = self.wire.pop(0)
        if link != self.link or self.target is None:
            return  # it went down with its link
        zone = self.ledger.zones.pop(chunk, None)
        landed = zone is not None and len(zone) == len(blocks)
        if zone is not None and landed:
            assert not {b for ids in self.ledger.writing.values() for b in ids} & set(zone)
            for mine, theirs in zip(zone, blocks, strict=True):
                self.ledger.contents[mine] = theirs
        checksum = hash(blocks) % 2**32
        self.do_target(self.target.chunk_arrived(chunk, checksum, landed=landed, now_s=self.now_s))

    def end_write(self, *, may_fail: bool) -> None:
        if not self.ledger.writing or self.target is None:
            return
        chunk = int(self.random.choice(sorted(self.ledger.writing)))
        del self.ledger.writing[chunk]
        if may_fail and self.random.random() < 0.05:
            self.do_target(self.target.write_failed(chunk, "broken"))
        else:
            self.do_target(self.target.chunk_written(chunk))

    def grant(self) -> None:
        """Room for some whole chunks."""
        target = self.target
        if target is None or not self.spec.by_chunk or not target.num_wanted:
            return
        size = self.spec.chunk_blocks
        count = min(int(self.random.integers(1, 4)) * size - target.num_reserved % size, target.num_wanted)
        self.do_target(target.reserved(self._take(count)))

    def add(self) -> None:
        if self.source.state.is_over:
            self.rest = ()
        if not self.rest:
            return
        count = int(self.random.integers(1, len(self.rest) + 1))
        more, self.rest = self.rest[:count], self.rest[count:]
        self.all_blocks += more
        self.do_source(self.source.add(more, self.now_s, is_whole=not self.rest))

    def cut(self) -> None:
        if self.is_linked:
            self.link += 1
            self.ledger.zones.clear()
            self.do_source(self.source.link_down())

    def mend(self) -> None:
        if not self.is_linked:
            self.link += 1
            if self.target is not None:
                self.do_target(self.target.link_up(self.now_s))
            self.do_source(self.source.link_up(self.now_s))

    def tick(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.do_source(self.source.tick(self.now_s))
        if self.target is not None:
            self.do_target(self.target.tick(self.now_s))

    def abort(self) -> None:
        if self.random.random() < 0.5:
            self.do_source(self.source.abort("cancelled"))
        elif self.target is not None:
            self.do_target(self.target.abort("cancelled"))

    def die(self, *, source_hears: bool) -> None:
        """One side is gone; the other is told."""
        self.died = True
        if source_hears:
            self.do_source(self.source.peer_died())
        elif self.target is not None:
            self.do_target(self.target.peer_died())

    def calm_down(self) -> None:
        """Everything works from now on: the move has to end."""
        self.mend()
        for _ in range(2000):
            while self.rest:
                self.add()
            busy = bool(self.to_source or self.to_target or self.wire or self.ledger.reading or self.ledger.writing)
            self.deliver(chaos=False)
            self.end_read()
            self.carry_chunk()
            self.end_write(may_fail=False)
            self.grant()
            target_over = self.target is None or self.target.state.is_over
            if self.source.state.is_over and target_over and not busy:
                return
            if not busy:
                self.tick(PARAMS.retry_s)
        raise AssertionError(f"the move does not end: {self.source.state}, {self.target and self.target.state}")
