"""A move of one request's KV, some layers of it, from one worker to another: what both ends have in common. Pure.

    OFFERED ──room──► RESERVED ──first chunk──► COPYING ──all chunks──► FINAL ──► COMMITTED
       │ refused, cancelled, silence, a death, an older epoch │            │ the target says no, or is dead
       └──────────────────────────────────────────────────────┴────────────┴────► ABORTED

One machine for exchange, migration and restore; the ends are `MoveSource` and `MoveTarget`. They get messages, news of
what they asked for, and the time; they answer with effects, which an agent carries out in order.

- The target reserves room before the first byte. A refusal is a normal answer.
- Chunks go in the order of blocks. Each is acknowledged with its checksum; what arrives twice is thrown away.
- The target commits, when the source has said that it has every acknowledgement. Until the source hears of it, in
  FINAL, it neither frees nor gives up: only the target knows. A target that was declared dead has not committed: the
  epoch of the next plan keeps it from acting on it.
- Blocks are pinned at the source while they may be read, and held at the target while they may be written, also when
  the move is cancelled: they are let go when the last read or write has ended.

Source: KunServe v2, section 4.2 (chunked exchange); v1, section 4.2 (live restore); Llumnix (Sun et al., 2024, section
4.2) for the handshake with reservation in rounds. Deviations: idempotent in each part, and resumed over a new link.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from services.worker.transfer.move_messages import MoveMessage, MoveOffer, SessionId
from shared.ids import RequestId, WorkerId
from shared.layers import LayerRange

Blocks = tuple[int, ...]
"""Block ids in sequence order."""


class MoveState(Enum):
    """Where a move is, as one end knows it."""

    OFFERED = auto()
    RESERVED = auto()
    COPYING = auto()
    FINAL = auto()
    COMMITTED = auto()
    ABORTED = auto()

    @property
    def is_over(self) -> bool:
        """Nothing changes it any more."""
        return self in {MoveState.COMMITTED, MoveState.ABORTED}


@dataclass(frozen=True, slots=True)
class MoveSpec:
    """What is moved; the same at both ends."""

    session_id: SessionId
    request_id: RequestId
    source_id: WorkerId
    target_id: WorkerId
    layers: LayerRange
    epoch: int
    """Of the plan that it belongs to."""
    stream: int
    """Of its chunks on the link."""
    chunk_blocks: int
    """Blocks of a chunk; the last one may have fewer."""
    by_chunk: bool = False
    """Room is reserved, and the source's blocks are given back, chunk by chunk: for an exchange in which both sides
    are full. If it is aborted half-way, what was given back is lost, and the request has to be computed again."""
    slack_s: float = 0.0
    """How long the reader can do without; decides between moves."""

    def __post_init__(self) -> None:
        if self.chunk_blocks < 1 or self.epoch < 0 or self.source_id == self.target_id:
            raise ValueError(f"a move needs chunks of a block or more, an epoch, and two workers: {self}")

    @classmethod
    def of_offer(cls, offer: MoveOffer, target_id: WorkerId) -> MoveSpec:
        """Return what an offer is about.

        Raises:
            ValueError: it makes no sense.
        """
        return cls(
            offer.session_id,
            offer.request_id,
            offer.source_id,
            target_id,
            LayerRange(offer.first_layer, offer.end_layer),
            offer.epoch,
            offer.stream,
            offer.chunk_blocks,
            offer.by_chunk,
            offer.slack_s,
        )

    def chunk(self, blocks: Blocks, chunk: int) -> Blocks:
        """Return the blocks of a chunk."""
        return blocks[chunk * self.chunk_blocks : (chunk + 1) * self.chunk_blocks]

    def num_chunks(self, num_blocks: int) -> int:
        """Return how many chunks so many blocks make."""
        return -(-num_blocks // self.chunk_blocks)


@dataclass(frozen=True, slots=True)
class MoveParams:
    """Limits of a move."""

    window_chunks: int = 2
    """Chunks that are on their way at a time; more hide the time that acknowledgements take."""
    retry_s: float = 0.5
    """Without news for this long, the source says again what it has said."""
    silent_s: float = 5.0
    """An end that hears nothing of the other for this long gives the move up."""
    limit_s: float = 120.0
    """Longest time of a move; the source gives up what takes longer and has not got as far as FINAL."""

    max_active: int = 4
    """Moves from one worker to another that run at a time."""

    def __post_init__(self) -> None:
        if min(self.window_chunks, self.max_active) < 1 or not 0 < self.retry_s < self.silent_s <= self.limit_s:
            raise ValueError(f"limits of a move that do not fit together: {self}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a move ended at the source."""

    is_committed: bool
    reason: str
    """Why not; empty if it was."""
    num_freed_blocks: int
    """Of the source's copy; if it was not committed, these are lost."""


# Effects. What is asked for is reported back where the comment says so.


@dataclass(frozen=True, slots=True)
class Send:
    """Say it to the other end; it may get lost."""

    message: MoveMessage


@dataclass(frozen=True, slots=True)
class Pin:
    """Source: keep these blocks as they are."""

    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Unpin:
    """Source: nobody reads these blocks any more. Each is unpinned once."""

    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Free:
    """Source: the KV of these layers in these blocks is not needed any more. Follows their `Unpin`."""

    blocks: Blocks


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Source: read a chunk and send it. Then `chunk_sent`, `chunk_unsent` or `read_failed`, always one of them."""

    chunk: int
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Revoke:
    """Source: if the chunk has not left, take it back."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """Target: find room for as many more blocks. Then `reserved`, at once or later, or `refused`."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Post:
    """Target: have the chunk received into these blocks. Then `chunk_arrived`."""

    chunk: int
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Write:
    """Target: make what has landed the contents of these blocks. Then `chunk_written` or `write_failed`."""

    chunk: int
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Target: receive nothing more; what arrives late goes nowhere."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Target: the blocks hold the request's KV; whoever keeps the request owns them from now on."""

    blocks: Blocks


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Target: the reservation of these blocks is over. Each reserved block is committed or given back, once."""

    blocks: Blocks


@dataclass(frozen=True, slots=True)
class End:
    """The end has nothing more to do, and only answers what comes late."""

    outcome: Outcome


Effect = Send | Pin | Unpin | Free | SendChunk | Revoke | Reserve | Post | Write | Withdraw | Commit | GiveBack | End
