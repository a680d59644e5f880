"""A link: the way of tensors between two workers. Classes with strict priority, small frames, credit per class.

    send(KV, …)  ──►┌─ outbox ──────────┐ frames of at most  ┌─ landing ────────────────┐
    send(ACTIV…) ──►│ CONTROL    credit │ rate · 2 ms        │ zones that were posted,   │──► on_arrival
                    │ ACTIVATION credit │═══════════════════►│ or a buffer of the link's │──► inbox (blocking)
                    │ KV         credit │                    └───────────────────────────┘
                    │ PARAMETERS credit │◄══════ credit, when the receiver is done with a message
                    └───────────────────┘

A message is a sequence of bytes with a stream and a number, both chosen by the sender. Messages of one class go in
order; a message of a higher class waits for one frame at most. A message begins only when the receiver has granted
credit for all of it, so that none stands half-sent and keeps others back. What the sender hands over stays where it is:
the buffers must not change until `Sending.done` is.

Nothing is lost silently: a link carries everything in order, or it breaks, at both ends, and stays broken. Frames and
messages carry checksums. Implementations: `modelled_link` (simulation), `tcp_link` (live), `fd_link` (live, between two
workers of one machine).

    LinkError
    ├── LinkClosedError       this end closed the link
    ├── LinkBrokenError       the wire or the peer is gone, or what came over it was damaged
    ├── LinkRefusedError      the two ends do not belong together (`hello`)
    ├── LinkFullError         too many messages of this class wait
    └── MessageTooLargeError  a message is over the class's window

Source: KunServe v2, section 4.2 (activations go first, KV in chunks); v1, section 4.2 (what must not wait for what).
Deviations: a class of its own for control, so that an acknowledgement never waits behind a chunk of KV.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Protocol

from shared.errors import SluiceError
from shared.ids import Incarnation, WorkerId

Buffer = bytes | bytearray | memoryview

MESSAGE_OVERHEAD_BYTES: Final = 64
"""What a message costs of its class's window beyond its bytes: so that empty ones are bounded too."""
MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
MIN_FRAME_BYTES: Final = 4 * 1024
MIN_FITTED_BYTES: Final = 64 * 1024
"""A slow wire makes frames no smaller than this: their headers would cost too much."""
MIB: Final = 1024 * 1024


class TrafficClass(IntEnum):
    """What a message is; a lower number goes first."""

    CONTROL = 0  # sessions' offers and acknowledgements: small
    ACTIVATION = 1  # hidden states between stages, and remote attention
    KV = 2
    PARAMETERS = 3


LANDING_CLASSES: Final = (TrafficClass.KV, TrafficClass.PARAMETERS)
"""Their messages are received into zones that were posted, and thrown away where there is none."""


class LinkError(SluiceError):
    """Anything that a link can fail with; names the peer."""

    def __init__(self, peer_id: WorkerId, reason: str) -> None:
        super().__init__(f"link to {peer_id}: {reason}")
        self.peer_id = peer_id
        self.reason = reason


class LinkClosedError(LinkError):
    """This end closed the link; what it had not sent was given up."""


class LinkBrokenError(LinkError):
    """The link cannot carry anything any more, and never will; a new one has to be made."""


class LinkRefusedError(LinkError):
    """The ends do not belong together: another token, version or worker than expected."""


class LinkFullError(LinkError):
    """The message was not taken: as many of its class wait already as the link keeps."""


class MessageTooLargeError(LinkError):
    """The message was not taken: it is larger than what the receiver ever grants to its class."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Most bytes of each class that are sent and not yet given back by the receiver; also the largest message."""

    control: int = 1 * MIB
    activation: int = 32 * MIB
    """Held in the receiver's own buffers until it takes them."""
    kv: int = 256 * MIB
    """Lands in zones: costs no memory of the link's."""
    parameters: int = 256 * MIB
    """As KV."""

    def __post_init__(self) -> None:
        for traffic in TrafficClass:
            if not 2 * MESSAGE_OVERHEAD_BYTES <= self.of(traffic) < 2**32:
                raise ValueError(f"a window of {self.of(traffic)} bytes for {traffic.name}")

    def of(self, traffic: TrafficClass) -> int:
        """Return the window of one class, bytes."""
        return (self.control, self.activation, self.kv, self.parameters)[traffic]


@dataclass(frozen=True, slots=True)
class LinkParams:
    """How one end of a link behaves."""

    rate_bytes_per_s: float = 3e9
    """The most that the wire carries; sets the size of frames, which become smaller where it carries less."""
    frame_s: float = 0.002
    """Longest time on the wire of one frame, which is how long an activation waits for another class."""
    windows: Windows = field(default_factory=Windows)
    """What this end grants its peer."""
    max_queued: int = 1024
    """Most messages of one class that wait at this end."""
    ping_s: float = 1.0
    """Silence after which this end says that it is there."""
    dead_after_s: float = 3.0
    """Silence after which the peer counts as gone."""

    def __post_init__(self) -> None:
        if not (self.rate_bytes_per_s > 0 and self.frame_s > 0 and self.max_queued >= 1):
            raise ValueError("a link needs a rate, a frame time and room for a message")
        if not 0 < self.ping_s < self.dead_after_s:
            raise ValueError("a peer has to say that it is there before it counts as gone")

    @property
    def max_frame_bytes(self) -> int:
        """Most bytes of a message that one frame carries."""
        return min(max(int(self.rate_bytes_per_s * self.frame_s), MIN_FRAME_BYTES), MAX_FRAME_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A message that has been received whole and undamaged."""

    traffic: TrafficClass
    stream: int
    number: int
    size: int
    """Bytes."""
    checksum: int
    """CRC-32 of its bytes, as compared with the sender's."""
    body: memoryview | None
    """Its bytes; None for a class that lands in zones."""
    landed: bool
    """False: there was no zone for it, or it was withdrawn; its bytes are nowhere."""


class Sending:
    """A message on its way out. Used on the event loop of the link."""

    def __init__(self, done: asyncio.Future[int], revoke: Callable[[], bool]) -> None:
        self.done = done
        """Its CRC-32, when the buffers may change again; fails with a `LinkError`. Not to be cancelled."""
        self._revoke = revoke

    def revoke(self) -> bool:
        """Take it back if none of it has been sent: then `done` is cancelled at once, and the buffers are free."""
        if self.done.done() or not self._revoke():
            return False
        self.done.cancel()
        return True


class Link(Protocol):
    """One end of a link. All methods are called on the event loop that it was made for, unless they say otherwise."""

    @property
    def peer_id(self) -> WorkerId:
        """Who is at the other end."""
        ...

    @property
    def peer_incarnation(self) -> Incarnation:
        """Which process of that name."""
        ...

    @property
    def params(self) -> LinkParams:
        """How this end behaves."""
        ...

    @property
    def is_up(self) -> bool:
        """Neither closed nor known to be broken."""
        ...

    def start(self, on_arrival: Callable[[Arrival], None], on_end: Callable[[LinkError], None]) -> None:
        """Begin to hand over what arrives, in this context; called once.

        Args:
            on_arrival: must see to it that `release` is called for each arrival, sooner or later.
            on_end: called once, after the last arrival, with why the link has ended.
        """
        ...

    def send(self, traffic: TrafficClass, stream: int, number: int, parts: Sequence[Buffer]) -> Sending:
        """Queue a message, the parts of which are its bytes in order.

        Raises:
            LinkFullError: as many messages of the class wait as the link keeps.
            MessageTooLargeError: it is over the peer's window.
            LinkClosedError, LinkBrokenError: the link has ended.
        """
        ...

    def post(self, stream: int, number: int, zones: Sequence[memoryview]) -> None:
        """Have the next KV or parameters of this stream and number received straight into this memory.

        A zone is used once. A message of another size than the zones' together is thrown away.
        """
        ...

    def withdraw(self, stream: int) -> None:
        """Take back the zones of a stream. When this returns nothing is written there any more. Idempotent."""
        ...

    def release(self, arrival: Arrival) -> None:
        """Be done with an arrival: the sender may send as much again."""
        ...

    async def close(self) -> None:
        """End the link: the frame under way is finished, what waits is given up. Idempotent."""
        ...


def message_cost(num_bytes: int) -> int:
    """Return what a message takes of its class's window, bytes."""
    return num_bytes + MESSAGE_OVERHEAD_BYTES


def settle(done: asyncio.Future[int], outcome: int | LinkError) -> None:
    """Tell who waits for a message what became of it; on the future's loop."""
    if done.done():  # taken back
        return
    if isinstance(outcome, LinkError):
        done.set_exception(outcome)
        done.exception()  # whether anybody looks is the sender's business
    else:
        done.set_result(outcome)


def settle_outside(done: concurrent.futures.Future[int], outcome: int | LinkError) -> None:
    """As `settle`, for a thread that waits."""
    if isinstance(outcome, LinkError):
        done.set_exception(outcome)
    else:
        done.set_result(outcome)
