"""Where what arrives over a link goes: zones that were posted, buffers of its own, or nowhere. Pure; callers lock.

begin(header) ─► room(), landed(n), room(), landed(n) … ─► end() ─► Arrival, when the message is whole
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.worker.transfer.cursor import Cursor
from services.worker.transfer.frames import FrameError, FrameKind, Header
from services.worker.transfer.link import LANDING_CLASSES, Arrival, TrafficClass, Windows, message_cost

MAX_ROOM_BYTES: Final = 256 * 1024
"""Most bytes received at a time: what is summed up is still in the cache, and a withdrawal waits briefly."""


@dataclass(slots=True)
class _Partial:
    """A message of which a part is here."""

    head: Header
    place: Cursor
    body: memoryview | None
    landed: bool
    checksum: int = 0


class Landing:
    """Zones, the messages under way, and what the peer has used of its credit."""

    def __init__(self, windows: Windows) -> None:
        """Begin with nothing.

        Args:
            windows: what this end grants.
        """
        self._windows = windows
        self._used = dict.fromkeys(TrafficClass, 0)
        self._next = dict.fromkeys(TrafficClass, 0)
        self._zones: dict[int, dict[int, Cursor]] = {}
        self._partial: dict[TrafficClass, _Partial] = {}
        self._frame: Header | None = None
        self._frame_left = 0

    def post(self, stream: int, number: int, zones: Sequence[memoryview]) -> None:
        """See `Link.post`."""
        self._zones.setdefault(stream, {})[number] = Cursor(zones, writable=True)

    def withdraw(self, stream: int) -> None:
        """See `Link.withdraw`."""
        self._zones.pop(stream, None)
        for partial in self._partial.values():
            if partial.head.stream == stream and partial.landed and partial.body is None:
                partial.place, partial.landed = Cursor.to_waste(partial.place.left), False

    @property
    def num_zones(self) -> int:
        """Zones that wait for their message."""
        return sum(map(len, self._zones.values()))

    def begin(self, header: Header) -> None:
        """Take in the header of a frame with data.

        Raises:
            FrameError: it does not follow what came before, or the peer has no credit for it.
        """
        assert self._frame is None, "one frame after the other"
        assert header.kind is FrameKind.DATA, "other frames carry nothing that lands"
        traffic = header.traffic
        if header.sequence != self._next[traffic]:
            raise FrameError(f"frame {header.sequence} of {traffic.name} instead of {self._next[traffic]}")
        self._next[traffic] = (header.sequence + 1) % 2**32
        partial = self._partial.get(traffic)
        if partial is None:
            partial = self._partial[traffic] = self._open(header)
        elif (header.stream, header.number, header.total) != (
            partial.head.stream,
            partial.head.number,
            partial.head.total,
        ):
            raise FrameError(f"a message of {traffic.name} within another")
        if header.length > partial.place.left:
            raise FrameError(f"a message of {traffic.name} that is longer than it said")
        self._frame, self._frame_left = header, header.length

    def _open(self, header: Header) -> _Partial:
        traffic = header.traffic
        self._used[traffic] += message_cost(header.total)
        if self._used[traffic] > self._windows.of(traffic):
            raise FrameError(f"more {traffic.name} than was granted")
        if traffic not in LANDING_CLASSES:
            body = memoryview(bytearray(header.total))
            return _Partial(header, Cursor([body], writable=True), body, landed=True)
        zone = self._zones.get(header.stream, {}).pop(header.number, None)
        if zone is None or zone.total != header.total:
            return _Partial(header, Cursor.to_waste(header.total), None, landed=False)
        return _Partial(header, zone, None, landed=True)

    def room(self) -> list[memoryview]:
        """Return where the next bytes of the frame go; empty when it is whole."""
        if self._frame is None or not self._frame_left:
            return []
        return self._partial[self._frame.traffic].place.peek(min(self._frame_left, MAX_ROOM_BYTES))

    def landed(self, num_bytes: int) -> None:
        """Note that so many bytes were put where `room` said, which was asked just before."""
        assert self._frame is not None, "no frame is being received"
        partial = self._partial[self._frame.traffic]
        for view in partial.place.peek(num_bytes):
            partial.checksum = zlib.crc32(view, partial.checksum)
        partial.place.advance(num_bytes)
        self._frame_left -= num_bytes

    def end(self) -> Arrival | None:
        """End the frame, and return its message if that is whole.

        Raises:
            FrameError: its bytes are not those that were sent.
        """
        frame = self._frame
        assert frame is not None, "no frame is being received"
        assert not self._frame_left, "a frame ends when it is whole"
        self._frame = None
        partial = self._partial[frame.traffic]
        if partial.checksum != frame.checksum:
            raise FrameError(f"a frame of {frame.traffic.name} arrived damaged")
        if partial.place.left:
            return None
        del self._partial[frame.traffic]
        return Arrival(
            frame.traffic,
            frame.stream,
            frame.number,
            frame.total,
            partial.checksum,
            partial.body,
            landed=partial.landed,
        )

    def release(self, arrival: Arrival) -> int:
        """Be done with an arrival, and return the credit that the peer is owed for it, bytes."""
        cost = message_cost(arrival.size)
        self._used[arrival.traffic] -= cost
        assert self._used[arrival.traffic] >= 0, "an arrival is released once"
        return cost

    def forget_zones(self) -> None:
        """Take back all zones, for good: the link has ended."""
        self._zones.clear()
        for partial in self._partial.values():
            if partial.body is None and partial.landed:
                partial.place, partial.landed = Cursor.to_waste(partial.place.left), False
