"""A connected stream socket as the two threads of a link use it: calls that wait, but not for ever.

Over a Unix socket descriptors go along with bytes: with the first byte of a write, and out of `take_descriptor` in
the order in which they were sent, once a byte that came with them, or after them, has been received.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from services.worker.transfer.cursor import Cursor
from services.worker.transfer.link import Buffer

UNSENT_BYTES: Final = 256 * 1024
"""Most bytes that the kernel keeps before they have left: nothing overtakes what lies there."""
MAX_DESCRIPTORS: Final = 4
"""Most that a peer may have sent before the first of them is asked for."""
_INT_BYTES: Final = array.array("i").itemsize
_ROOM: Final = socket.CMSG_SPACE(MAX_DESCRIPTORS * _INT_BYTES)
_TCP_NOTSENT_LOWAT: Final = getattr(socket, "TCP_NOTSENT_LOWAT", 25)


class WireSocket:
    """One thread writes, another reads; the latter may `write_now`.

    Args:
        sock: connected, TCP or Unix; owned from here on.
        tick_s: how often what waits looks at `is_over`.
        dead_after_s: silence after which the peer counts as gone.
        is_over: the link has ended.
    """

    def __init__(self, sock: socket.socket, *, tick_s: float, dead_after_s: float, is_over: Callable[[], bool]) -> None:
        self._sock = sock
        self._tick_s = tick_s
        self._dead_after_s = dead_after_s
        self._is_over = is_over
        self._poll = select.poll()
        self._writing = threading.Lock()
        """Held while a write is under way: of one that was begun, the rest comes next."""
        self._descriptors: deque[int] | None = deque() if sock.family == socket.AF_UNIX else None
        sock.settimeout(None)
        if self._descriptors is None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES)
        seconds, part = divmod(tick_s, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(part * 1e6)))
        self._poll.register(sock, select.POLLIN)

    def write(self, parts: Sequence[Buffer], descriptor: int | None = None) -> None:
        """Send all of it.

        Args:
            parts: bytes.
            descriptor: that the peer gets a copy of, over a Unix socket; the caller's to close.

        Raises:
            OSError: the connection or the link has ended, or the peer takes nothing for `dead_after_s`.
        """
        with self._writing:
            self._write(Cursor(parts), descriptor)

    def write_now(self, data: bytes) -> bool:
        """Send a few bytes without waiting, from whatever thread; return whether that could be done.

        Where it cannot because the connection has ended, others hear of that.
        """
        if not self._writing.acquire(blocking=False):
            return False
        try:
            size = self._sock.send(data, socket.MSG_DONTWAIT)
        except OSError:
            return False
        finally:
            self._writing.release()
        if size < len(data):
            raise ConnectionAbortedError("a part of a header was sent")
        return True

    def _write(self, cursor: Cursor, descriptor: int | None) -> None:
        moved_s = time.monotonic()
        along = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        while cursor.left:
            try:
                cursor.advance(self._sock.sendmsg(cursor.peek(cursor.left), along))
                moved_s, along = time.monotonic(), []
            except BlockingIOError:
                self._check(moved_s, "it took nothing")

    def fill(self, view: memoryview) -> None:
        """Receive until the view is full.

        Raises:
            OSError: the connection or the link has ended, or nothing was heard for `dead_after_s`.
        """
        heard_s = time.monotonic()
        while view:
            size = self.read_some([view])
            if size:
                view, heard_s = view[size:], time.monotonic()
            else:
                self.wait(heard_s)

    def read_some(self, views: list[memoryview]) -> int:
        """Return how many bytes were received, without waiting; 0 if there are none now.

        Raises:
            OSError: the connection has ended, or brought more descriptors than it may.
        """
        try:
            if self._descriptors is None:
                size: int = self._sock.recvmsg_into(views, 0, socket.MSG_DONTWAIT)[0]
            else:
                size = self._read_along(views, self._descriptors)
        except BlockingIOError:
            return 0
        if not size:
            raise ConnectionResetError("the connection has ended")
        return size

    def take_descriptor(self) -> int | None:
        """Return the oldest descriptor that came along and was not taken yet; whoever takes it closes it."""
        return self._descriptors.popleft() if self._descriptors else None

    def wait(self, heard_s: float) -> None:
        """Wait for the next bytes.

        Args:
            heard_s: when the last ones came, monotonic.

        Raises:
            OSError: the link has ended, or nothing was heard for `dead_after_s`.
        """
        while not self._poll.poll(self._tick_s * 1000):
            self._check(heard_s, "nothing was heard")

    def shut(self) -> None:
        """End the connection: whoever waits at it wakes. Idempotent."""
        with contextlib.suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back, and those that came along; nobody uses it any more."""
        self._sock.close()
        while (descriptor := self.take_descriptor()) is not None:
            os.close(descriptor)

    def _read_along(self, views: list[memoryview], descriptors: deque[int]) -> int:
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        size, along, came, _ = self._sock.recvmsg_into(views, _ROOM, flags)
        for level, kind, data in along:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.extend(array.array("i", data[: len(data) // _INT_BYTES * _INT_BYTES]))
        if came & socket.MSG_CTRUNC or len(descriptors) > MAX_DESCRIPTORS:
            raise ConnectionAbortedError("more descriptors came along than were announced")
        return size

    def _check(self, moved_s: float, what: str) -> None:
        if self._is_over():
            raise ConnectionAbortedError("the link has ended")
        if time.monotonic() - moved_s > self._dead_after_s:
            raise TimeoutError(f"{what} for {self._dead_after_s:g} s")


def describe(error: OSError) -> str:
    """Return what a socket's error says."""
    return error.strerror or str(error) or type(error).__name__
