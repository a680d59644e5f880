"""Links in simulation: bytes take the time that a modelled wire needs, on the event loop's clock. No threads.

    end ──outbox──► frame on the wire: (32 + length) / rate ──► latency ──► landing ──► end     each direction by itself

    up ──cut──► held: what is on the wire waits ──heal──► up, late, nothing lost
                                │ notice_s of it
                                ▼
                              broken: both ends hear of it, for good

Real bytes move, so a transfer that mixes up memory is seen. (`shared.memory_link` is something else: a connection to
the broker.) Not modelled: memory bandwidth at the ends, packets, congestion by other pairs.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from services.worker.transfer.cursor import Cursor
from services.worker.transfer.frames import HEADER_BYTES, FrameError, FrameKind, Header
from services.worker.transfer.landing import Landing
from services.worker.transfer.link import (
    Arrival,
    Buffer,
    LinkBrokenError,
    LinkClosedError,
    LinkError,
    LinkParams,
    Sending,
    TrafficClass,
    settle,
)
from services.worker.transfer.outbox import Frame, Outbox, Outgoing
from shared.ids import NOBODY, Incarnation, WorkerId


@dataclass(frozen=True, slots=True)
class WireModel:
    """A wire between two workers, each direction by itself."""

    rate_bytes_per_s: float = 25e9
    """What one direction carries (25e9: 200 Gbit/s)."""
    latency_s: float = 20e-6
    """From the last byte's leaving to its arrival."""
    notice_s: float = 3.0
    """How long a wire may be cut before both ends give it up; how long the death of a host goes unnoticed."""

    def __post_init__(self) -> None:
        if not (self.rate_bytes_per_s > 0 and self.latency_s >= 0 and self.notice_s > 0):
            raise ValueError(f"a wire needs a rate and times that are not negative: {self}")


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """Who is at one end."""

    worker_id: WorkerId
    incarnation: Incarnation = NOBODY


class ModelledWire:
    """Two ends and what lies between them; faults are planned here. Made on the loop that runs it."""

    def __init__(
        self, one: LinkEnd, other: LinkEnd, model: WireModel | None = None, params: LinkParams | None = None
    ) -> None:
        self.model = model or WireModel()
        self.loop = asyncio.get_running_loop()
        self.extra_latency_s = 0.0
        """Added to what is sent from now on."""
        self.is_cut = False
        self._cuts = itertools.count()
        self._cut = 0
        params = params or LinkParams(rate_bytes_per_s=self.model.rate_bytes_per_s)
        a, b = ModelledLink(self, other, params), ModelledLink(self, one, params)
        self.ends = (a, b)
        """The link as `one` has it, and as `other` has it."""
        a.join(b)
        b.join(a)

    def cut(self) -> None:
        """Carry nothing from now on. What is on the wire waits."""
        if not self.is_cut:
            self.is_cut = True
            self._cut = next(self._cuts)
            self.at(self.loop.time() + self.model.notice_s, partial(self._give_up, self._cut))

    def heal(self) -> None:
        """Carry everything again, and what has waited first; a link that was given up stays broken."""
        if self.is_cut:
            self.is_cut = False
            for end in self.ends:
                end.go_on()

    def kill(self, index: int, *, host: bool = False) -> None:
        """End one end without a word: its process has died.

        Args:
            index: of `ends`.
            host: its machine has, too; then nobody tells the other end, which notices in its own time.
        """
        self.ends[index].vanish()
        noticed_s = self.loop.time() + (self.model.notice_s if host else self.model.latency_s)
        self.at(noticed_s, self.ends[1 - index].lose_peer)

    def damage(self, index: int) -> None:
        """Turn a bit in the next frame with bytes that this end sends."""
        self.ends[index].damage_next = True

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Call the action at this time, in no process's context: a wire goes on when processes do not."""
        self.loop.call_at(when_s, action, context=contextvars.Context())

    def _give_up(self, cut: int) -> None:
        if self.is_cut and self._cut == cut:
            for end in self.ends:
                end.lose_peer()


class ModelledLink:
    """One end; implements `Link`. Made by `ModelledWire`."""

    def __init__(self, wire: ModelledWire, peer: LinkEnd, params: LinkParams) -> None:
        self._wire = wire
        self._peer_end = peer
        self._params = params
        self._peer: ModelledLink | None = None
        self._outbox = Outbox(peer.worker_id, params.windows, params.max_frame_bytes, params.max_queued)
        self._landing = Landing(params.windows)
        self._error: LinkError | None = None
        self._gone = False
        self._on_arrival: Callable[[Arrival], None] | None = None
        self._on_end: Callable[[LinkError], None] | None = None
        self._context = contextvars.Context()
        self._backlog: list[Arrival] = []
        self._is_sending = False
        self._arrives_s = 0.0
        """When the last frame that left arrives: none overtakes another."""
        self._flying: deque[tuple[float, Callable[[], None]]] = deque()
        """What has left and not arrived: when it does, and what that does."""
        self.damage_next = False

    def join(self, peer: ModelledLink) -> None:
        """Name the other end."""
        self._peer = peer

    @property
    def peer_id(self) -> WorkerId:
        """See `Link`."""
        return self._peer_end.worker_id

    @property
    def peer_incarnation(self) -> Incarnation:
        """See `Link`."""
        return self._peer_end.incarnation

    @property
    def params(self) -> LinkParams:
        """See `Link`."""
        return self._params

    @property
    def is_up(self) -> bool:
        """See `Link`."""
        return self._error is None and not self._gone

    def start(self, on_arrival: Callable[[Arrival], None], on_end: Callable[[LinkError], None]) -> None:
        """See `Link`."""
        assert self._on_arrival is None, "a link is started once"
        self._on_arrival, self._on_end = on_arrival, on_end
        self._context = contextvars.copy_context()
        backlog, self._backlog = self._backlog, []
        for arrival in backlog:
            self._hand_over(arrival)
        if self._error is not None:
            self._call(on_end, self._error)

    def send(self, traffic: TrafficClass, stream: int, number: int, parts: Sequence[Buffer]) -> Sending:
        """See `Link`."""
        if self._error is not None:
            raise type(self._error)(self.peer_id, self._error.reason)
        done: asyncio.Future[int] = self._wire.loop.create_future()
        message = Outgoing(traffic, stream, number, Cursor(parts), partial(settle, done))
        self._outbox.put(message)
        self._pump()
        return Sending(done, lambda: self._outbox.revoke(message))

    def post(self, stream: int, number: int, zones: Sequence[memoryview]) -> None:
        """See `Link`."""
        self._landing.post(stream, number, zones)

    def withdraw(self, stream: int) -> None:
        """See `Link`."""
        self._landing.withdraw(stream)

    def release(self, arrival: Arrival) -> None:
        """See `Link`."""
        self._outbox.owe(arrival.traffic, self._landing.release(arrival))
        self._pump()

    async def close(self) -> None:
        """See `Link`."""
        if not self.is_up:
            return
        assert self._peer is not None, "a link has two ends"
        self._carry(self._peer.lose_peer)  # behind what has left
        self._end(LinkClosedError(self.peer_id, "closed by this worker"))

    def vanish(self) -> None:
        """Be gone: nobody at this end hears anything more."""
        self._gone = True
        self._landing.forget_zones()
        self._outbox.clear()

    def lose_peer(self) -> None:
        """The other end is gone, or the wire is."""
        self._end(LinkBrokenError(self.peer_id, "the peer is gone or cannot be reached"))

    def go_on(self) -> None:
        """The wire carries again: what has waited first."""
        wire = self._wire
        wire.at(wire.loop.time() + wire.model.latency_s, self._arrive)
        self._pump()

    def _end(self, error: LinkError) -> None:
        if not self.is_up:
            return
        self._error = error
        self._landing.forget_zones()
        for message in self._outbox.clear():
            message.settle(error)
        if self._on_end is not None:
            self._call(self._on_end, error)

    def _pump(self) -> None:
        """Put the next frame on the wire if it is free."""
        if self._is_sending or self._wire.is_cut or not self.is_up:
            return
        credit = self._outbox.take_credit()
        if credit is not None:
            frame = Frame(credit, [])
        else:
            message = self._outbox.pick()
            if message is None:
                return
            frame = self._outbox.cut(message)
        self._is_sending = True
        data = bytearray(b"".join(frame.payload))
        if data and self.damage_next:
            self.damage_next = False
            data[len(data) // 2] ^= 1
        duration_s = (HEADER_BYTES + len(data)) / self._wire.model.rate_bytes_per_s
        self._wire.at(self._wire.loop.time() + duration_s, partial(self._left, frame, data))

    def _left(self, frame: Frame, data: bytearray) -> None:
        """The frame's last byte is on the wire."""
        self._is_sending = False
        if not self.is_up:
            return
        if frame.message is not None and frame.ends_message:
            self._outbox.finish(frame.message)
            frame.message.settle(frame.message.checksum)
        assert self._peer is not None, "a link has two ends"
        self._carry(partial(self._peer.receive, frame.header, data))
        self._pump()

    def _carry(self, action: Callable[[], None]) -> None:
        """Do it at the other end when it has got there."""
        wire = self._wire
        latency_s = wire.model.latency_s + wire.extra_latency_s
        self._arrives_s = max(self._arrives_s, wire.loop.time() + latency_s)
        self._flying.append((self._arrives_s, action))
        wire.at(self._arrives_s, self._arrive)

    def _arrive(self) -> None:
        """Let arrive what is due, in order; while the wire is cut it waits."""
        while self._flying and not self._wire.is_cut and self._flying[0][0] <= self._wire.loop.time():
            self._flying.popleft()[1]()

    def receive(self, header: Header, data: bytearray) -> None:
        """Take in a frame from the other end."""
        if not self.is_up:
            return
        try:
            if header.kind is FrameKind.CREDIT:
                self._outbox.grant(header.traffic, header.total)
                self._pump()
                return
            self._landing.begin(header)
            self._write(memoryview(data))
            arrival = self._landing.end()
        except FrameError as error:
            self._break(error.reason)
            return
        if arrival is not None:
            self._hand_over(arrival)

    def _write(self, data: memoryview) -> None:
        while room := self._landing.room():
            size = 0
            for view in room:
                view[:] = data[size : size + len(view)]
                size += len(view)
            self._landing.landed(size)
            data = data[size:]

    def _break(self, reason: str) -> None:
        assert self._peer is not None, "a link has two ends"
        self._carry(self._peer.lose_peer)
        self._end(LinkBrokenError(self.peer_id, reason))

    def _hand_over(self, arrival: Arrival) -> None:
        if self._on_arrival is None:
            self._backlog.append(arrival)
        else:
            self._call(self._on_arrival, arrival)

    def _call(self, callback: Callable[..., None], argument: object) -> None:
        if not self._gone:
            self._wire.loop.call_soon(callback, argument, context=self._context)
