"""What waits to be sent over a link: which message goes next, cut into frames. Pure; `tcp_link` locks around it."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from services.worker.transfer.cursor import Cursor
from services.worker.transfer.frames import FrameError, FrameKind, Header
from services.worker.transfer.link import (
    MIN_FITTED_BYTES,
    LinkError,
    LinkFullError,
    MessageTooLargeError,
    TrafficClass,
    Windows,
    message_cost,
)
from shared.ids import WorkerId


@dataclass(slots=True, eq=False)
class Outgoing:
    """A message that waits or is being sent."""

    traffic: TrafficClass
    stream: int
    number: int
    body: Cursor
    settle: Callable[[int | LinkError], None]
    """Called once, with its checksum when it has been sent, or with why it will not be."""
    checksum: int = 0
    """CRC-32 of what has been cut off so far."""
    begun: bool = False
    """Some of it may have been sent."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What goes over the wire next."""

    header: Header
    payload: list[memoryview]
    message: Outgoing | None = None
    """Whose share it carries."""

    @property
    def ends_message(self) -> bool:
        """It carries the last of its message."""
        return self.message is not None and not self.message.body.left


class Outbox:
    """Queues by class, the peer's credit, and the credit that is owed to the peer.

    `cut` may run beside the other methods, but not beside itself; those others one at a time.
    """

    def __init__(self, peer_id: WorkerId, windows: Windows, max_frame_bytes: int, max_queued: int) -> None:
        """Begin empty.

        Args:
            peer_id: for errors.
            windows: what the peer grants.
            max_frame_bytes: the smaller of what the two ends want.
            max_queued: most messages of one class.
        """
        self._peer_id = peer_id
        self._windows = windows
        self._max_frame_bytes = max_frame_bytes
        self.frame_bytes = max_frame_bytes
        """Most bytes of a frame at present; see `fit_frames`."""
        self._max_queued = max_queued
        self._queues: dict[TrafficClass, deque[Outgoing]] = {traffic: deque() for traffic in TrafficClass}
        self._credit = {traffic: windows.of(traffic) for traffic in TrafficClass}
        self.held: frozenset[TrafficClass] = frozenset()
        """Classes of which nothing goes at present, whatever credit there is."""
        self._owed = dict.fromkeys(TrafficClass, 0)
        self._sequence = dict.fromkeys(TrafficClass, 0)

    def put(self, message: Outgoing) -> None:
        """Queue a message behind those of its class.

        Raises:
            LinkFullError: the class's queue is full.
            MessageTooLargeError: credit for it will never be there.
        """
        window = self._windows.of(message.traffic)
        if message_cost(message.body.total) > window:
            text = f"{message.body.total} bytes of {message.traffic.name} are over the window of {window}"
            raise MessageTooLargeError(self._peer_id, text)
        if len(self._queues[message.traffic]) >= self._max_queued:
            raise LinkFullError(self._peer_id, f"{self._max_queued} messages of {message.traffic.name} wait")
        self._queues[message.traffic].append(message)

    def revoke(self, message: Outgoing) -> bool:
        """Take a message back if it has not begun."""
        if message.begun or message not in self._queues[message.traffic]:
            return False
        self._queues[message.traffic].remove(message)
        return True

    def grant(self, traffic: TrafficClass, num_bytes: int) -> None:
        """Take in credit from the peer.

        Raises:
            FrameError: it is more than what was used.
        """
        self._credit[traffic] += num_bytes
        if self._credit[traffic] > self._windows.of(traffic):
            raise FrameError(f"credit for {traffic.name} beyond its window")

    def owe(self, traffic: TrafficClass, num_bytes: int) -> None:
        """Note credit to be given to the peer."""
        self._owed[traffic] += num_bytes

    def take_credit(self) -> Header | None:
        """Return the next frame that gives credit."""
        for traffic, num_bytes in self._owed.items():
            if num_bytes:
                self._owed[traffic] = 0
                return Header(FrameKind.CREDIT, traffic, total=num_bytes)
        return None

    def pick(self) -> Outgoing | None:
        """Return the message whose frame goes next: of the highest class that has one with credit."""
        for traffic, queue in self._queues.items():
            if not queue or traffic in self.held:
                continue
            message = queue[0]
            if message.begun:
                return message
            cost = message_cost(message.body.total)
            if cost <= self._credit[traffic]:
                self._credit[traffic] -= cost
                message.begun = True
                return message
        return None

    def cut(self, message: Outgoing) -> Frame:
        """Cut the next frame off the message that was picked last."""
        total = message.body.total
        payload = message.body.take(self.frame_bytes)
        for view in payload:
            message.checksum = zlib.crc32(view, message.checksum)
        header = Header(
            kind=FrameKind.DATA,
            traffic=message.traffic,
            stream=message.stream,
            number=message.number,
            sequence=self._sequence[message.traffic],
            total=total,
            length=sum(map(len, payload)),
            checksum=message.checksum,
        )
        self._sequence[message.traffic] = (header.sequence + 1) % 2**32
        return Frame(header, payload, message)

    def fit_frames(self, num_bytes: int, took_s: float, frame_s: float) -> None:
        """Bring the size of frames nearer to what takes `frame_s`, which is how long an activation may wait.

        Args:
            num_bytes: of a frame that was sent.
            took_s: time to sum it up and hand it to the wire.
            frame_s: wanted.
        """
        if num_bytes < self.frame_bytes // 2:
            return  # it says little about large ones
        fitting = num_bytes * frame_s / max(took_s, 1e-6)
        step = min(max(fitting / self.frame_bytes, 0.75), 1.25)
        least = min(MIN_FITTED_BYTES, self._max_frame_bytes)
        self.frame_bytes = min(max(int(self.frame_bytes * step), least), self._max_frame_bytes)

    def finish(self, message: Outgoing) -> None:
        """Forget a message whose last frame has been sent; the caller settles it."""
        first = self._queues[message.traffic].popleft()
        assert first is message, "messages of a class end in order"

    def clear(self) -> list[Outgoing]:
        """Return all messages that are left, the highest class first, and forget them; the caller settles them."""
        left = [message for queue in self._queues.values() for message in queue]
        for queue in self._queues.values():
            queue.clear()
        return left

    @property
    def num_waiting(self) -> int:
        """Messages that have not been sent whole."""
        return sum(map(len, self._queues.values()))
