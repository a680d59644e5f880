"""Pages on a socket between two processes of one machine, as descriptors. Calls wait, but not beyond a deadline.

    PAGES     number of pages, 0    of each page where it begins in its file u64; beside it, their descriptors
    others    0, 0                  nothing

A frame is a packet, which keeps its borders (SOCK_SEQPACKET), and arrives whole or not at all. Each one with pages is
answered, so that few descriptors are on their way at a time.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from services.worker.memory.ranges import PageHandle
from services.worker.peers.frames import HEADER_BYTES, FrameHead, FrameKind, PeerLostError, pack_head, read_head
from shared.errors import WireError

BATCH_PAGES: Final = 64
"""Most descriptors in a packet: far fewer than a process may have open."""
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_OFFSET: Final = struct.Struct("<Q")
_FD_BYTES: Final = array.array("i").itemsize
_MOST_BYTES: Final = HEADER_BYTES + BATCH_PAGES * _OFFSET.size


class PageDoor:
    """Where a stage that does not lead waits for the leader, at a path that only this process's user can reach.

    Raises:
        OSError: there is no place for it.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sluice-pages-", ignore_cleanup_errors=True)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._sock.bind(self.path)
            self._sock.listen(1)
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        """To be dialled."""
        return str(Path(self._folder.name, "door"))

    def accept(self, limit_s: float) -> PageSocket:
        """Return the leader's connection, which has come already or comes in time.

        Raises:
            OSError: it does not, or is another user's.
        """
        self._sock.settimeout(limit_s)
        sock, _ = self._sock.accept()
        return _of_this_user(sock)

    def close(self) -> None:
        """Wait no more. Idempotent."""
        self._sock.close()
        self._folder.cleanup()


class PageSocket:
    """A connection between two processes of one machine, over which pages go. Calls wait until `deadline_s`.

    Args:
        sock: connected, of packets; owned.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.deadline_s = 0.0
        """Monotonic."""

    def give(self, handles: Sequence[PageHandle]) -> None:
        """Send descriptors, which stay the caller's to close, and wait until they were taken.

        Raises:
            OSError: the other side has gone, or takes too long.
            WireError: it says something else.
        """
        offsets = b"".join(_OFFSET.pack(handle.offset) for handle in handles)
        descriptors = array.array("i", [handle.descriptor for handle in handles])
        self._wait_for_time()
        along = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        head = pack_head(FrameKind.PAGES, len(offsets), (len(handles), 0))
        with _noticing_loss():
            self._sock.sendmsg([head, offsets], along)
        self.expect(FrameKind.PAGES_TAKEN)

    @contextlib.contextmanager
    def taking(self, count: int) -> Iterator[list[PageHandle]]:
        """Receive descriptors, which are closed afterwards, and say that they were taken if all went well.

        Args:
            count: of them.

        Raises:
            OSError: the other side has gone, or takes too long.
            WireError: something else has come.
        """
        self._wait_for_time()
        with _noticing_loss():
            data, along, flags, _ = self._sock.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(BATCH_PAGES * _FD_BYTES))
        descriptors = array.array("i")
        for level, kind, part in along:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(part[: len(part) // _FD_BYTES * _FD_BYTES])
        try:
            num_pages = _read_head(data, FrameKind.PAGES).words[0]
            is_cut = flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(data) != HEADER_BYTES + count * _OFFSET.size
            if is_cut or not num_pages == len(descriptors) == count:
                raise WireError(f"{len(descriptors)} descriptors came in a packet of {num_pages}, for {count} pages")
            offsets = [offset for (offset,) in _OFFSET.iter_unpack(data[HEADER_BYTES:])]
            yield [PageHandle(*pair) for pair in zip(descriptors.tolist(), offsets, strict=True)]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self.say(FrameKind.PAGES_TAKEN)

    def say(self, word: FrameKind) -> None:
        """Say a word.

        Raises:
            OSError: the other side has gone, or takes nothing.
        """
        self._wait_for_time()
        with _noticing_loss():
            self._sock.send(pack_head(word, 0))

    def expect(self, *words: FrameKind) -> FrameKind:
        """Return the word that comes next, which must be one of these.

        Raises:
            PeerLostError: the other side has gone.
            OSError: it takes too long.
            WireError: something else has come.
        """
        self._wait_for_time()
        with _noticing_loss():
            try:
                data = self._sock.recv(_MOST_BYTES)
            except ConnectionResetError:  # it left something of ours unread; what it had said before is still there
                data = self._sock.recv(_MOST_BYTES)
        return _read_head(data, *words).kind

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._sock.close()

    def _wait_for_time(self) -> None:
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it takes too long")
        self._sock.settimeout(left_s)


def dial_doors(paths: Sequence[str], limit_s: float) -> list[PageSocket]:
    """Return connections to some doors, in their order: all or none.

    Args:
        paths: of the doors.
        limit_s: for each of them.

    Raises:
        OSError: a door cannot be reached from here, or is another user's.
    """
    found: list[PageSocket] = []
    with contextlib.ExitStack() as opened:
        for path in paths:
            sock = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.settimeout(limit_s)
            sock.connect(path)
            found.append(_of_this_user(sock))
        opened.pop_all()
    return found


@contextlib.contextmanager
def _noticing_loss() -> Iterator[None]:
    try:
        yield
    except ConnectionError as error:
        raise PeerLostError(f"the other side has gone: {error}") from error


def _read_head(data: bytes, *words: FrameKind) -> FrameHead:
    """Return what a packet says, which must be one of these words."""
    if not data:
        raise PeerLostError("the other side has gone")
    return read_head(data[:HEADER_BYTES], words, _MOST_BYTES)


def _of_this_user(sock: socket.socket) -> PageSocket:
    """Return the connection, which ends if the process at its other end is another user's.

    Raises:
        PermissionError: it is.
    """
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user == os.geteuid():
        return PageSocket(sock)
    sock.close()
    raise PermissionError(f"its process is of user {user}, this one of {os.geteuid()}")
