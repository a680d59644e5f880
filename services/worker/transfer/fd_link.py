"""Links between two workers on one machine: a Unix socket, over which pages are lent and bulk bytes do not go.

    KV, parameters   in lent pages:  source ──LEND(page, descriptor)──► target maps it, once per page
                                     source ──PLACES(page, offset, length; …)──► target copies into its zones
                                     source ◄──TAKEN── and the source may send on
                     elsewhere:      inline, as over TCP
    all else         inline

One copy, by the receiver, straight into the zone; checksums, classes, credit and frames are those of every link. What
this costs: a sender's buffers are read by the peer, so a message is done when the peer has said so, and of bulk frames
`MAX_UNTAKEN` at most are under way, each half as long as another link's, as an activation waits behind them.
Where the link ends first, the buffers are free at once, as always, and the peer may still be reading: what it has read
is handed over only if its checksum is right.

A page that its owner unmaps is revoked: the peer unmaps it, and gets it anew if it is used again. Descriptors are for
reading only, and a file that could be cut short is not accepted. A peer reads all of a memory file of which a page was
lent, if it wants to: links are for workers of one cluster that trust each other.

Source: `docs/design/elastic-memory.md`, "Links and moves".
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from services.worker.memory.ranges import MappingError, PageId, VirtualMemory
from services.worker.transfer import fd_frames
from services.worker.transfer.cursor import Cursor
from services.worker.transfer.fd_frames import Place
from services.worker.transfer.frames import FrameError, FrameKind, Header, encode_header
from services.worker.transfer.lending import BorrowedPages, LentPages, main_memory
from services.worker.transfer.link import LANDING_CLASSES, LinkParams, Windows
from services.worker.transfer.outbox import Frame, Outgoing
from services.worker.transfer.socket_link import SocketLink
from shared.ids import Incarnation, WorkerId

MAX_UNTAKEN: Final = 2
"""Bulk frames that the peer has not copied yet: one that it copies, and one that is summed up meanwhile."""
LONG_COPY_BYTES: Final = 128 * 1024
"""Other threads of Python may run during a copy of so many bytes; for a shorter one it would not pay."""
_HELD: Final = frozenset(LANDING_CLASSES)


@dataclass(frozen=True, slots=True)
class PageSharing:
    """The pages of a worker, as its links on this machine use them."""

    lent: LentPages | None = None
    """What it lends; None: nothing, all goes inline."""
    open_memory: Callable[[int], VirtualMemory] = main_memory
    """Returns a memory, with pages of so many bytes, that maps what is borrowed; one for each link."""


@dataclass(frozen=True, slots=True)
class _Untaken:
    """A frame of places that the peer has not copied yet."""

    header: Header
    message: Outgoing | None


class FdLink(SocketLink):
    """One end; implements `Link`. Made by `fd_connect`.

    Args:
        sock: a Unix socket, connected, and past its greeting.
        peer: who is at the other end, and which process of that name.
        peer_windows: what it grants.
        max_frame_bytes: longest payload that both ends take.
        params: of this end.
        sharing: what this end lends, and how it borrows.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: tuple[WorkerId, Incarnation],
        peer_windows: Windows,
        max_frame_bytes: int,
        params: LinkParams,
        sharing: PageSharing,
    ) -> None:
        super().__init__(sock, peer, peer_windows, max_frame_bytes, params)
        self._lent = sharing.lent
        self._borrowed = BorrowedPages(sharing.open_memory)
        self._shown: set[PageId] = set()
        """Pages that the peer has mapped; the sender's thread."""
        self._revoked: set[PageId] = set()
        """Pages that were unmapped since the peer was last told. This and what follows: under `_to_send`."""
        self._taken: deque[Header] = deque()
        """To be told to the peer, in order; what could not be told at once. The first one may be on its way."""
        self._untaken: deque[_Untaken] = deque()
        self._unsettled: list[Outgoing] = []
        """Messages that are on the wire whole, and not yet copied."""
        self._copy_s_per_byte = 0.0
        """How long the peer takes."""
        self.num_lent_bytes = 0
        """Sent by their places."""
        if self._lent is not None:
            self._lent.watch(self._on_unmapped)

    async def close(self) -> None:
        """See `Link`."""
        await super().close()
        if self._lent is not None:
            self._lent.forget(self._on_unmapped)

    def _on_unmapped(self, pages: Sequence[PageId]) -> None:
        """In whatever thread."""
        with self._to_send:
            if self._error is None:
                self._revoked.update(pages)
                self._to_send.notify()

    # The sender's thread

    def _write(self, frame: Frame) -> None:
        places = self._show(frame)
        if places is None:
            super()._write(frame)
            if frame.header.kind is FrameKind.TAKEN:
                with self._to_send:
                    self._taken.popleft()  # not before: the receiver's thread would overtake it
            return
        with self._to_send:
            self._untaken.append(_Untaken(frame.header, frame.message))
            self._outbox.held = _HELD if len(self._untaken) >= MAX_UNTAKEN else frozenset()
        head = encode_header(replace(frame.header, kind=FrameKind.PLACES))
        self._sock.write([head, fd_frames.encode_places(places)])
        self.num_lent_bytes += frame.header.length

    def _show(self, frame: Frame) -> list[Place] | None:
        """Return where a frame's bytes lie, in pages that the peer has mapped; None: they go inline."""
        header = frame.header
        if self._lent is None or header.kind is not FrameKind.DATA or header.traffic not in LANDING_CLASSES:
            return None
        places = self._lent.find(frame.payload)
        if not places or len(places) * fd_frames.MIN_PLACE_BYTES > header.length:
            return None
        new = {place.page for place in places} - self._shown
        return places if all(self._show_page(self._lent, page) for page in sorted(new)) else None

    def _show_page(self, lent: LentPages, page: PageId) -> bool:
        """Lend a page to the peer; return whether it can be lent."""
        try:
            loan, handle = lent.loan(page)
        except (MappingError, OSError):
            return False
        try:
            head = encode_header(Header(FrameKind.LEND))
            self._sock.write([head, fd_frames.encode_loan(loan)], handle.descriptor)
        finally:
            os.close(handle.descriptor)
        self._shown.add(page)
        return True

    def _fit_frames(self, num_bytes: int, took_s: float) -> None:
        slowest_s = max(took_s, num_bytes * self._copy_s_per_byte)
        super()._fit_frames(num_bytes, slowest_s * MAX_UNTAKEN)

    def _settle_sent(self, message: Outgoing) -> None:
        with self._to_send:
            if self._is_untaken(message):
                self._unsettled.append(message)
                return
        super()._settle_sent(message)

    def _next_notice(self) -> Frame | None:
        pages = sorted(self._revoked & self._shown)[: fd_frames.MAX_REVOKED] if self._revoked else []
        if pages:
            self._revoked.difference_update(pages)
            self._shown.difference_update(pages)
            return Frame(Header(FrameKind.REVOKE), [memoryview(fd_frames.encode_pages(pages))])
        self._revoked.clear()
        if self._taken:
            return Frame(self._taken[0], [])
        return super()._next_notice()

    def _leftovers(self) -> list[Outgoing]:
        left = [*self._unsettled, *super()._leftovers()]
        self._unsettled.clear()
        return left

    def _give_up(self) -> None:
        if self._lent is not None:
            self._lent.forget(self._on_unmapped)
        super()._give_up()

    def _is_untaken(self, message: Outgoing) -> bool:
        return any(frame.message is message for frame in self._untaken)

    # The receiver's thread

    def _receive(self) -> None:
        try:
            super()._receive()
        finally:
            self._borrowed.close()

    def _take(self, header: Header) -> None:
        if header.kind is FrameKind.PLACES:
            self._fetch(header, fd_frames.decode_places(self._body(), header.length))
        elif header.kind is FrameKind.TAKEN:
            self._on_taken(header)
        elif header.kind is FrameKind.LEND:
            self._borrow(self._body())
        elif header.kind is FrameKind.REVOKE:
            self._borrowed.give_back(fd_frames.decode_pages(self._body()))
        else:
            super()._take(header)

    def _body(self) -> memoryview:
        prefix = memoryview(bytearray(fd_frames.PREFIX.size))
        self._sock.fill(prefix)
        body = memoryview(bytearray(fd_frames.body_bytes(prefix)))
        self._sock.fill(body)
        fd_frames.check_body(prefix, body)
        return body

    def _borrow(self, body: memoryview) -> None:
        descriptor = self._sock.take_descriptor()
        if descriptor is None:
            raise FrameError("a page is lent, and no descriptor came along")
        try:
            self._borrowed.take(fd_frames.decode_loan(body), descriptor)
        finally:
            os.close(descriptor)

    def _fetch(self, header: Header, places: list[Place]) -> None:
        """Copy a share of a message from where it lies to where it belongs."""
        began_s = time.monotonic()
        source = Cursor(self._borrowed.views(places))
        with self._receiving:
            self._landing.begin(replace(header, kind=FrameKind.DATA))
        while True:
            with self._receiving:  # let go after each part: a withdrawal may change where the rest goes
                room = self._landing.room()
                if not room:
                    arrival = self._landing.end()
                    break
                self._landing.landed(_copy(source, room))
        took_us = min(int((time.monotonic() - began_s) * 1e6), 2**32 - 1)
        taken = replace(header, kind=FrameKind.TAKEN, total=took_us, length=0, checksum=0)
        if self._taken or not self._sock.write_now(encode_header(taken)):
            with self._to_send:
                self._taken.append(taken)
                self._to_send.notify()
        if arrival is not None:
            self._hand_over(arrival)

    def _on_taken(self, header: Header) -> None:
        with self._to_send:
            if not self._untaken or not _is_same(self._untaken[0].header, header):
                raise FrameError("a frame was taken that was not sent")
            frame = self._untaken.popleft()
            self._outbox.held = frozenset()
            self._copy_s_per_byte = header.total / 1e6 / frame.header.length
            done = [message for message in self._unsettled if not self._is_untaken(message)]
            self._unsettled = [message for message in self._unsettled if self._is_untaken(message)]
            self._to_send.notify()
        for message in done:
            message.settle(message.checksum)


def _is_same(sent: Header, taken: Header) -> bool:
    return (sent.traffic, sent.stream, sent.number, sent.sequence) == (
        taken.traffic,
        taken.stream,
        taken.number,
        taken.sequence,
    )


def _copy(source: Cursor, room: Sequence[memoryview]) -> int:
    """Fill the room with the source's next bytes, and return how many there were."""
    copied = source.left
    for view in room:
        done = 0
        while done < len(view):
            part = source.peek(len(view) - done, max_views=1)[0]
            _copy_bytes(part, view[done : done + len(part)])
            source.advance(len(part))
            done += len(part)
    return copied - source.left


def _copy_bytes(source: memoryview, target: memoryview) -> None:
    if len(source) < LONG_COPY_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
