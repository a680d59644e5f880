"""One end of a link between processes: a stream socket, calls that wait, a thread for each direction.

    event loop ──send──► outbox ──► sender thread ──sendmsg──► socket ──► receiver thread ──recvmsg_into──► zones
    any thread ──send_from_thread──►┘                                         │ ├─► inbox of a stream (blocking)
                                                                              │ └─► on_arrival, on the event loop
                                                                              └──credit──► outbox

Threads, because the event loop's streams reach a fifth of what the socket carries, and because an activation must not
wait for a turn of the event loop. The calls release the GIL while they copy and sum up. Buffers are read and written by
the kernel itself: nothing is copied in between.

Each end says that it is there (`ping_s`), so that a peer that has vanished, or stands still, is noticed within
`dead_after_s`; a process that died is noticed at once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from services.worker.transfer.cursor import Cursor
from services.worker.transfer.frames import (
    HEADER_BYTES,
    MAX_REASON_BYTES,
    FrameError,
    FrameKind,
    Header,
    decode_header,
    encode_header,
)
from services.worker.transfer.inbox import Inbox
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
    Windows,
    settle,
    settle_outside,
)
from services.worker.transfer.outbox import Frame, Outbox, Outgoing
from services.worker.transfer.wire_socket import WireSocket, describe
from shared.ids import Incarnation, WorkerId


class SocketLink:
    """One end; implements `Link`. Owns the socket and two threads. `TcpLink` is one, `FdLink` adds frames of its own.

    Args:
        sock: connected, and past its greeting.
        peer: who is at the other end, and which process of that name.
        peer_windows: what it grants.
        max_frame_bytes: longest payload that both ends take.
        params: of this end.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: tuple[WorkerId, Incarnation],
        peer_windows: Windows,
        max_frame_bytes: int,
        params: LinkParams,
    ) -> None:
        self._peer = peer
        self._params = params
        self._max_frame_bytes = max_frame_bytes
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(peer[0], peer_windows, max_frame_bytes, params.max_queued)
        self._landing = Landing(params.windows)
        self._to_send = threading.Condition()
        """Guards the outbox and `_error`."""
        self._receiving = threading.Lock()
        """Guards the landing: held for a part of a frame at a time."""
        self._error: LinkError | None = None
        self._inboxes: dict[int, Inbox] = {}
        self._on_arrival: Callable[[Arrival], None] | None = None
        self._on_end: Callable[[LinkError], None] | None = None
        self._threads: tuple[threading.Thread, ...] = ()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._sock = WireSocket(
            sock,
            tick_s=min(params.ping_s, params.dead_after_s / 4),
            dead_after_s=params.dead_after_s,
            is_over=lambda: self._error is not None,
        )

    @property
    def peer_id(self) -> WorkerId:
        """See `Link`."""
        return self._peer[0]

    @property
    def peer_incarnation(self) -> Incarnation:
        """See `Link`."""
        return self._peer[1]

    @property
    def params(self) -> LinkParams:
        """See `Link`."""
        return self._params

    @property
    def is_up(self) -> bool:
        """See `Link`. Any thread."""
        return self._error is None

    def inbox(self, stream: int) -> Inbox:
        """Return where activations of this stream go, for threads to wait at; opened before `start`."""
        assert stream in self._inboxes or not self._threads, "inboxes are opened before the link is started"
        return self._inboxes.setdefault(stream, Inbox(self.release))

    def start(self, on_arrival: Callable[[Arrival], None], on_end: Callable[[LinkError], None]) -> None:
        """See `Link`."""
        assert not self._threads, "a link is started once"
        self._on_arrival, self._on_end = on_arrival, on_end
        receiver = threading.Thread(target=self._receive, name=f"link-in-{self.peer_id}", daemon=True)
        sender = threading.Thread(target=self._send, args=(receiver,), name=f"link-out-{self.peer_id}", daemon=True)
        self._threads = (receiver, sender)
        for thread in self._threads:
            thread.start()

    def send(self, traffic: TrafficClass, stream: int, number: int, parts: Sequence[Buffer]) -> Sending:
        """See `Link`."""
        done: asyncio.Future[int] = self._loop.create_future()
        message = Outgoing(traffic, stream, number, Cursor(parts), partial(self._on_loop, settle, done))
        self._put(message)
        return Sending(done, partial(self._revoke, message))

    def send_from_thread(
        self, traffic: TrafficClass, stream: int, number: int, parts: Sequence[Buffer]
    ) -> concurrent.futures.Future[int]:
        """As `send`, from any thread; the future may be waited for there. Not to be cancelled."""
        done: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._put(Outgoing(traffic, stream, number, Cursor(parts), partial(settle_outside, done)))
        return done

    def post(self, stream: int, number: int, zones: Sequence[memoryview]) -> None:
        """See `Link`."""
        with self._receiving:
            self._landing.post(stream, number, zones)

    def withdraw(self, stream: int) -> None:
        """See `Link`."""
        with self._receiving:
            self._landing.withdraw(stream)

    def release(self, arrival: Arrival) -> None:
        """See `Link`. Any thread."""
        with self._receiving:
            cost = self._landing.release(arrival)
        with self._to_send:
            self._outbox.owe(arrival.traffic, cost)
            self._to_send.notify()

    async def close(self) -> None:
        """See `Link`."""
        self._stop(LinkClosedError(self.peer_id, "closed by this worker"))
        if not self._threads:
            self._sock.close()
            for message in self._outbox.clear():
                message.settle(LinkClosedError(self.peer_id, "closed by this worker"))
            return
        await asyncio.shield(self._ended)
        for thread in self._threads:
            thread.join()

    def _put(self, message: Outgoing) -> None:
        with self._to_send:
            if self._error is not None:
                raise type(self._error)(self.peer_id, self._error.reason)
            self._outbox.put(message)
            self._to_send.notify()

    def _revoke(self, message: Outgoing) -> bool:
        with self._to_send:
            return self._outbox.revoke(message)

    def _stop(self, error: LinkError) -> None:
        """Have both threads end; the first reason counts."""
        with self._to_send:
            if self._error is not None:
                return
            self._error = error
            self._to_send.notify()
        if not isinstance(error, LinkClosedError):  # else the sender says goodbye first
            self._sock.shut()

    # The sender's thread

    def _send(self, receiver: threading.Thread) -> None:
        try:
            sent_s = time.monotonic()
            while (item := self._next_item(sent_s + self._params.ping_s)) is not None:
                began_s = time.monotonic()
                frame = self._outbox.cut(item) if isinstance(item, Outgoing) else item
                self._write(frame)
                sent_s = time.monotonic()
                self._fit_frames(frame.header.length, sent_s - began_s)
                if frame.message is not None and frame.ends_message:
                    with self._to_send:
                        self._outbox.finish(frame.message)
                    self._settle_sent(frame.message)
            self._say_goodbye()
        except OSError as error:
            self._stop(LinkBrokenError(self.peer_id, describe(error)))
        finally:
            self._stop(LinkBrokenError(self.peer_id, "its thread failed"))  # unless it has ended for a reason
            self._sock.shut()
            receiver.join()
            self._sock.close()
            self._give_up()

    def _write(self, frame: Frame) -> None:
        """Put a frame on the wire."""
        self._sock.write([encode_header(frame.header), *frame.payload])

    def _fit_frames(self, num_bytes: int, took_s: float) -> None:
        """Learn from the time that a frame took."""
        self._outbox.fit_frames(num_bytes, took_s, self._params.frame_s)

    def _settle_sent(self, message: Outgoing) -> None:
        """All of a message is on the wire."""
        message.settle(message.checksum)

    def _next_notice(self) -> Frame | None:
        """Return a frame that goes before all others, if there is one; the outbox is locked."""
        credit = self._outbox.take_credit()
        return None if credit is None else Frame(credit, [])

    def _next_item(self, ping_at_s: float) -> Frame | Outgoing | None:
        """Wait for something to send, a frame or a message of which one is to be cut; None: the link has ended."""
        with self._to_send:
            while True:
                if self._error is not None:
                    return None
                notice = self._next_notice()
                if notice is not None:
                    return notice
                message = self._outbox.pick()
                if message is not None:
                    return message
                left_s = ping_at_s - time.monotonic()
                if left_s <= 0:
                    return Frame(Header(FrameKind.PING), [])
                self._to_send.wait(left_s)

    def _say_goodbye(self) -> None:
        error = self._error
        if isinstance(error, LinkClosedError):
            reason = error.reason.encode()[:MAX_REASON_BYTES]
            head = encode_header(Header(FrameKind.END, total=len(reason), length=len(reason)))
            with contextlib.suppress(OSError):  # it hears of the end either way
                self._sock.write([head, reason])

    def _give_up(self) -> None:
        """Both threads are done: nobody reads or writes anybody's memory any more."""
        error = self._error
        assert error is not None, "a link ends for a reason"
        with self._to_send:
            left = self._leftovers()
        for message in left:
            message.settle(error)
        for inbox in self._inboxes.values():
            inbox.put(error)
        self._on_loop(self._end)

    def _leftovers(self) -> list[Outgoing]:
        """Return the messages that have not been settled, and forget them; the outbox is locked."""
        return self._outbox.clear()

    # The receiver's thread

    def _receive(self) -> None:
        head = memoryview(bytearray(HEADER_BYTES))
        try:
            while self._error is None:
                self._sock.fill(head)
                self._take(decode_header(head, self._max_frame_bytes))
        except FrameError as error:
            self._stop(LinkBrokenError(self.peer_id, error.reason))
        except OSError as error:
            self._stop(LinkBrokenError(self.peer_id, describe(error)))
        finally:
            self._stop(LinkBrokenError(self.peer_id, "its thread failed"))  # unless it has ended for a reason
            with self._receiving:
                self._landing.forget_zones()

    def _take(self, header: Header) -> None:
        if header.kind is FrameKind.CREDIT:
            with self._to_send:
                self._outbox.grant(header.traffic, header.total)
                self._to_send.notify()
        elif header.kind is FrameKind.END:
            reason = bytearray(header.length)
            self._sock.fill(memoryview(reason))
            raise ConnectionResetError(f"the peer closed it: {reason.decode(errors='replace')}")
        elif header.kind is FrameKind.DATA:
            self._land(header)
        elif header.kind is not FrameKind.PING:
            raise FrameError(f"a frame of kind {header.kind.name} on a link that has none")

    def _land(self, header: Header) -> None:
        with self._receiving:
            self._landing.begin(header)
        heard_s = time.monotonic()
        while True:
            with self._receiving:  # let go after each part: a withdrawal may change where the rest goes
                room = self._landing.room()
                if not room:
                    arrival = self._landing.end()
                    break
                size = self._sock.read_some(room)
                if size:
                    self._landing.landed(size)
            if size:
                heard_s = time.monotonic()
            else:
                self._sock.wait(heard_s)
        if arrival is not None:
            self._hand_over(arrival)

    def _hand_over(self, arrival: Arrival) -> None:
        inbox = self._inboxes.get(arrival.stream) if arrival.traffic is TrafficClass.ACTIVATION else None
        if inbox is not None:
            inbox.put(arrival)
        else:
            assert self._on_arrival is not None, "threads run once the link is started"
            self._on_loop(self._on_arrival, arrival)

    # The way to the event loop

    def _on_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear of it
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _end(self) -> None:
        """On the event loop: say that the link has ended, behind everything that has arrived."""
        assert self._error is not None, "a link ends for a reason"
        assert self._on_end is not None, "threads run once the link is started"
        if not self._ended.done():
            self._ended.set_result(None)
        self._on_end(self._error)
