"""A connected TCP socket as the two threads of a link use it: calls that wait, but not for ever."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final

from services.worker.transfer.cursor import Cursor
from services.worker.transfer.link import Buffer

UNSENT_BYTES: Final = 256 * 1024
"""Most bytes that the kernel keeps before they have left: nothing overtakes what lies there."""
_TCP_NOTSENT_LOWAT: Final = getattr(socket, "TCP_NOTSENT_LOWAT", 25)


class WireSocket:
    """One thread writes, another reads.

    Args:
        sock: connected; owned from here on.
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
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        seconds, part = divmod(tick_s, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(part * 1e6)))
        self._poll.register(sock, select.POLLIN)

    def write(self, parts: Sequence[Buffer]) -> None:
        """Send all of it.

        Raises:
            OSError: the connection or the link has ended, or the peer takes nothing for `dead_after_s`.
        """
        cursor, moved_s = Cursor(parts), time.monotonic()
        while cursor.left:
            try:
                cursor.advance(self._sock.sendmsg(cursor.peek(cursor.left)))
                moved_s = time.monotonic()
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
            OSError: the connection has ended.
        """
        try:
            size: int = self._sock.recvmsg_into(views, 0, socket.MSG_DONTWAIT)[0]
        except BlockingIOError:
            return 0
        if not size:
            raise ConnectionResetError("the connection has ended")
        return size

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
        """Give the descriptor back; nobody uses it any more."""
        self._sock.close()

    def _check(self, moved_s: float, what: str) -> None:
        if self._is_over():
            raise ConnectionAbortedError("the link has ended")
        if time.monotonic() - moved_s > self._dead_after_s:
            raise TimeoutError(f"{what} for {self._dead_after_s:g} s")


def describe(error: OSError) -> str:
    """Return what a socket's error says."""
    return error.strerror or str(error) or type(error).__name__
