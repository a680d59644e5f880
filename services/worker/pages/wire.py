"""Pages on a socket between two processes of one machine, as descriptors. Calls wait, but not beyond a deadline.

    packet   word u8 · number of pages u32 · of each page where it begins in its file u64 · beside it, their descriptors

Packets keep their borders (SOCK_SEQPACKET), and arrive whole or not at all. Each one with pages is answered, so that
few descriptors are on their way at a time.
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
from enum import IntEnum
from pathlib import Path
from typing import Final

from services.worker.memory.ranges import PageHandle
from services.worker.peers.door import check_user
from shared.errors import WireError

BATCH_PAGES: Final = 64
"""Most descriptors in a packet: far fewer than a process may have open."""
_HEAD: Final = struct.Struct("<BI")
_OFFSET: Final = struct.Struct("<Q")
_FD_BYTES: Final = array.array("i").itemsize
_MOST_BYTES: Final = _HEAD.size + BATCH_PAGES * _OFFSET.size


class Word(IntEnum):
    """What a packet says."""

    PAGES = 1
    TAKEN = 2
    MAPPED = 3
    COMMIT = 4
    UNDO = 5


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
        self._sock.sendmsg([_HEAD.pack(Word.PAGES, len(handles)), offsets], along)
        self.expect(Word.TAKEN)

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
        data, along, flags, _ = self._sock.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(BATCH_PAGES * _FD_BYTES))
        descriptors = array.array("i")
        for level, kind, part in along:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(part[: len(part) // _FD_BYTES * _FD_BYTES])
        try:
            _, num_pages = _read_head(data, Word.PAGES)
            is_cut = flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(data) != _HEAD.size + count * _OFFSET.size
            if is_cut or not num_pages == len(descriptors) == count:
                raise WireError(f"{len(descriptors)} descriptors came in a packet of {num_pages}, for {count} pages")
            offsets = [offset for (offset,) in _OFFSET.iter_unpack(data[_HEAD.size :])]
            yield [PageHandle(*pair) for pair in zip(descriptors.tolist(), offsets, strict=True)]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self.say(Word.TAKEN)

    def say(self, word: Word) -> None:
        """Say a word.

        Raises:
            OSError: the other side has gone, or takes nothing.
        """
        self._wait_for_time()
        self._sock.send(_HEAD.pack(word, 0))

    def expect(self, *words: Word) -> Word:
        """Return the word that comes next, which must be one of these.

        Raises:
            ConnectionError: the other side has gone.
            OSError: it takes too long.
            WireError: something else has come.
        """
        self._wait_for_time()
        try:
            data = self._sock.recv(_MOST_BYTES)
        except ConnectionResetError:  # it left something of ours unread; what it had said before that is still there
            data = self._sock.recv(_MOST_BYTES)
        return _read_head(data, *words)[0]

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
    try:
        for path in paths:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                sock.settimeout(limit_s)
                sock.connect(path)
            except BaseException:
                sock.close()
                raise
            found.append(_of_this_user(sock))
    except BaseException:
        for known in found:
            known.close()
        raise
    return found


def _read_head(data: bytes, *words: Word) -> tuple[Word, int]:
    """Return the word of a packet, which must be one of these, and the number of its pages."""
    if not data:
        raise ConnectionResetError("the other side has gone")
    if len(data) < _HEAD.size:
        raise WireError(f"a packet of {len(data)} bytes")
    word, count = _HEAD.unpack_from(data)
    if word not in words:
        raise WireError(f"a packet of kind {word} came instead of {' or '.join(each.name for each in words)}")
    return Word(word), count


def _of_this_user(sock: socket.socket) -> PageSocket:
    try:
        check_user(sock)
    except BaseException:
        sock.close()
        raise
    return PageSocket(sock)
